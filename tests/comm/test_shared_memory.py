"""Exchanges of the ranks of one host through memory that they share."""

import contextlib
import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks, ask_briefly, at_once, raised

from moe_ext import MoELayer, _runtime_library
from moe_ext.comm import collectives, shared_memory
from moe_ext.comm.agreement import neighbours, share
from moe_ext.comm.failures import RankFailureError
from moe_ext.testing import spawn_ranks

CPU = torch.device("cpu")
# Networks of four ranks, and the ranks whose memory the last of them shares.
NETWORKS = {
    "one": ((0, 0, 0, 0), (0, 4)),
    "two of two": ((0, 0, 1, 1), (2, 4)),
    "one and three": ((0, 1, 1, 1), (1, 4)),
    "four": ((0, 1, 2, 3), None),
    "in turn": ((0, 1, 0, 1), None),
}

pytestmark = pytest.mark.skipif(
    _runtime_library.load() is None, reason="exchanges through memory are compiled"
)


def world():
    return dist.group.WORLD


def near(group=None):
    return neighbours(group or world(), CPU, "test")


@contextlib.contextmanager
def spread(networks):
    """A group of all ranks, which are in these networks."""
    group = dist.new_group()
    network = networks[dist.get_rank()]
    with mock.patch.object(shared_memory, "network_identity", lambda: network):
        yield group


def rows_for(sizes, source, width, dtype):
    """Rows that a rank sends: each says from which rank it comes and for which it is."""
    found = [torch.full((size, width), 16 * source + to) for to, size in enumerate(sizes)]
    return torch.cat(found).to(dtype)


def check_rows_reach_whom_they_are_for():
    generator, rank = torch.Generator().manual_seed(0), dist.get_rank()
    for networks, shared in NETWORKS.values():
        with spread(networks) as group:
            found = near(group)
        assert found.are_all == (len(set(networks)) == 1)
        assert found.over_network == (len(set(networks)) > 1)
        if rank == 3:
            assert (found.memory is None) == (shared is None)
            assert (found.first, found.end) == (shared or (3, 4))
        for most in (1, 3, 40):
            sizes_PP = torch.randint(0, most + 1, (4, 4), generator=generator).tolist()
            send, receive = sizes_PP[rank], [sizes[rank] for sizes in sizes_PP]
            for width, dtype in ((1, torch.float64), (64, torch.bfloat16), (300, torch.uint8)):
                x = rows_for(send, rank, width, dtype)
                out = x.new_empty(sum(receive), width)
                works = collectives.post_rows(out, x, group, send, receive, None)
                if found.are_all:
                    x.fill_(0)  # it has left
                for work in works:
                    work.wait()
                sent = [rows_for(sizes, p, width, dtype) for p, sizes in enumerate(sizes_PP)]
                due = zip(sent, sizes_PP, strict=True)
                assert torch.equal(out, torch.cat([x.split(sizes)[rank] for x, sizes in due]))
        message = collectives.all_to_all(torch.full((4, 2), rank), group, operation="t")
        assert message[:, 0].tolist() == [0, 1, 2, 3]
        gathered = collectives.all_gather(torch.full((2, 3), rank), group, operation="t")
        assert gathered[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert share([rank], group, CPU, operation="t") == [[0], [1], [2], [3]]


def check_messages_are_read_in_any_order_and_late():
    group, rank = world(), dist.get_rank()
    near()
    many = 300 if rank == 0 else 3
    # A rank that is ahead: what it has posted lies there until the others come.
    posted = []
    for number in range(300):
        x = torch.full((4, 5), float(100 * rank + number % 90))
        out = torch.empty(4, 5)
        posted.append((number, out, collectives._post(out, x, group, None, None, near().memory)))
        if len(posted) == many:
            for each, filled, work in reversed(posted):
                work.wait()
                assert filled[:, 0].tolist() == [100.0 * p + each % 90 for p in range(4)]
            posted.clear()


def check_a_rank_far_ahead_takes_no_longer():
    memory = near(dist.new_group()).memory
    x, works, seconds = torch.ones(4, 5), [], []
    for number in range(4000 if dist.get_rank() == 0 else 0):
        started = time.thread_time()
        works.append(memory.all_to_all(torch.empty(4, 5), x, [], [], number))
        seconds.append(time.thread_time() - started)
    assert sum(seconds[-200:]) <= 50 * sum(seconds[:200])
    dist.barrier()


def check_a_message_that_another_thread_waits_for_is_asked_about():
    memory, rank = near(dist.new_group()).memory, dist.get_rank()
    if rank == 0:
        work = memory.all_gather(torch.empty(4), torch.ones(1), 0)
        waiting = threading.Thread(target=work.wait)
        waiting.start()
        time.sleep(0.1)
        assert not work.is_completed()
    dist.barrier()
    if rank != 0:
        memory.all_gather(torch.empty(4), torch.ones(1), 0).wait()
    else:
        waiting.join()
        assert work.is_completed()


def mapped_bytes():
    """Memory that the files of this process take."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    files = {}
    for link in links:
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("/memfd:moe_ext"):
                files[os.stat(link).st_ino] = 512 * os.stat(link).st_blocks
    return files


def check_memory_is_given_back():
    group, other = dist.new_group(), dist.new_group()
    memory, before = near(other).memory, mapped_bytes()
    mine = torch.zeros(4, 18 << 20, dtype=torch.uint8)
    assert collectives.all_to_all(mine, group, operation="test").equal(mine)
    # All have read: what is more than 64 MiB goes with the next exchange.
    dist.barrier()
    collectives.all_to_all(mine[:, :8].contiguous(), group, operation="test")
    after = mapped_bytes()
    (kept,) = (size for file, size in after.items() if file not in before)
    assert kept <= 65 << 20
    # Rows that nobody waits for make room all the same.
    mine = torch.zeros(4, 4 << 20, dtype=torch.uint8)
    for _ in range(6):
        collectives._post(torch.empty_like(mine), mine, other, None, None, memory)
        dist.barrier()
    assert max(mapped_bytes()[file] for file in before) <= 40 << 20
    dist.barrier()
    shared_memory.known.pop(group)
    gc.collect()
    assert len(mapped_bytes()) == len(before)


def check_a_layer_has_the_bits_of_gloo():
    torch.manual_seed(0)
    layer = MoELayer(16, 8, 8, ep_group=world())
    x = torch.randn((5, 30, 0, 2)[dist.get_rank()], 16, requires_grad=True)

    def outcome():
        x.grad = None
        y = layer(x)
        y.sum().backward()
        return y.detach(), x.grad

    found, known = outcome(), shared_memory.known[world()]
    assert known.are_all
    me = dist.get_rank()
    shared_memory.known[world()] = shared_memory.Neighbours(None, me, me + 1)
    with mock.patch.object(collectives, "_post", wraps=collectives._post) as post:
        want = outcome()
    shared_memory.known[world()] = known
    assert all(call.args[-1] is None for call in post.call_args_list) and post.call_count > 3
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def check_reductions_are_those_of_one_process():
    group, rank = world(), dist.get_rank()
    near()
    of_rows = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
    # Whole, in a part for each rank with some elements left, and in pieces.
    lengths = (1, 3, 2**14 - 1, 2**14, 2**15 + 3, 2**20 + 2**14 + 1)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("by Gloo")):
        for length in lengths:
            generator = torch.Generator().manual_seed(length)
            x_PN = torch.randint(0, 30, (4, length), generator=generator, dtype=torch.uint8)
            for op, reduced in of_rows.items():
                want = reduced(x_PN)
                for dtype in dtypes:
                    x = x_PN[rank].to(dtype, copy=True)
                    assert collectives.all_reduce_(x, group, operation="test", op=op) is x
                    assert torch.equal(x, want.to(dtype)), (dtype, length, op)
        x = torch.full((2, 2), float(rank), requires_grad=True)
        assert collectives.all_reduce_(x, group, operation="test").tolist() == [[6.0, 6.0]] * 2
        # Every rank gets the same bits, that round as the order of ranks does.
        x = torch.randn(2**15 + 3, generator=torch.Generator().manual_seed(rank))
        x_PN = collectives.all_gather(x.unsqueeze(0), group, operation="test")
        sums = collectives.all_reduce_(x.clone(), group, operation="test")
        assert torch.equal(sums, x_PN[0] + x_PN[1] + x_PN[2] + x_PN[3])


def check_tensors_of_other_devices_are_reduced_by_c10d():
    assert near().are_all
    done = mock.NonCallableMock(spec=["wait", "is_completed"])
    with mock.patch.object(dist, "all_reduce", return_value=done) as sent:
        collectives.all_reduce_(torch.empty(3, device="meta"), world(), operation="test")
    assert sent.call_count == done.wait.call_count == 1


def check_without_the_module_on_one_rank_gloo_sends():
    group = dist.new_group()
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 2:
            stack.enter_context(mock.patch.object(_runtime_library, "load", lambda: None))
        assert near(group).memory is None
    assert collectives.all_to_all(torch.ones(4), group, operation="test").tolist() == [1.0] * 4


def check_another_file_is_not_opened():
    memory = near().memory
    fd, token = memory.place()
    # The file of this process itself is owned by nobody else.
    for process, number, key in ((os.getpid(), 0, token), (os.getpid(), 999, token), (1, fd, 0)):
        assert not memory.open((dist.get_rank() + 1) % 4, process, number, key)


def check_sizes_that_do_not_fit_are_told():
    group, rank = dist.new_group(), dist.get_rank()
    memory = near(group).memory
    send, receive = [1, 1, 1, 1], [1, 1, 1, 1]
    if rank == 0:
        receive = [1, 2, 1, 1]
    x, out = torch.zeros(4, 2), torch.zeros(sum(receive), 2)
    work = collectives._post(out, x, group, send, receive, memory)
    if rank == 0:
        raised(RuntimeError, "expected 16 bytes from rank 1, got 8", work.wait)
    else:
        work.wait()
    for sizes in ([1, 1, 1], [1, 1, 1, 2], [4, 1, -1, 0]):
        with pytest.raises(RuntimeError, match="expected a size for each of 4 ranks|at least 0"):
            memory.all_to_all(x, x, sizes, send, 99)
    with pytest.raises(RuntimeError, match="expected numbers that rise"):
        memory.all_gather(out.new_empty(16, 2), x, 0)


def check_a_rank_that_gives_up_rows_it_was_not_sent_frees_no_others():
    group, rank = dist.new_group(), dist.get_rank()
    memory, nothing = near(group).memory, torch.empty(0, 2)
    # Rank 0 sends to rank 2, and rank 1 expects a row as well.
    send, receive = [0, 0, int(rank == 0), 0], [int(rank in (1, 2)), 0, 0, 0]
    out = torch.empty(sum(receive), 2)
    work = memory.all_to_all(out, torch.full((sum(send), 2), 7.0), receive, send, 50)
    if rank == 1:
        raised(RuntimeError, "expected 8 bytes from rank 0, got 0", work.wait)
        del work
        gc.collect()
        memory.all_to_all(nothing, nothing, [0] * 4, [0] * 4, 51)
    dist.barrier()
    if rank == 0:
        memory.all_to_all(nothing, torch.full((1, 2), 9.0), [0] * 4, send, 51)
    dist.barrier()
    if rank == 2:
        work.wait()
        assert out.tolist() == [[7.0, 7.0]]


def check_a_fork_closes_nothing():
    group = dist.new_group()
    near(group)
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            shared_memory.known.clear()
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.3)  # while the others look
    assert collectives.all_to_all(torch.ones(4), group, operation="test").tolist() == [1.0] * 4
    # Who has left the group says so at once.
    dist.barrier()
    if dist.get_rank() == 1:
        shared_memory.known.pop(group)
        gc.collect()
        return
    started = time.monotonic()
    memory = shared_memory.known[group].memory
    out = torch.empty(16)
    work = memory.all_gather(out, torch.ones(4), 50)
    raised(RuntimeError, "connection closed by rank 1", work.wait)
    assert time.monotonic() - started < 5


test_over_ranks = Checks.of(globals()).test(4)


def a_rank_does_not_come(rank, how):
    """(error, ranks named, seconds) on the others of three ranks."""
    ask_briefly()
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    assert near(group).are_all
    collectives.all_to_all(torch.ones(3), group, operation="test")
    started = time.monotonic()
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(6)
    found = None
    try:
        collectives.all_to_all(torch.ones(3), group, operation="test")
    except RankFailureError as error:
        found = str(error), error.ranks, time.monotonic() - started
    # Nobody meets the exchange that another rank has missed.
    told = "shared memory: (an earlier exchange has failed|connection closed by rank)"
    with pytest.raises(RuntimeError, match=told):
        collectives.all_to_all(torch.ones(3), group, operation="test")
    return found


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_rank_that_does_not_come_is_named(how):
    found = spawn_ranks(a_rank_does_not_come, 3, how, may_die=(1,))
    for text, ranks, seconds in (found[0], found[2]):
        assert ranks == (1,)
        assert ("rank 1 died" if how == "killed" else "rank 1 did not answer") in text
        said = "connection closed by rank 1" if how == "killed" else "timed out after 1.5 s"
        assert f"reports: shared memory: {said}" in text
        assert seconds < (4 if how == "killed" else 5)


def asked_until_it_ends(rank, how):
    """(error, seconds) on the others of three ranks, of which one posts nothing."""
    group = dist.new_group(timeout=timedelta(seconds=20 if how != "silent" else 1.5))
    memory = near(group).memory
    dist.barrier()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "left":
            shared_memory.known.pop(group)
            del memory
            gc.collect()
        time.sleep(6)
        return None
    started = time.monotonic()
    work = memory.all_gather(torch.empty(3), torch.ones(1), 50)
    while not work.is_completed() and time.monotonic() - started < 10:
        time.sleep(0.01)
    assert work.is_completed()
    with pytest.raises(RuntimeError) as error:
        work.wait()
    return str(error.value), time.monotonic() - started


ABSENT = ("killed", "left", "silent")


@pytest.fixture(scope="module")
def absent():
    def run(how):
        return spawn_ranks(asked_until_it_ends, 3, how, may_die=(1,))

    return at_once(run, [(how,) for how in ABSENT])


@pytest.mark.parametrize("how", ABSENT)
def test_who_asks_learns_that_a_rank_does_not_come(absent, how):
    found = absent[(how,)].result()
    for text, seconds in (found[0], found[2]):
        assert ("timed out after 1.5 s" if how == "silent" else "closed by rank 1") in text
        assert seconds < 5
