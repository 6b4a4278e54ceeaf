"""The common layer over c10d: collectives, their handle and counts, and agreement between ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks

from moe_ext.comm import agreement
from moe_ext.comm.agreement import Agreement, share
from moe_ext.comm.c10d import IN_ORDER, twin_group
from moe_ext.comm.collectives import (
    Pending,
    all_gather,
    all_reduce_,
    all_to_all,
    broadcast_,
    gather_objects,
    reduce_scatter,
    start_all_gather,
    start_all_reduce_,
    subgroups,
)
from moe_ext.comm.failures import RankFailureError
from moe_ext.distributed import count_traffic
from moe_ext.testing import spawn_ranks

CPU = torch.device("cpu")


def mine():
    return torch.arange(4.0) + 10 * dist.get_rank()


def every():
    return [torch.arange(4.0) + 10 * rank for rank in range(dist.get_world_size())]


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def check_collectives():
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    total, stacked = sum(every()), torch.cat(every())
    with count_traffic() as traffic:
        assert torch.equal(all_reduce_(mine(), group, operation="op"), total)
        assert torch.equal(all_reduce_(mine(), group, operation="op", op="max"), every()[-1])
        assert torch.equal(all_gather(mine(), group, operation="op"), stacked)
        scattered = reduce_scatter(stacked, group, operation="op")
        assert torch.equal(scattered, size * every()[rank])
        uneven = [index + 1 for index in range(size)]
        rows = torch.full((sum(uneven), 2), float(rank))
        got = all_to_all(rows, group, operation="op", send=uneven, receive=[rank + 1] * size)
        assert got[:, 0].tolist() == [source for source in range(size) for _ in range(rank + 1)]
    row = 16
    assert traffic.calls == {
        "all_reduce": 2,
        "all_gather": 1,
        "reduce_scatter": 1,
        "all_to_all": 1,
    }
    assert traffic.sent_bytes["all_gather"] == (size - 1) * row
    assert traffic.sent_bytes["reduce_scatter"] == (size - 1) * row
    assert traffic.sent_bytes["all_reduce"] == 2 * (2 * (size - 1) * row // size)
    assert traffic.sent_bytes["all_to_all"] == (sum(uneven) - rank - 1) * 8
    assert torch.equal(broadcast_(mine(), group, 1, operation="op"), every()[1])
    assert gather_objects({"rank": rank}, group, operation="op")[1] == {"rank": 1}


def check_handle():
    group = dist.group.WORLD
    first = start_all_gather(mine(), group, operation="op")
    second = start_all_reduce_(mine(), group, operation="op")
    assert torch.equal(second.wait(), sum(every()))
    assert torch.equal(first.wait(), torch.cat(every()))
    # As many may wait as like to.
    assert first.wait() is first.wait()
    assert first.is_completed()
    assert torch.equal(second.get_future().wait(), sum(every()))


def check_groups():
    size = dist.get_world_size()
    alone = subgroups([[rank] for rank in range(size)])
    assert dist.get_process_group_ranks(alone) == [dist.get_rank()]
    # Ranks may belong to unequal numbers of groups.
    subgroups([[0]])
    for _ in range(2):
        twin = twin_group(dist.group.WORLD, CPU)
        assert torch.equal(all_gather(mine(), twin, operation="op"), torch.cat(every()))
    group = dist.new_group([*reversed(range(size))], **IN_ORDER)
    ranks = dist.get_process_group_ranks(twin_group(group, CPU))
    assert ranks == dist.get_process_group_ranks(group)


def check_agreement():
    group, rank = dist.group.WORLD, dist.get_rank()
    told = Agreement("op", group).compare({"size": 3, "kind": "a"}, values=[rank, -rank])
    assert told == [[r, -r] for r in range(dist.get_world_size())]
    assert share([rank], group, CPU, operation="op") == [[r] for r in range(dist.get_world_size())]
    found = raised(Agreement("op", group).compare, {"size": 3, "kind": rank})
    ranks = range(dist.get_world_size())
    each = ", ".join(f"{r} on rank {r}" for r in ranks)
    assert found == ("ValueError", f"op: expected kind to be equal on every rank, got {each}")


def check_refusal():
    group, rank = dist.group.WORLD, dist.get_rank()
    problem = "expected x to be 1, got 2" if rank == 1 else None
    for _ in range(2):
        found = raised(Agreement("op", group).compare, {"size": rank}, problem=problem)
        assert found == ("ValueError", "op: expected x to be 1, got 2 on rank 1")
    error = TypeError("op: expected x to be a tensor, got 2") if rank == 1 else None
    found = raised(Agreement("op", group).compare, {}, problem=error)
    assert found == ("TypeError", "op: expected x to be a tensor, got 2 on rank 1")


def check_an_error_in_its_context():
    """It comes in the place of the facts, and leaves the group as it was."""
    group, rank = dist.group.WORLD, dist.get_rank()

    def refuse(error):
        with Agreement("op", group) as call:
            if rank == 1:
                raise error
            call.compare({"size": rank})

    errors = [TypeError("op: expected x, got 2"), KeyError("x"), RankFailureError("op: lost", (7,))]
    classes = ["TypeError", "ValueError", "RankFailureError"]
    for error, name in zip(errors, classes, strict=True):
        text = str(error).removeprefix("op: ")
        assert raised(refuse, error) == (name, f"op: {text} on rank 1")
    assert len(share([rank], group, CPU, operation="op")) == group.size()


def check_what_an_agreement_sends():
    """Nothing without an error and without a comparison; no error of what comes after it."""
    group, rank = dist.group.WORLD, dist.get_rank()
    with mock.patch.object(agreement, "share", wraps=agreement.share) as sent:
        with Agreement("op", group):
            pass
        assert sent.call_count == 0
        found = None
        try:
            with Agreement("op", group) as call:
                call.compare({"size": 3})
                if rank == 1:
                    raise KeyError("afterwards")
        except KeyError as error:
            found = str(error)
        assert sent.call_count == 1
        assert found == ("'afterwards'" if rank == 1 else None)


def check_other_operation():
    operation = "one" if dist.get_rank() == 0 else "another"
    name, message = raised(Agreement(operation, dist.group.WORLD).compare, {"a": 1})
    assert name == "ValueError"
    assert "expected the operation to be equal on every rank, got one on rank 0" in message


def check_long_facts():
    """More than one message holds, on one rank alone or on all."""
    group, rank = dist.group.WORLD, dist.get_rank()
    facts = {f"fact {i}": i * 10**9 for i in range(400)}
    told = Agreement("op", group).compare(facts, values=range(300))
    assert told[-1] == list(range(300))
    long_problem = "expected x to be short, got " + "x" * 5000
    problem = long_problem if rank == 0 else None
    found = raised(Agreement("op", group).compare, facts, problem=problem)
    assert found == ("ValueError", f"op: {long_problem} on rank 0")
    text = "y" * 5000 + str(rank)
    name, message = raised(Agreement("op", group).compare, {"text": text})
    shown = ", ".join(f"... {'y' * 32}{r} (item 0) on rank {r}" for r in range(group.size()))
    assert (name, message) == (
        "ValueError",
        f"op: expected text to be equal on every rank, got {shown}",
    )


test_over_ranks = Checks.of(globals()).test(3)


def test_this_process_alone():
    x = torch.arange(3.0)
    assert all_reduce_(x, None, operation="op") is x
    assert all_gather(x, None, operation="op") is x
    assert reduce_scatter(x, None, operation="op") is x
    assert all_to_all(x, None, operation="op") is x
    assert gather_objects("a", None, operation="op") == ["a"]
    assert Pending.done(x).wait() is x
    assert Agreement("op", None).compare({"a": 1}, values=[5]) == [[5]]


def test_refusal_of_this_process_alone():
    with pytest.raises(ValueError, match=r"^op: expected x to be 1, got 2$"):
        Agreement("op", None).compare({}, problem="expected x to be 1, got 2")
    error = TypeError("op: as it is")
    with pytest.raises(TypeError, match=r"^op: as it is$") as found, Agreement("op", None):
        raise error
    assert found.value is error


def met_in_a_second_job(rank, store):
    """A sum over those of three ranks that go on without the second one."""
    if rank < 2:
        pair = twin_group(subgroups([[0, 1]]), CPU)
        agreement.meet("op", pair, hint="")
    else:
        subgroups([[0, 1]])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        return None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank // 2, world_size=2)
    with mock.patch.object(agreement, "MEETING_SECONDS", 5):
        agreement.meet("op", dist.group.WORLD, hint="")
    twin = twin_group(dist.group.WORLD, CPU)
    return all_reduce_(torch.tensor([float(rank)]), twin, operation="op").item()


def test_processes_of_another_job_meet(tmp_path):
    assert spawn_ranks(met_in_a_second_job, 3, tmp_path / "store") == [2.0, None, 2.0]
