import pytest
import torch
from torch import nn

import moe_ext
from moe_ext.nn import Capacity, ResidualMoE, pyramid

TIGHT = {"rtol": 1e-13, "atol": 1e-13}


def test_residual_formula_with_gradients():
    torch.manual_seed(0)
    layer = ResidualMoE(8, 6, 4, 1, bias=True, dtype=torch.float64, capacity=Capacity(1.0))
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 5, [True, True, False, False, True]])
    weight = torch.randn(2, 5, 8, dtype=torch.float64)
    y = layer(x, token_mask=mask)
    (y * weight).sum().backward()
    got = [x.grad.clone(), *[p.grad.clone() for p in layer.parameters()]]
    layer.zero_grad()
    x.grad = None
    c = (x @ layer.coefficient.weight.T + layer.coefficient.bias).softmax(-1)
    want = layer.moe(x, token_mask=mask) * c[..., 0:1] + layer.mlp(x) * c[..., 1:2]
    (want * weight).sum().backward()
    torch.testing.assert_close(y, want, **TIGHT)
    for a, b in zip(got, [x.grad, *[p.grad for p in layer.parameters()]], strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    names = {name.split(".")[0] for name in layer.state_dict()}
    assert names == {"moe", "mlp", "coefficient"}


def test_residual_takes_a_network_of_ones_own_and_resets():
    torch.manual_seed(0)
    mlp = nn.Linear(8, 8)
    layer = ResidualMoE(8, 6, 4, mlp=mlp)
    assert layer.mlp is mlp
    before = [p.clone() for p in layer.parameters()]
    layer.reset_parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert layer.moe.top_k == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 8)).dtype == torch.bfloat16


def test_shared_expert_gate():
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(
        8, 6, 4, shared_expert=moe_ext.nn.SharedExpert(5, gate=True), dtype=torch.float64
    )
    assert tuple(layer.state_dict()["shared_expert_gate.weight"].shape) == (1, 8)
    x = torch.randn(7, 8, dtype=torch.float64)
    y = layer(x)
    gate = torch.sigmoid(x @ layer.shared_expert_gate.weight.T)
    shared, layer.shared_expert = layer.shared_expert, None
    torch.testing.assert_close(y, layer(x) + gate * shared(x), **TIGHT)
    with pytest.raises(ValueError, match=r"SharedExpert: expected ffn_dim to be at least 1, got 0"):
        moe_ext.nn.SharedExpert(0, gate=True)


def test_pyramid():
    assert pyramid(12, 32) == [32] * 10 + [64] * 2
    assert pyramid(3, 4, factor=3, wide_layers=1) == [4, 4, 12]
    assert pyramid(2, 4, wide_layers=0) == [4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, r"pyramid: expected num_layers to be at least 1, got 0"),
        ({"num_experts": 0}, r"pyramid: expected num_experts to be at least 1, got 0"),
        ({"factor": 0}, r"pyramid: expected factor to be at least 1, got 0"),
        ({"wide_layers": 5}, r"pyramid: expected wide_layers to be in 0..num_layers=4, got 5"),
        ({"wide_layers": -1}, r"pyramid: expected wide_layers to be in 0..num_layers=4, got -1"),
    ],
)
def test_wrong_pyramid(options, message):
    with pytest.raises(ValueError, match=message):
        pyramid(**{"num_layers": 4, "num_experts": 4, **options})
