"""A process that exits while threads of C++ still have something to do ends with code 0."""

import ctypes
import os
import sys
import time

import pytest
import torch.distributed as dist
from collective_checks import PATHS, of_rank, skip_unless_built

from moe_ext.compression import quantized_all_reduce_
from moe_ext.compression.codecs import dense_reduction
from moe_ext.testing import spawn_ranks

NUMEL = 4096


def spin(seconds):
    """Seconds in which no other thread has the interpreter."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class EndsSlowly:
    """As a global, dies when the interpreter ends, and takes a while for it."""

    def __init__(self, seconds):
        self.seconds = seconds

    # Modules are gone by then.
    def __del__(self, now=time.perf_counter):
        end = now() + self.seconds
        while now() < end:
            pass


def exit_with(held, seconds):
    """The way of `sys.exit`; a rank of `spawn_ranks` would end without ending Python."""
    global kept
    kept = held, EndsSlowly(seconds)
    ctypes.pythonapi.Py_Exit(0)


def asks_before_the_exit(rank, start, num_messages):
    """Threads that need the interpreter get no turn until rank 0 exits."""
    start(of_rank(rank, NUMEL)).wait()
    # More than Python lets others run on its way out.
    given = [of_rank(rank, NUMEL, salt=i) for i in range(num_messages)]
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)
        handles = [start(x) for x in given]
        time.sleep(0.6)
        os._exit(int(len(handles) != len(given)))
    sys.setswitchinterval(0.5)
    for x in given:
        # Dropped: the thread is the last to know of it.
        start(x)
    spin(0.5)
    exit_with(given, 1.0)


def with_worker(rank, path):
    os.environ["MOE_EXT_RUNTIME"] = PATHS[path]
    asks_before_the_exit(
        rank, lambda x: quantized_all_reduce_(x, validate=False, async_op=True), num_messages=16
    )


def with_backend(rank):
    # Fewer: the exit does not wait until these are done.
    asks_before_the_exit(
        rank, lambda x: dense_reduction(x, dist.group.WORLD, False), num_messages=8
    )


def assert_exit_codes(function, *args):
    """Both ranks end with code 0, without a word."""
    with pytest.raises(RuntimeError) as error:
        spawn_ranks(function, 2, *args)
    found = str(error.value).splitlines()[1:]
    assert found == [f"rank {rank}: ended with exit code 0" for rank in range(2)]


@pytest.mark.parametrize("path", PATHS)
def test_exit_lets_workers_end(path):
    skip_unless_built(path)
    assert_exit_codes(with_worker, path)


def test_exit_lets_backend_end():
    assert_exit_codes(with_backend)
