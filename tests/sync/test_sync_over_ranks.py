"""Weights by deltas over process groups, from whole models and from shards of FSDP2."""

import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from test_delta_sync import assert_same, copies, cut
from torch import nn

from moe_ext import sync
from moe_ext.distributed import RankFailureError
from moe_ext.sync import exchange
from moe_ext.sync.region import Region
from moe_ext.testing import spawn_ranks

checks = Checks()
RANKS = 4


def state(seed):
    torch.manual_seed(seed)
    return {"w": torch.randn(40, 8).bfloat16(), "b": torch.randn(7)}


def end_of(own):
    """The encoder on rank 0, a receiver on the others."""
    return sync.DeltaReceiver(own) if dist.get_rank() else sync.DeltaEncoder(own)


@checks()
def check_receivers_follow():
    """Two follow, one joins late with other weights, one message short: all end alike."""
    rank, group = dist.get_rank(), dist.group.WORLD
    own = state(0 if rank < 3 else 1)
    if rank == 0:
        end = sync.DeltaEncoder(own, history=2)
    else:
        end = sync.DeltaReceiver(own)
        if rank < 3:
            # The same checkpoint: nothing but hashes is needed.
            end.apply(sync.DeltaEncoder(state(0)).base())
    whole = sync.sync_weights(end, group)
    trained = state(0)
    sent = []
    for step in range(3):
        trained["w"].view(-1)[step::50] += 1
        trained["b"][step] = float("nan")
        if rank == 0:
            own["w"].copy_(trained["w"])
            own["b"].copy_(trained["b"])
            end.encode()
        # The second update is not sent by itself.
        if step != 1:
            sent.append(sync.sync_weights(end, group))
        if step != 1:
            assert_same(own, trained)
    assert end.version == 3
    assert whole > 40 * 8 * 2 and 0 < sent[0] < sent[1]


@checks()
def check_bytes():
    """A byte for a place and two for a value, and the table."""
    rank, group = dist.get_rank(), dist.group.WORLD
    own = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    end = end_of(own)
    sync.sync_weights(end, group)
    if rank == 0:
        own["w"][::100] = 1
        end.encode()
    sent = sync.sync_weights(end, group)
    assert 3 * (1 << 20) / 100 < sent < 3.1 * (1 << 20) / 100 + 600
    assert (own["w"][::100] == 1).all()


class Trained(nn.Module):
    """Linear layers that FSDP2 cuts, a norm and a buffer of which every rank holds all, a tie."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(5, 10), nn.LayerNorm(10)
        self.last, self.tied = (nn.Linear(10, 4, bias=False) for _ in range(2))
        self.tied.weight = self.last.weight
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x):
        self.steps += 1
        x = self.norm(self.first(x))
        return self.last(x) + self.tied(x.square())


@checks((False,), (True,))
def check_shards_of_fsdp2(xored):
    """Three ranks train shards of uneven size; the fourth holds the whole model."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank, group = dist.get_rank(), dist.group.WORLD
    trainers = dist.new_group([0, 1, 2])
    model = Trained()
    if rank < 3:
        mesh = DeviceMesh.from_group(trainers, "cpu")
        ignored = set(model.norm.parameters())
        fully_shard(model, mesh=mesh, ignored_params=ignored)
        end = sync.DeltaEncoder(model, xored=xored)
    else:
        end = sync.DeltaReceiver(model)
    sync.sync_weights(end, group, sources=[0, 1, 2])
    for _ in range(2):
        if rank < 3:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(1)
            model(torch.randn(6, 5)).sum().backward()
            optimizer.step()
            end.encode()
        sync.sync_weights(end, group, sources=[0, 1, 2])
        if rank == 3:
            end.verify()
    found = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = whole.tolist()
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, found)
    assert gathered[0] == gathered[1] == gathered[3]
    assert gathered[3]["steps"] == [2.0] * 3 and "norm.weight" in gathered[3]

    # Replicas that have come apart are named on every rank; nobody takes one of them.
    before = copies(model.state_dict()) if rank == 3 else {}
    if rank < 3:
        with torch.no_grad():
            model.norm.weight += rank == 1
        end.encode()
    with pytest.raises(ValueError, match=r"sources 0 and 1 to send the same norm\.weight"):
        sync.sync_weights(end, group, sources=[0, 1, 2])
    if rank == 3:
        assert_same(before, model.state_dict())
        end.verify()


@checks()
def check_what_sources_are():
    rank, group = dist.get_rank(), dist.group.WORLD
    for sources in ([], [0, 0], [0, 9]):
        end = sync.DeltaEncoder(state(0)) if rank in sources else sync.DeltaReceiver(state(0))
        with pytest.raises(ValueError, match="expected sources to be ranks of 4, each once"):
            sync.sync_weights(end, group, sources=sources)
    # One rank has a number in the place of a list, and no rank waits for it.
    with pytest.raises(Exception, match="'int' object is not iterable"):
        sync.sync_weights(end_of(state(0)), group, sources=0 if rank == 1 else [0])
    # Numbers of numpy and in tensors are as others.
    kinds = (list, np.array, torch.tensor, set)
    sync.sync_weights(end_of(state(0)), group, sources=kinds[rank]([0]))
    for other in (None, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match="expected group to be of type ProcessGroup, got"):
            sync.sync_weights(end_of(state(0)), other)
    # One of them keeps fewer updates than the other.
    own = state(0)
    end = sync.DeltaReceiver(own) if rank > 1 else sync.DeltaEncoder(own, history=1 + 3 * rank)
    sync.sync_weights(end, group, sources=[0, 1])
    if rank < 2:
        for _ in range(3):
            own["b"] += 1
            end.encode()
    with pytest.raises(ValueError, match=r"keep as many updates as each other, got \[1, 3\]"):
        sync.sync_weights(end, group, sources=[0, 1])


@checks()
def check_a_refusal_is_written_nowhere():
    """One of three receivers cannot take an update: the others have not taken it either."""
    rank, group = dist.get_rank(), dist.group.WORLD
    own = state(0)
    end = end_of(own)
    sync.sync_weights(end, group)
    before = copies(own)
    if rank == 0:
        own["w"] += 1
        end.encode()
    if rank == 2:
        own["b"] = own["b"].double()
    with pytest.raises(ValueError, match="expected state to hold the tensors .* on rank 2"):
        sync.sync_weights(end, group)
    if rank:
        assert end.version == 0
        assert_same({"w": own["w"]}, before)
    with pytest.raises(ValueError, match="expected end to be a DeltaReceiver on rank 1"):
        sync.sync_weights(sync.DeltaEncoder(state(0)) if rank < 2 else end, group)


@checks()
def check_regions_of_dtensors():
    """A region names the elements that this rank holds: FSDP2 over tensor parallelism, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 10, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    whole = torch.randn(7, 5, 3)
    tensors = [distribute_tensor(whole, mesh, [Shard(a), Shard(b)]) for a in (0, 1) for b in (0, 1)]
    tensors += [distribute_tensor(whole, mesh, [Replicate(), Shard(2)])]
    tensors += list(model.state_dict().values())
    for tensor in tensors:
        part = cut(tensor.full_tensor(), Region.of(tensor))
        assert torch.equal(part, tensor.to_local()), tensor.placements


test_over_ranks = checks.test(RANKS, timeout=120)


def lose_the_source(rank):
    """The source is killed when all of an update has left it; what each receiver has then."""
    group, own = dist.group.WORLD, state(0)
    end = end_of(own)
    sync.sync_weights(end, group)
    agreement = exchange.Agreement

    def die(operation, *args, **kwargs):
        if operation.endswith("apply"):
            os.kill(os.getpid(), signal.SIGKILL)
        return agreement(operation, *args, **kwargs)

    if rank == 0:
        own["w"] += 1
        end.encode()
        exchange.Agreement = die
    with pytest.raises(RankFailureError, match="rank 0 died"):
        sync.sync_weights(end, group)
    end.verify()
    return end.version, bool((own["w"] == state(0)["w"]).all())


def test_a_rank_that_raises_has_written_nothing():
    found = spawn_ranks(lose_the_source, 3, may_die=[0])
    assert found == [None, (0, True), (0, True)]
