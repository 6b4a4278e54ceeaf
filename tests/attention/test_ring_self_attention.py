"""Published ring self-attention on ranks against one process; all cases share a spawn of ranks."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from helpers import TIGHT, group, make_inputs, reference, visible, with_grads
from rank_checks import ChecksOn
from test_ring_attention import CASES, KEY_MASK
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_ext.attention import (
    LAYOUTS,
    RingSelfAttention,
    make_layout,
    ring_attention,
    ring_self_attention,
    shard_sequence,
)
from moe_ext.distributed import count_traffic

SERVED = ("full", "causal", "scale", "window", "documents", "key_mask")
# By the number of ranks.
check = ChecksOn(1, 2, 3)


def expected_of(inputs, **kwargs):
    return with_grads(lambda *qkv: reference(*qkv, **kwargs)[0], *inputs)


def found_of(inputs, layout="contiguous", key_mask=None, attn_mask=None, **kwargs):
    where = {"group": group(), "layout": layout, "cu_seqlens": kwargs.get("cu_seqlens")}
    if key_mask is not None:
        key_mask = shard_sequence(key_mask, dim=1, **where)
    if attn_mask is not None:
        attn_mask = shard_sequence(attn_mask, dim=2, **where)
    options = {"group": group(), "layout": layout, **kwargs}
    options |= {"key_mask": key_mask, "attn_mask": attn_mask}
    parts = (shard_sequence(x, dim=2, **where) for x in inputs)
    return with_grads(ring_self_attention, *parts, **options)


def assert_same(found, expected, layout="contiguous", cu_seqlens=None, **tolerances):
    where = {"group": group(), "layout": layout, "cu_seqlens": cu_seqlens}
    for name, part, full in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        full = shard_sequence(full, dim=2, **where).to(part.dtype)
        torch.testing.assert_close(
            part, full, **(tolerances or TIGHT), msg=lambda m, n=name: f"{n}: {m}"
        )


@check.pairs(LAYOUTS, SERVED)
def equals_one_process(layout, case):
    kwargs = {"cu_seqlens": (0, 20, 37), **CASES[case]}
    if layout in ("contiguous", "zigzag", "striped") and case != "documents":
        del kwargs["cu_seqlens"]
    inputs = make_inputs(kv_heads=(1, 2, 4)[len(case) % 3])
    found = found_of(inputs, layout=layout, **kwargs)
    assert_same(found, expected_of(inputs, **kwargs), layout, kwargs.get("cu_seqlens"))


@check.pairs(("contiguous", "zigzag", "striped"), (0, 1, 2, 3, 5, 8))
def any_length(layout, seq_len):
    inputs = make_inputs(seq_len=seq_len)
    for kwargs in ({"is_causal": True}, {"window": (1, 0)}):
        found = found_of(inputs, layout=layout, **kwargs)
        assert_same(found, expected_of(inputs, **kwargs), layout)
    dropped = found_of(inputs, layout=layout, dropout_p=0.5, seed=1)
    assert all(bool(torch.isfinite(x).all()) for x in dropped)


@check(("contiguous",), ("striped",))
def masks_of_ones_own(layout):
    inputs, generator = make_inputs(kv_heads=1), torch.Generator().manual_seed(4)
    bias = torch.randn(1, 4, 37, 37, generator=generator, dtype=torch.float64)
    seen = torch.rand(2, 1, 37, 37, generator=generator) < 0.3
    seen[0, 0, 5] = False
    attend = nn.functional.scaled_dot_product_attention
    for mask in (bias, seen):
        expected = with_grads(attend, *inputs, attn_mask=mask, enable_gqa=True)
        assert_same(found_of(inputs, layout=layout, attn_mask=mask), expected, layout)


@check()
def queries_without_keys_give_zeros():
    hidden = torch.zeros(2, 37, dtype=torch.bool)
    hidden[1, 30:] = True
    inputs = make_inputs()
    found = found_of(inputs, key_mask=hidden, is_causal=True)
    assert_same(found, expected_of(inputs, key_mask=hidden, is_causal=True))
    assert not any(x[0].any() for x in found)


@check(("contiguous",), ("zigzag",))
def dropout_is_that_of_ring_attention(layout):
    inputs = make_inputs()
    kwargs = {"is_causal": True, "dropout_p": 0.4, "seed": -11}
    expected = with_grads(ring_attention, *inputs, group=None, **kwargs)
    assert_same(found_of(inputs, layout=layout, **kwargs), expected, layout)


@check(("float32",), ("bfloat16",), ("float16",))
def error_is_that_of_one_rounding(dtype):
    inputs = make_inputs(batch=1, seq_len=192, dim=32, v_dim=32, dtype=getattr(torch, dtype))
    found = found_of(inputs, is_causal=True)
    expected = expected_of([x.double() for x in inputs], is_causal=True)
    for part, full in zip(found, expected, strict=True):
        full = shard_sequence(full, dim=2, group=group(), layout="contiguous")
        floor = (full.to(part.dtype).double() - full).norm()
        assert (part.double() - full).norm() <= 1.05 * floor + 2e-6 * full.norm()


@check(("float32",), ("bfloat16",))
def bytes_are_those_of_the_formula(dtype):
    num_ranks = dist.get_world_size() if group() else 1
    kwargs = {"heads": 4, "kv_heads": 4, "dim": 8, "v_dim": 8, "seq_len": 6 * num_ranks}
    inputs = make_inputs(dtype=getattr(torch, dtype), **kwargs)
    leaves = [shard_sequence(x, dim=2, group=group(), layout="contiguous") for x in inputs]
    leaves = [x.requires_grad_() for x in leaves]
    # B H S D elements; a shard of K or V is a P-th of them.
    elements = 2 * 4 * 6 * num_ranks * 8
    unit = elements * leaves[0].element_size() * (num_ranks - 1) // num_ranks
    with count_traffic() as forward:
        out = ring_self_attention(*leaves[:3], group=group())
    assert forward.total_bytes == forward.sent_bytes["send"] == 2 * unit
    assert forward.calls["send"] == 2 * (num_ranks - 1)
    with count_traffic() as backward:
        out.backward(leaves[3].detach())
    assert backward.sent_bytes["send"] == 2 * unit
    # dK and dV travel in float32.
    wire = 4 // leaves[0].element_size()
    assert backward.sent_bytes["reduce_scatter"] == 2 * wire * unit
    assert backward.calls["reduce_scatter"] == (2 if group() else 0)
    if dtype == "float32":
        published = 8 * unit
        assert forward.total_bytes + backward.total_bytes == published * 6 // 8


@check()
def recomputation_gives_the_same_bits():
    where = {"group": group(), "layout": "contiguous"}
    parts = [shard_sequence(x, dim=2, **where) for x in make_inputs()]
    attend = functools.partial(ring_self_attention, **where, is_causal=True)
    found = []
    for again in (attend, functools.partial(checkpoint, attend, use_reentrant=False)):
        torch.manual_seed(5)
        found.append(with_grads(again, *parts, dropout_p=0.2))
    assert all(map(torch.equal, *found))
    with torch.inference_mode():
        out = attend(*parts[:3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(*parts[:3]), out)


def run_module(module, x, grad, **kwargs):
    x = x.detach().clone().requires_grad_()
    y = module(x, **kwargs)
    module.zero_grad()
    y.backward(grad)
    return y.detach(), x.grad, {n: p.grad.clone() for n, p in module.named_parameters()}


@check(("contiguous", 4), ("zigzag", 2))
def module_equals_one_process(layout, kv_heads):
    torch.manual_seed(3)
    options = {"num_kv_heads": kv_heads, "is_causal": True, "dropout": 0.3, "rotary_base": 1e4}
    where = {"group": group(), "layout": layout}
    module = RingSelfAttention(16, 4, dtype=torch.float64, **where, **options)
    whole = RingSelfAttention(16, 4, group=None, dtype=torch.float64, **options)
    whole.load_state_dict(module.state_dict())
    x, grad = torch.randn(2, 2, 23, 16, dtype=torch.float64)
    y, dx, grads = run_module(whole, x, grad, seed=7)
    parts = [shard_sequence(t, dim=1, **where) for t in (x, grad)]
    part_y, part_dx, part_grads = run_module(module, *parts, seed=7)
    torch.testing.assert_close(part_y, shard_sequence(y, dim=1, **where))
    torch.testing.assert_close(part_dx, shard_sequence(dx, dim=1, **where))
    for name, g in part_grads.items():
        if group() is not None:
            dist.all_reduce(g)
        torch.testing.assert_close(g, grads[name], msg=lambda m, n=name: f"{n}: {m}")
    module.eval()
    assert torch.equal(module(parts[0]), module(parts[0]))


@check()
def module_equals_that_of_torch():
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    module = RingSelfAttention.from_multihead_attention(theirs, group=group(), is_causal=True)
    x = torch.randn(2, 37, 16, dtype=torch.float64)
    hidden = ~visible(37, is_causal=True)
    padding = ~KEY_MASK
    padding[:, 0] = False
    mask = {"attn_mask": hidden, "key_padding_mask": padding, "need_weights": False}
    expected, _ = theirs(x, x, x, **mask)
    where = {"dim": 1, "group": group(), "layout": "contiguous"}
    found = module(shard_sequence(x, **where), key_mask=shard_sequence(~padding, **where))
    torch.testing.assert_close(found, shard_sequence(expected, **where))


def refused(match, *tensors, **kwargs):
    with pytest.raises(ValueError, match=match):
        ring_self_attention(*tensors, group=group(), **kwargs)


@check(on=(2, 3))
def what_differs_between_ranks_is_refused_on_all():
    """Beside each option by itself, which tests/test_options_over_ranks.py has."""
    q, k, v, _ = (
        shard_sequence(x, group=group(), dim=2, layout="contiguous") for x in make_inputs()
    )
    odd = dist.get_rank() == 1
    match = r"the dtype of q to be equal .* torch.float64 on rank 0, torch.float32 on rank 1"
    refused(match, *(x.float() if odd else x for x in (q, k, v)))
    refused("shards of a contiguous layout of", *(x[:, :, 3 * odd :] for x in (q, k, v)))
    refused("k to be .* to go with q, got .* on rank 1$", q, k[:, :, odd:], v)
    refused("window to be None or .*, got 3 on rank 1$", q, k, v, window=3 if odd else None)
    refused("q to be a tensor .*, got NoneType on rank 1$", None if odd else q, k, v)
    mask = torch.ones(1, 1, q.shape[2], 36, dtype=torch.bool)
    refused("S of attn_mask to be the 37 keys of all ranks, got 36", q, k, v, attn_mask=mask)
    x = torch.zeros(2, q.shape[2], 16)
    for options in ({}, {"rotary_base": 1e4}):
        module = RingSelfAttention(16, 4, group=group(), **options)
        with pytest.raises(ValueError, match=r"x to be of shape .*, got \[2, 8\] on rank 1$"):
            module(torch.zeros(2, 8) if odd else x)
    ids = torch.arange(x.shape[1])
    for wrong in (ids[:3], ids.expand(3, -1)):
        with pytest.raises(ValueError, match=r"position_ids to be .*, got \[3.*\] on rank 1$"):
            module(x, position_ids=wrong if odd else ids.expand(2, -1))
    for match, argument, given in (
        ("layout to be a Layout or one of .*, got 'spiral' on rank 1$", "layout", "spiral"),
        (r"cu_seqlens to start at 0 .*, got \[3, 37\] on rank 1$", "cu_seqlens", [3, 37]),
        (r"cu_seqlens to be equal .* None on rank 0, \(0, 9, 37\) on", "cu_seqlens", [0, 9, 37]),
        ("layout to be equal .* contiguous on rank 0, striped on", "layout", "striped"),
        ("position_ids to be equal on every rank", "position_ids", torch.arange(x.shape[1])),
    ):
        with pytest.raises(ValueError, match=match):
            module(x, **({argument: given} if odd else {}))
    with pytest.raises(ValueError, match="layout to be for 37 .*, got 36"):
        module(x, layout=make_layout("zigzag", 36, dist.get_world_size()))
    with pytest.raises(ValueError, match="x to be torch.float32 like .*, got .*64 on rank 1$"):
        module(x.double() if odd else x)
    # Nothing is left underway that a later call could take for its own.
    assert module(x).shape == x.shape


test_ranks = check.test(group_timeout=30)


def test_a_mask_that_learns_is_refused():
    mask = torch.ones(1, 1, 37, 37).requires_grad_()
    with pytest.raises(ValueError, match="attn_mask to be without gradient"):
        ring_self_attention(*make_inputs()[:3], group=None, attn_mask=mask)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_heads": 3}, "model_dim to be a multiple of the 3 heads, got 16"),
        ({"num_heads": 0}, "num_heads to be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_kv_heads to be a divisor of the 4 heads, got 3"),
        ({"dropout": 1.0}, r"dropout to be in \[0, 1\), got 1.0"),
        ({"layout": "spiral"}, "layout to be a Layout or one of"),
        ({"num_heads": 16, "rotary_base": 1e4}, "head dim to be even for rotary_base, got 1"),
    ],
)
def test_modules_refused(kwargs, message):
    with pytest.raises(ValueError, match=f"RingSelfAttention: expected {message}"):
        RingSelfAttention(16, **{"num_heads": 4, "group": None, **kwargs})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kdim": 8}, "kdim and vdim to be embed_dim"),
        ({"add_bias_kv": True}, "module to be without add_bias_kv"),
        ({"batch_first": False}, "module to be batch_first=True"),
    ],
)
def test_modules_of_torch_refused(options, message):
    theirs = nn.MultiheadAttention(16, 4, **{"batch_first": True, **options})
    with pytest.raises(ValueError, match=message):
        RingSelfAttention.from_multihead_attention(theirs, group=None)


@pytest.mark.parametrize(
    ("frozen", "names"),
    [
        ("in_proj_weight", r"[qkv]_proj\.weight"),
        ("in_proj_bias", r"[qkv]_proj\.bias"),
        ("out_proj", r"out_proj\..*"),
    ],
)
def test_frozen_parameters_of_torch_stay_frozen(frozen, names):
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    getattr(theirs, frozen).requires_grad_(False)
    made = RingSelfAttention.from_multihead_attention(theirs, group=None)
    for name, parameter in made.named_parameters():
        assert parameter.requires_grad != bool(re.fullmatch(names, name)), name
