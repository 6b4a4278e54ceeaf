"""Checkpoints that are written while training goes on, and ranks that die meanwhile."""

import contextlib
import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

import moe_ext
from moe_ext.distributed import RankFailureError, checkpoint
from moe_ext.distributed.checkpoint_files import ReplacingWriter
from moe_ext.distributed.dtensor import local_part
from moe_ext.testing import spawn_ranks

FULL = os.environ.get("MOE_EXT_FULL") == "1"


def trained(value, ep_group=None):
    """A layer and its optimizer, full of a number."""
    layer = moe_ext.MoELayer(4, 2, 2, ep_group=ep_group)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in layer.parameters():
        parameter.data.fill_(value)
        optimizer.state[parameter]["momentum_buffer"].fill_(value)
    return layer, optimizer


def numbers_of(layer, optimizer):
    """The numbers that weights and momenta are full of."""
    moments = [state["momentum_buffer"] for state in optimizer.state.values()]
    tensors = [local_part(t.detach()) for t in (*layer.parameters(), *moments)]
    return {x for tensor in tensors for x in tensor.flatten().tolist()}


def saved_in(folder):
    """The numbers in a checkpoint, loaded by one process."""
    found = trained(0.0)
    checkpoint.load(folder, *found)
    return numbers_of(*found)


class Watched:
    """A file that calls a function before each write, with all earlier ones in the file."""

    def __init__(self, file, before):
        self._file, self._before = file, before

    def write(self, data):
        self._file.flush()
        self._before("write")
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


def call_before_changes(folder, before):
    """Call a function, from now on, before anything that changes files of a folder."""
    create = FileSystem.create_stream

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        with create(self, path, mode) as file:
            yield Watched(file, before) if mode == "wb" else file

    def audit(event, arguments):
        if event in ("os.rename", "os.remove") and str(arguments[0]).startswith(folder):
            before(event)

    FileSystem.create_stream = create_stream
    sys.addaudithook(audit)


def save_killed_at(folder, value, number):
    """Save in a fork, which dies before its n-th change; the changes that it began."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        begun = []

        def before(event):
            begun.append(event)
            os.write(writer, f"{event} ".encode())
            if len(begun) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        call_before_changes(folder, before)
        layer, optimizer = trained(value)
        written = checkpoint.async_save(folder, layer, optimizer)
        with torch.no_grad():
            for parameter in layer.parameters():  # what is saved has been copied
                parameter.zero_()
                optimizer.state[parameter]["momentum_buffer"].zero_()
        written.result()
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        begun = file.read().split()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) == (number > 0), (number, status)
    return begun


def die_at_every_change(_rank, folder):
    checkpoint.is_initialized = lambda: False  # a fork has none of the group's threads
    checkpoint.save(folder, *trained(1.0))
    changes = save_killed_at(folder, 2.0, 0)
    assert saved_in(folder) == {2.0}
    renamed = changes.index("os.rename") + 1
    assert changes[renamed:] == ["os.remove"] and len(changes) > 100
    chosen = [n for n in range(1, renamed + 1) if FULL or n % 40 == 1 or n > renamed - 3]
    for number in chosen:
        assert save_killed_at(folder, 3.0, number) == changes[:number]
        assert saved_in(folder) == {2.0}, number
    assert len(os.listdir(folder)) > len(chosen)
    save_killed_at(folder, 3.0, renamed + 1)
    assert saved_in(folder) == {3.0}
    save_killed_at(folder, 4.0, 0)
    assert saved_in(folder) == {4.0}
    assert len(os.listdir(folder)) == 2  # metadata and tensors: leftovers are gone


def test_a_kill_at_every_change_leaves_one_checkpoint_whole(tmp_path):
    spawn_ranks(die_at_every_change, 1, str(tmp_path))


def save_with_a_rank_that_dies(rank, folder):
    """While the files are written ranks send, one dies, and the other is told so."""
    group = dist.group.WORLD
    layer, optimizer = trained(1.0, group)
    checkpoint.save(folder, layer, optimizer)
    writes, goes_on = threading.Event(), threading.Event()

    def before(event):
        writes.set()
        goes_on.wait()
        if rank == 1 and event == "write" and dies:
            os.kill(os.getpid(), signal.SIGKILL)

    call_before_changes(folder, before)
    for dies in (False, True):
        goes_on.clear()
        writes.clear()
        for parameter in layer.parameters():
            parameter.data.fill_(3.0 if dies else 2.0)
        written = checkpoint.async_save(folder, layer, optimizer)
        writes.wait()
        # Training, whose messages are not those of the checkpoint.
        layer(torch.ones(3, 4)).sum().backward()
        assert not written.done()
        goes_on.set()
        if not dies:
            # It waits by itself.
            checkpoint.load(folder, layer, optimizer)
            assert numbers_of(layer, optimizer) == {2.0, 1.0}
            assert written.done()
    try:
        written.result()
    except RankFailureError as error:
        return str(error), error.ranks


def test_survivors_of_a_kill_name_the_rank(tmp_path):
    told = spawn_ranks(save_with_a_rank_that_dies, 2, str(tmp_path), may_die=[1])[0]
    assert told is not None
    assert told[1] == (1,) and "checkpoint.async_save" in told[0] and "rank 1 died" in told[0]
    assert saved_in(str(tmp_path)) == {2.0, 1.0}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_folder_is_that_of_the_call(tmp_path, monkeypatch):
    """The process changes its directory before the thread that writes begins."""
    moved, reset = threading.Event(), ReplacingWriter.reset

    def late(*args):
        moved.wait(30)
        reset(*args)

    monkeypatch.setattr(ReplacingWriter, "reset", late)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    written = checkpoint.async_save("saved", *trained(1.0))
    monkeypatch.chdir("other")
    moved.set()
    written.result(timeout=60)
    assert (tmp_path / "saved" / ".metadata").exists() and not list(tmp_path.glob("other/*"))
