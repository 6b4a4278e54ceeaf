"""Optimizers that communicate themselves go on with another number of replicas of each expert."""

import itertools

import pytest
import torch
import torch.distributed as dist
from one_bit_ranks import MAKERS, assert_equal_on_ranks, rank_gradient, total
from rank_checks import Checks
from torch import nn

EP = 2
checks = Checks()


def shared_by(size, neighbours):
    """(group of the first ranks, group of those that hold this rank's experts, which ones)."""
    group, mine = dist.new_group(list(range(size))), (None, None)
    for part in range(EP):
        ranks = list(range(part, size, EP))
        if neighbours:
            ranks = list(range(part * size // EP, (part + 1) * size // EP))
        made = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = made, part
    return group, *mine


def made(name, group, replicas, weights):
    dense, experts = (nn.Parameter(w.clone()) for w in weights)
    groups = [{"params": [dense]}, {"params": [experts], "process_group": replicas}]
    return MAKERS[name](groups, lr=0.05, group=group), [dense, experts]


def run(optimizer, params, part, steps):
    for step in steps:
        for index, p in enumerate(params):
            p.grad = rank_gradient(p.shape, step, dist.get_rank(), index) + index * part
        optimizer.step()


@checks(*itertools.product(MAKERS, (False, True)))
def check_experts(name, neighbours):
    """What each expert is owed, and its moments, come from the ranks that held it."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(9, 20, generator=generator)
    carried = {part: [dense, torch.full((2, 3, 64), float(part))] for part in range(EP)}
    saved, owed, parts, done = None, None, None, 0
    for size in (4, 2, 4):
        group, replicas, part = shared_by(size, neighbours)
        shared = [carried, saved, owed, parts]
        dist.broadcast_object_list(shared, src=0)
        carried, saved, owed, parts = shared
        if dist.get_rank() < size:
            optimizer, params = made(name, group, replicas, carried[part])
            if saved is not None:
                optimizer.load_rank_states(saved)
                _, mean = optimizer._means
                found = total(mean.errors(), replicas) / mean.size
                torch.testing.assert_close(found, owed[part], rtol=1e-6, atol=1e-7)
                was = next(s for s, p in zip(saved, parts, strict=True) if p == part)
                moment = optimizer.state[params[1]]["exp_avg"]
                assert torch.equal(moment, was["state"][1]["exp_avg"])
                other = next(s for s, p in zip(saved, parts, strict=True) if p != part)
                assert not torch.equal(moment, other["state"][1]["exp_avg"])
            run(optimizer, params, part, range(done, done + 8))
            assert_equal_on_ranks(params[:1], group)
            assert_equal_on_ranks(params[1:], replicas)
            _, mean = optimizer._means
            mine = (
                part,
                optimizer.rank_state_dict(),
                [p.detach() for p in params],
                total(mean.errors(), replicas) / mean.size,
            )
            everyone = [None] * size
            dist.all_gather_object(everyone, mine, group=group)
            saved, parts = [one[1] for one in everyone], [one[0] for one in everyone]
            carried = {one[0]: one[2] for one in everyone}
            owed = {one[0]: one[3] for one in everyone}
            # A rank that holds its experts alone gets what it is owed in its first step.
            assert all(bool(error.any()) == (size > EP) for error in owed.values())
        done += 8


@checks()
def check_another_division_is_refused():
    group, replicas, part = shared_by(4, False)
    weights = [torch.zeros(9, 20), torch.zeros(2, 3, 64)]
    optimizer, params = made("OneBitAdam", group, replicas, weights)
    run(optimizer, params, part, range(6))
    states = [None] * 4
    dist.all_gather_object(states, optimizer.rank_state_dict())
    other, _ = made("OneBitAdam", group, group, weights)
    with pytest.raises(ValueError, match="parameter group 1 to be divided over as many ranks as"):
        other.load_rank_states(states)
    assert not other.state
    with pytest.raises(ValueError, match="expected state 0 of 4 to be that of rank 0 of 4, got"):
        optimizer.load_rank_states(states[::-1])
    dist.barrier()


@pytest.mark.parametrize("name", checks)
def test_replicas(name):
    checks.assert_passed(4, name, timeout=90, group_timeout=20)
