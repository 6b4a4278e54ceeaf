"""Horovod's calls on two ranks against one process that saw all rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_ext.integrations.horovod as hvd
from moe_ext.testing import spawn_ranks

# Batches of each rank: rank 0 runs out first.
BATCHES = 2, 4


def made(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def rows(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sin()


def script(rank):
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (rank, 2, rank)
    model = made(seed=rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    for step in range(BATCHES[rank]):
        optimizer.zero_grad()
        x, y = rows(rank, step)
        F.mse_loss(model(x), y).backward()
        if step % 2:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    last = hvd.join()
    assert last == 1
    hvd.broadcast_parameters(model.named_parameters(), root_rank=last)
    x = torch.tensor([rank + 1.0])
    reduced = [float(hvd.allreduce(x)), float(hvd.allreduce(x, op=hvd.Sum)), float(x)]
    return [p.detach() for p in model.parameters()], reduced, refusals(rank, sgd)


def refusals(rank, sgd):
    texts = []
    for call in (
        lambda: hvd.allreduce(torch.ones(1), op="adasum"),
        lambda: hvd.allreduce(torch.ones(1, dtype=torch.int64)),
        lambda: hvd.broadcast_parameters({}, root_rank=2),
        lambda: hvd.DistributedOptimizer(sgd, compression="fp16"),
        lambda: hvd.join() if rank else hvd.allreduce(torch.ones(1)),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        texts.append(str(caught.value).split(",")[0])
    return texts


def one_process():
    model = made(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(BATCHES)):
        optimizer.zero_grad()
        for rank in range(2):
            if step < BATCHES[rank]:
                x, y = rows(rank, step)
                (F.mse_loss(model(x), y) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_two_ranks_are_one_process():
    found = spawn_ranks(script, 2)
    for rank, (parameters, reduced, texts) in enumerate(found):
        for p, want in zip(parameters, one_process(), strict=True):
            torch.testing.assert_close(p, want, rtol=1e-12, atol=1e-12)
        assert reduced == [1.5, 3.0, rank + 1.0]
        assert texts == [
            "allreduce: expected op to be Average or Sum",
            "allreduce: expected op to be Sum for torch.int64",
            "broadcast_parameters: expected root_rank to be in [0",
            "DistributedOptimizer: expected compression to be None",
            "allreduce: expected no rank to have joined",
        ]


# Steps of each rank before it joins: the last to join is the middle one, the lowest, one of two.
ENDS = [(2, 4, 1), (4, 1, 2), (4, 4, 1), (1, 4, 4)]


def two_optimizers(rank):
    """Sums and means by an optimizer each, stepped in turn, while ranks run out of data."""
    hvd.init()
    found = []
    for ends in ENDS:
        model = made(seed=1)
        layers = model[0], model[2]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), op=op)
            for layer, op in zip(layers, (hvd.Sum, hvd.Average), strict=True)
        ]
        for step in range(ends[rank]):
            model.zero_grad()
            x, y = rows(rank, step)
            F.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        found.append((last, [p.detach() for p in model.parameters()]))
    return found


def summed_and_averaged(ends):
    model = made(seed=1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(ends)):
        model.zero_grad()
        for rank, end in enumerate(ends):
            if step < end:
                x, y = rows(rank, step)
                F.mse_loss(model(x), y).backward()
        for p in model[2].parameters():
            p.grad /= len(ends)
        sgd.step()
    return [p.detach() for p in model.parameters()]


def test_sums_and_two_optimizers_while_ranks_join():
    for found in spawn_ranks(two_optimizers, 3):
        for ends, (last, parameters) in zip(ENDS, found, strict=True):
            assert last == max(rank for rank, end in enumerate(ends) if end == 4)
            for p, want in zip(parameters, summed_and_averaged(ends), strict=True):
                torch.testing.assert_close(p, want, rtol=1e-12, atol=1e-12)
