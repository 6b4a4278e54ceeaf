import copy
import functools
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from one_bit_ranks import as_parameter, muon, placed, spread
from rank_checks import Checks, ask_briefly
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from moe_ext import distributed as md
from moe_ext import optim
from moe_ext.distributed.dtensor import local_part
from moe_ext.testing import spawn_ranks

TIGHT = {"rtol": 1e-11, "atol": 1e-13}
SHAPES = [(5, 3), (7,), (2, 5, 4), (1, 6), (3, 1)]
MAKERS = {
    "LAMB": functools.partial(optim.LAMB, lr=0.05, weight_decay=0.1),
    "LARS": functools.partial(optim.LARS, lr=0.05, weight_decay=0.1, trust_coefficient=0.1),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.05, weight_decay=0.1),
}
checks = Checks()


@functools.cache
def mesh(*sizes):
    return init_device_mesh("cpu", sizes)


def placements():
    """Name to (mesh, placements of a parameter)."""
    line, grid = mesh(4), mesh(2, 2)
    return {
        "rows": (line, lambda p: [Shard(0)]),
        "last": (line, lambda p: [Shard(p.dim() - 1)]),
        "replicated": (line, lambda p: [Replicate()]),
        "hybrid": (grid, lambda p: [Replicate(), Shard(0)]),
        "rows and last": (grid, lambda p: [Shard(0), Shard(p.dim() - 1)]),
        "rows twice": (grid, lambda p: [Shard(0), Shard(0)]),
        "middle": (grid, lambda p: [Shard(max(0, p.dim() - 2)), Shard(p.dim() - 1)]),
    }


def whole_parameters(scale=1.0):
    generator = torch.Generator().manual_seed(3)
    found = []
    for shape in SHAPES:
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        # Slices of far different size, so that a norm over the wrong ones shows.
        value *= torch.logspace(0, scale, shape[0]).double().view(-1, *[1] * (len(shape) - 1))
        found.append(nn.Parameter(value))
    return found


def gradients(step):
    generator = torch.Generator().manual_seed(50 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def take_steps(optimizer, params, steps=2):
    for step in range(steps):
        for p, grad in zip(params, itertools.cycle(gradients(step)), strict=False):
            p.grad = as_parameter(grad, p)
        optimizer.step()


@checks(*itertools.product(MAKERS, (False, True)))
def check_any_placement(name, per_expert):
    whole = whole_parameters()
    take_steps(MAKERS[name](whole, per_expert=per_expert), whole)
    for kind, (where, place) in placements().items():
        sharded = placed(where, place, whole_parameters())
        optimizer = MAKERS[name](sharded, per_expert=per_expert)
        take_steps(optimizer, sharded)
        for p, q in zip(sharded, whole, strict=True):
            torch.testing.assert_close(
                p.full_tensor(), q, msg=lambda m, kind=kind: f"{kind}: {m}", **TIGHT
            )
        for p, state in optimizer.state.items():
            for key, value in state.items():
                assert key == "step" or isinstance(value, DTensor)
                if isinstance(value, DTensor) and value.shape == p.shape:
                    # A dimension of length one that was summed is on all ranks.
                    assert value.placements == p.placements or key in ("row_var", "col_var")


@checks()
def check_one_all_reduce_for_all_norms():
    ranks = dist.get_world_size()
    for name in MAKERS:
        # Rows and stacked experts lie along dimension 0: an expert's norms need no message.
        calls = {False: 1 if name != "Adafactor" else 2, True: 0}
        for per_expert in (False, True):
            params = placed(mesh(ranks), lambda p: [Shard(0)], whole_parameters())
            optimizer = MAKERS[name](params, per_expert=per_expert)
            with md.count_traffic() as traffic:
                take_steps(optimizer, params, 1)
            assert traffic.calls["all_reduce"] == calls[per_expert], (name, traffic)
        if name != "Adafactor":
            # Two norms of each parameter, and the two numbers by which ranks compare options.
            norms = (2 * len(SHAPES) + 2) * 8
            take_one = MAKERS[name](params)
            with md.count_traffic() as traffic:
                take_one.step()
            assert traffic.total_bytes == 2 * (ranks - 1) * norms // ranks


@checks()
def check_messages():
    where = mesh(dist.get_world_size())
    for make in MAKERS.values():
        p = nn.Parameter(spread(torch.ones(4, 3), where, [Shard(0)]))
        p.grad = spread(torch.ones(4, 3), where, [Replicate()])
        with pytest.raises(ValueError, match=r"gradients to be placed as their parameters.*'w'"):
            make([("w", p)]).step()
        part = DTensor.from_local(torch.ones(4, 3), where, [Partial()])
        q = nn.Parameter(part)
        q.grad = part
        with pytest.raises(ValueError, match="DTensor parameters to be sharded or replicated"):
            make([q]).step()


def before_a_loss(make):
    """(optimizer, its parameters, copies of them and of its state) between two steps."""
    sharded = placed(mesh(2), lambda p: [Shard(p.dim() - 1)], whole_parameters())
    *early, late = params = [*whole_parameters(), *sharded]
    optimizer = make(params)
    take_steps(optimizer, early)
    weights = [local_part(p).detach().clone() for p in params]
    before = copy.deepcopy(optimizer.state_dict())
    # One parameter has no state yet.
    late.grad = as_parameter(gradients(0)[-1], late)
    return optimizer, params, weights, before


def lose_a_rank(rank):
    ask_briefly()
    everything = [before_a_loss(make) for make in (*MAKERS.values(), muon)]
    dist.barrier()
    if rank == 1:
        os._exit(1)
    for kept in everything:
        assert_a_step_changes_nothing(*kept)
    return True


def assert_a_step_changes_nothing(optimizer, params, weights, before):
    with pytest.raises(md.RankFailureError, match="optimizer step"):
        optimizer.step()
    assert all(torch.equal(local_part(p), w) for p, w in zip(params, weights, strict=True))
    after = optimizer.state_dict()
    assert after["state"].keys() == before["state"].keys()
    for index, state in before["state"].items():
        assert after["state"][index].keys() == state.keys()
        for key, value in state.items():
            found = after["state"][index][key]
            assert torch.equal(local_part(found), local_part(value)), (index, key)


test_sharded = checks.test(4)


def test_a_rank_that_dies_leaves_weights_and_moments():
    assert spawn_ranks(lose_a_rank, 2, may_die=[1], group_timeout=10)[0]
