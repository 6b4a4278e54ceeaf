"""Tokens through the experts in one call, against the same layer whose experts are given rows."""

import functools

import pytest
import torch
from layer_oracle import assert_all_close, outcome
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import _runtime_library
from moe_ext.nn import GroupedExperts

pytestmark = pytest.mark.skipif(
    _runtime_library.load() is None, reason="there is no _runtime for this torch"
)


@pytest.fixture
def calls(monkeypatch):
    """A list that has an entry for each of these calls."""
    found, module = [], _runtime_library.load()
    original = module.routed_experts
    monkeypatch.setattr(
        module, "routed_experts", lambda *args: found.append(args) or original(*args)
    )
    return found


def results(layer, x, mask):
    run = functools.partial(checkpoint, layer, use_reentrant=False)
    return [*outcome(layer, x, run, token_mask=mask), *layer.metrics.values()]


@pytest.mark.parametrize(
    ("dtype", "options", "masked"),
    [
        (torch.float32, {}, False),
        (torch.float64, {"layout": "interleaved", "activation": "geglu"}, True),
        (torch.bfloat16, {"transposed": True, "activation": "reglu"}, False),
        (torch.float16, {"activation": "geglu_tanh"}, True),
    ],
)
def test_the_bits_are_those_of_rows(dtype, options, masked, calls):
    torch.manual_seed(0)
    experts = GroupedExperts(5, 16, 8, **options)
    layer = moe_ext.MoELayer(16, 8, 5, 2, experts=experts, shared_expert=4).to(dtype)
    x, mask = torch.randn(131, 16).to(dtype), torch.arange(131) % 3 > 0 if masked else None
    found = results(layer, x, mask)
    assert len(calls) == 2  # the recomputation too, which ends by an exception
    seen = []
    experts.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    expected = results(layer, x, mask)
    assert len(calls) == 2 and all(rows >= 2 * 131 - 2 * 44 for rows, _ in seen) and len(seen) == 2
    assert_all_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.experts.register_forward_hook(lambda *args: None),
        lambda layer: layer.experts.register_full_backward_hook(lambda *args: None),
        lambda layer: layer.to(torch.bfloat16).float().experts.half(),
        lambda layer: setattr(layer.experts, "activation", torch.tanh),
        lambda layer: setattr(layer.experts, "forward", layer.experts.forward),
    ],
    ids=["forward hook", "backward hook", "dtypes", "function", "forward"],
)
def test_rows_are_made_where_something_wants_them(change, calls):
    layer, x = moe_ext.MoELayer(16, 8, 4, 2), torch.randn(9, 16)
    layer(x)
    assert len(calls) == 1
    change(layer)
    with torch.autocast("cpu", enabled=layer.experts.down_proj.dtype != x.dtype):
        layer(x)
    assert len(calls) == 1


def test_a_forward_that_is_set_on_experts_runs():
    layer, x = moe_ext.MoELayer(16, 8, 4, 2), torch.randn(9, 16)
    own, expected = layer.experts.forward, 2 * layer(x)
    layer.experts.forward = lambda rows, offsets: 2 * own(rows, offsets)
    assert_all_close([layer(x)], [expected], rtol=1e-5, atol=1e-6)


def test_autocast_casts_the_products(calls):
    layer, x = moe_ext.MoELayer(16, 8, 4, 2), torch.randn(9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert not calls


def test_an_index_out_of_range_is_named_by_the_operator():
    layer, x = moe_ext.MoELayer(16, 8, 4, 2), torch.randn(9, 16)
    original = layer.router.forward

    def shifted(*args, **kwargs):
        routed = original(*args, **kwargs)
        return routed._replace(gate=routed.gate._replace(topk_idx=routed.gate.topk_idx + 4))

    layer.router.forward = shifted
    with pytest.raises(RuntimeError, match="permute_tokens: expected topk_idx"):
        layer(x)
