import pytest
import torch
from layer_oracle import assert_all_close, outcome
from torch import nn

from moe_ext.nn import Capacity, ResidualMoE, pyramid

TIGHT = {"rtol": 1e-13, "atol": 1e-13}


def test_residual_formula_with_gradients():
    torch.manual_seed(0)
    layer = ResidualMoE(8, 6, 4, 1, bias=True, dtype=torch.float64, capacity=Capacity(1.0))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True, True, False, False, True]])

    def formula(x, token_mask):
        c = (x @ layer.coefficient.weight.T + layer.coefficient.bias).softmax(-1)
        return layer.moe(x, token_mask=token_mask) * c[..., 0:1] + layer.mlp(x) * c[..., 1:2]

    want = outcome(layer, x, formula, token_mask=mask)
    assert_all_close(outcome(layer, x, token_mask=mask), want, **TIGHT)
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
