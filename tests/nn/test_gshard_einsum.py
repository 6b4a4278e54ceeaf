"""GShard's layer as its paper writes it, in einsums over DTensors, beside ours."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import moe_ext
from moe_ext.testing import spawn_ranks

T, D, FFN, E, K = 24, 8, 12, 4, 2
# Expert capacity that does not hold what the fullest expert is given, and is no whole number: 8.4.
CAPACITY_FACTOR = 0.7


def layer():
    torch.manual_seed(0)
    router = moe_ext.nn.GShardRouter(D, E, second_expert="always")
    capacity = moe_ext.nn.Capacity(CAPACITY_FACTOR, drop="choice")
    made = moe_ext.MoELayer(
        *(D, FFN, E, K), router=router, activation="relu", capacity=capacity, balance=0.0
    ).double()
    for p in made.parameters():
        nn.init.normal_(p, std=0.5)
    return made, torch.randn(T, D, dtype=torch.float64)


def masks(x, router, capacity):
    """Weights of (token, expert, slot): algorithm 1 of the paper, first choices before second."""
    probabilities = F.softmax(x @ router.T, dim=-1)
    weights, experts = probabilities.topk(K)
    weights = weights / weights.sum(-1, keepdim=True)
    combine, filled = x.new_zeros(len(x), E, capacity), [0] * E
    for choice in range(K):
        for token, expert in enumerate(experts[:, choice].tolist()):
            if filled[expert] < capacity:
                onehot = torch.zeros_like(combine)
                onehot[token, expert, filled[expert]] = 1
                combine = combine + onehot * weights[token, choice]
            filled[expert] += 1
    return combine


def einsum_layer(rank):
    """Tokens over the ranks, then experts, then tokens: outputs, gradients, tokens dropped."""
    ours, x = layer()
    up, down = ours.experts.up_proj, ours.experts.down_proj
    router = ours.router.weight
    y = ours(x)
    want = torch.autograd.grad(y.square().sum(), [router, up, down])

    mesh = init_device_mesh("cpu", (2,))
    capacity = int(-(-CAPACITY_FACTOR * T * K // E))
    combine = masks(x, router, capacity)
    dropped = T * K - int((combine != 0).sum())
    combine = DTensor.from_local(combine, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    x = distribute_tensor(x, mesh, [Shard(0)])
    up, down = (distribute_tensor(w.detach(), mesh, [Shard(0)]) for w in (up, down))
    up, down = up.requires_grad_(), down.requires_grad_()
    dispatched = torch.einsum("sec,sm->ecm", (combine != 0).double(), x)
    dispatched = dispatched.redistribute(placements=[Shard(0)])
    hidden = torch.einsum("ecm,ehm->ech", dispatched, up).relu()
    outputs = torch.einsum("ech,emh->ecm", hidden, down)
    outputs = outputs.full_tensor()
    result = torch.einsum("sec,ecm->sm", combine.full_tensor(), outputs)
    torch.testing.assert_close(result, y, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(result.square().sum(), [router, up, down])
    for a, b in zip(found, want, strict=True):
        a = a.full_tensor() if hasattr(a, "full_tensor") else a
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return dropped


def test_equals_our_layer():
    assert all(dropped > 0 for dropped in spawn_ranks(einsum_layer, 2))
