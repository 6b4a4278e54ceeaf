"""The helper that the distributed tests stand on must not hide a failure."""

import time

import pytest
import torch
import torch.distributed as dist

from moe_ext.testing import spawn_ranks


def behave(rank, how):
    value = torch.tensor([rank])
    dist.all_reduce(value)
    if rank == 1 and how == "raises":
        raise KeyError("from rank 1")
    if rank == 1 and how == "exits":
        import os

        os._exit(7)
    if rank == 1 and how == "hangs":
        time.sleep(1000)
    return rank, int(value)


def test_results_in_rank_order():
    assert spawn_ranks(behave, 3, "well") == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("how", "message", "timeout"),
    [
        ("raises", r"rank 1: Traceback[\s\S]*KeyError: 'from rank 1'", 60),
        ("exits", r"rank 1: ended with exit code 7", 60),
        # Rank 1 runs on, however slowly ranks start.
        ("hangs", r"rank 1: still running at the time limit", 2),
    ],
)
def test_failures_are_raised(how, message, timeout):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        spawn_ranks(behave, 2, how, timeout=timeout)
    assert time.monotonic() - started < 60


def test_a_rank_that_may_die():
    assert spawn_ranks(behave, 2, "exits", may_die=[1], store="tcp") == [(0, 1), None]


def a_tensor(rank):
    return torch.full((3,), rank)


def test_tensors_come_by_value():
    # A tensor in shared memory is gone with the rank that made it, if that ends first.
    found = spawn_ranks(a_tensor, 2)
    assert not any(tensor.is_shared() for tensor in found)
    assert torch.equal(torch.stack(found), torch.tensor([[0] * 3, [1] * 3]))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"world_size": 0}, "expected world_size to be at least 1, got 0"),
        ({"world_size": 1, "store": "redis"}, "expected store to be one of"),
    ],
)
def test_what_starts_no_job_is_refused(options, message):
    with pytest.raises(ValueError, match=f"spawn_ranks: {message}"):
        spawn_ranks(a_tensor, **options)
