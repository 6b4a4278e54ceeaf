"""Gathers of the experts that routers chose, under FSDP2, against gathers of all."""

import functools

import pytest
import torch
import torch.distributed as dist
from fsdp_checks import assert_same, gradients, weights
from rank_checks import Checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import compression
from moe_ext import distributed as md

D, F, E = 8, 12, 16
CHECKS = Checks()


class Model(nn.Module):
    """Two layers, few tokens and many experts."""

    def __init__(self, recompute=""):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(moe_ext.MoELayer(D, F, E, 2, bias=True) for _ in range(2))
        self.recompute = recompute
        if recompute == "experts":
            for layer in self.layers:
                own = layer.experts.forward
                layer.experts.forward = functools.partial(checkpoint, own, use_reentrant=False)

    def forward(self, x):
        for layer in self.layers:
            run = layer
            if self.recompute == "layer":
                run = functools.partial(checkpoint, layer, use_reentrant=False)
            x = x + run(x)
        return x


def sharded(chosen, dim=1, recompute="", **options):
    model = Model(recompute)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(parameter):
        divides = parameter.dim() > 1 and parameter.shape[1] % mesh.size() == 0
        return Shard(dim if divides else 0)

    for layer in model.layers:
        fully_shard(layer.experts, mesh=mesh, shard_placement_fn=place, **options)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if chosen:
        assert compression.pack_fsdp_messages(model, chosen_experts=True) == [
            "layers.0.experts",
            "layers.1.experts",
        ]
    return model


def batch(step, num_tokens=2):
    seed = 10 * step + dist.get_rank()
    return torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(seed))


def loss_of(model, step):
    return model(batch(step)).square().mean()


def in_turns(model, optimizer):
    """A step a batch."""
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def accumulated(model, optimizer):
    """Reduced once, after three batches."""
    optimizer.zero_grad()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(model, step).backward()
    optimizer.step()
    in_turns(model, optimizer)


def interleaved(model, optimizer):
    """As in a pipeline: passes are ahead of the backward passes, each of which reduces."""
    optimizer.zero_grad()
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    third = loss_of(model, 2)
    second.backward()
    third.backward()
    del first, second, third
    with torch.no_grad():
        loss_of(model, 7)
    loss_of(model, 8)  # no backward pass
    optimizer.step()
    in_turns(model, optimizer)


@CHECKS(
    (in_turns.__name__, 0, ""),
    (in_turns.__name__, 1, "layer"),
    (accumulated.__name__, 1, ""),
    (interleaved.__name__, 1, ""),
    (interleaved.__name__, 0, "experts"),
)
def bits_are_those_of_whole_gathers(loop, dim, recompute):
    ends = []
    for chosen in (False, True):
        model = sharded(chosen, dim, recompute)
        globals()[loop](model, torch.optim.AdamW(model.parameters(), lr=0.05))
        ends.append((weights(model), gradients(model)))
    assert_same(ends[1][0], ends[0][0])
    assert_same(ends[1][1], ends[0][1])


@CHECKS()
def bytes_are_the_chosen_share():
    model = sharded(True)
    loss_of(model, 0).backward()
    flags = []
    for layer in model.layers:
        layer.experts.register_forward_pre_hook(
            lambda _, args: flags.append((args[1].diff() > 0).long())
        )
    with md.count_traffic() as traffic:
        loss_of(model, 1).backward()
    ranks = dist.get_world_size()
    row = sum(p.numel() // E // ranks for p in model.layers[0].experts.parameters())
    sent = 0
    for own in flags:
        dist.all_reduce(own, dist.ReduceOp.MAX)
        assert 0 < int(own.sum()) < E
        sent += (ranks - 1) * 4 * row * int(own.sum())
    assert traffic.sent_bytes["all_gather"] == 2 * sent
    assert traffic.sent_bytes["reduce_scatter"] == sent


@CHECKS()
def experts_that_stay_gathered_are_refused():
    kept = sharded(False, reshard_after_forward=False)
    with pytest.raises(ValueError, match=r"layers.0.experts to be resharded over all of its ranks"):
        compression.pack_fsdp_messages(kept, chosen_experts=True)
    with pytest.raises(ValueError, match="expected model to hold pruned parameters, got none"):
        compression.pack_fsdp_messages(kept)
    model = sharded(True)
    loss_of(model, 0).backward()
    model.set_reshard_after_backward(False)
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="experts to be gathered for each forward pass"):
        model(batch(2, num_tokens=64))


test_over_two_ranks = CHECKS.test(2)
