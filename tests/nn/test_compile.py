"""A layer as one graph, which serves every number of tokens."""

import contextlib
import inspect
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import moe_ext
from moe_ext.nn import Balance, Capacity, count_tokens, routers

E, K = 4, 2

ROUTERS = sorted(
    name
    for name in routers.__all__
    if isinstance(getattr(routers, name), type)
    and issubclass(getattr(routers, name), routers.Router)
    and name != "Router"
)


def make_router(name):
    torch.manual_seed(0)
    kind = getattr(routers, name)
    takes_top_k = "top_k" in inspect.signature(kind).parameters
    keyword = {"HashRouter": {"vocab_size": 64}}.get(name, {})
    return kind(8, E, **({"top_k": K} if takes_top_k else {}), **keyword)


def tokens(num_tokens):
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 8, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def outcome(layer, module, x, ids):
    layer.zero_grad()
    x.grad = None
    if layer.global_counts is not None:
        layer.global_counts.total.zero_()
    y = module(x, **ids)
    y.square().sum().backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *gradients, *layer.metrics.values(), *layer.losses.values()]


def check(layer, sizes=(16, 23, 40), ids=lambda n: {}):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for size in sizes:
        x, per_token = tokens(size), ids(size)
        for value in per_token.values():
            torch._dynamo.mark_dynamic(value, 0)
        want = outcome(layer, layer, x, per_token)
        found = outcome(layer, compiled, x, per_token)
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1, "compiled once, whatever the number of tokens"


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_in_one_graph(name):
    router = make_router(name)
    layer = moe_ext.MoELayer(8, 6, E, router=router, balance=Balance(z_coef=0.1), shared_expert=4)

    def ids(num_tokens):
        given = {"token_mask": torch.arange(num_tokens) % 3 > 0}
        return given | ({"token_ids": torch.arange(num_tokens)} if "Hash" in name else {})

    check(layer, ids=ids)


@pytest.mark.parametrize(
    "options",
    [
        {
            "router": "sigmoid",
            "capacity": Capacity(0.7, pad=True),
            "balance": Balance("sequence", mode="return"),
            "shared_expert": moe_ext.nn.SharedExpert(4, gate=True),
        },
        {
            "capacity": Capacity(0.7, groups=3, drop="choice"),
            "bias": True,
            "balance": Balance("global_batch"),
        },
        {"capacity": Capacity(0.7, drop="batch_prioritized", overflow="reroute")},
    ],
    ids=str,
)
def test_every_option_in_one_graph(options):
    torch.manual_seed(0)
    balance = replace(options.get("balance", Balance()), z_coef=0.1)
    layer = moe_ext.MoELayer(8, 6, E, K, **options | {"balance": balance})
    check(layer)


def test_without_marks_the_second_size_is_the_last_to_compile():
    layer = moe_ext.MoELayer(8, 6, E, K, balance=Balance(z_coef=0.1))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for size in (16, 23, 40, 8, 100):
        compiled(torch.randn(size, 8))
    assert counter.frame_count == 2


def test_counts_of_a_step_are_those_of_the_layer():
    layer, inputs = (
        moe_ext.MoELayer(8, 6, E, K, balance=Balance("global_batch")),
        torch.randn(3, 9, 8),
    )
    torch._dynamo.reset()
    losses = []
    for module in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        for _ in range(2):
            with count_tokens(layer):
                for x in inputs:
                    module(x)
            losses.append([[module(x), layer.losses["balance"]][1].item() for x in inputs])
        # Graphs count no passes: the layer alone knows of one too many.
        with contextlib.nullcontext() if module is not layer else pytest.raises(RuntimeError):
            module(inputs[0])
    assert losses[0] == losses[1]
    torch.testing.assert_close(losses[2:], losses[:2])
