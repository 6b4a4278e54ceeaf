"""A rank that dies in a compressed collective, or comes late to it."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from collective_checks import PATHS, of_rank, skip_unless_built

from moe_ext.comm import workers
from moe_ext.compression import (
    SplitRegions,
    block_sparse_all_reduce_,
    quantized_all_reduce_,
    quantized_reduce_scatter,
    shard_numel,
    sparse_all_reduce,
)
from moe_ext.compression.collectives import quantized
from moe_ext.distributed import RankFailureError, count_traffic
from moe_ext.ops import topk_compress_
from moe_ext.testing import spawn_ranks

NUMEL, LONG, BLOCK = 21_000, 60_000, 64


def reductions(rank, size):
    """Name to (call, tensors that must not change when it fails)."""
    residual = of_rank(rank, NUMEL, salt=1)
    values, indices = topk_compress_(of_rank(rank, NUMEL), residual, 200)
    regions = SplitRegions(NUMEL, size)
    x, owed = of_rank(rank, NUMEL), of_rank(rank, NUMEL, salt=2)
    server = of_rank(rank, shard_numel(NUMEL, size, BLOCK), salt=3)
    output = torch.zeros(NUMEL // size)
    long, long_owed = of_rank(rank, LONG), of_rank(rank, LONG, salt=1)
    long_server = of_rank(rank, shard_numel(LONG, size), salt=2)
    return {
        "split": (
            lambda **how: sparse_all_reduce(
                values,
                indices,
                NUMEL,
                algorithm="split",
                residual=residual,
                regions=regions,
                value_codec="int8",
                **how,
            ),
            [residual],
        ),
        "quantized": (
            lambda **how: quantized_all_reduce_(
                x, block=BLOCK, residual=owed, server_residual=server, **how
            ),
            [x, owed, server],
        ),
        "reduce_scatter": (
            lambda **how: quantized_reduce_scatter(output, x, residual=owed, **how),
            [output, owed],
        ),
        "blocks": (lambda **how: block_sparse_all_reduce_(x, **how), [x]),
        "pieces": (
            lambda **how: quantized_all_reduce_(
                long, residual=long_owed, server_residual=long_server, **how
            ),
            [long, long_owed, long_server],
        ),
    }


def die_between_pieces():
    """Die when the second piece of the sum has been sent."""
    sent = []

    def killing(kind, num_bytes):
        sent.append(kind)
        if sent.count("all_gather") == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    workers.record_traffic = killing


def dying(rank, path, name, async_op):
    os.environ["MOE_EXT_RUNTIME"] = PATHS[path]
    quantized._LEAST_BYTES = 1024
    size = dist.get_world_size()
    call, kept = reductions(rank, size)[name]
    # Everyone knows everyone's process by now, and the worker's group exists.
    done = call(async_op=async_op)
    if async_op:
        done.wait()
    before = [x.clone() for x in kept]
    if rank == 1 and name == "pieces":
        die_between_pieces()
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with count_traffic():
            handle = call(validate=False, async_op=async_op)
            if async_op:
                handle.get_future().wait() if rank == 0 else handle.wait()
    except RuntimeError as error:
        same = all(torch.equal(x, y) for x, y in zip(kept, before, strict=True))
        named = isinstance(error, RankFailureError) or "RankFailureError" in str(error)
        return named, "rank 1 died" in str(error), same, str(error)
    return "no error"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "async_op"),
    [("split", False), ("pieces", False), ("pieces", True), ("quantized", True),
     ("reduce_scatter", False), ("blocks", True)],
)  # fmt: skip
def test_a_dead_rank_is_named_and_nothing_has_changed(name, async_op, path):
    skip_unless_built(path)
    found = spawn_ranks(dying, 3, path, name, async_op, may_die=[1], store="tcp")
    for rank in (0, 2):
        named, dead, same, text = found[rank]
        assert named, text
        assert dead, text
        assert same, f"rank {rank}: changed although {text}"


def waiting(rank, path):
    os.environ["MOE_EXT_RUNTIME"] = PATHS[path]
    x = of_rank(rank, NUMEL)
    quantized_all_reduce_(x)
    beats, ended = [], threading.Event()

    def beat():
        while not ended.is_set():
            beats.append(time.monotonic())
            time.sleep(0.01)

    if rank == 1:
        time.sleep(0.7)
        quantized_all_reduce_(x, validate=False)
        quantized_all_reduce_(x, async_op=True).wait()
        return None
    thread = threading.Thread(target=beat)
    thread.start()
    quantized_all_reduce_(x, validate=False)
    ended.set()
    thread.join()
    quantized_all_reduce_(x, async_op=True).wait()
    return len(beats)


@pytest.mark.parametrize("path", PATHS)
def test_other_threads_run_while_a_rank_is_late(path):
    skip_unless_built(path)
    assert spawn_ranks(waiting, 2, path)[0] > 10


def beside(rank, path):
    os.environ["MOE_EXT_RUNTIME"] = PATHS[path]
    x = of_rank(rank, NUMEL)
    quantized_all_reduce_(x, async_op=True).wait()
    if rank == 1:
        time.sleep(0.5)
    start = time.monotonic()
    handle = quantized_all_reduce_(x, validate=False, async_op=True)
    at_once, waits = time.monotonic() - start, not handle.is_completed()
    handle.wait()
    return at_once, waits


@pytest.mark.parametrize("path", PATHS)
def test_async_returns_at_once(path):
    skip_unless_built(path)
    at_once, waits = spawn_ranks(beside, 2, path)[0]
    assert waits
    assert at_once < 0.4
