import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from routing_oracle import TIGHT, assert_trains_as, best_first, combine
from torch import nn

from moe_ext.integrations import megablocks as mb

D, E, H = 12, 4, 20


def arguments(**options):
    defaults = {
        "hidden_size": D,
        "ffn_hidden_size": H,
        "moe_num_experts": E,
        "moe_top_k": 2,
        "fp16": False,
        "init_method": lambda t: nn.init.normal_(t, std=0.5),
    }
    return mb.Arguments(**{**defaults, **options})


def make(**options):
    torch.manual_seed(1)
    return mb.dMoE(arguments(**options)).double()


@pytest.fixture(autouse=True)
def nothing_left():
    mb.clear_load_balancing_loss()
    mb.clear_router_zloss()


def mlps(layer, glu, act):
    w = {name: p.view(E, H, D) for name, p in layer.experts.mlp.named_parameters()}

    def run(x, e):
        hidden = act(x @ w["w1"][e].T)
        return (hidden * (x @ w["v1"][e].T) if glu else hidden) @ w["w2"][e]

    return [lambda x, e=e: run(x, e) for e in range(E)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", [None, 1, 2])
@pytest.mark.parametrize(("mlp_type", "act"), [("mlp", None), ("glu", F.silu), ("glu", torch.tanh)])
def test_results_are_those_of_the_formula(mlp_type, act, order, recompute):
    options = {} if act is None else {"activation_fn": act}
    layer = make(
        mlp_type=mlp_type,
        moe_normalize_expert_weights=order,
        return_bias=False,
        memory_optimized_mlp=recompute,
        moe_zloss_weight=0.1,
        num_layers=2,
        num_layers_per_virtual_pipeline_stage=1,
        **options,
    )
    nn.init.normal_(layer.experts.bias)
    x = torch.randn(7, 3, D, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    tokens = x.view(21, D)
    logits = tokens @ layer.router.layer.weight.T
    scores = logits.softmax(1)
    idx = best_first(scores)[:, :2]
    weights = scores.gather(1, idx)
    if order is not None:
        weights = weights / weights.norm(p=order, dim=1, keepdim=True)
    act = (lambda t: F.gelu(t, approximate="tanh")) if act is None else act
    experts = mlps(layer, mlp_type == "glu", act)
    expected = combine(tokens, weights, idx, idx >= 0, experts) + layer.experts.bias
    counts = torch.stack([(idx == e).sum() for e in range(E)]).double()
    balance = 0.1 * E / (2 * 21 * 2) * counts @ scores.mean(0)
    zloss = 0.1 * logits.logsumexp(1).square().mean()
    losses = mb.batched_load_balancing_loss(layer.args) + mb.batched_router_zloss(layer.args).sum()
    assert_trains_as(layer, x, (y, losses), (expected.view_as(y), balance + zloss))


def test_bias_is_returned_beside_the_output_by_default():
    layer = make()
    x = torch.randn(2, 3, D, dtype=torch.float64)
    y, bias = layer(x)
    nn.init.ones_(bias)
    assert torch.equal(layer(x)[0], y)
    plain = make(bias=False)
    assert torch.equal(plain(x), y)
    assert "experts.bias" not in plain.state_dict()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_shared_expert(mlp_type, weighted):
    options = {"mlp_type": mlp_type, "activation_fn": F.silu, "return_bias": False}
    layer = make(shared_expert=True, shared_expert_weighted_sum=weighted, **options)
    routed = make(**options)
    routed.load_state_dict(
        {n: t for n, t in layer.state_dict().items() if not n.startswith("shared_expert.")}
    )
    x = torch.randn(2, 3, D, dtype=torch.float64)
    shared = layer.shared_expert
    up = shared.up_proj(x)
    hidden = F.silu(shared.gate_proj(x)) * up if mlp_type == "glu" else F.silu(up)
    dense, moe = shared.down_proj(hidden), routed(x)
    expected = (dense + 2 * moe) / 3 if weighted else dense + moe
    torch.testing.assert_close(layer(x), expected, **TIGHT)
    layer.reset_parameters()


def test_state_dict_has_megablocks_names_and_shapes():
    layer = make(mlp_type="glu")
    model = nn.ModuleDict({"ffn": layer})
    state = model.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "ffn.router.layer.weight": (E, D),
        "ffn.experts.mlp.w1": (E * H, D),
        "ffn.experts.mlp.w2": (E * H, D),
        "ffn.experts.mlp.v1": (E * H, D),
        "ffn.experts.bias": (D,),
    }
    assert {name for name, _ in model.named_parameters()} == set(state)
    assert all(layer.get_parameter(name) is p for name, p in layer.named_parameters())
    other = nn.ModuleDict({"ffn": make(mlp_type="glu")})
    nn.init.zeros_(other["ffn"].experts.mlp.w1)
    other.load_state_dict(state)
    assert torch.equal(other["ffn"].experts.mlp.w1, layer.experts.mlp.w1)
    assert set(state) == set(model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({n: t for n, t in state.items() if not n.endswith("w2")})


def test_losses_do_not_grow_and_follow_their_layers():
    args = arguments(num_layers=2, moe_zloss_weight=0.01, return_bias=False, device="cpu")
    layers = [mb.dMoE(args) for _ in range(2)]
    x = torch.randn(4, 2, D)
    for _ in range(3):
        for layer in layers:
            layer(x)
    losses = [layer(x) is None or float(mb.batched_load_balancing_loss(args)) for layer in layers]
    assert losses[0] == losses[1]
    assert mb.batched_router_zloss(args).shape == (2,)
    mb.clear_load_balancing_loss()
    mb.clear_router_zloss()
    with pytest.raises(ValueError, match="losses of 2 layers since the last clear, got 0"):
        mb.batched_load_balancing_loss(args)
    with pytest.raises(ValueError, match="expected a layer to have run"):
        mb.batched_router_zloss(args)
    layers[0].eval()(x)
    with pytest.raises(ValueError, match="got 0"):
        mb.batched_load_balancing_loss(args)
    layers[1](x)
    copy.deepcopy(layers[1])
    del layers[1], layer
    gc.collect()
    with pytest.raises(ValueError, match="got 0"):
        mb.batched_load_balancing_loss(args)
    assert mb.batched_load_balancing_loss(arguments(moe_loss_weight=0)) == 0
    with pytest.raises(ValueError, match="moe_zloss_weight to be positive"):
        mb.batched_router_zloss(arguments())


def test_uniform_assignment_and_jitter():
    layer = make(uniform_expert_assignment=True, return_bias=False)
    layer(torch.randn(6, 2, D, dtype=torch.float64))
    assert layer.metrics["num_tokens_per_expert"].tolist() == [6] * E
    layer = make(moe_jitter_eps=0.5, return_bias=False)
    x = torch.randn(6, 2, D, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_parameters_are_half_precision_by_default():
    layer = mb.dMoE(mb.Arguments(hidden_size=D, ffn_hidden_size=H))
    assert {p.dtype for p in layer.parameters()} == {torch.float16}
    assert layer(torch.randn(2, 2, D, dtype=torch.float16))[0].dtype == torch.float16
    half = mb.dMoE(mb.Arguments(hidden_size=D, ffn_hidden_size=H, fp16=False, bf16=True))
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_arguments_from_megatron():
    class Megatron:
        hidden_size = 7
        moe_top_k = 3
        something_else = 1

    args = mb.from_megatron(Megatron())
    assert (args.hidden_size, args.moe_top_k, args.moe_num_experts) == (7, 3, 1)
    assert args.shared_expert_hidden_size == args.ffn_hidden_size


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mlp_type": "kan"}, ValueError, "mlp_type to be 'mlp' or 'glu', got 'kan'"),
        ({"mlp_impl": "dense"}, ValueError, "mlp_impl to be 'grouped' or 'sparse'"),
        ({"expert_parallel_group": object()}, ValueError, "without moe_expert_model_parallelism"),
        ({"shared_expert": True}, ValueError, "return_bias to be False with a shared expert"),
        ({"moe_top_k": 5}, ValueError, "top_k to be in 1..num_experts=4, got 5"),
        ({"moe_capacity": 2}, TypeError, "unexpected keyword argument 'moe_capacity'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        make(**options)
