"""Presets: the constants that they set, that they train, and that options replace them."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from moe_ext.nn import Balance, Capacity, GShardRouter, SwitchRouter, TopKRouter, presets

NAMES = sorted(presets.__all__)


def make(name, **options):
    torch.manual_seed(0)
    sizes = {"num_groups": 4, "top_groups": 2} if name == "deepseek_v3" else {}
    return getattr(presets, name)(16, 8, 16, **sizes, **options)


def test_constants_of_the_papers():
    layers = {name: getattr(presets, name)(8, 4, device="meta") for name in NAMES}
    found = {
        name: (
            layer.num_experts,
            layer.top_k,
            layer.balance_loss_coef,
            layer.experts.activation,
            layer.balance.scope,
        )
        for name, layer in layers.items()
    }
    assert found == {
        "switch": (128, 1, 0.01, "relu", "micro_batch"),
        "gshard": (128, 2, 0.01, "relu", "micro_batch"),
        "glam": (64, 2, 0.01, "gelu", "micro_batch"),
        "mixtral": (8, 2, 0.01, "swiglu", "micro_batch"),
        "qwen3": (128, 8, 0.008, "swiglu", "micro_batch"),
        "deepseek_v3": (256, 8, 1e-4, "swiglu", "sequence"),
    }
    assert layers["switch"].capacity == Capacity(1.25, eval_factor=2.0)
    for name in ("gshard", "glam"):
        assert layers[name].capacity == Capacity(1.0, drop="choice")
        assert isinstance(layers[name].router, GShardRouter)
        assert layers[name].router.second_expert == "random"
    for name in ("mixtral", "qwen3", "deepseek_v3"):
        assert layers[name].capacity is None
    assert isinstance(layers["switch"].router, SwitchRouter)
    assert layers["switch"].router.jitter_eps == 0.01
    router = layers["deepseek_v3"].router
    assert (router.score_fn, router.scale, router.num_groups, router.top_groups) == (
        "sigmoid",
        2.5,
        8,
        4,
    )
    assert router.selection_bias is not None
    assert layers["deepseek_v3"].shared_expert is not None
    assert layers["mixtral"].router.score_fn == "topk_softmax"
    assert layers["qwen3"].router.renormalize
    assert all(layer.experts.down_proj_bias is None for layer in layers.values())


@pytest.mark.parametrize("name", NAMES)
def test_presets_train(name):
    layer = make(name)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(4, 32, 16)
    target = torch.tanh(x.roll(1, dims=-1))
    losses = []
    for _ in range(30):
        loss = F.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_options_replace_the_presets(name):
    layer = make(name, balance=0.5, dtype=torch.bfloat16, activation="geglu")
    assert layer.balance_loss_coef == 0.5
    assert layer.experts.activation == "geglu"
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert make(name, capacity=3.0).capacity == Capacity(3.0)
    assert make(name, capacity=None).capacity is None
    assert make(name, balance=Balance()).balance.scope == "micro_batch"
    with pytest.raises(TypeError, match="no_such_option"):
        make(name, no_such_option=1)


@pytest.mark.parametrize("name", NAMES)
def test_another_router_replaces_that_of_the_preset(name):
    layer = make(name, router="sigmoid")
    assert (layer.router.score_fn, layer.top_k) == ("sigmoid", make(name).top_k)
    layer = make(name, router=TopKRouter(16, 16, 3), top_k=3)
    assert layer.router.top_k == layer.top_k == 3
    layer(torch.randn(5, 16)).sum().backward()


def test_capacities_are_those_of_the_papers():
    for name, factors in (("switch", (1.25, 2.0)), ("gshard", (2.0, 2.0))):
        layer = make(name)
        with torch.no_grad():
            layer.router.weight.zero_()  # every first choice is expert 0
        for training, factor in zip((True, False), factors, strict=True):
            layer.train(training)
            y = layer(torch.randn(64, 16))
            kept = math.ceil(factor * 64 / 16)
            if name == "switch":
                assert int((y.abs().sum(dim=1) > 0).sum()) == kept
                assert int(layer.metrics["num_dropped"]) == 64 - kept
            else:
                first = 64 - kept
                assert int(layer.metrics["num_dropped"]) >= first


def test_mixtral_is_the_softmax_of_two_logits():
    layer = make("mixtral")
    x = torch.randn(5, 16)
    routed = layer.router(x)
    best = (x @ layer.router.weight.T).topk(2, dim=1)
    torch.testing.assert_close(routed.gate.topk_weights, best.values.softmax(dim=1))
    assert torch.equal(routed.gate.topk_idx, best.indices)
    assert isinstance(layer.router, TopKRouter)


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_cite_the_paper(name):
    assert "Reference: " in inspect.getdoc(getattr(presets, name))
    assert "arXiv" in inspect.getdoc(getattr(presets, name))
