"""Arguments that the attention operators refuse."""

import pytest
import refusals
import torch

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


OUT, LSE = torch.zeros(2, 4, 3, 6), torch.zeros(2, 4, 3)
REFUSED = {
    "attention_block_": [
        {"out": OUT, "lse": LSE},
        ({"out": OUT.half()}, "out to be Float, got Half"),
        ({"lse": LSE.double()}, "lse to be Float, got Double"),
        ({"out": torch.zeros(2, 4, 3, 5)}, "out to be of size 6 in dim 3"),
        ({"out": torch.zeros(2, 4, 2, 6)}, "out to be of size 3 in dim 2"),
        ({"lse": torch.zeros(2, 4, 2)}, "lse to have the first 3 sizes of q"),
        ({"out": torch.zeros(2, 4, 6, 3).mT}, "out to be contiguous"),
        ({"lse": torch.zeros(2, 3, 4).mT}, "lse to be contiguous"),
    ],
    "attention_block_backward": [
        {"grad_out": OUT, "lse": LSE, "delta": LSE},
        ({"grad_out": OUT.half()}, "grad_out to be Float, got Half"),
        ({"grad_out": torch.zeros(2, 4, 3, 5)}, "grad_out to be of size 6 in dim 3"),
        ({"grad_out": torch.zeros(2, 4, 4, 6)}, "grad_out to be of size 3 in dim 2"),
        ({"lse": torch.zeros(2, 4)}, "lse to have the first 3 sizes of q"),
        ({"delta": LSE.double()}, "delta to be Float, got Double"),
    ],
    "attention_delta": [
        {"grad_out": OUT, "out": OUT},
        (
            {"grad_out": OUT.half(), "out": OUT.half()},
            "grad_out to be float32 or float64, got Half",
        ),
        ({"out": OUT.double()}, "out to be Float"),
        ({"grad_out": OUT[0], "out": OUT[0]}, "grad_out to be a 4-D tensor"),
        ({"out": torch.zeros(2, 4, 3, 5)}, "out to have the first 4 sizes"),
        ({"grad_lse": torch.zeros(2, 4)}, "grad_lse to have the first 3"),
    ],
    "merge_attention": [
        {"out_a": OUT[0, 0], "lse_a": LSE[0, 0], "out_b": OUT[0, 0], "lse_b": LSE[0, 0]},
        ({"out_a": torch.zeros(3, 6).long()}, "out_a to be float32"),
        ({"out_a": torch.zeros(())}, "out_a to have a dim at least"),
        ({"out_b": torch.zeros(3, 6).long()}, "out_b to be float32"),
        ({"out_b": torch.zeros(3, 6).double()}, "out_b to be float32, .* or float16 beside out_a"),
        ({"out_b": torch.zeros(3, 5)}, r"out_b to have the first 2 sizes of out_a, \[3, 6\], got"),
        ({"lse_a": torch.zeros(3).half()}, "lse_a to be Float, got Half"),
        ({"lse_a": torch.zeros(3, 1)}, "lse_a to have the first 1 sizes of out_a"),
        ({"lse_b": torch.zeros(4)}, "lse_b to have the first 1 sizes of out_a"),
    ],
    "merge_attention_": [
        {"out": OUT, "lse": LSE, "out_b": OUT.half(), "lse_b": LSE.clone()},
        ({"out": OUT.half()}, "out to be Float, got Half"),
        ({"out": OUT[0]}, r"out to be a 4-D tensor \[B, H, S, D\]"),
        ({"out": OUT[:, :, :1].expand(2, 4, 3, 6)}, "memory for each element, .* in dim 2"),
        ({"lse": LSE[:, :, :1].expand(2, 4, 3)}, "lse to have memory for each element"),
        ({"out": torch.zeros(2, 4, 6, 3).mT}, "columns of out to be adjacent, got stride 3"),
        ({"out_b": OUT.double()}, "out_b to be float32, bfloat16 or float16"),
        ({"out_b": torch.zeros(2, 4, 3, 5)}, "out_b to have the first 4 sizes"),
        ({"lse_b": LSE.half()}, "lse_b to be Float, got Half"),
    ],
}


@refusals.parametrize(REFUSED)
def test_refuses(moved, name, given, message):
    operator, given = getattr(ops, name), moved(given)
    with pytest.raises(RuntimeError, match=f"^{name}: expected .*{message}"):
        if name.startswith("attention_block_"):
            block(operator, *given.values(), moved=moved)
        else:
            operator(*given.values())


def test_sinks_refuse(device):
    with pytest.raises(ValueError, match=r"sinks_H to hold a number for each head .* got shapes"):
        ops.merge_attention_sinks(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(3))


def test_document_ids(device):
    cu_seqlens = torch.tensor([0, 3, 3, 5, 9], dtype=torch.int32)
    positions = torch.tensor([8, 0, 2, 3, 4, 5])
    assert ops.document_ids(positions, cu_seqlens).tolist() == [3, 0, 0, 2, 2, 3]
