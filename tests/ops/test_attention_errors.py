"""What the attention operators refuse, and that fake kernels and autograd fit them."""

import pytest
import torch
from attention_cases import MASKS, mask_options, positions, qkv

from moe_ext import ops

BASE = {
    "q": torch.zeros(2, 4, 3, 8),
    "k": torch.zeros(2, 2, 5, 8),
    "v": torch.zeros(2, 2, 5, 6),
    "q_positions": torch.arange(3),
    "k_positions": torch.arange(5),
}
BLOCK_ERRORS = [
    ({"q": torch.zeros(2, 4, 3, 8).long()}, "q to be float32, .* got Long"),
    ({"k": BASE["k"].double()}, "k to be Float, got Double"),
    ({"v": BASE["v"].half()}, "v to be Float, got Half"),
    ({"q": torch.zeros(4, 3, 8)}, r"q to be a 4-D tensor \[B, H, Sq, Dk\], got shape \[4, 3, 8\]"),
    ({"k": torch.zeros(2, 5, 8)}, r"k to be a 4-D tensor"),
    ({"v": torch.zeros(2, 5, 8)}, r"v to be a 4-D tensor"),
    ({"k": torch.zeros(1, 2, 5, 8)}, r"k to be of size 2 in dim 0 \(the batch of q\)"),
    ({"k": torch.zeros(2, 2, 5, 7)}, r"k to be of size 8 in dim 3 \(the head dim of q\)"),
    ({"v": torch.zeros(1, 2, 5, 6)}, r"v to be of size 2 in dim 0 \(the batch of k\)"),
    ({"v": torch.zeros(2, 1, 5, 6)}, r"v to be of size 2 in dim 1 \(the heads of k\)"),
    ({"v": torch.zeros(2, 2, 4, 6)}, r"v to be of size 5 in dim 2 \(the keys of k\)"),
    ({"q": torch.zeros(2, 3, 3, 8)}, "heads of q to be a multiple of those of k, got 3 and 2"),
    ({"q_positions": torch.arange(3).int()}, "q_positions to be Long, got Int"),
    ({"q_positions": torch.arange(4)}, r"q_positions to be of size 3 in dim 0"),
    ({"k_positions": torch.arange(4)}, r"k_positions to be of size 5 in dim 0"),
    ({"k_positions": torch.zeros(5, 1).long()}, r"k_positions to be a 1-D tensor"),
    ({"q_positions": torch.tensor([0, -1, 2])}, r"q_positions to be in \[0, .* got -1 at index 1"),
    (
        {"k_positions": torch.arange(5) + 2**31},
        r"k_positions to be in .* got 2147483648 at index 0",
    ),
    ({"q_documents": torch.zeros(3).long()}, "given together, got q_documents alone"),
    ({"k_documents": torch.zeros(5).long()}, "given together, got k_documents alone"),
    (
        {"q_documents": torch.zeros(3).long(), "k_documents": torch.zeros(3).long()},
        "k_documents to be of size 5",
    ),
    (
        {"q_documents": torch.zeros(3).long() + 2**31, "k_documents": torch.zeros(5).long()},
        r"q_documents to be in \[-2\^31, 2\^31\), got 2147483648 at index 0",
    ),
    ({"key_mask": torch.ones(2, 5)}, "key_mask to be Bool, got Float"),
    ({"key_mask": torch.ones(1, 5).bool()}, "key_mask to be of size 2 in dim 0"),
    ({"key_mask": torch.ones(2, 4).bool()}, "key_mask to be of size 5 in dim 1"),
    ({"alibi_slopes": torch.ones(4).long()}, "alibi_slopes to be float32"),
    ({"alibi_slopes": torch.ones(2)}, "alibi_slopes to be of size 4 in dim 0"),
    ({"bias": torch.ones(4, 3, 5)}, r"bias to be a 4-D tensor \[B or 1, H or 1, Sq, Sk\]"),
    ({"bias": torch.ones(2, 2, 3, 5)}, "bias to have size 1 or 4 in dim 1, as q, got shape"),
    ({"bias": torch.ones(1, 1, 1, 5)}, r"bias to be of size 3 in dim 2 \(the queries of q\)"),
    ({"bias": torch.ones(1, 1, 3, 4)}, r"bias to be of size 5 in dim 3 \(the keys of k\)"),
    ({"bias": torch.ones(1, 1, 3, 5).long()}, "bias to be float32, .* got Long"),
    ({"scale": float("nan")}, "scale to be finite, got nan"),
    ({"window_left": -2}, r"window_left to be in \[-1, .* got -2"),
    ({"window_right": 2**31}, r"window_right to be in \[-1, .* got 2147483648"),
    ({"softcap": -1.0}, "softcap to be finite and not negative, got -1"),
    ({"dropout_p": 1.0, "seed": 0}, r"dropout_p to be in \[0, 1\), got 1"),
    ({"dropout_p": -0.1, "seed": 0}, r"dropout_p to be in \[0, 1\), got -0.1"),
    ({"dropout_p": 0.1}, "seed to be given with dropout_p 0.1, got none"),
    ({"dropout_p": 0.1, "seed": torch.zeros(2).long()}, "seed to be one number"),
    ({"dropout_p": 0.1, "seed": torch.zeros(1)}, "seed to be Long, got Float"),
    ({"dropout_p": 0.1, "seed": 0, "head_offset": 2**16}, "at most 65536 heads with dropout"),
    ({"batch_offset": -1}, "not to be negative, got -1 and 0"),
]


def block(function, *before, moved=dict, **changes):
    values = moved(BASE | changes)
    tensors = [values.pop(name) for name in ("q", "k", "v", "q_positions", "k_positions")]
    return function(*before, *tensors, **values)


@pytest.mark.parametrize(("changes", "message"), BLOCK_ERRORS)
def test_block_refuses(moved, changes, message):
    with pytest.raises(RuntimeError, match="attention_block: expected .*" + message):
        block(ops.attention_block, moved=moved, **changes)
    out, lse = torch.ones(2, 4, 3, 6), torch.ones(2, 4, 3)
    with pytest.raises(RuntimeError, match="attention_block_: expected .*" + message):
        block(ops.attention_block_, out, lse, moved=moved, **changes)
    assert (out == 1).all() and (lse == 1).all()
    with pytest.raises(RuntimeError, match="attention_block_backward: expected .*" + message):
        block(ops.attention_block_backward, out, lse, lse, moved=moved, **changes)


def test_slopes_have_no_gradient(device):
    with pytest.raises(ValueError, match="alibi_slopes not to require a gradient"):
        block(ops.attention_block, alibi_slopes=torch.ones(4, requires_grad=True))


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (torch.zeros(2, 4, 3, 6).half(), torch.zeros(2, 4, 3), "out to be Float, got Half"),
        (torch.zeros(2, 4, 3, 6), torch.zeros(2, 4, 3).double(), "lse to be Float, got Double"),
        (torch.zeros(2, 4, 3, 5), torch.zeros(2, 4, 3), "out to be of size 6 in dim 3"),
        (torch.zeros(2, 4, 2, 6), torch.zeros(2, 4, 3), "out to be of size 3 in dim 2"),
        (torch.zeros(2, 4, 3, 6), torch.zeros(2, 4, 2), "lse to have the first 3 sizes of q"),
        (torch.zeros(2, 4, 6, 3).mT, torch.zeros(2, 4, 3), "out to be contiguous"),
        (torch.zeros(2, 4, 3, 6), torch.zeros(2, 3, 4).mT, "lse to be contiguous"),
    ],
)
def test_state_is_refused(moved, out, lse, message):
    with pytest.raises(RuntimeError, match="attention_block_: expected .*" + message):
        block(ops.attention_block_, *moved((out, lse)), moved=moved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad_out": torch.zeros(2, 4, 3, 6).half()}, "grad_out to be Float, got Half"),
        ({"grad_out": torch.zeros(2, 4, 3, 5)}, "grad_out to be of size 6 in dim 3"),
        ({"grad_out": torch.zeros(2, 4, 4, 6)}, "grad_out to be of size 3 in dim 2"),
        ({"lse": torch.zeros(2, 4)}, "lse to have the first 3 sizes of q"),
        ({"delta": torch.zeros(2, 4, 3).double()}, "delta to be Float, got Double"),
    ],
)
def test_backward_refuses(moved, change, message):
    given = {"grad_out": torch.zeros(2, 4, 3, 6), "lse": torch.zeros(2, 4, 3)}
    given["delta"] = given["lse"]
    with pytest.raises(RuntimeError, match="attention_block_backward: expected .*" + message):
        block(ops.attention_block_backward, *moved(given | change).values(), moved=moved)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(1, 2, 3, 4).half(),) * 2, "grad_out to be float32 or float64, got Half"),
        ((torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4).double()), "out to be Float"),
        ((torch.zeros(2, 3, 4),) * 2, "grad_out to be a 4-D tensor"),
        ((torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)), "out to have the first 4 sizes"),
        ((torch.zeros(1, 2, 3, 4),) * 2 + (torch.zeros(1, 2),), "grad_lse to have the first 3"),
    ],
)
def test_delta_refuses(moved, args, message):
    with pytest.raises(RuntimeError, match="attention_delta: expected " + message):
        ops.attention_delta(*moved(args))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(3, 4).long()}, "out_a to be float32"),
        ({0: torch.zeros(())}, "out_a to have a dim at least"),
        ({2: torch.zeros(3, 4).long()}, "out_b to be float32"),
        ({2: torch.zeros(3, 4).double()}, "out_b to be float32, bfloat16 or float16 beside out_a"),
        ({2: torch.zeros(3, 5)}, r"out_b to have the first 2 sizes of out_a, \[3, 4\], got shape"),
        ({1: torch.zeros(3).half()}, "lse_a to be Float, got Half"),
        ({1: torch.zeros(3, 1)}, "lse_a to have the first 1 sizes of out_a"),
        ({3: torch.zeros(4)}, "lse_b to have the first 1 sizes of out_a"),
    ],
)
def test_merge_refuses(moved, change, message):
    args = dict(enumerate((torch.zeros(3, 4), torch.zeros(3), torch.zeros(3, 4), torch.zeros(3))))
    with pytest.raises(RuntimeError, match="merge_attention: expected " + message):
        ops.merge_attention(*moved(args | change).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(1, 2, 3, 4).half()}, "out to be Float, got Half"),
        ({0: torch.zeros(2, 3, 4)}, r"out to be a 4-D tensor \[B, H, S, D\]"),
        ({0: torch.zeros(1, 2, 1, 4).expand(1, 2, 3, 4)}, "memory for each element, .* in dim 2"),
        ({1: torch.zeros(1, 2, 1).expand(1, 2, 3)}, "lse to have memory for each element"),
        ({0: torch.zeros(1, 2, 4, 3).mT}, "columns of out to be adjacent, got stride 3"),
        ({2: torch.zeros(1, 2, 3, 4).double()}, "out_b to be float32, bfloat16 or float16"),
        ({2: torch.zeros(1, 2, 3, 5)}, "out_b to have the first 4 sizes"),
        ({3: torch.zeros(1, 2, 3).half()}, "lse_b to be Float, got Half"),
    ],
)
def test_merge_in_place_refuses(moved, change, message):
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    args = dict(enumerate((out, lse, out.half(), lse.clone())))
    with pytest.raises(RuntimeError, match="merge_attention_: expected .*" + message):
        ops.merge_attention_(*moved(args | change).values())


def test_sinks_refuse(device):
    with pytest.raises(ValueError, match=r"sinks_H to hold a number for each head .* got shapes"):
        ops.merge_attention_sinks(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(3))


def test_document_ids(device):
    cu_seqlens = torch.tensor([0, 3, 3, 5, 9], dtype=torch.int32)
    positions = torch.tensor([8, 0, 2, 3, 4, 5])
    assert ops.document_ids(positions, cu_seqlens).tolist() == [3, 0, 0, 2, 2, 3]


def operator_args(mask, **more):
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 1, 6, 9, 4))
    at = positions(6, 9)
    options = {
        "scale": 0.5,
        "causal": False,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "batch_offset": 0,
        "head_offset": 0,
    } | mask_options(mask, 1, 2, *at)
    options |= more
    if isinstance(options.get("seed"), int):
        options["seed"] = torch.tensor([options["seed"]])
    optional = ("q_documents", "k_documents", "key_mask", "alibi_slopes", "bias", "seed")
    tensors = [options.pop(name, None) for name in optional]
    order = (
        "scale",
        "causal",
        "window_left",
        "window_right",
        "softcap",
        "dropout_p",
        "batch_offset",
        "head_offset",
    )
    return [q, k, v, *at, *tensors, *(options[name] for name in order)]


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "key mask"])
def test_opcheck_block(device, mask):
    args = operator_args(mask)
    torch.library.opcheck(torch.ops.moe_ext.attention_block, args)


def test_opcheck_others(device):
    op, args = torch.ops.moe_ext, operator_args("all")
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in args]
    out, lse = op.attention_block(*detached)
    torch.library.opcheck(op.attention_block_, [out.clone(), lse.clone(), *detached])
    torch.library.opcheck(op.attention_block_backward, [out, lse, lse, *detached, True])
    biased = operator_args("all", bias=torch.randn(1, 2, 6, 9, requires_grad=True))
    torch.library.opcheck(op.attention_block, biased)
    biased = [t.detach() if isinstance(t, torch.Tensor) else t for t in biased]
    for needs_grad_bias in (True, False):
        torch.library.opcheck(
            op.attention_block_backward, [out, lse, lse, *biased, needs_grad_bias]
        )
    torch.library.opcheck(op.attention_delta, [out, out, lse])
    merge = [t.requires_grad_() for t in (torch.randn(5, 4), torch.randn(5))]
    merge += [t.requires_grad_() for t in (torch.randn(5, 4).half(), torch.randn(5))]
    torch.library.opcheck(op.merge_attention, merge)
    torch.library.opcheck(op.merge_attention, [*merge[:2], None, merge[3]])
    state = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    torch.library.opcheck(op.merge_attention_, [*state, state[0].bfloat16(), state[1].clone()])
    detached = [t.detach() for t in merge]
    for out_b in (detached[2], None):
        args = [torch.randn(5, 4), torch.randn(5), *detached[:2], out_b, detached[3]]
        torch.library.opcheck(op._merge_attention_backward, args)
