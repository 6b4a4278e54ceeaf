"""Gates, permutation, experts and whole layers, in one process and with experts over ranks."""

from dataclasses import replace

import torch
import torch.distributed as dist
from golden.cases import case, fill, integers, numbers

import moe_ext
from moe_ext import distributed as md
from moe_ext import nn as mn
from moe_ext import ops

T, DIM, FFN, EXPERTS, K = 45, 16, 12, 6, 2
VOCABULARY = 30


def logits():
    return numbers("logits", T, EXPERTS, scale=3.0).requires_grad_()


@case()
def topk_gate():
    x = logits()
    gate = ops.topk_gate(x, K)
    loss = ops.load_balance_loss(gate.score_sum, gate.num_tokens_per_expert, K)
    z_loss = ops.router_z_loss(x)
    (gate.topk_weights * numbers("grad", T, K)).sum().add(loss + z_loss).backward()
    return gate, loss, z_loss, x.grad


@case()
def other_gates():
    x, found = logits(), {}
    state = torch.tensor([7, 1, 2, 0])
    found["gshard"] = ops.gshard_gate(x, state)
    found["noisy"] = ops.noisy_topk_gate(
        x, numbers("noise", T, EXPERTS), state, K, noise_epsilon=0.01
    )
    found["expert_choice"] = ops.expert_choice_gate(x, 9)
    found["sinkhorn"] = ops.sinkhorn_gate(x, K)
    found["base"] = ops.balanced_assignment(x.detach())
    found["given"] = ops.gate_weights(x, x.argsort(dim=1)[:, 1:4], score_fn="sigmoid")
    load = ops.sequence_load(x, found["sinkhorn"].topk_idx, 5)
    found["load"] = load, ops.sequence_balance_loss(*load, K)
    total = sum(
        (found[name].topk_weights * numbers(name, *found[name].topk_weights.shape)).sum()
        for name in ("gshard", "noisy", "expert_choice", "sinkhorn", "given")
    )
    (total + found["load"][1]).backward()
    found["grad"] = x.grad
    return found


@case(exact=True)
def drawn_numbers():
    state = torch.tensor([3, 1, 4, 1])
    rows = integers("rows", 1000, 20)
    return (
        ops.routing_uniform(state, 20, 7, stream=2),
        ops.routing_uniform(state, 20, 3, stream=1, token_idx=rows),
    )


ROUTERS = {
    "softmax": lambda: "softmax",
    "topk_softmax": lambda: "topk_softmax",
    "sigmoid": lambda: "sigmoid",
    "deepseek": lambda: mn.TopKRouter(
        DIM, EXPERTS, K, score_fn="sigmoid", num_groups=3, top_groups=2, selection_bias=True,
        scale=2.5,
    ),
    "kept_weights": lambda: mn.TopKRouter(DIM, EXPERTS, K, renormalize=False),
    "switch": lambda: mn.SwitchRouter(DIM, EXPERTS, seed=1),
    "gshard": lambda: mn.GShardRouter(DIM, EXPERTS, seed=2),
    "noisy": lambda: mn.NoisyTopKRouter(DIM, EXPERTS, K, seed=3),
    "expert_choice": lambda: mn.ExpertChoiceRouter(DIM, EXPERTS),
    "base": lambda: mn.BaseRouter(DIM, EXPERTS),
    "sinkhorn": lambda: mn.SinkhornRouter(DIM, EXPERTS, top_k=K),
    "cosine": lambda: mn.CosineRouter(DIM, EXPERTS, K, proj_dim=8),
    "hash": lambda: mn.HashRouter(
        DIM, EXPERTS, top_k=K, vocab_size=VOCABULARY, token_counts=torch.arange(VOCABULARY, 0, -1)
    ),
}  # fmt: skip


def through(layer, *, tokens=T, shape=None, steps=1, **kwargs):
    """Results, gradients and counts of some steps of a layer, which differ between ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {}
    mn.number_routers(layer)
    for step in range(steps):
        mn.set_routing_step(layer, step + 3, first_token=1000 * rank)
        layer.zero_grad()
        x = numbers(("x", rank, step), tokens, DIM, scale=1.5).requires_grad_()
        given = dict(kwargs)
        if isinstance(getattr(layer, "router", None), mn.HashRouter):
            given["token_ids"] = integers(("ids", rank, step), VOCABULARY, tokens)
        if given.get("token_mask") is True:
            given["token_mask"] = integers(("mask", rank), 3, tokens) > 0
        y = layer(x.view(shape or x.shape), **given)
        y.backward(numbers(("grad", rank, step), tokens, DIM).view(y.shape))
        found[f"step_{step}"] = {
            "y": y,
            "x.grad": x.grad,
            "grads": {name: p.grad for name, p in layer.named_parameters()},
        }
        if isinstance(layer, moe_ext.MoELayer):
            found[f"step_{step}"]["counts"] = [
                layer.metrics[name] for name in ("num_tokens_per_expert", "num_dropped")
            ]
            found[f"step_{step}"]["losses"] = dict(layer.losses)
    return found


def make_layer(router="softmax", **options):
    group = options.get("ep_group")
    balance = replace(options.pop("balance", mn.Balance()), coef=0.05, z_coef=0.01)
    options = {"balance": balance, **options}
    layer = moe_ext.MoELayer(DIM, FFN, EXPERTS, router=ROUTERS[router](), **options)
    fill(layer, **({} if group is None else {"rank": group.rank(), "num_ranks": group.size()}))
    if getattr(layer.router, "selection_bias", None) is not None:
        layer.router.selection_bias.copy_(numbers("selection_bias", EXPERTS, scale=0.3))
    return layer


@case(*[(name,) for name in ROUTERS])
def layer_of(router):
    return through(make_layer(router), steps=2, token_mask=True)


OPTIONS = {
    "bias": {"bias": True, "activation": "geglu"},
    "ungated": {"activation": "relu"},
    "shared": {"shared_expert": moe_ext.nn.SharedExpert(10, gate=True)},
    "returned": {"balance": moe_ext.nn.Balance(mode="return")},
    "by_sequence": {"balance": mn.Balance("sequence")},
    "global_batch": {"balance": mn.Balance("global_batch")},
    "position": {"capacity": 0.7},
    "choice": {"capacity": mn.Capacity(0.7, drop="choice")},
    "score": {"capacity": mn.Capacity(0.7, drop="score")},
    "batch_prioritized": {"capacity": mn.Capacity(0.7, drop="batch_prioritized")},
    "random": {"capacity": mn.Capacity(0.7, drop="random", seed=5)},
    "reroute": {"capacity": mn.Capacity(0.8, overflow="reroute")},
    "groups": {"capacity": mn.Capacity(0.8, groups=5, minimum=2)},
    "pad": {"capacity": mn.Capacity(1.0, pad=True)},
    "rounds": {"row_budget": mn.RowBudget(32)},
    "budget_drops": {"row_budget": mn.RowBudget(32, overflow="drop")},
    "capacity_and_rounds": {"capacity": 0.9, "row_budget": mn.RowBudget(24)},
}


@case(*[(name,) for name in OPTIONS])
def layer_with(name):
    return through(make_layer(**OPTIONS[name]), shape=(5, 9, DIM))


@case()
def residual_layer():
    layer = fill(mn.ResidualMoE(DIM, FFN, EXPERTS, 1))
    return through(layer)


@case()
def selection_bias():
    layer = make_layer("deepseek")
    found = []
    for rate in (0.001, 0.1):
        through(layer)
        mn.update_selection_bias(layer, rate=rate, center=True)
        found.append((layer.router.selection_bias.clone(), layer.choices.clone()))
    return found


@case(("ops",), ("bfloat16",))
def layer_in_half(way):
    layer = make_layer().bfloat16() if way == "bfloat16" else make_layer()
    x = numbers("x", T, DIM, scale=1.5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "ops"):
        y = layer(x)
    y.float().backward(numbers("grad", T, DIM))
    return y, [p.grad for p in layer.parameters()]


def over_ranks(layer, **options):
    """A step of an expert-parallel layer with synchronised and clipped gradients."""
    found = through(layer, **options)
    md.sync_gradients(layer)
    found["synchronised"] = {name: p.grad.clone() for name, p in layer.named_parameters()}
    found["norm"] = md.clip_grad_norm_(layer, 1.0)
    found["clipped"] = {name: p.grad for name, p in layer.named_parameters()}
    return found


@case(*[(name,) for name in ROUTERS], ranks=(2,))
def parallel_layer_of(router):
    layer = make_layer(router, ep_group=dist.group.WORLD)
    return over_ranks(layer, token_mask=True)


@case(*[(n,) for n in OPTIONS if n not in ("ungated", "returned")], ranks=(2,))
def parallel_layer_with(name):
    layer = make_layer(ep_group=dist.group.WORLD, **OPTIONS[name])
    return over_ranks(layer, shape=(5, 9, DIM))


@case((0,), (7,), ranks=(2, 3))
def uneven_tokens(fewest):
    layer = make_layer("sigmoid", ep_group=dist.group.WORLD, row_budget=mn.RowBudget(40))
    return over_ranks(layer, tokens=fewest + 30 * dist.get_rank())


@case(ranks=(2,))
def global_balance():
    layer = make_layer(
        ep_group=dist.group.WORLD, balance=mn.Balance("global_batch", dist.group.WORLD)
    )
    return over_ranks(layer, steps=2)
