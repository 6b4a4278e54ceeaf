"""Optimizers that communicate themselves: states on other ranks, and what ranks have to share."""

import copy
import functools
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from one_bit_ranks import (
    BLOCK,
    MAKERS,
    assert_equal_on_ranks,
    give,
    owed,
    parameters,
    rank_gradient,
    run,
    total,
)
from rank_checks import Checks, assert_same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moe_ext import distributed as md
from moe_ext import optim
from moe_ext.testing import spawn_ranks

over_3, over_4 = Checks(), Checks()


@functools.cache
def first_ranks(count):
    return dist.new_group(list(range(count)))


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


EP = 2


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


def owed_by(optimizer):
    """For dense weights and for experts what the ranks that hold them owe to the mean."""
    return [total(mean.errors(), mean.group) / mean.size for mean in optimizer._means]


def run_part(optimizer, params, part, steps):
    for step in steps:
        for index, p in enumerate(params):
            p.grad = rank_gradient(p.shape, step, dist.get_rank(), index) + index * part
        optimizer.step()


@over_4(*itertools.product(MAKERS, (False, True)))
def check_experts(name, neighbours):
    """Residuals and moments stay; an expert's come from the ranks that held it."""
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
                assert optimizer.steps_taken == done
                torch.testing.assert_close(owed_by(optimizer), owed[part], rtol=1e-6, atol=1e-7)
                was = next(s for s, p in zip(saved, parts, strict=True) if p == part)
                moment = optimizer.state[params[1]]["exp_avg"]
                assert torch.equal(moment, was["state"][1]["exp_avg"])
                other = next(s for s, p in zip(saved, parts, strict=True) if p != part)
                assert not torch.equal(moment, other["state"][1]["exp_avg"])
            run_part(optimizer, params, part, range(done, done + 8))
            assert_equal_on_ranks(params[:1], group)
            assert_equal_on_ranks(params[1:], replicas)
            weights = [p.detach() for p in params]
            mine = (part, optimizer.rank_state_dict(), weights, owed_by(optimizer))
            everyone = [None] * size
            dist.all_gather_object(everyone, mine, group=group)
            saved, parts = [one[1] for one in everyone], [one[0] for one in everyone]
            carried = {one[0]: one[2] for one in everyone}
            owed = {one[0]: one[3] for one in everyone}
            # A rank that holds its experts alone gets what it is owed in its first step.
            for of_dense, of_experts in owed.values():
                assert bool(of_dense.any()) and bool(of_experts.any()) == (size > EP)
        done += 8


@over_4()
def check_another_division_is_refused():
    group, replicas, part = shared_by(4, False)
    weights = [torch.zeros(9, 20), torch.zeros(2, 3, 64)]
    optimizer, params = made("OneBitAdam", group, replicas, weights)
    run_part(optimizer, params, part, range(6))
    states = [None] * 4
    dist.all_gather_object(states, optimizer.rank_state_dict())
    other, _ = made("OneBitAdam", group, group, weights)
    with pytest.raises(ValueError, match="parameter group 1 to be divided over as many ranks as"):
        other.load_rank_states(states)
    assert not other.state
    with pytest.raises(ValueError, match="expected state 0 of 4 to be that of rank 0 of 4, got"):
        optimizer.load_rank_states(states[::-1])
    dist.barrier()


# -- what ranks tell each other before a step


@over_3()
def check_messages_on_every_rank():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for name, make in MAKERS.items():
        p = nn.Parameter(torch.zeros(4, 4))
        optimizer = make([("w", p)])
        p.grad = torch.ones(4, 4).to_sparse() if rank == last else torch.ones(4, 4)
        message = f"{name}: expected gradients to be dense, got a sparse one for 'w' on rank {last}"
        with pytest.raises(TypeError, match=message):
            optimizer.step()
        p.grad = torch.ones(4, 4)
        optimizer.step()
        q = nn.Parameter(torch.full((2, 2), float(rank)))
        q.grad = torch.ones(2, 2)
        message = r"the values of the parameters at the first step \(seed every rank alike\) to be"
        with pytest.raises(ValueError, match=message):
            make([q]).step()
        more = [nn.Parameter(torch.ones(2)) for _ in range(1 + rank)]
        message = "expected the number of parameters to be equal on every rank, got 1 on rank 0, 2 "
        with pytest.raises(ValueError, match=message):
            make(more).step()
        p.grad = torch.ones(4, 4)
        if rank == last:
            optimizer.param_groups[0]["step"] += 1
        message = "expected the number of the step to be equal on every rank, got 1 on rank 0"
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        where = init_device_mesh("cpu", (dist.get_world_size(),))
        d = nn.Parameter(distribute_tensor(torch.ones(4), where, [Shard(0)]))
        d.grad = distribute_tensor(torch.ones(4), where, [Shard(0)])
        with pytest.raises(
            TypeError,
            match="to be plain tensors or experts over ranks, got a DTensor for parameter 0 of",
        ):
            make([d]).step()


@over_3(*((name,) for name in MAKERS))
def check_a_state_loaded_on_one_rank_in_mid_training_is_told(name):
    params, rank = parameters(), dist.get_rank()
    optimizer = MAKERS[name](params, lr=0.05)
    run(optimizer, params, range(4))
    saved = copy.deepcopy(optimizer.rank_state_dict())
    if rank == 1:
        optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in params]
    for _ in range(2):
        give(params, 4, rank)
        with pytest.raises(
            ValueError, match=r"\(load a state on all ranks or on none\) to be equal"
        ):
            optimizer.step()
        assert all(torch.equal(p, w) for p, w in zip(params, before, strict=True))
    optimizer.load_state_dict(saved)
    run(optimizer, params, range(4, 6))


@over_3(*((name,) for name in MAKERS))
def check_options_changed_on_one_rank_are_told(name):
    params, last = parameters(), dist.get_rank() == dist.get_world_size() - 1
    optimizer = MAKERS[name](params, lr=0.05)
    # ZeroOneAdam has a step of its own at 8, and synchronises at 9.
    for steps in (2, 4, 9):
        run(optimizer, params, range(optimizer.steps_taken, steps))
        weights = [p.detach().clone() for p in params]
        before = copy.deepcopy(optimizer.rank_state_dict())
        for option, value in (("lr", 0.04), ("weight_decay", 0.1), ("non_freeze", True)):
            group, kept = optimizer.param_groups[0], dict(optimizer.param_groups[0])
            group[option] = value if last else kept.get(option, False)
            give(params, steps, dist.get_rank())
            message = rf"{name}: expected {option} to be equal .*, got \[.*{value}\] on rank 2"
            with pytest.raises(ValueError, match=message):
                optimizer.step()
            group.clear()
            group.update(kept)
            assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
            assert_same_bits(optimizer.rank_state_dict(), before)
    run(optimizer, params, range(9, 10))


@over_3(*((name,) for name in MAKERS))
def check_gradients_too_large_for_the_type_they_travel_as(name):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    # The second one travels as it is after the freeze, too; float16 ends at 65504.
    for steps, options in ((1, {}), (6, {"non_freeze": True})):
        params = [nn.Parameter(torch.zeros(4, 80)) for _ in range(2)]
        optimizers = [
            MAKERS[name]([{"params": [p], **options}], lr=0.05, communication_data_type=dtype)
            for p, dtype in zip(params, (torch.float16, torch.float32), strict=True)
        ]
        for step in range(steps + 1):
            for p, optimizer in zip(params, optimizers, strict=True):
                give([p], step, rank)
                if step == steps:
                    p.grad = p.grad * 4e5 + (1e15 if rank == last else 0.0)
                optimizer.step()
        assert_equal_on_ranks(params)
        moments = [o.state[p]["exp_avg"] for o, p in zip(optimizers, params, strict=True)]
        # Rounded to 11 bits in each rank, and in each of two sums.
        bound = 2.0**-11 * 3 * moments[1].abs().max()
        assert moments[0].abs().max() > 1e13 and (moments[0] - moments[1]).abs().max() <= bound


@over_3()
def check_many_parameters():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(520)]
    optimizer = optim.OneBitAdam(params, 0.1)
    last = dist.get_world_size() - 1
    for index in (1, 300, 510):
        params[index].grad = torch.ones(1) if dist.get_rank() == last else None
    optimizer.step()
    assert [i for i, p in enumerate(params) if bool(p)] == [1, 300, 510]
    assert_equal_on_ranks(params[300:301] + params[510:511])


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
    assert_same_bits(optimizer.rank_state_dict(), before)
    return True


test_state_over_three_ranks = over_3.test(3)


test_other_numbers_of_ranks = over_4.test(4, timeout=90, group_timeout=20)


def test_a_rank_that_dies_is_named_and_nothing_changes():
    assert spawn_ranks(lose_a_rank, 2, may_die=[1], group_timeout=10)[0]
