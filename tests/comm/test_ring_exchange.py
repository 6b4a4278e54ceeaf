"""Hops of a ring by the compiled exchange and by that in Python: the same checks run over both."""

import contextlib
import functools
import gc
import itertools
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks, ask_briefly, assert_passed, at_once, run_checks

from moe_ext import _runtime_library
from moe_ext.comm.agreement import share
from moe_ext.comm.ring_exchange import Buffers, Exchange, PythonRingExchange, ring_exchange
from moe_ext.distributed import RankFailureError
from moe_ext.testing import spawn_ranks

PATHS = {"python": "0", "compiled": "1"}
CHECKS = Checks()


@contextlib.contextmanager
def taking(path):
    """The path of every exchange made inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EXT_RUNTIME", PATHS[path])
        yield


def skip_unless_built(path):
    if path == "compiled" and _runtime_library._load()[0] is None:
        pytest.skip(_runtime_library.state())


def neighbours():
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


def row(rank, length, salt=0):
    """What a rank sends."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randint(256, (length,), dtype=torch.uint8, generator=generator)


@CHECKS()
def messages_of_unlike_and_no_length_go_round(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = neighbours()
    for lengths in ([5, 0, 70_001, 3], [0, 0, 0, 0], [1, 4, 0, 2]):
        exchange, buffers = ring_exchange(group), Buffers(max(lengths), torch.device("cpu"))
        held = row(rank, lengths[rank])
        for step in range(size - 1):
            source = (rank - step - 1) % size
            buffer = buffers.take(step, lengths[source])
            held = exchange.post([(held, right)], buffer, left, step).wait()
            assert torch.equal(held, row(source, lengths[source]))


@CHECKS()
def hops_both_ways_are_told_apart_by_their_tags(group):
    # With two ranks both neighbours are the same.
    rank = dist.get_rank()
    left, right = neighbours()
    exchange = ring_exchange(group)
    found = [torch.zeros(9, dtype=torch.uint8) for _ in range(4)]
    hops = []
    for kind, buffer in enumerate(found):
        to, origin = (right, left) if kind % 2 else (left, right)
        hops.append(exchange.post([(row(rank, 9, kind), to)], buffer, origin, kind))
    for kind in (2, 0, 3, 1):
        assert torch.equal(hops[kind].wait(), row(left if kind % 2 else right, 9, kind))


@CHECKS()
def several_messages_in_one_hop(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [(row(rank, 8, to), to) for to in range(size) if to != rank]
    if rank == 0:
        ring_exchange(group).post(everyone, None, 0, 3).wait()
    else:
        buffer = torch.zeros(8, dtype=torch.uint8)
        assert torch.equal(ring_exchange(group).post([], buffer, 0, 3).wait(), row(0, 8, rank))


@CHECKS()
def two_groups_at_a_time(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = neighbours()
    other = dist.new_group(list(range(size)))
    hops = []
    for salt, members in enumerate((group, other)):
        buffer = torch.zeros(50, dtype=torch.uint8)
        hops.append(ring_exchange(members).post([(row(rank, 50, salt), right)], buffer, left, 0))
    for salt in (1, 0):
        assert torch.equal(hops[salt].wait(), row(left, 50, salt))
    dist.destroy_process_group(other)


@CHECKS()
def memory_of_a_hop_underway_is_refused(group):
    left, right = neighbours()
    exchange = ring_exchange(group)
    memory = torch.zeros(48, dtype=torch.uint8)
    sent, filled, spare = memory.split(16)
    first = exchange.post([(sent, right)], filled, left, 0)
    for buffer, use in ((memory[8:20], "fills"), (memory[15:16], "sends"), (filled, "fills")):
        with pytest.raises(ValueError, match=f"the buffer to be free, .* underway {use} at tag 1"):
            exchange.post([], buffer, left, 1)
    with pytest.raises(ValueError, match="a message to be free, .* underway fills at tag 1"):
        exchange.post([(memory[31:], right)], None, left, 1)
    second = exchange.post([(sent, right)], spare, left, 1)
    first.wait()
    with pytest.raises(ValueError, match="the buffer to be free, .* underway sends at tag 2"):
        exchange.post([(filled, right)], sent, left, 2)
    second.wait()
    exchange.post([(filled, right)], sent, left, 2).wait()


@CHECKS()
def what_is_sent_is_kept(group):
    rank, length = dist.get_rank(), 3_000_000
    left, right = neighbours()
    exchange = ring_exchange(group)
    buffer = torch.empty(length, dtype=torch.uint8)
    if rank == 0:
        time.sleep(0.2)
    hop = exchange.post([(row(rank, length), right)], buffer, left, 0)
    del buffer
    gc.collect()
    # Takes the memory of the message if it is free.
    others = [torch.zeros(length, dtype=torch.uint8) for _ in range(4)]
    assert torch.equal(hop.wait(), row(left, length))
    assert not any(other.any() for other in others)


@CHECKS()
def other_threads_run_while_a_hop_waits(group):
    left, right = neighbours()
    buffer = torch.zeros(4, dtype=torch.uint8)
    moments, done = [], threading.Event()

    def tick():
        while not done.is_set():
            moments.append(time.monotonic())
            time.sleep(0.005)

    dist.barrier()
    started = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(0.6)
        ring_exchange(group).post([(row(0, 4), right)], buffer, left, 0).wait()
        return
    thread = threading.Thread(target=tick)
    thread.start()
    hop = ring_exchange(group).post([(row(dist.get_rank(), 4), right)], buffer, left, 0)
    hop.wait()
    waited = time.monotonic() - started
    done.set()
    thread.join()
    if left == 0:
        assert waited > 0.4
        # Far from the one tick or two of a thread that is shut out.
        assert sum(moment < started + waited for moment in moments) > 10


@CHECKS()
def mistakes_are_refused(group):
    exchange, size = ring_exchange(group), dist.get_world_size()
    left, right = neighbours()
    good = torch.zeros(6, dtype=torch.uint8)
    rule = r"to be a contiguous row of bytes \(uint8\), got"
    for bad in (torch.zeros(6), good.view(2, 3), good[::2]):
        with pytest.raises(ValueError, match=f"RingExchange: expected a message {rule}"):
            exchange.post([(bad, right)], None, left, 0)
        with pytest.raises(ValueError, match=f"RingExchange: expected the buffer {rule}"):
            exchange.post([], bad, left, 0)
    match = rf"to be in \[0, {size}\), got"
    with pytest.raises(ValueError, match=f"a destination {match} {size}"):
        exchange.post([(good, size)], None, left, 0)
    with pytest.raises(ValueError, match=f"the source {match} -1"):
        exchange.post([], good, -1, 0)


@CHECKS()
def a_hop_with_nothing_to_do(group):
    exchange = ring_exchange(group)
    nothing = torch.zeros(0, dtype=torch.uint8)
    assert exchange.post([], None, 0, 0).wait() is None
    assert exchange.post([(nothing, 0)], nothing, 0, 0).wait().numel() == 0
    hop = exchange.post([], None, 0, 0)
    hop.wait()
    assert hop.wait() is None


def run_all(rank, path):
    with taking(path):
        made = isinstance(ring_exchange(dist.group.WORLD), PythonRingExchange)
        assert made == (path == "python")
        return run_checks(CHECKS, dist.group.WORLD, before=dist.barrier)


@functools.cache
def outcomes(num_ranks, path):
    return spawn_ranks(run_all, num_ranks, path)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("num_ranks", "path"), [*itertools.product((2, 4), PATHS)])
def test_ranks(num_ranks, path, name):
    skip_unless_built(path)
    assert_passed(outcomes(num_ranks, path), name)


def go_round_without_a_rank(rank, path, how):
    """(message, ranks named, seconds) of the error after a rank dies or stops in its second hop."""
    ask_briefly()
    with taking(path):
        exchange = Exchange(dist.group.WORLD, "a ring")
    # Learns which process is which rank.
    share([], dist.group.WORLD, torch.device("cpu"), operation="a ring")
    left, right = neighbours()
    buffers = Buffers(1000, torch.device("cpu"))
    held, started = row(rank, 1000), time.monotonic()
    try:
        for step in range(4):
            if step == 1 and rank == 1:
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(6)  # longer than the others wait
            held = exchange.post([(held, right)], buffers.take(step, 1000), left, step).wait()
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - started
    return "no error", (), 0.0


PATIENCE = {"dies": 20.0, "stops": 2.0}


@pytest.fixture(scope="module")
def without_a_rank():
    def run(path, how):
        limits = {"group_timeout": PATIENCE[how], "may_die": [1]}
        return spawn_ranks(go_round_without_a_rank, 3, path, how, **limits)

    return at_once(run, list(itertools.product(PATHS, PATIENCE)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", PATIENCE)
def test_the_rank_that_fails_is_named(without_a_rank, path, how):
    skip_unless_built(path)
    found, seconds = without_a_rank[path, how].result(), PATIENCE[how]
    for rank in (0, 2):
        message, named, waited = found[rank]
        assert named == (1,), message
        assert message.startswith("a ring: expected every rank of the group [0, 1, 2]"), message
        assert ("rank 1 died" if how == "dies" else "rank 1 did not answer") in message
        # The group's timeout, and the second that a silent rank has to answer.
        assert waited < seconds + 8
