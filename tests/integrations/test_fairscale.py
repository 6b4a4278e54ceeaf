import copy
import importlib.util

import pytest
import torch
from routing_oracle import (
    assert_trains_alike,
    assert_trains_as,
    by_choice,
    combine,
    gshard_loss,
    serve,
    trained,
)
from torch import nn

from moe_ext.integrations import fairscale as ours

D, E = 12, 4


def experts():
    torch.manual_seed(1)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(D, 20), nn.ReLU(), nn.Linear(20, D)) for _ in range(E)
    )


def make(scale=3.0):
    layer = ours.MOELayer(ours.Top2Gate(D, E), experts())
    with torch.no_grad():
        layer.gate.wg.weight.mul_(scale)
    return layer


def test_results_are_those_of_the_formula():
    layer = make().double()
    x = torch.randn(5, 8, D, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(9)
    y = layer(x)
    tokens = x.view(40, D)
    logits = tokens @ layer.gate.wg.weight.T
    scores = logits.softmax(1)
    torch.manual_seed(9)
    noisy = logits.detach() - (-torch.rand_like(logits, dtype=torch.float32).log()).log()
    first = scores.argmax(1)
    second = noisy.scatter(1, first[:, None], -torch.inf).argmax(1)
    idx = torch.stack([first, second], 1)
    kept = serve(idx, E, 2 * 40 // E, by_choice(idx))
    weights = scores.gather(1, idx) * kept
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
    expected = combine(tokens, weights, idx, kept, layer.experts).view_as(x)
    loss = gshard_loss(scores, first) / E**2
    assert not kept.all()
    assert int(layer.metrics["num_dropped"]) == int((~kept).sum())
    assert_trains_as(layer, x, (y, layer.l_aux), (expected, loss))


def test_one_module_is_one_expert():
    single = ours.MOELayer(ours.Top2Gate(D, 2), nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)]))
    assert set(single.state_dict()) == {
        "gate.wg.weight",
        *(f"experts.{i}.{name}" for i in range(2) for name in ("weight", "bias")),
    }
    assert all(parameter.expert for parameter in single.experts.parameters())
    with pytest.raises(ValueError, match=r"gate to be for 1 experts \(1 on each of 1 ranks\)"):
        ours.MOELayer(ours.Top2Gate(D, 2), nn.Linear(D, D))


def test_fewer_tokens_than_experts_are_all_dropped():
    layer = make()
    y = layer(torch.randn(1, 1, D))
    assert not y.any()
    assert layer.metrics["num_dropped"] == 2


def test_copies_and_refusals():
    layer = make()
    layer(torch.randn(2, 8, D))
    copy.deepcopy(layer)
    with pytest.raises(ValueError, match="expected input to have 3 dimensions, got 2"):
        layer(torch.randn(8, D))
    with pytest.raises(TypeError, match="expected gate to be a moe_ext.*Top2Gate, got Linear"):
        ours.MOELayer(nn.Linear(D, E), experts())


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_equal_weights_and_seeds_give_fairscales_results(scale, tmp_path):
    if importlib.util.find_spec("fairscale") is None:
        pytest.skip("fairscale is not installed")
    from fairscale.nn.moe import MOELayer, Top2Gate

    layer = make(scale)
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        theirs = MOELayer(Top2Gate(D, E), experts())
        theirs.load_state_dict(layer.state_dict())
        x, upstream = torch.randn(4, 16, D, requires_grad=True), torch.randn(4, 16, D)
        expected, found = (trained(module, upstream, x) for module in (theirs, layer))
    finally:
        torch.distributed.destroy_process_group()
    assert layer.metrics["num_dropped"] > 0
    assert_trains_alike(found, expected)
