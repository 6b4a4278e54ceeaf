import pytest
import torch
from outside_codecs import Short
from torch import nn

import moe_ext
from moe_ext.compression import (
    CompressionState,
    Policy,
    Quantize,
    ResidualMonitor,
    TopK,
    Warmup,
    compress_gradients,
    parameter_roles,
)


class RMSNorm(nn.Module):
    """As model libraries write it."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


class Block(nn.Module):
    """One of everything."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 64)
        self.ln_1 = nn.LayerNorm(64)
        self.self_attn = nn.MultiheadAttention(64, 2)
        self.post_norm = RMSNorm(64)
        self.moe = moe_ext.MoELayer(64, 64, 4, 2, bias=True, shared_expert=32)
        self.gate = nn.Linear(64, 4)
        self.gate_proj = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.wte.weight


WANTED = {
    "wte.weight": "embedding",
    "ln_1.weight": "norm",
    "ln_1.bias": "norm",
    "self_attn.in_proj_weight": "attention",
    "self_attn.in_proj_bias": "bias",
    "self_attn.out_proj.weight": "attention",
    "self_attn.out_proj.bias": "bias",
    "post_norm.weight": "norm",
    "moe.router.weight": "router",
    "moe.experts.gate_up_proj": "expert",
    "moe.experts.gate_up_proj_bias": "bias",
    "moe.experts.down_proj": "expert",
    "moe.experts.down_proj_bias": "bias",
    "gate.weight": "router",
    "gate.bias": "router",
    "gate_proj.weight": "other",
    "gate_proj.bias": "bias",
}


def test_roles():
    roles = parameter_roles(Block())
    assert {name: roles[name] for name in WANTED} == WANTED
    rest = set(roles) - set(WANTED)
    assert rest and all(name.startswith("moe.shared_expert") for name in rest), rest
    assert "lm_head.weight" not in roles


@pytest.mark.parametrize(
    "router", ["SwitchRouter", "ExpertChoiceRouter", "CosineRouter", "SinkhornRouter"]
)
def test_every_router_is_one(router):
    module = getattr(moe_ext.nn, router)(64, 4)
    assert set(parameter_roles(nn.Sequential(module)).values()) <= {"router"}


def codecs_of(policy, model):
    roles = parameter_roles(model)
    return {
        name: policy.codec_for(name, roles[name], parameter)
        for name, parameter in model.named_parameters()
    }


def test_defaults_keep_routers_norms_and_biases_dense():
    model = Block()
    roles = parameter_roles(model)
    for name, codec in codecs_of(Policy(TopK(0.01), dense_below=0), model).items():
        if roles[name] in ("router", "norm", "bias"):
            assert codec.name == "none", name
        elif roles[name] == "embedding":
            assert codec.name == "block_sparse" and not codec.lossy
        else:
            assert codec == TopK(0.01), name
    auto = codecs_of(Policy(), model)
    assert auto["gate_proj.weight"] is None and auto["gate.weight"].name == "none"


def test_exceptions():
    policy = Policy("int8", expert="int4", by_name={"moe.experts.d*": Quantize("fp8")}, density=0.1)
    found = codecs_of(policy, Block())
    assert found["moe.experts.gate_up_proj"].name == "int4"
    assert found["moe.experts.down_proj"].name == "fp8"
    assert found["self_attn.in_proj_weight"].name == "int8"
    assert found["self_attn.in_proj_bias"].name == "none"
    assert codecs_of(Policy("int8", dense_below=10**6), Block())["gate_proj.weight"].name == "none"
    with pytest.raises(ValueError, match="Policy: expected codec to be one of .*'auto'"):
        Policy(expert="zip")


def test_warm_up_falls_in_stages():
    warmup = Warmup(dense_steps=3, ramp_steps=8, start_density=0.25, stages=4)
    densities = [warmup.density(step, 0.001) for step in range(14)]
    assert densities[:3] == [1.0] * 3
    assert densities[3] == densities[4] == pytest.approx(0.25)
    ratio = (0.001 / 0.25) ** 0.25
    assert densities[5] == pytest.approx(0.25 * ratio) and densities[5] == densities[6]
    assert densities[11:] == [0.001] * 3
    assert warmup.codec(Quantize("int8"), 2).name == "none"
    assert warmup.codec(Quantize("int8"), 3).name == "int8"
    assert warmup.density(5, 0.5) == 0.5 and warmup.density(5, 0.0) == 0.0
    assert Warmup().codec(TopK(0.01), 0) == TopK(0.01)
    for wrong in ({"dense_steps": -1}, {"start_density": 0.0}, {"stages": 0}):
        with pytest.raises(ValueError, match="Warmup: expected"):
            Warmup(**wrong)


def test_monitor():
    monitor = ResidualMonitor(every=10, limit=2.0, action="densify")
    assert [step for step in range(25) if monitor.due(step)] == [9, 19]
    assert not ResidualMonitor(every=0).due(0)
    with pytest.warns(UserWarning, match="to be at most 2 times that of the gradients, got 3;"):
        assert monitor.factor(3.0, 1.0) == 2.0
    assert monitor.factor(2.0, 4.0) == 4.0
    assert monitor.codec(TopK(0.1), 2.0) == TopK(0.2)
    assert monitor.codec(TopK(0.1), 8.0) == TopK(0.25)
    assert monitor.codec(TopK(0.3), 8.0) == TopK(0.3)
    assert monitor.codec(Quantize(), 8.0) == Quantize()
    with pytest.warns(UserWarning, match="raise the density, or flush"):
        assert ResidualMonitor(limit=2.0).factor(3.0, 1.0) == 1.0
    for wrong in ({"every": -1}, {"limit": 0.0}, {"action": "stop"}):
        with pytest.raises(ValueError, match="ResidualMonitor: expected"):
            ResidualMonitor(**wrong)


@pytest.mark.parametrize("options", [{}, {"candidates": ("none", Short())}])
def test_one_rank_with_auto_sends_nothing_and_loses_nothing(options):
    model = nn.Linear(200, 200)
    state = CompressionState(model=model, **options)
    want = torch.autograd.grad(model(torch.ones(2, 200)).square().sum(), list(model.parameters()))
    model(torch.ones(2, 200)).square().sum().backward()
    assert compress_gradients(model, state)
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert not state.residuals() and "one rank" in state.explain()
