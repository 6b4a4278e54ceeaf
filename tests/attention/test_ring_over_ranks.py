"""Ranks against one process; one group of processes runs the whole list of cases."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from helpers import expect_equal, group, leaves, make_inputs, sharded, whole
from rank_checks import ChecksOn
from test_ring_attention import ATTN_MASKS, CASES

from moe_ext import _runtime_library
from moe_ext.attention import (
    LAYOUTS,
    explain_scheme,
    position_ids,
    ring_attention,
    ring_attention_varlen,
    shard_sequence,
    shift_labels,
    token_mean_loss,
    unshard_sequence,
)

PER_HEAD = ("alibi_slopes", "sinks")
# The number of ranks, and "0" for the exchange in Python in the place of the compiled one.
SETTINGS = ((2, ""), (3, ""), (3, "0"))
# Calls that exchange nothing in a ring are the same with both.
COMPILED = [setting for setting in SETTINGS if not setting[1]]
check = ChecksOn(*SETTINGS)


@check(on=[(3, "0")])
def messages_are_exchanged_in_python():
    os.environ["MOE_EXT_RUNTIME"] = "0"
    assert _runtime_library.load() is None


@check(on=[(3, "")])
def both_exchanges_give_the_same_bits():
    if _runtime_library.load() is None:
        return
    for kwargs in ({"is_causal": True}, {"window": (5, 0), "layout": "contiguous"}):
        found = []
        for path in ("1", "0"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MOE_EXT_RUNTIME", path)
                inputs = make_inputs(dtype=torch.float32, seq_len=61)
                found.append(sharded(*inputs, group=group(), **kwargs))
        assert all(map(torch.equal, *found))


@check.pairs(LAYOUTS, CASES)
def equals_one_process(layout, case):
    kwargs = {"cu_seqlens": (0, 20, 37), **CASES[case]}
    if case in ("full", "causal") and layout in ("contiguous", "zigzag", "striped"):
        del kwargs["cu_seqlens"]
    inputs = make_inputs(kv_heads=(1, 2, 4)[len(case) % 3])
    found = sharded(*inputs, group=group(), layout=layout, **kwargs)
    where = {"layout": layout, "cu_seqlens": kwargs.get("cu_seqlens")}
    expect_equal(found, whole(*inputs, **kwargs), group=group(), **where)


@check.pairs(("all_gather", "ulysses"), LAYOUTS, CASES, ("1/1", "2/0", "2/1"), on=COMPILED)
def other_schemes_equal_one_process(scheme, layout, case, per_rank):
    kwargs = CASES[case]
    if layout in ("per_document", "cost_balanced"):
        kwargs = {"cu_seqlens": (0, 20, 20, 37), **kwargs}
    # Heads of q and of k for each rank; 0 for one in all.
    heads, kv_heads = (max(1, int(n) * dist.get_world_size()) for n in per_rank.split("/"))
    inputs = make_inputs(heads=heads, kv_heads=kv_heads)
    per_head = {n: kwargs[n][torch.arange(heads) % 4] for n in PER_HEAD if n in kwargs}
    case_kwargs = {**kwargs, **per_head}
    found = sharded(*inputs, group=group(), layout=layout, scheme=scheme, **case_kwargs)
    expected = whole(*inputs, **case_kwargs)
    where = {"layout": layout, "cu_seqlens": kwargs.get("cu_seqlens")}
    expect_equal(found, expected, group=group(), **where)


@check()
def bfloat16_on_the_wire():
    inputs = make_inputs(batch=1, seq_len=256, dim=32, v_dim=32, dtype=torch.bfloat16)
    found = sharded(*inputs, group=group(), is_causal=True, kv_grad_dtype=torch.bfloat16)
    expected = whole(*(x.double() for x in inputs), is_causal=True)
    for part, full in zip(found, expected, strict=True):
        part = unshard_sequence(part, group=group(), dim=2).double()
        assert ((part - full).norm() / full.norm()).item() <= 5e-3


@check()
def a_seed_is_drawn_for_all_ranks():
    inputs = make_inputs()
    torch.manual_seed(100 + dist.get_rank())
    found = sharded(*inputs, group=group(), dropout_p=0.4)
    torch.manual_seed(100)
    expected = sharded(*inputs, group=None, dropout_p=0.4)
    expect_equal(found, expected, group=group())


def attend(tensors, masks):
    return ring_attention(*tensors, group=group(), **masks)


@check()
def two_attentions_and_inference():
    *qkv, grad = (shard_sequence(x, group=group(), dim=2) for x in make_inputs())
    qkv, masks = leaves(qkv), [{"is_causal": True}, {"window": (3, 3)}]
    apart = [torch.autograd.grad(attend(qkv, m), qkv, grad) for m in masks]
    once = attend(qkv, masks[0])
    together = torch.autograd.grad(once + attend(qkv, masks[1]), qkv, grad)
    for total, a, b in zip(together, *apart, strict=True):
        torch.testing.assert_close(total, a + b)
    with torch.inference_mode():
        assert torch.equal(attend(qkv, masks[0]), once)


@check(*itertools.product(LAYOUTS), on=COMPILED)
def helpers_of_sequences(layout):
    rank, offsets = dist.get_rank(), [0, 11, 11, 30, 37]
    where = {"group": group(), "layout": layout, "cu_seqlens": offsets}
    x = torch.randn(3, 37, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    part = shard_sequence(x, dim=1, **where).requires_grad_()
    full = unshard_sequence(part, dim=1, **where)
    assert torch.equal(full, x)
    (full * x * (rank + 1)).sum().backward()
    ranks = sum(range(1, dist.get_world_size() + 1))
    torch.testing.assert_close(part.grad, part.detach() * ranks)
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint16, torch.bool):
        cast = x.to(dtype)
        again = unshard_sequence(shard_sequence(cast, dim=1, **where), dim=1, **where)
        assert torch.equal(again.float(), cast.float())
    ids = position_ids(37, **where)
    assert torch.equal(
        ids, shard_sequence(torch.cat([torch.arange(n) for n in (11, 19, 7)]), dim=0, **where)
    )
    plain = position_ids(37, restart=False, **where)
    assert torch.equal(x[:, plain], part)
    learns = part.detach().requires_grad_(rank == 1)
    with pytest.raises(ValueError, match="requiring a gradient to be equal .* 1 on rank 1"):
        unshard_sequence(learns, dim=1, **where)
    total = x.sum() if rank == 1 else x.sum((0, 1))
    with pytest.raises(ValueError, match=r"token_mean_loss: expected loss_sum .* got shapes \[2\]"):
        token_mean_loss(total, 4, group=group())


def refused(match, *tensors, **kwargs):
    with pytest.raises(ValueError, match=match):
        ring_attention(*tensors, group=group(), **kwargs)


def whole_rows(inputs, options_of_rows, **options):
    """The results of one process for each row of the batch, which has options of its own."""
    rows = zip(zip(*(x.split(1) for x in inputs), strict=True), options_of_rows, strict=True)
    parts = [whole(*row, **of_row, **options) for row, of_row in rows]
    return [torch.cat(pair) for pair in zip(*parts, strict=True)]


@check(("ring", "zigzag"), ("all_gather", "striped"), ("ulysses", "contiguous"), on=COMPILED)
def rows_with_documents_of_their_own(scheme, layout):
    rows = ((0, 5, 5, 14, 30, 37), (0, 21, 37))
    inputs = make_inputs(heads=12, kv_heads=12)
    masks = {"window": (6, 2), "is_causal": scheme != "all_gather"}
    key_mask = torch.arange(37).repeat(2, 1) % 7 != 3
    pairs = zip(rows, key_mask.split(1), strict=True)
    expected = whole_rows(inputs, [{"cu_seqlens": r, "key_mask": m} for r, m in pairs], **masks)
    where = {"group": group(), "layout": layout}
    # A tensor, whose rows are filled with documents of no length.
    for given in (rows, torch.tensor([rows[0], (*rows[1], 37, 37, 37)])):
        options = {**where, **masks, "scheme": scheme, "cu_seqlens": given}
        found = sharded(*inputs, key_mask=key_mask, **options)
        expect_equal(found, expected, **where)
    ids = torch.stack([position_ids(37, cu_seqlens=row, **where) for row in rows])
    assert torch.equal(position_ids(37, cu_seqlens=rows, **where), ids)
    labels = torch.arange(74).view(2, 37)
    pairs = zip(labels.split(1), rows, strict=True)
    shifted = torch.cat([shift_labels(part, cu_seqlens=row) for part, row in pairs])
    assert torch.equal(shift_labels(labels, cu_seqlens=rows), shifted)
    same = sharded(*inputs, **where, is_causal=True, cu_seqlens=(rows[0], rows[0]))
    one = sharded(*inputs, **where, is_causal=True, cu_seqlens=rows[0])
    assert all(map(torch.equal, same, one))


@check(("ring", "zigzag"), ("all_gather", "striped"), ("ulysses", "contiguous"), on=COMPILED)
def prefixes_of_rows(scheme, layout):
    inputs = make_inputs(heads=12, kv_heads=12)
    where = {"group": group(), "layout": layout}
    options = {**where, "scheme": scheme, "is_causal": True}
    expected = whole(*inputs, is_causal=True, prefix_len=torch.tensor([21, 3]))
    found = sharded(*inputs, **options, prefix_len=torch.tensor([21, 3]))
    expect_equal(found, expected, **where)
    dropped = {"is_causal": True, "prefix_len": [21, 3], "dropout_p": 0.3, "seed": 5}
    found = sharded(*inputs, **where, scheme=scheme, **dropped)
    expect_equal(found, sharded(*inputs, group=None, **dropped), **where)
    rows, lens = ((0, 5, 5, 14, 30, 37), (0, 21, 37)), ((3, 0, 20, 1, 2), (8, 16))
    pairs = zip(rows, lens, strict=True)
    of_rows = [{"cu_seqlens": row, "prefix_len": n} for row, n in pairs]
    expected = whole_rows(inputs, of_rows, is_causal=True)
    for given in (lens, torch.tensor([lens[0], (*lens[1], 9, 9, 9)])):
        offsets = rows if given is lens else torch.tensor([rows[0], (*rows[1], 37, 37, 37)])
        found = sharded(*inputs, **options, cu_seqlens=offsets, prefix_len=given)
        expect_equal(found, expected, **where)


@check.pairs(("ring zigzag", "auto contiguous", "all_gather striped"), ATTN_MASKS, on=COMPILED)
def masks_of_all_pairs_equal_one_process(way, case):
    scheme, layout = way.split()
    options, where = ATTN_MASKS[case], {"group": group(), "layout": layout}
    found = sharded(*make_inputs(), **where, scheme=scheme, **options)
    where["cu_seqlens"] = options.get("cu_seqlens")
    expect_equal(found, whole(*make_inputs(), **options), **where, last="dmask")


@check(on=COMPILED)
def masks_of_all_pairs_are_refused():
    rank, odd = dist.get_rank(), dist.get_rank() == 1
    q, k, v, _ = (shard_sequence(x, group=group(), dim=2) for x in make_inputs(heads=4))
    mask = torch.zeros(1, 1, q.shape[2], 37)
    heads = make_inputs(heads=dist.get_world_size(), kv_heads=1)
    parts = [shard_sequence(x, group=group(), dim=2) for x in heads[:3]]
    match = "attn_mask to be None for scheme 'ulysses', where queries leave"
    refused(match, *parts, scheme="ulysses", attn_mask=mask)
    choice = explain_scheme(*parts, group=group(), attn_mask=mask)
    assert choice.scheme in ("ring", "all_gather", "double_ring")
    assert "expects attn_mask to be None for scheme 'ulysses'" in str(choice)
    refused("S of attn_mask .0: none. to be equal", q, k, v, attn_mask=None if odd else mask)
    refused("attn_mask to be .*, S., .* on rank 1$", q, k, v, attn_mask=mask[:, :, odd:])
    refused("S of attn_mask to be the 37 keys", q, k, v, attn_mask=mask[..., 1:])
    learns = mask.clone().requires_grad_(rank == 0)
    refused("requiring a gradient to be equal", q, k, v, attn_mask=learns)


@check(("ring", "per_document"), ("all_gather", "striped"), on=COMPILED)
def packed_tokens_as_the_kernels_take_them(scheme, layout):
    offsets = torch.tensor([0, 5, 5, 14, 30, 37], dtype=torch.int32)
    where = {"group": group(), "layout": layout}
    inputs = [shard_sequence(x, dim=2, cu_seqlens=offsets, **where) for x in make_inputs(batch=1)]
    expected = [x.clone().requires_grad_() for x in inputs[:3]]
    options = {"is_causal": True, "window": (6, -1), "softcap": 1.5, "scale": 0.3, "seed": 3}
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    common = {**where, "alibi_slopes": slopes, "dropout_p": 0.2, "scheme": scheme}
    out = ring_attention(*expected, cu_seqlens=offsets, **options, **common)
    out.backward(inputs[3])
    tokens = [x[0].transpose(0, 1).detach().contiguous().requires_grad_() for x in inputs[:3]]
    kernel = (0.2, 0.3, True, (6, -1), 1.5, slopes)
    found = ring_attention_varlen(
        *tokens, offsets, offsets.clone(), 16, 16, *kernel, **where, scheme=scheme, seed=3
    )
    found.backward(inputs[3][0].transpose(0, 1))
    assert torch.equal(found, out[0].transpose(0, 1))
    for token, x in zip(tokens, expected, strict=True):
        assert torch.equal(token.grad, x.grad[0].transpose(0, 1))
    bias = torch.randn(1, 4, expected[0].shape[2], 37, dtype=torch.float64)
    found = ring_attention_varlen(
        *tokens, offsets, offsets, causal=True, **where, scheme=scheme, attn_mask=bias[0]
    )
    options = {"is_causal": True, "cu_seqlens": offsets, "attn_mask": bias}
    out = ring_attention(*expected, **options, **where, scheme=scheme)
    assert torch.equal(found, out[0].transpose(0, 1))
    tokens = [x.detach() for x in tokens]
    odd = dist.get_rank() == 1
    with pytest.raises(ValueError, match=r"attn_mask to be a tensor \[H or 1, T, S\], .* rank 1$"):
        rows = bias if odd else bias[0]
        ring_attention_varlen(*tokens, offsets, offsets, **where, attn_mask=rows)
    q, wrong = tokens[0], [0, 37] if odd else offsets
    for match, *given in (
        (r"q to be packed tokens \[T, heads, dim\]", q[None] if odd else q, offsets, offsets),
        ("cu_seqlens_k to be equal to cu_seqlens_q", q, offsets, offsets + odd),
        ("cu_seqlens_q to be a tensor of integers", q, wrong, wrong),
    ):
        with pytest.raises(ValueError, match=f"{match}.* on rank 1$"):
            ring_attention_varlen(given[0], *tokens[1:], *given[1:], **where)
    again = ring_attention_varlen(*tokens, offsets, offsets, 16, 16, **where)
    assert again.shape == found.shape


@check(on=COMPILED)
def what_differs_between_ranks_is_refused_on_all():
    """Beside each option by itself, which tests/test_options_over_ranks.py has."""
    odd = dist.get_rank() == 1
    q, k, v, _ = (shard_sequence(x, group=group(), dim=2) for x in make_inputs())
    match = r"the dtype of q to be equal .* torch.float64 on rank 0, torch.float32 on rank 1"
    refused(match, *(x.float() if odd else x for x in (q, k, v)))
    refused("B of q to be equal .* 2 on rank 0, 1 on rank 1", *(x[odd:] for x in (q, k, v)))
    refused("D of q to be equal", q[..., odd:], k[..., odd:], v)
    refused("Dv of v to be equal .* 6 on rank 0, 5 on rank 1", q, k, v[..., odd:])
    refused("giving seed to be equal", q, k, v, dropout_p=0.1, seed=1 if odd else None)
    slopes = torch.ones(4) if odd else None
    refused("alibi_slopes to be equal .* None on rank 0, .1.0, 1.0", q, k, v, alibi_slopes=slopes)
    for name in ("alibi_slopes", "sinks"):
        match = rf"{name} to be equal .* \(1.0, 1.0, 1.0, 1.0\) on rank 0, \(1.0, 1.0, 1.0, 2.0\)"
        refused(match, q, k, v, **{name: torch.tensor([1.0, 1.0, 1.0, 1.0 + odd])})
    offsets = list(range(38))
    offsets[30] += odd
    match = (
        r"cu_seqlens to be equal .* \.\.\. 29, 30, 31, .* \(item 30\) on rank 0, "
        r"\.\.\. 29, 31, 31, .* \(item 30\) on rank 1"
    )
    refused(match, q, k, v, cu_seqlens=offsets)
    match = "cu_seqlens .* .item 1. on rank 0, .0, 37. .item 1. on"
    refused(match, q, k, v, cu_seqlens=[0, 37] if odd else offsets)
    match = r"shards of a zigzag layout of 36 positions to be .* long, got .*\]: .*in the place of"
    refused(match, *(x[:, :, odd:] for x in (q, k, v)))
    needs = [x.clone().requires_grad_(odd) for x in (q, k, v)]
    refused("requiring a gradient to be equal .* 0 on rank 0, 1 on rank 1", *needs)


@check(on=COMPILED)
def what_is_wrong_on_one_rank_is_refused_on_all():
    odd = dist.get_rank() == 1
    q, k, v, _ = (shard_sequence(x, group=group(), dim=2) for x in make_inputs())
    expected = ring_attention(q, k, v, group=group())
    refused("expected k to be .* to go with q, got .* on rank 1$", q, k[:, :, odd:], v)
    refused("v to be torch.float64 like q, got .* on rank 1$", q, k, v.float() if odd else v)
    refused("q to be a tensor .*, got NoneType on rank 1$", None if odd else q, k, v)
    slopes = torch.ones(4, dtype=torch.int64 if odd else torch.float64)
    refused("slopes to be floating .* on rank 1$", q, k, v, alibi_slopes=slopes)
    refused("key_mask to be .* got .* on rank 1$", q, k, v, key_mask=q[0] if odd else None)
    few = [x[:, :1] if odd else x for x in (q, k, v)]
    match = "the heads of q to be at least as many as the . ranks, got 1 on rank 1$"
    refused(match, *few, scheme="ulysses")
    wrong = {"layout": "spiral", "cu_seqlens": [0, 9, 4, 37], "scheme": "star", "seed": 1 << 63}
    for rows, match in (
        ([[0, 37], [0, 36]], "all rows of cu_seqlens to end"),
        ([[0, 37], [0, 7, 4, 37]], "cu_seqlens to start at 0 and be sorted"),
        ([[0, 5, 37], [0, 37], [0, 37]], "cu_seqlens to be a row of offsets, or 2 as q has, got 3"),
    ):
        refused(f"{match}.* on rank 1$", q, k, v, cu_seqlens=rows if odd else None)
    rows = {"cu_seqlens": [[0, 5, 37], [0, 37]], "layout": "per_document"}
    refused("cu_seqlens to be one row of offsets for 'per_document', got 2", q, k, v, **rows)
    for name, value in wrong.items():
        match = f"{name} to .* on rank 1$"
        refused(match, q, k, v, **({name: value} if odd else {}))
    # Nothing is left underway that a later call could take for its own.
    assert torch.equal(ring_attention(q, k, v, group=group()), expected)


@pytest.mark.parametrize(("setting", "name"), check.names(), ids=str)
def test_ranks(setting, name):
    check[setting].assert_passed(setting[0], name)
