import copy
import math

import pytest
import torch
from routing_oracle import (
    assert_same_gradients,
    assert_trains_as,
    best_first,
    by_token,
    combine,
    gradients,
    gshard_loss,
    serve,
)
from torch import nn

from moe_ext.integrations import fastmoe, paddle

D, E = 12, 4


GATES = {"naive": fastmoe.NaiveGate, "gshard": fastmoe.GShardGate, "switch": fastmoe.SwitchGate}


class Expert(nn.Module):
    """As FastMoE calls them, with the number of rows beside the rows."""

    def __init__(self, d_model):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 20), nn.Linear(20, d_model)

    def forward(self, x, count=None):
        assert count is None or count.tolist() == [x.shape[0]]
        return self.down(torch.tanh(self.up(x)))


def make(library, kind, top_k, **options):
    """A layer of FastMoE or of PaddlePaddle, whose logits differ."""
    torch.manual_seed(1)
    if library == "paddle":
        config = {"type": kind, "top_k": top_k}
        experts = nn.ModuleList(Expert(D) for _ in range(E))
        layer = paddle.MoELayer(D, experts, config, **options).double()
        assert config == {"type": kind, "top_k": top_k}
    else:
        gate = GATES[kind]
        layer = fastmoe.FMoE(E, D, gate=gate, expert=Expert, top_k=top_k, **options).double()
    with torch.no_grad():
        layer.gate.gate.weight.mul_(4)
        layer.gate.gate.bias.mul_(4)
    return layer


libraries = pytest.mark.parametrize("library", ["fastmoe", "paddle"])


def run(layer, x):
    torch.manual_seed(7)
    y = layer(x)
    return y, layer.gate.get_loss()


def logits_of(layer, tokens):
    return tokens @ layer.gate.gate.weight.T + layer.gate.gate.bias


@libraries
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_naive_gate(library, top_k):
    layer = make(library, "naive", top_k)
    x = torch.randn(3, 10, D, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    y, loss = run(layer, x)
    assert torch.equal(x, before)
    logits = logits_of(layer, x.view(30, D))
    idx = best_first(logits)[:, :top_k]
    weights = logits.gather(1, idx)
    weights = weights.softmax(1) if library == "fastmoe" else weights
    expected = combine(x.view(30, D), weights, idx, idx >= 0, layer.experts).view_as(x)
    none = torch.zeros((), dtype=torch.float64)
    assert (loss is None) == (library == "paddle")
    assert_trains_as(layer, x, (y, none if loss is None else loss.sum()), (expected, none))


@libraries
@pytest.mark.parametrize("training", [True, False])
def test_gshard_gate(library, training):
    layer = make(library, "gshard", 2).train(training)
    layer.gate.capacity = (0.7, 3.0) if library == "fastmoe" else (0.4, 3.0)
    x = torch.randn(1, 31, D, dtype=torch.float64, requires_grad=True)
    y, loss = run(layer, x)
    logits = logits_of(layer, x[0])
    idx = best_first(logits)[:, :2]
    weights = logits.gather(1, idx)
    room = math.ceil(layer.gate.capacity[0 if training else 1] * 31)
    if library == "fastmoe":
        weights, room = weights.softmax(1), room * 2 // E
    kept = serve(idx, E, room, by_token(idx))
    assert kept.all() != training
    torch.manual_seed(7)
    kept[:, 1] &= 2 * weights[:, 1] >= torch.rand(31)
    expected = combine(x[0], weights, idx, kept, layer.experts)[None]
    assert_trains_as(layer, x, (y, loss), (expected, gshard_loss(logits.softmax(1), idx[:, 0])))


@libraries
@pytest.mark.parametrize("training", [True, False])
def test_switch_gate(library, training):
    layer = make(library, "switch", 1).train(training)
    layer.gate.capacity = (0.5, 0.8)
    x = torch.randn(1, 31, D, dtype=torch.float64, requires_grad=True)
    y, loss = run(layer, x)
    logits = logits_of(layer, x[0])
    if training:
        torch.manual_seed(7)
        logits = logits + (torch.rand_like(logits) * 0.2 + 0.9)
    scores = logits.softmax(1)
    idx = scores.argmax(1, keepdim=True)
    rate = 0.5 if training else 0.8
    room = math.ceil(rate * 31 / E) if library == "fastmoe" else math.ceil(rate * 31)
    kept = serve(idx, E, room, by_token(idx))
    assert library == "paddle" or not kept.all()
    valid = int(kept.sum())
    share = torch.stack([((idx == e) & kept).sum().double() / valid for e in range(E)])
    expected_loss = (share * scores.sum(0) / valid).sum() * E
    expected = combine(x[0], scores.gather(1, idx), idx, kept, layer.experts)[None]
    assert_trains_as(layer, x, (y, loss), (expected, expected_loss))


def test_paddles_recomputation_changes_nothing():
    x = torch.randn(2, 8, D, dtype=torch.float64, requires_grad=True)
    found = []
    for interval in (0, 1):
        layer = make("paddle", "gshard", 2, recompute_interval=interval, recompute_ctx={})
        y, loss = run(layer, x)
        found.append((y, gradients(y.square().sum() + loss, layer, x)))
    assert torch.equal(found[0][0], found[1][0])
    assert_same_gradients(found[1][1], found[0][1], rtol=0, atol=0)


def test_transformer_mlp_is_two_linear_layers_an_expert():
    torch.manual_seed(0)
    layer = fastmoe.FMoETransformerMLP(E, D, 20, activation=nn.ReLU(), top_k=2)
    assert set(layer.state_dict()) == {
        "gate.gate.weight",
        "gate.gate.bias",
        *(
            f"experts.{e}.{name}.{part}"
            for e in range(E)
            for name in ("htoh4", "h4toh")
            for part in ("weight", "bias")
        ),
    }
    assert layer.experts[0].htoh4.weight.shape == (1, 20, D)
    x = torch.randn(3, 7, D)
    logits = logits_of(layer, x.view(21, D))
    idx = best_first(logits)[:, :2]

    def mlp(e):
        expert = layer.experts[e]
        up, down = expert.htoh4, expert.h4toh
        return lambda t: torch.relu(t @ up.weight[0].T + up.bias) @ down.weight[0].T + down.bias

    mlps = [mlp(e) for e in range(E)]
    weights = logits.gather(1, idx).softmax(1)
    expected = combine(x.view(21, D), weights, idx, idx >= 0, mlps).view_as(x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert {p.dp_comm for p in layer.gate.parameters()} == {"gate"}
    assert {p.dp_comm for p in layer.experts.parameters()} == {"none"}


def test_fmoe_linear_runs_every_expert_on_its_rows():
    torch.manual_seed(0)
    linear = fastmoe.FMoELinear(3, D, 5)
    with torch.no_grad():
        linear.bias.normal_()
    x = torch.randn(7, D)
    y = linear(x, torch.tensor([2, 0, 5]))
    torch.testing.assert_close(y[:2], x[:2] @ linear.weight[0].T + linear.bias[0])
    torch.testing.assert_close(y[2:], x[2:] @ linear.weight[2].T + linear.bias[2])


def test_hook_list_of_experts_and_losses():
    seen = []
    torch.manual_seed(0)
    layer = fastmoe.FMoE(
        d_model=D,
        gate=fastmoe.GShardGate,
        expert=[Expert, Expert],
        gate_hook=lambda idx, weights, _: seen.append((idx.shape, weights.shape)),
        gate_bias=False,
    )
    assert layer.num_expert == 2
    assert layer.gate.gate.bias is None
    layer(torch.randn(6, D))
    assert seen == [((6, 2), (6, 2))]
    assert layer.gate.has_loss
    copy.deepcopy(layer)
    assert layer.gate.get_loss(clear=False) is layer.gate.get_loss()
    assert not layer.gate.has_loss
    layer.gate.set_loss(torch.zeros(()))
    assert layer.gate.has_loss


@pytest.mark.parametrize("library", [fastmoe, paddle])
def test_gates_written_for_the_library_are_refused(library):
    """They choose in their forward pass, which the layer does not call."""
    with pytest.raises(TypeError, match=r"Own: expected a gate to choose in decide\(logits\)"):
        type("Own", (library.SwitchGate,), {"forward": lambda self, inp: None})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mask": torch.ones(2)}, ValueError, "mask to be None"),
        ({"mask_dict": {}}, ValueError, "mask_dict to be None"),
        ({"slice_group": object()}, ValueError, "slice_group to be None"),
        ({"mp_group": object()}, ValueError, "mp_group to be None"),
        ({"world_size": 2}, ValueError, "world_size to be the size of moe_group, 1, got 2"),
        ({"expert": None}, ValueError, "expert to be a callable or a list"),
        ({"gate": nn.Linear}, TypeError, "gate to be NaiveGate, GShardGate, SwitchGate"),
        ({"gate": fastmoe.GShardGate, "top_k": 3}, ValueError, "topk to be 2, got 3"),
        ({"gate": fastmoe.SwitchGate}, ValueError, "topk to be 1, got 2"),
    ],
)
def test_fastmoe_refuses_what_it_cannot_mean(options, error, text):
    with pytest.raises(error, match=text):
        fastmoe.FMoE(**{"num_expert": 2, "d_model": D, "expert": Expert, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expert_dp_comm": "world"}, "expert_dp_comm to be 'none' or 'dp', got 'world'"),
        ({"expert_rank": 1}, "expert_rank to be 0, got 1"),
        ({"expert": Expert}, "expert to be left out"),
    ],
)
def test_transformer_mlp_refuses_what_it_cannot_mean(options, text):
    with pytest.raises(ValueError, match=text):
        fastmoe.FMoETransformerMLP(2, D, 8, **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gate": {"type": "hash"}}, ValueError, r"gate\['type'\] to be 'naive', 'gshard'"),
        ({"gate": {"topk": 2}}, ValueError, "keys of gate to be among type, top_k, got 'topk'"),
        ({"gate": {"type": "switch"}}, ValueError, "topk to be 1, got 2"),
        ({"gate": nn.Linear(2, 2)}, TypeError, "gate to be a dict or a gate of"),
        ({"gate": paddle.NaiveGate(D, 3, 1)}, ValueError, "gate.num_expert to be 2"),
        ({"recompute_ctx": {"offload": True}}, ValueError, "'offload'.* to be false, got True"),
        ({"recompute_ctx": {"depth": 1}}, ValueError, "of the known keys, got 'depth'"),
        ({"experts": []}, ValueError, "experts to be at least one module"),
        ({"mp_group": 3}, TypeError, "None or a ProcessGroup"),
    ],
)
def test_paddle_refuses_what_it_cannot_mean(options, error, text):
    with pytest.raises(error, match=text):
        paddle.MoELayer(**{"d_model": D, "experts": [Expert(D), Expert(D)], **options})
    with pytest.raises(ValueError, match="expected inp to have 3 dimensions, got 2"):
        make("paddle", "naive", 2)(torch.randn(4, D, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected capacity to be two positive rates"):
        paddle.GShardGate(D, 2, 1, capacity=(1.0, 0.0))
