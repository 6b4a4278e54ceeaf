"""The function registered with transformers, on experts of every layout."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hf_models import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from moe_ext.integrations.huggingface import register

T, D, FFN, E, K = 9, 6, 5, 4, 3
FLAGS = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm")

assert transformers


class OwnGate:
    """A gate of its own, interleaved, as GPT-OSS has one."""

    def _apply_gate(self, x):
        return torch.tanh(x[..., ::2]) * (x[..., 1::2] + 1)


def make_experts(hidden_act="silu", own_gate=False, **flags):
    def __init__(self, config):  # noqa: N807
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.num_experts = E
        self.act_fn = ACT2FN[hidden_act]
        up = 2 * FFN if flags.get("has_gate", True) else FFN
        name = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"
        for key, inner, outer in ((name, D, up), ("down_proj", FFN, D)):
            shape = (inner, outer) if flags.get("is_transposed") else (outer, inner)
            setattr(self, key, nn.Parameter(torch.randn(E, *shape)))
            if flags.get("has_bias"):
                setattr(self, f"{key}_bias", nn.Parameter(torch.randn(E, outer)))
        if flags.get("has_post_expert_norm"):
            self.post_expert_norm = nn.LayerNorm(D)
            nn.init.normal_(self.post_expert_norm.bias)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("the eager forward is not under test")

    bases = (OwnGate, nn.Module) if own_gate else (nn.Module,)
    cls = type("Experts", bases, {"__init__": __init__, "forward": forward})
    cls = moe.use_experts_implementation(cls, **flags)
    return cls(SimpleNamespace(_experts_implementation="batched_mm")).double()


def make_tokens(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    index_TK = torch.rand(T, E, generator=generator).argsort(1)[:, :K]
    weights_TK = torch.rand(T, K, generator=generator).to(dtype).requires_grad_()
    return x_TD, index_TK, weights_TK


def assert_like_batched_mm(experts, index_TK=None, weights_TK=None):
    """transformers' implementation that gathers a weight per token is the oracle."""
    register()
    x_TD, index, weights = make_tokens()
    index = index if index_TK is None else index_TK
    weights = weights if weights_TK is None else weights_TK
    inputs = [x_TD, weights, *experts.parameters()]
    grad = torch.randn(T, D, dtype=x_TD.dtype, generator=torch.Generator().manual_seed(2))
    kept = [t.detach().clone() for t in (x_TD, index, weights)]
    results = []
    for implementation in ("batched_mm", "moe_ext"):
        experts.config._experts_implementation = implementation
        y = experts(x_TD, index, weights)
        results.append([y, *torch.autograd.grad(y, inputs, grad)])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    for tensor, before in zip((x_TD, index, weights), kept, strict=True):
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=5)), ids=str)
def test_every_combination_of_flags(values):
    flags = dict(zip(FLAGS, values, strict=True))
    assert_like_batched_mm(make_experts(**flags))


def test_experts_without_the_flag_of_a_norm():
    """Experts of transformers before 5.20."""
    register()
    experts = make_experts()
    experts.config._experts_implementation = "moe_ext"
    want = experts(*make_tokens())
    del experts.has_post_expert_norm
    assert torch.equal(experts(*make_tokens()), want)


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "relu", "relu2", "mish"])
@pytest.mark.parametrize("has_gate", [False, True])
def test_activations(hidden_act, has_gate):
    assert_like_batched_mm(make_experts(hidden_act, has_gate=has_gate))


def test_a_gate_of_its_own():
    assert_like_batched_mm(make_experts(own_gate=True, is_concatenated=False, has_bias=True))


@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_elsewhere(has_bias):
    experts = make_experts(has_bias=has_bias, has_post_expert_norm=True)
    experts._is_expert_parallel = True
    _, index, weights = make_tokens()
    elsewhere = torch.rand(T, K, generator=torch.Generator().manual_seed(4)) < 0.4
    elsewhere[0] = True  # a token with no expert here
    index = index.masked_fill(elsewhere, E)
    weights = weights.detach().masked_fill(elsewhere, 0.0).requires_grad_()
    assert_like_batched_mm(experts, index, weights)


def test_no_token_has_an_expert_here():
    experts = make_experts(has_bias=True)
    experts._is_expert_parallel = True
    experts.config._experts_implementation = "moe_ext"
    register()
    x_TD, index, weights = make_tokens()
    y = experts(x_TD, torch.full_like(index, E), torch.zeros_like(weights))
    assert not y.any()
    y.sum().backward()
    assert not x_TD.grad.any()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


@pytest.mark.parametrize("autocast", [False, True])
def test_tokens_of_another_dtype(autocast):
    experts = make_experts(has_bias=True).to(torch.float32 if autocast else torch.bfloat16)
    experts.config._experts_implementation = "moe_ext"
    register()
    x_TD, index, weights = make_tokens(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = experts(x_TD, index, weights)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert experts.down_proj.grad.dtype == experts.down_proj.dtype
    want = experts.float()(x_TD, index, weights)
    torch.testing.assert_close(y, want, rtol=0, atol=0.05 * float(want.detach().abs().max()))


def test_compiles():
    experts = make_experts(has_bias=True).float()
    experts.config._experts_implementation = "moe_ext"
    register()
    tokens = make_tokens(torch.float32)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tokens), experts(*tokens))
