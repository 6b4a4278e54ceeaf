"""Operators on DTensors of two ranks: results and gradients are those of plain tensors."""

import pytest
import torch
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from moe_ext import ops
from moe_ext.distributed import register_sharding_rules
from moe_ext.ops.sharding_rules import _RULES, _operators
from moe_ext.testing import spawn_ranks

WHOLE = Replicate()
# Sums of a few tens of float64 numbers of size 1, in another order.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
PLACEMENTS = [
    {"x": Shard(0)},
    {"x": Shard(0), "w1": Shard(0), "b1": Shard(0), "w2": Shard(0)},
    {"w1": Shard(1), "b1": Shard(1), "w2": Shard(2)},
    {"x": Shard(1), "w1": Shard(2), "b2": Shard(1), "w2": Shard(1)},
    {"router": Shard(0), "w2": Shard(2)},
]


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def layer(x, router, w1, b1, w2, b2):
    """Mixture of experts by our operators, and losses of its router."""
    logits = ops.router_logits(x, router)
    gate = ops.topk_gate(logits, 2)
    rows, permutation = ops.permute_tokens(x, gate.topk_idx, 3)
    offsets = permutation.expert_offsets
    hidden = ops.gated_activation(
        ops.grouped_mm(rows, w1, offsets, bias_EM=b1), layout="interleaved"
    )
    y = ops.unpermute_tokens(
        ops.grouped_mm(hidden, w2, offsets, bias_EM=b2), permutation, gate.topk_weights
    )
    losses = ops.load_balance_loss(gate.score_sum, gate.num_tokens_per_expert, 2)
    return y, y.square().sum() + losses + ops.router_z_loss(logits)


def check_layer(mesh, placements):
    torch.manual_seed(0)
    shapes = {"x": (5, 8), "router": (3, 8), "w1": (3, 12, 8), "b1": (3, 12), "w2": (3, 8, 6)}
    plain = {name: random(*shape) for name, shape in {**shapes, "b2": (3, 8)}.items()}
    placed = {n: distribute_tensor(t, mesh, [placements.get(n, WHOLE)]) for n, t in plain.items()}
    for arguments in (plain, placed):
        for tensor in arguments.values():
            tensor.requires_grad_()
        for _ in range(2):  # the second backward pass adds to gradients
            layer(**arguments)[1].backward()
    torch.testing.assert_close(layer(**placed)[0].full_tensor(), layer(**plain)[0], **CLOSE)
    for name, tensor in placed.items():
        torch.testing.assert_close(tensor.grad.full_tensor(), plain[name].grad, **CLOSE)


def calls():
    """Operators with rules to their arguments, of 6 tokens."""
    torch.manual_seed(1)
    logits, x, rng = random(6, 4), random(6, 8), torch.tensor([3, 0, 0, 0])
    index = torch.arange(6)
    gate = ops.topk_gate(logits, 2)
    rows, permutation = ops.permute_tokens(x, gate.topk_idx, 4)
    tables = permutation.slot_of_row, permutation.row_of_slot, 2
    mask = index != 4
    return {
        "activation": (x, "silu"),
        "gated_activation": (rows, "swiglu", "concatenated", gate.topk_weights, tables[0]),
        "topk_gate": (logits, 2, "softmax", True, 1.0, random(4), 1, 1, mask),
        "gate_weights": (logits, gate.topk_idx),
        "gshard_gate": (logits, rng, 1.0, mask, index),
        "noisy_topk_gate": (logits, random(6, 4), rng, 2, 0.01, 1.0, mask, index),
        "routing_jitter": (x, rng, 0.01, index),
        "router_logits": (x, random(4, 8)),
        "permute_tokens": (x, gate.topk_idx, 4),
        "unpermute_tokens": (rows, *tables, gate.topk_weights),
        "quantize_rows": (x.float(), "int8"),
        "dequantize_rows": (ops.quantize_rows(x.float(), format="int8"), 8, "int8"),
    }


def placed(tensor, mesh, code):
    if code == "+":
        return DTensor.from_local(tensor / 2, mesh, [Partial()]).detach()
    return distribute_tensor(tensor, mesh, [Shard(int(code)) if code != "-" else WHOLE])


def run(operator, arguments):
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            argument.requires_grad_()
    results = operator(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    moved = [r for r in results if r.requires_grad]
    if moved:
        sum(r.square().sum() for r in moved).backward()
    return results


def check_rules(mesh, name, arguments):
    """Each rule is chosen where its arguments lie as it says."""
    operator = getattr(torch.ops.moe_ext, name).default
    names = [a.name for a in operator._schema.arguments]
    expected = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    plain = run(operator, expected)
    rules = [r for r in _RULES[name] if "x:2" not in r and "x:3" not in r]
    rules = [r for r in rules if not (name == "gated_activation" and "x:1" in r)]
    for rule in rules:
        results, codes = rule.split(" <- ")
        codes = dict(word.split(":") for word in codes.split())
        given = [
            placed(a.detach(), mesh, codes.get(n, "-")) if isinstance(a, torch.Tensor) else a
            for n, a in zip(names, arguments, strict=False)
        ]
        for result, whole, code in zip(run(operator, given), plain, results.split(), strict=True):
            (place,) = result.placements
            found = "+" if place.is_partial() else "-" if place.is_replicate() else str(place.dim)
            assert found == code, (name, rule, place)
            torch.testing.assert_close(result.full_tensor(), whole, **CLOSE)
        for argument, a in zip(given, expected, strict=True):
            if isinstance(a, torch.Tensor) and a.grad is not None:
                torch.testing.assert_close(argument.grad.full_tensor(), a.grad, **CLOSE)


def check_refusals(mesh):
    x = distribute_tensor(random(8), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match=r"topk_compress_: expected plain tensors"):
        torch.ops.moe_ext.topk_compress_(x, x.clone(), 2)
    with pytest.raises(NotImplementedError, match=r"attention_delta: .*ring_attention; give"):
        torch.ops.moe_ext.attention_delta(x, x, None)
    weight = distribute_tensor(random(3, 4, 8), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"grouped_mm: expected x to be a DTensor as the others"):
        ops.grouped_mm(random(2, 8), weight, torch.tensor([0, 1, 1, 2]))
    # Random numbers of a shard's tokens are unknown without their indices: the tokens come first.
    rng = distribute_tensor(torch.tensor([3, 0, 0, 0]), mesh, [WHOLE])
    tokens = distribute_tensor(random(4, 2), mesh, [Shard(0)])
    assert torch.ops.moe_ext.routing_jitter(tokens, rng, 0.01).placements == (WHOLE,)


def check_all(rank):
    register_sharding_rules()
    mesh = init_device_mesh("cpu", (2,))
    for placements in PLACEMENTS:
        check_layer(mesh, placements)
    for name, arguments in calls().items():
        check_rules(mesh, name, arguments)
    check_refusals(mesh)


def test_operators_on_two_ranks():
    spawn_ranks(check_all, 2)


def test_every_rule_is_of_an_operator():
    known = {o._schema.name.removeprefix("moe_ext::"): o for o in _operators()}
    assert set(_RULES) <= set(known)
    for name, rules in _RULES.items():
        arguments = {a.name for a in known[name]._schema.arguments}
        for rule in rules:
            results, named = rule.split(" <- ")
            assert len(results.split()) == len(known[name]._schema.returns), name
            assert {word.split(":")[0] for word in named.split()} <= arguments, name
