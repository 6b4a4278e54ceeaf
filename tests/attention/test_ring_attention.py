import functools
import inspect
import sys
import typing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import expect_equal, leaves, make_inputs, reference, sharded, whole
from torch.nn.attention.flex_attention import create_block_mask

from moe_ext.attention import (
    RingAttention,
    make_layout,
    ring_attention,
    ring_attention_varlen,
    ring_self_attention,
    sequence_parallel,
)

OFFSETS = (0, 5, 5, 14, 30, 37)
KEY_MASK = torch.arange(37).repeat(2, 1) % 5 != torch.tensor([[1], [3]])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0]).double()
OTHERS = {"key_mask": KEY_MASK, "alibi_slopes": SLOPES, "softcap": 1.5}
CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"is_causal": True, "scale": 0.3},
    "window": {"window": (4, 2)},
    "causal_window": {"is_causal": True, "window": (5, -1)},
    "documents": {"is_causal": True, "cu_seqlens": OFFSETS},
    "prefix": {"is_causal": True, "prefix_len": 11},
    "prefix_documents": {
        "is_causal": True,
        "cu_seqlens": OFFSETS,
        "prefix_len": [[2, 1, 0, 20, 3], [5, 0, 4, 16, 0]],
        **OTHERS,
        "sinks": SINKS,
    },
    "key_mask": {"key_mask": KEY_MASK},
    "alibi": {"is_causal": True, "alibi_slopes": SLOPES},
    "softcap": {"softcap": 0.7},
    "sinks": {"is_causal": True, "sinks": SINKS},
    "all": {
        "is_causal": True,
        "window": (9, -1),
        "cu_seqlens": OFFSETS,
        **OTHERS,
        "sinks": SINKS,
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_process_computes_the_formula(case, kv_heads):
    inputs = make_inputs(kv_heads=kv_heads)
    found = sharded(*inputs, group=None, **CASES[case])
    expect_equal(found, whole(*inputs, **CASES[case]), group=None)


BIAS = torch.randn(2, 4, 37, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
# A row that sees nothing, and keys that no row sees.
HOLES = BIAS.masked_fill((BIAS > 0.7) | (torch.arange(37) == 5)[:, None], -torch.inf)
ATTN_MASKS = {
    "bias": {"is_causal": True, "attn_mask": BIAS},
    "shared bias": {"window": (9, 3), "softcap": 1.5, "attn_mask": BIAS[:1, :1]},
    "bias of heads": {"is_causal": True, "cu_seqlens": OFFSETS, "attn_mask": BIAS[:1]},
    "holes": {"attn_mask": HOLES[:, :1], "key_mask": KEY_MASK},
    "bool": {"attn_mask": BIAS[:, :1] > 0},
    "all": {
        "is_causal": True,
        "prefix_len": [11, 3],
        "attn_mask": HOLES,
        **OTHERS,
    },
}


@pytest.mark.parametrize("case", ATTN_MASKS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_masks_of_all_pairs(case, kv_heads):
    inputs, options = make_inputs(kv_heads=kv_heads), ATTN_MASKS[case]
    found, expected = sharded(*inputs, group=None, **options), whole(*inputs, **options)
    assert len(found) == len(expected) == 5 + options["attn_mask"].is_floating_point()
    expect_equal(found, expected, group=None, last="dmask")


def test_a_bias_of_other_dtypes():
    q, k, v, _ = (x.bfloat16().requires_grad_() for x in make_inputs())
    bias = BIAS[:1, :1].float().requires_grad_()
    out = ring_attention(q, k, v, group=None, attn_mask=bias, precision="fast")
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert bias.grad.dtype == torch.float32 and q.grad.dtype == torch.bfloat16
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    expected = reference(*wide[:3], attn_mask=wide[3])[0]
    expected.square().sum().backward()
    # The output, and with it the gradient that comes in, is rounded to 8 bits.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2**-9)
    error = (bias.grad.double() - wide[3].grad).norm() / wide[3].grad.norm()
    assert error < 2**-8
    assert wide[3].grad.norm() > 0
    # A constant bias costs no gradient.
    ring_attention(q, k, v, group=None, attn_mask=bias.detach()).float().sum().backward()


def test_queries_without_keys_give_zeros():
    inputs = make_inputs(seq_len=6)
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 2:] = True
    out, lse, *grads = sharded(*inputs, group=None, key_mask=hidden, is_causal=True)
    assert not out[0].any() and not out[1, :, :2].any() and out[1, :, 2:].any()
    assert torch.equal(lse[0], torch.full_like(lse[0], -torch.inf))
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert not any(grad[0].any() for grad in grads)


def test_sinks_of_no_weight_are_none():
    inputs = make_inputs(seq_len=6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0] = False
    sinks = torch.full((4,), -torch.inf, dtype=torch.float64)
    *found, grad_sinks = sharded(*inputs, group=None, key_mask=mask, sinks=sinks)
    assert torch.equal(grad_sinks, torch.zeros_like(sinks))
    expect_equal(found, whole(*inputs, key_mask=mask), group=None)


def test_gradients_of_one_process():
    options = {"softcap": 0.9, "window": (3, 0), "dropout_p": 0.3}
    q, k, v, _ = (x.requires_grad_() for x in make_inputs(batch=1, seq_len=5, dim=3, v_dim=2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sinks, bias):
        kwargs = {"group": None, "is_causal": True, "sinks": sinks, "seed": 3, "return_lse": True}
        return ring_attention(q, k, v, attn_mask=bias, **kwargs, **options)

    assert torch.autograd.gradcheck(attend, (q, k, v, sinks, bias))


def test_dropout_keeps_the_mean_and_the_seed():
    q, k, v, _ = make_inputs(seq_len=64, dtype=torch.float32)
    plain = ring_attention(q, k, v, group=None)
    draws = [ring_attention(q, k, v, group=None, dropout_p=0.25, seed=s) for s in range(200)]
    again = ring_attention(q, k, v, group=None, dropout_p=0.25, seed=7)
    assert torch.equal(draws[7], again) and not torch.equal(draws[7], draws[8])
    torch.testing.assert_close(torch.stack(draws).mean(0), plain, rtol=0, atol=0.08)
    torch.manual_seed(1)
    first = ring_attention(q, k, v, group=None, dropout_p=0.25)
    torch.manual_seed(1)
    assert torch.equal(first, ring_attention(q, k, v, group=None, dropout_p=0.25))


def test_packed_tokens_of_one_process():
    q, k, v, _ = make_inputs(batch=1)
    offsets = torch.tensor([0, 5, 14, 37])
    lens = [2, 0, 12]
    expected = ring_attention(
        q, k, v, group=None, cu_seqlens=offsets, is_causal=True, prefix_len=lens
    )
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    attend = functools.partial(ring_attention_varlen, causal=True, prefix_len=lens, group=None)
    found = attend(*tokens, offsets, offsets)
    assert torch.equal(found, expected[0].transpose(0, 1))
    graph = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(*tokens, offsets, offsets), found)
    with pytest.raises(ValueError, match="q to be packed tokens .*, got NoneType"):
        attend(None, *tokens[1:], offsets, offsets)


@pytest.mark.parametrize("of", [torch.tensor, np.array])
@pytest.mark.parametrize("option", [{"scale": 0.5}, {"softcap": 2.0}, {"is_causal": True}])
def test_graphs_take_numbers_in_tensors(option, of):
    q, k, v, _ = make_inputs()
    attend = functools.partial(ring_attention, q, k, v, group=None)
    ((name, value),) = option.items()
    graph = torch.compile(lambda **options: attend(**options) * 2, backend="eager")
    number = of(value)[()]
    assert torch.equal(graph(**{name: number}), attend(**option) * 2)


@pytest.mark.parametrize(
    "rows",
    [
        {"prefix_len": [3, 2]},
        {"cu_seqlens": [[0, 9, 37], [0, 5, 37]]},
        {"cu_seqlens": [0, 9, 37], "prefix_len": [2, 3]},
        {"cu_seqlens": [[0, 9, 37], [0, 5, 37]], "prefix_len": [[2, 3], [1, 1]]},
    ],
)
def test_arrays_of_numpy_are_rows_of_integers(rows):
    q, k, v, _ = make_inputs()
    attend = functools.partial(ring_attention, q, k, v, group=None, is_causal=True)
    arrays = {name: np.array(row) for name, row in rows.items()}
    assert torch.equal(attend(**arrays), attend(**rows))


@pytest.mark.parametrize("of", [torch.tensor, list])
def test_graphs_break_at_documents_of_each_row(of):
    q, k, v, _ = make_inputs()
    attend = functools.partial(ring_attention, q, k, v, group=None)
    rows = [[0, 9, 37], [0, 5, 37]]
    graph = torch.compile(lambda cu_seqlens: attend(cu_seqlens=cu_seqlens) * 2, backend="eager")
    assert torch.equal(graph(of(rows)), attend(cu_seqlens=rows) * 2)


FUNCTIONS = pytest.mark.parametrize("function", [ring_attention, ring_self_attention])


@FUNCTIONS
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "spiral"}, "layout to be a Layout or one of .* got 'spiral'"),
        ({"window": (-2, 0)}, r"window to be -1 \(no limit\) or more, got \(-2, 0\)"),
        ({"dropout_p": 1.0}, r"dropout_p to be in \[0, 1\), got 1.0"),
        ({"seed": 1 << 63}, "seed to be a 64-bit integer"),
        ({"scale": float("nan")}, "scale to be a number, got nan"),
        ({"scale": torch.tensor(0.3, requires_grad=True)}, "scale to be without gradient .mult"),
        ({"scale": float("inf")}, "scale to be finite, got inf"),
        ({"cu_seqlens": [0, 9, 4, 37]}, "cu_seqlens to start at 0 and be sorted"),
        ({"cu_seqlens": [0, 36]}, "cu_seqlens to end at .* 37, got 36"),
        ({"key_mask": torch.ones(2, 37)}, r"key_mask to be bool \[2, 37\]"),
        ({"key_mask": [[True] * 37] * 2}, "key_mask to be a tensor, got list"),
        ({"attn_mask": torch.zeros(37, 37)}, r"attn_mask to be \[2 or 1, 4 or 1, 37, S\], .* got"),
        ({"attn_mask": torch.zeros(1, 1, 37, 36)}, "S of attn_mask to be the 37 keys .* got 36"),
        ({"attn_mask": torch.zeros(1, 1, 37, 37).long()}, "attn_mask to be bool or floating, got"),
        ({"layout": make_layout("contiguous", 36, 1)}, "layout to be for 37 positions"),
        ({"key_mask": torch.ones(2, 37, device="meta") > 0}, "key_mask to be on cpu like q"),
        ({"attn_mask": torch.ones(1, 1, 37, 37, device="meta")}, "attn_mask to be on cpu like q"),
    ],
)
def test_arguments_refused_by_both(function, changes, message):
    with pytest.raises(ValueError, match=message):
        function(*make_inputs()[:3], group=None, **changes)


@FUNCTIONS
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": "0.3"}, "scale to be a number, got '0.3'"),
        ({"is_causal": "False"}, "is_causal to be True or False, got 'False'"),
        ({"dropout_p": 0.1, "seed": 3.5}, "seed to be an integer, got 3.5"),
    ],
)
def test_arguments_of_other_types(function, changes, message):
    with pytest.raises(TypeError, match=message):
        function(*make_inputs()[:3], group=None, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "tree"}, "scheme to be one of .* got 'tree'"),
        ({"precision": "sloppy"}, "precision to be one of .* got 'sloppy'"),
        ({"window": 3}, r"window to be None or \(left, right\), integers, got 3"),
        ({"dropout_p": -0.1}, r"dropout_p to be in \[0, 1\), got -0.1"),
        ({"softcap": -1.0}, r"softcap to be 0 \(none\) or more, got -1.0"),
        ({"cu_seqlens": torch.zeros(2)}, "cu_seqlens to be a row of integers"),
        ({"key_mask": torch.ones(2, 36, dtype=torch.bool)}, r"key_mask to be bool \[2, 37\]"),
        ({"softcap": torch.tensor(5.0, requires_grad=True)}, "softcap to be without gradient"),
        ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes to be \[4\], got \[2\]"),
        ({"alibi_slopes": [1.0] * 4}, r"alibi_slopes to be a tensor \[4\], got list"),
        ({"sinks": [1.0] * 4}, r"sinks to be a tensor \[4\], got list"),
        ({"sinks": torch.ones(5)}, r"sinks to be \[4\], got \[5\]"),
        ({"alibi_slopes": torch.ones(4).long()}, "alibi_slopes to be floating .* torch.int64"),
        ({"alibi_slopes": torch.ones(4).requires_grad_()}, "alibi_slopes to be without gradient"),
        ({"sinks": torch.ones(4).bool()}, "sinks to be floating point, got torch.bool"),
        ({"sinks": torch.ones(4, device="meta")}, "sinks to be on cpu like q, got meta"),
        ({"window": (1.5, 0)}, r"window to be None or \(left, right\), integers, got \(1.5, 0\)"),
        ({"cu_seqlens": [0, 2.5, 37]}, "cu_seqlens to be a row of integers"),
        ({"prefix_len": 3}, "is_causal to be True with prefix_len, got False"),
        (
            {"prefix_len": 3, "is_causal": True, "window": (5, -1)},
            r"window to be None with prefix_len, got \(5, -1\)",
        ),
        ({"prefix_len": -1}, "prefix_len to be an integer from 0 on, or 2, one .* got -1"),
        ({"prefix_len": [1, 2, 3]}, r"or 2, one for each row of q, got \[1, 2, 3\]"),
        ({"prefix_len": torch.ones(2)}, "prefix_len to be an integer"),
        (
            {"prefix_len": [3, 3, 3], "cu_seqlens": [0, 9, 37]},
            r"or 2, one for each document, or 2 rows of 2, got \[3, 3, 3\]",
        ),
        (
            {"prefix_len": [3], "cu_seqlens": [[0, 9, 37], [0, 37]]},
            "prefix_len to be an integer, or 2 .* for each row of q, got",
        ),
        ({"attn_mask": torch.zeros(1, 3, 37, 37)}, r"attn_mask to be .* got \[1, 3, 37, 37\]"),
        (
            {"attn_mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 37, 37, "cpu")},
            r"attn_mask to be a tensor \(blocks of flex_attention: is_causal, window, .* BlockMask",
        ),
        (
            {"attn_mask": torch.zeros(1, 1, 37, 37), "cu_seqlens": [[0, 9, 37], [0, 37]]},
            "attn_mask to be None with other documents in each row",
        ),
        ({"kv_grad_dtype": torch.int8}, "kv_grad_dtype to be one of"),
        ({"layout": "per_document"}, "cu_seqlens to be given for 'per_document'"),
    ],
)
def test_arguments_refused(changes, message):
    q, k, v, _ = make_inputs()
    with pytest.raises(ValueError, match=message):
        ring_attention(q, k, v, group=None, **changes)


@FUNCTIONS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"q to be of shape \[B, H, L, D\]"),
        (lambda q, k, v: (q.float(), k, v), "k to be torch.float32 like q, got torch.float64"),
        (lambda q, k, v: (q, k[:, :, 1:], v), r"k to be \[2, Hkv, 37, 8\] to go with q"),
        (lambda q, k, v: (q, k, v[:, :1]), r"v to be \[2, 2, 37, Dv\] to go with k"),
        (lambda q, k, v: (q[:, :3], k, v), "heads of q to be a multiple of the 2 heads of k"),
        (lambda q, k, v: (q.long(), k, v), "q to be float32, bfloat16, float16 or float64"),
    ],
)
def test_tensors_refused(function, change, message):
    with pytest.raises(ValueError, match=f"{function.__name__}: expected .*{message}"):
        function(*change(*make_inputs()[:3]), group=None)


TWICE = "expected the result to be differentiated once, got a second derivative"


@FUNCTIONS
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_second_derivative_is_refused(function, which):
    """It would lose the terms that come by saved tensors."""
    inputs = [torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
    wanted = inputs[which].requires_grad_()
    (grad,) = torch.autograd.grad(function(*inputs, group=None).sum(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{function.__name__}: {TWICE}"):
        torch.autograd.grad(grad.square().sum(), wanted)


@pytest.mark.parametrize("name", ["q", "k", "v", "key_mask", "attn_mask", "alibi_slopes", "sinks"])
def test_a_change_in_place_before_the_backward_pass_is_an_error(name):
    given = dict(zip(("q", "k", "v"), leaves(make_inputs()[:3]), strict=True))
    given |= {"key_mask": KEY_MASK.clone(), "alibi_slopes": SLOPES.clone(), "sinks": SINKS.clone()}
    given["attn_mask"] = torch.zeros(1, 1, 37, 37)
    out = ring_attention(**given, group=None)
    with torch.no_grad():
        given[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_first_derivatives_with_a_graph_are_right():
    inputs = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    out = ring_attention(*inputs, group=None, is_causal=True)
    plain = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    found = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_a_group_that_is_none_of_ours_is_refused():
    with pytest.raises(TypeError, match="to be None or a ProcessGroup"):
        ring_attention(*make_inputs()[:3], group=-100)


def inside(q, k, v):
    with sequence_parallel(None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("way", ["function", "module", "context", "graph"])
def test_autocast_holds_as_for_torch(way):
    def run(attend, *tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(*tensors)

    function = functools.partial(ring_attention, group=None, is_causal=True)
    module = RingAttention(None, is_causal=True)
    attend = {"function": function, "module": module}.get(way, inside)
    graph = torch.compile(run, fullgraph=True, backend="aot_eager") if way == "graph" else run
    q, k, v = (x.float().requires_grad_() for x in make_inputs(kv_heads=4)[:3])
    expected = run(functools.partial(F.scaled_dot_product_attention, is_causal=True), q, k, v)
    # Layers leave a mixture: norms in float32 beside projections in bfloat16.
    out = graph(attend, q, k, v.bfloat16())
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.float().sum(), (q, k, v)))
    assert torch.equal(out, function(*(x.bfloat16() for x in (q, k, v))))
    assert run(attend, *(x.double() for x in (q, k, v))).dtype == torch.float64
    with pytest.raises(ValueError, match="q to be float32, .* got torch.int64"):
        run(attend, q.long(), k, v)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads")
@pytest.mark.parametrize("mode", [torch._subclasses.FakeTensorMode, lambda: torch.device("meta")])
def test_tensors_may_have_no_values(mode):
    with mode():
        q = torch.ones(2, 4, 47, 8, requires_grad=True)
        out = ring_attention(q, q, q, group=None, is_causal=True)
        out.sum().backward()
    assert out.shape == q.grad.shape == q.shape


def test_types_of_the_result_have_every_keyword():
    defined = inspect.signature(ring_attention).parameters
    keywords = {n: p.annotation for n, p in defined.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords.pop("return_lse") == "bool"
    told = sys.modules[ring_attention.__module__]._Keywords.__annotations__
    told = {name: kind.__forward_arg__ for name, kind in told.items()}
    assert told == {**keywords, "group": f"Required[{keywords['group']}]"}
    results = [o.__annotations__["return"] for o in typing.get_overloads(ring_attention)]
    assert results == ["Tensor", "tuple[Tensor, Tensor]", "Tensor | tuple[Tensor, Tensor]"]
