import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from routing_oracle import (
    TIGHT,
    assert_trains_as,
    best_first,
    by_choice,
    combine,
    gshard_loss,
    serve,
)
from torch import nn

from moe_ext.integrations import tutel

D, E, H = 12, 4, 20
FFN = {"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": H}


def make(gate=None, experts=FFN, **options):
    torch.manual_seed(1)
    layer = tutel.moe_layer(
        {"type": "top", "k": 2} if gate is None else gate, D, experts, **options
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(4).add_(0.1 * torch.randn_like(parameter))
    return layer.double()


def ffns(layer, act=torch.relu):
    w = layer.experts
    return [
        lambda x, e=e: (
            act(x @ w.batched_fc1_w[e].T + w.batched_fc1_bias[e]) @ w.batched_fc2_w[e]
            + w.batched_fc2_bias[e]
        )
        for e in range(E)
    ]


def expected_of(layer, x, k, factor, *, prioritized=False, normalize=True, noise=0.0):
    scores = (x @ layer.gates.get_submodule("0").wg.weight.T + noise).softmax(1)
    idx = best_first(scores)[:, :k]
    order = by_choice(idx)
    if prioritized:
        order.sort(key=lambda slot: (slot[1], -float(scores.detach()[slot[0]].max())))
    room = len(x) if factor == 0 else k * int(abs(factor) * math.ceil(len(x) / E))
    kept = serve(idx, E, room, order)
    weights = scores.gather(1, idx)
    if normalize and k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    return combine(x, weights, idx, kept, ffns(layer)), gshard_loss(scores, idx[:, 0]), kept


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.5, -0.5, 0])
@pytest.mark.parametrize("prioritized", [False, True])
def test_results_are_those_of_the_formula(k, factor, prioritized):
    gate = {"type": "top", "k": k, "capacity_factor": factor}
    layer = make(gate, batch_prioritized_routing=prioritized)
    x = torch.randn(31, D, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    expected, loss, kept = expected_of(layer, x, k, factor, prioritized=prioritized)
    assert kept.all() == (factor == 0)
    assert layer.l_aux is y.l_aux
    assert_trains_as(layer, x, (y, y.l_aux), (expected, loss))


def test_arguments_of_a_call_stand_before_those_of_the_gate():
    layer = make(normalize_gate=False)
    x = torch.randn(2, 15, D, dtype=torch.float64)
    y = layer(x, top_k=3, capacity_factor=0.4)
    expected, _, _ = expected_of(layer, x.view(30, D), 3, 0.4, normalize=False)
    torch.testing.assert_close(y.view(30, D), expected, **TIGHT)
    expected, _, _ = expected_of(layer, x.view(30, D), 2, 1.0, normalize=False)
    torch.testing.assert_close(layer(x, inequivalent_tokens=True).view(30, D), expected, **TIGHT)


def test_numbers_of_numpy_are_taken():
    sizes = {
        name: np.int64(FFN[name]) for name in ("num_experts_per_device", "hidden_size_per_expert")
    }
    x = torch.randn(3, D, dtype=torch.float64)
    found = make({"type": "top", "k": np.int64(2)}, {**FFN, **sizes})(x)
    assert torch.equal(found, make()(x))


def test_gates_of_a_list_and_noise():
    gates = [{"type": "top", "k": 1}, {"type": "top", "k": 2, "gate_noise": 8.0}]
    layer = make(gates, result_func=lambda y: (y, y.l_aux))
    x = torch.randn(40, D, dtype=torch.float64)
    assert layer(x)[0].shape == x.shape
    counts = layer.metrics["num_tokens_per_expert"]
    assert counts.sum() == 40
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(layer(x, gate_index=1)[0])
    assert layer.metrics["num_tokens_per_expert"].sum() == 80
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    layer.eval()
    assert torch.equal(layer(x, gate_index=1)[0], layer(x, gate_index=1)[0])
    with pytest.raises(ValueError, match="gate_index to be in 0..1, got 2"):
        layer(x, gate_index=2)


def test_cosine_gate():
    layer = make({"type": "cosine_top", "k": 2, "proj_dim": 8, "capacity_factor": 0})
    gate = layer.gates.get_submodule("0")
    x = torch.randn(9, D, dtype=torch.float64)
    projected = F.normalize(gate.cosine_projector(x), dim=1)
    logits = projected @ F.normalize(gate.sim_matrix, dim=0)
    logits = logits * gate.temperature.clamp(max=math.log(100)).exp()
    idx = best_first(logits)[:, :2]
    weights = logits.gather(1, idx).softmax(1)
    expected = combine(x, weights, idx, idx >= 0, ffns(layer))
    torch.testing.assert_close(layer(x), expected, **TIGHT)


def test_llama_experts_and_custom_gate():
    class Fixed(nn.Module):
        top_k = 1
        capacity_factor = 0.0

        def __init__(self, model_dim, num_global_experts, shift):
            super().__init__()
            self.logits = torch.arange(num_global_experts).roll(shift).double()

        def forward(self, x):
            return self.logits.expand(x.shape[0], -1)

    experts = {"type": "llama_ffn", "num_experts_per_device": E, "hidden_size_per_expert": H}
    layer = make({"type": "custom", "module": Fixed, "shift": 2}, experts)
    x = torch.randn(5, D, dtype=torch.float64)
    first, second = (w.view(E, D, H)[1] for w in (layer.experts.W_fc1, layer.experts.W_fc2))
    down = layer.experts.W_fc3.view(E, H, D)[1]
    score = layer.gates.get_submodule("0").logits.softmax(0)[1]
    expected = score * ((F.silu(x @ first) * (x @ second)) @ down)
    torch.testing.assert_close(layer(x), expected, **TIGHT)


def test_noise_is_that_of_the_formula():
    """Logits plus gate_noise times a normal number over E, drawn from torch's generator."""
    layer = make({"type": "top", "k": 2, "gate_noise": 3.0, "capacity_factor": 0})
    x = torch.randn(40, D, dtype=torch.float64)
    torch.manual_seed(4)
    y = layer(x)
    torch.manual_seed(4)
    noise = 3.0 * torch.randn(40, E, dtype=x.dtype) / E
    torch.testing.assert_close(y, expected_of(layer, x, 2, 0, noise=noise)[0], **TIGHT)
    assert not torch.allclose(y, expected_of(layer, x, 2, 0)[0])


def test_load_importance_loss_is_small_where_load_is_even():
    x = torch.randn(64, D, dtype=torch.float64)
    losses = []
    for scale in (0.0, 30.0):
        layer = make({"type": "top", "k": 2, "gate_noise": 1.0}, is_gshard_loss=False)
        with torch.no_grad():
            layer.gates.get_submodule("0").wg.weight.mul_(scale)
        torch.manual_seed(2)
        losses.append(float(layer(x).l_aux))
    assert losses[0] < 0.01 < losses[1]
    with pytest.raises(ValueError, match="gate_noise to be positive for is_gshard_loss=False"):
        make(is_gshard_loss=False)(x)


def test_names_seeds_and_copies():
    gate, experts = {"type": "top", "k": 2, "fp32_gate": True}, dict(FFN)
    before = (dict(gate), dict(experts))
    seen = []
    layers = [
        tutel.moe_layer(
            gate, D, experts, seeds=(1, 5, 9), scan_expert_func=lambda n, p: seen.append(n)
        )
        for _ in range(2)
    ]
    assert (gate, experts) == before
    assert list(layers[0].state_dict()) == [
        "_num_global_experts",
        "gates.0.wg.weight",
        "experts.batched_fc1_w",
        "experts.batched_fc2_w",
        "experts.batched_fc1_bias",
        "experts.batched_fc2_bias",
    ]
    assert seen[:4] == [n for n, _ in layers[0].get_parameter_iterator("local_experts")]
    for name, tensor in layers[0].state_dict().items():
        assert torch.equal(tensor, layers[1].state_dict()[name])
    assert layers[0]._num_global_experts == E
    layers[0](torch.randn(8, D))
    copy.deepcopy(layers[0])
    with pytest.raises(ValueError, match="param_type to be 'gate' or 'local_experts'"):
        layers[0].get_parameter_iterator("all")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gate_type": {"type": "hash"}}, r"gate_type\['type'\] to be 'top', 'cosine_top'"),
        ({"gate_type": {"type": "top", "k": 0}}, r"gate_type\['k'\] to be at least 1"),
        ({"gate_type": {"type": "top", "noise": 1}}, "keys of a gate of type 'top' .* got 'noise'"),
        ({"gate_type": []}, "gate_type to be a dict or a list of dicts"),
        ({"gate_type": "Top2Gate"}, "gate_type to be a dict or a list of dicts"),
        ({"experts": {**FFN, "type": "moe"}}, r"experts\['type'\] to be 'ffn' or 'llama_ffn'"),
        ({"experts": {**FFN, "dropout": 1}}, "keys of experts of type 'ffn' .* got 'dropout'"),
        ({"experts": {**FFN, "num_experts_per_device": -2}}, "not split over ranks, got -2"),
        ({"experts": {**FFN, "hidden_size_per_expert": 0}}, "to be at least 1, got 0"),
        ({"experts": {**FFN, "output_dim": 3}}, r"output_dim'\] to be 12 or None, got 3"),
        ({"a2a_ffn_overlap_degree": 2}, "a2a_ffn_overlap_degree to be 1, got 2"),
        ({"is_postscore": False}, "is_postscore to be True"),
        ({"use_2dh": True}, "use_2dh to be False"),
        ({"parallel_type": "adaptive:2"}, "parallel_type to be 'adaptive:1'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        tutel.moe_layer(**{"gate_type": {"type": "top"}, "model_dim": D, "experts": FFN, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reserve_dims": 2}, "reserve_dims to be 1"),
        ({"adaptive_r": 0}, "adaptive_r to be None or 1"),
        ({"megablocks_size": 8}, "megablocks_size to be 0"),
        ({"a2a_ffn_overlap_degree": 4}, "a2a_ffn_overlap_degree to be 1"),
        ({"top_k": 0}, "top_k to be at least 1"),
    ],
)
def test_arguments_without_a_meaning_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        make()(torch.randn(4, D, dtype=torch.float64), **options)
