"""States of the optimizers that communicate themselves: saved, flushed, on other ranks."""

import copy
import functools
import io
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from one_bit_ranks import (
    BLOCK,
    MAKERS,
    assert_equal_on_ranks,
    assert_same,
    give,
    owed,
    parameters,
    run,
    total,
)
from rank_checks import Checks
from torch import nn

from moe_ext import distributed as md
from moe_ext import optim
from moe_ext.testing import spawn_ranks

over_3, over_4 = Checks(), Checks()


@functools.cache
def first_ranks(count):
    return dist.new_group(list(range(count)))


@over_3(*itertools.product(MAKERS, (2, 5, 9)))
def check_resume_has_the_same_bits(name, steps):
    params = parameters()
    optimizer = MAKERS[name](params, lr=0.05, weight_decay=0.1)
    run(optimizer, params, range(steps))
    file = io.BytesIO()
    torch.save(optimizer.rank_state_dict(), file)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = MAKERS[name](copies)
    file.seek(0)
    resumed.load_state_dict(torch.load(file))
    run(optimizer, params, range(steps, steps + 6))
    run(resumed, copies, range(steps, steps + 6))
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
    assert_same(optimizer.rank_state_dict(), resumed.rank_state_dict())


@over_3()
def check_flush_brings_in_what_is_owed():
    params, ranks = parameters(), dist.get_world_size()
    optimizer = MAKERS["OneBitAdam"](params, lr=0.05)
    run(optimizer, params, range(8))
    mean = optimizer._means[0]
    before = [e.state["exp_avg"].clone() for e in mean.entries]
    parts = mean.parts_of(total(owed(optimizer)))
    assert bool(owed(optimizer).any())
    optimizer.flush()
    for entry, had, part in zip(mean.entries, before, parts, strict=True):
        found = optimizer.state[entry.parameter]["exp_avg"]
        torch.testing.assert_close(found.double(), had + part / ranks, rtol=1e-5, atol=1e-6)
    assert not bool(owed(optimizer).any())
    # The state of any rank now fits any number of ranks.
    state = [None]
    if dist.get_rank() == 0:
        state = [optimizer.rank_state_dict()]
    dist.broadcast_object_list(state)
    pair = first_ranks(2)
    if dist.get_rank() < 2:
        other = MAKERS["OneBitAdam"](params, lr=0.05, group=pair)
        other.load_state_dict(state[0])
        run(other, params, range(8, 10))
        assert_equal_on_ranks(params, pair)


def all_states(optimizer, group):
    states = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, optimizer.rank_state_dict(), group=group)
    return states


@over_4(*((name,) for name in MAKERS))
def check_elastic(name):
    """What the mean is owed stays the same from one number of ranks to the next."""
    params = parameters()
    optimizer, size, done, states = None, None, 0, None
    for size in (4, 2, 3):
        group = first_ranks(size)
        carried = [states, [p.detach() for p in params]]
        dist.broadcast_object_list(carried, src=0)
        if dist.get_rank() < size:
            params = [nn.Parameter(p.clone()) for p in carried[1]]
            optimizer = MAKERS[name](params, lr=0.05, group=group)
            if carried[0] is not None:
                optimizer.load_rank_states(carried[0])
                found = total(owed(optimizer), group) / size
                torch.testing.assert_close(found, want_of(carried[0]), rtol=1e-6, atol=1e-7)
                assert optimizer.steps_taken == done
            run(optimizer, params, range(done, done + 8))
            assert_equal_on_ranks(params, group)
            states = all_states(optimizer, group)
        done += 8


def want_of(states):
    """Mean over the old ranks of what they owed, by the saved states alone."""
    sums = 0
    for state in states:
        (server,) = state["compression"]["servers"]
        rows = []
        for index in server["parameters"]:
            error = state["state"][index]["worker_error"].double().flatten()
            rows.append(torch.cat([error, error.new_zeros(-len(error) % BLOCK)]))
        flat = torch.cat(rows)
        shard = server["server_error"].double()
        start = server["rank"] * len(shard)
        flat[start : start + len(shard)] += shard[: max(0, len(flat) - start)]
        sums = sums + flat
    return sums / len(states)


@over_3()
def check_states_of_other_ranks_are_refused():
    params = parameters()
    optimizer = MAKERS["OneBitAdam"](params, lr=0.05)
    run(optimizer, params, range(6))
    states = all_states(optimizer, None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % ranks
    message = f"expected the state of rank {rank} of {ranks}, got that of rank {other} of {ranks}; "
    with pytest.raises(ValueError, match=message + "call flush before saving, or load_rank_states"):
        MAKERS["OneBitAdam"](params).load_state_dict(states[other])
    message = rf"OneBitAdam: expected state 0 of {ranks} to be that of rank 0 of {ranks}, got rank"
    with pytest.raises(ValueError, match=message):
        MAKERS["OneBitAdam"](params).load_rank_states(states[::-1])
    with pytest.raises(ValueError, match="expected a state of blocks of 128 of parameters .* got"):
        optim.OneBitAdam(params, freeze_step=3, block=128).load_state_dict(states[rank])
    local = MAKERS["ZeroOneAdam"](params, lr=0.05)
    run(local, params, range(9))
    assert not local.synchronised
    with pytest.raises(ValueError, match="expected states of synchronised ranks, got some from be"):
        MAKERS["ZeroOneAdam"](params).load_rank_states(all_states(local, None))
    with pytest.raises(ValueError, match="expected the state of rank"):
        MAKERS["ZeroOneAdam"](params).load_state_dict(all_states(local, None)[other])
    dist.barrier()


@over_3(("OneBitAdam",), ("OneBitLamb",))
def check_a_state_goes_by_names(name):
    params = parameters()
    names = [f"layer.{i}" for i in range(len(params))]
    optimizer = MAKERS[name](list(zip(names, params, strict=True)), lr=0.05)
    run(optimizer, params, range(6))
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    turned = list(zip(names, copies, strict=True))[::-1]
    states = all_states(optimizer, None)
    assert bool(owed(optimizer).any())
    resumed = MAKERS[name](turned)
    # The shards of the flat tensor are others: their owners take over what belongs to them.
    with pytest.raises(ValueError, match="expected a state of blocks of 64 of .* load_rank_states"):
        resumed.load_state_dict(states[dist.get_rank()])
    resumed.load_rank_states(states)
    torch.testing.assert_close(want_of(all_states(resumed, None)).sum(), want_of(states).sum())
    optimizer.flush()
    resumed = MAKERS[name](turned)
    resumed.load_state_dict(copy.deepcopy(optimizer.rank_state_dict()))
    for p, q in zip(params, copies, strict=True):
        had, has = optimizer.state[p], resumed.state[q]
        assert torch.equal(had["exp_avg"], has["exp_avg"])
        assert torch.equal(had["exp_avg_sq"], has["exp_avg_sq"])
    strange = MAKERS[name]([("strange", copies[0]), *turned[:-1]])
    with pytest.raises(ValueError, match="names of these, got one without strange"):
        strange.load_state_dict(optimizer.rank_state_dict())


@over_3()
def check_a_state_that_has_lost_what_is_owed_is_refused():
    params = parameters()
    optimizer = MAKERS["OneBitAdam"](params, lr=0.05)
    run(optimizer, params, range(6))
    state = copy.deepcopy(optimizer.rank_state_dict())
    del state["compression"]
    with pytest.raises(ValueError, match="to hold `compression`, got one without it that owes for"):
        optimizer.load_state_dict(state)
    for one in state["state"].values():
        one.pop("worker_error", None)
    optimizer.load_state_dict(state)
    assert optimizer._means == []
    run(optimizer, params, [6])


def lose_a_rank(rank):
    params = parameters()
    optimizer = MAKERS["OneBitAdam"](params, lr=0.05)
    run(optimizer, params, range(6))
    weights = [p.detach().clone() for p in params]
    before = copy.deepcopy(optimizer.rank_state_dict())
    give(params, 6, rank)
    if rank == 1:
        os._exit(1)
    with pytest.raises(md.RankFailureError, match="OneBitAdam: expected every rank .* rank 1"):
        optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
    assert_same(optimizer.rank_state_dict(), before)
    return True


@pytest.mark.parametrize("name", over_3)
def test_state_over_three_ranks(name):
    over_3.assert_passed(3, name)


@pytest.mark.parametrize("name", over_4)
def test_other_numbers_of_ranks(name):
    over_4.assert_passed(4, name)


def test_a_rank_that_dies_is_named_and_nothing_changes():
    assert spawn_ranks(lose_a_rank, 2, may_die=[1], group_timeout=10)[0]
