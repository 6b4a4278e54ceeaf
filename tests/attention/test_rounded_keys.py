"""Keys and values that are rounded to a byte an element."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import make_inputs, reference, visible
from rank_checks import Checks

from moe_ext.attention import (
    RingAttention,
    choose_scheme,
    ring_attention,
    ring_attention_varlen,
    sequence_parallel,
    shard_sequence,
)
from moe_ext.attention.block import Keys
from moe_ext.distributed import count_traffic
from moe_ext.ops import dequantize_rows, quantize_rows

# An element is off by at most so much of itself, or of the largest of its row: see quantize_rows.
LOST = {"int8": (0.0, 1 / 254), "fp8": (1 / 16, 2.0**-18), "mx": (1 / 16, 2.0**-17)}


check = Checks()


def rounded(x, wire):
    codes = quantize_rows(x.flatten(0, 2), wire)
    return dequantize_rows(codes, x.shape[3], wire, dtype=x.dtype).view(x.shape)


@pytest.mark.parametrize("wire", LOST)
def test_results_are_those_of_the_rounded_keys_within_the_bound(wire):
    q, k, v, grad = make_inputs(seq_len=61, dim=16, v_dim=12, dtype=torch.float32)
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ring_attention(*tensors, group=None, is_causal=True, wire=wire)
    found = [out, *torch.autograd.grad((out * grad).sum(), tensors)]
    exact = [x.double() for x in (q, rounded(k, wire), rounded(v, wire), grad)]
    leaves = [x.requires_grad_() for x in exact[:3]]
    expected, _ = reference(*leaves, is_causal=True)
    gradients = torch.autograd.grad((expected * exact[3]).sum(), leaves)
    for one, other in zip(found, (expected, *gradients), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)
    # The bound of docs/attention.md, in float64.
    q, k, v = (x.double() for x in (q, k, v))
    of_itself, of_largest = LOST[wire]
    off_k, off_v = (
        torch.maximum(of_itself * x.abs(), of_largest * x.abs().amax(3, keepdim=True))
        for x in (k, v)
    )
    share = q.shape[1] // k.shape[1]
    off_k, off_v, v = (x.repeat_interleave(share, 1) for x in (off_k, off_v, v))
    seen = visible(61, is_causal=True)
    scores = (q.abs() @ off_k.mT / math.sqrt(16)).masked_fill(~seen, 0.0)
    epsilon = scores.amax(3, keepdim=True)
    bound = torch.expm1(2 * epsilon) * v.abs().amax() + off_v.amax()
    error = (expected - reference(q, k, v[:, ::share], is_causal=True)[0]).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-4, "nothing was rounded"


def test_a_message_has_a_byte_an_element_and_the_scales():
    _, k, v, _ = (x.bfloat16() for x in make_inputs(dim=160, v_dim=6))
    keys = Keys(k, v, torch.ones(2, 37, dtype=torch.bool))
    sent = replace(keys.form, wire="int8").on_wire(keys).packed()
    assert sent.nbytes == 2 * 2 * 37 * (160 + 2 * 4 + 6 + 4) + 2 * 37
    assert keys.form.on_wire(keys) is keys


def test_float64_and_unknown_formats_are_refused():
    q, k, v, _ = make_inputs()
    with pytest.raises(ValueError, match="expected wire to be None for float64"):
        ring_attention(q, k, v, group=None, wire="int8")
    with pytest.raises(ValueError, match="expected wire to be one of"):
        ring_attention(q.float(), k.float(), v.float(), group=None, wire="int4")


def test_the_choice_counts_the_bytes_of_the_wire():
    sizes = {"batch": 1, "heads": 8, "dim": 128, "seq_len": 4096, "num_ranks": 4}
    choice = choose_scheme(**sizes, wire="int8")
    by_name = {c.scheme: c for c in choice.candidates}
    assert by_name["ring"].forward_bytes == 3 * 2 * 8 * 1024 * (128 + 4)
    assert "wire to be None" in by_name["ulysses"].refused


def test_a_compiled_graph_has_the_bits_of_the_eager_call():
    q, k, v, _ = (x.float() for x in make_inputs())
    graph = torch.compile(ring_attention, fullgraph=True, backend="aot_eager")
    found = graph(q, k, v, group=None, is_causal=True, wire="fp8")
    assert torch.equal(found, ring_attention(q, k, v, group=None, is_causal=True, wire="fp8"))
    assert not torch.equal(found, ring_attention(q, k, v, group=None, is_causal=True))


@check(("int8", "ring"), ("mx", "all_gather"))
def every_way_to_attention_sends_codes(wire, scheme):
    """The results are those of one process, which rounds the same keys."""
    where = {"group": dist.group.WORLD, "layout": "zigzag"}
    whole = [x.float() for x in make_inputs(batch=1, seq_len=32)]
    whole_out = ring_attention(*whole[:3], group=None, is_causal=True, wire=wire)
    q, k, v, expected = (shard_sequence(x, dim=2, **where) for x in (*whole[:3], whole_out))
    offsets = torch.tensor([0, 32])

    def by_context(wire):
        with sequence_parallel(**where, scheme=scheme, wire=wire):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def by_tokens(wire):
        tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
        options = {"causal": True, "scheme": scheme, "wire": wire}
        out = ring_attention_varlen(*tokens, offsets, offsets, **where, **options)
        return out.transpose(0, 1)[None]

    for attend in (by_context, by_tokens):
        with count_traffic() as exact:
            attend(None)
        with count_traffic() as coded:
            found = attend(wire)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        codes = sum(quantize_rows(x.flatten(0, 2), wire).nbytes for x in (k, v))
        saved = (dist.get_world_size() - 1) * (k.nbytes + v.nbytes - codes)
        assert exact.total_bytes - coded.total_bytes == saved > 0


@check()
def schemes_that_exchange_heads_are_refused_at_once():
    group, match = dist.group.WORLD, "expected wire to be None for scheme 'ulysses'"
    with (
        pytest.raises(ValueError, match=match),
        sequence_parallel(group, scheme="ulysses", wire="int8"),
    ):
        raise AssertionError
    with pytest.raises(ValueError, match=match):
        RingAttention(group, scheme="ulysses", wire="int8")


def test_ways_to_attention_over_ranks():
    for name in check:
        check.assert_passed(2, name)
