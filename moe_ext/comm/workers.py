"""Runs collectives that encode and decode their messages, with their messages and threads.

A collective is a method of `moe_ext._runtime.CollectiveWorker`, which runs without the
interpreter's lock. Each has a Python version over `Messages` that gives the same bits. It is used
with a torch for which the library was not built, and with codecs that are written in Python.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library
from moe_ext.comm import at_exit, c10d, collectives, streams
from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.groups import group_rank, group_size
from moe_ext.comm.pending import Future, Pending
from moe_ext.comm.traffic import open_counts, record_traffic

T = TypeVar("T")
OnSent = Callable[[str, int], None]

# First tag of these messages, as in csrc/runtime/messages.cpp. The number of the message is added.
# Tags of this range do not collide with tags of the caller.
_TAG = 0x6D780000


class Message:
    """A message underway."""

    def __init__(self, received: Tensor, tag: int) -> None:
        self.received, self.tag = received, tag
        self.works: list[Any] = []
        self.sent: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait, and return the bytes from all ranks as one row, in rank order."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], None
        return self.received


class Messages:
    """Messages of one collective, and copies of tensors that `undo` restores after a failure.

    This is the Python version of `Messages` in csrc/runtime/messages.h. In Gloo's own collectives,
    the request for data queues behind the data being sent, which doubles the time on a slow link.
    Here every rank posts the receives of a message before it sends its own part, in the same order.
    """

    def __init__(self, group: ProcessGroup | None, on_sent: OnSent | None = None) -> None:
        self._group, self._on_sent = group, on_sent
        self.size, self.rank = group_size(group), group_rank(group)
        self._num_asked = 0
        self._kept: list[tuple[Tensor, Tensor]] = []

    def ask(self, num_bytes: int, like: Tensor) -> Message:
        """Post receives of `num_bytes` bytes from every rank, on the device of `like`."""
        received = torch.empty(self.size * num_bytes, dtype=torch.uint8, device=like.device)
        message = Message(received, _TAG + self._num_asked)
        self._num_asked += 1
        if num_bytes and like.device.type == "cpu":
            theirs = received.view(self.size, -1)
            for step in range(1, self.size):
                peer = (self.rank - step) % self.size
                work = dist.irecv(theirs[peer], None, self._group, message.tag, group_src=peer)
                message.works.append(work)
        return message

    def all_to_all(self, message: Message, row: Tensor) -> None:
        """Send part p of a row of bytes, cut into P equal parts, to rank p."""
        self._send("all_to_all", message, row, row.view(self.size, row.numel() // self.size))

    def all_gather(self, message: Message, row: Tensor) -> None:
        """Send a row of bytes to every rank."""
        self._send("all_gather", message, row, row.expand(self.size, -1))

    def exchange(self, row: Tensor) -> Tensor:
        """Send part p of a row of N bytes to rank p; return the received bytes, [P, N / P]."""
        num_bytes = row.numel() // self.size
        message = self.ask(num_bytes, row)
        self.all_to_all(message, row)
        return message.wait().view(self.size, num_bytes)

    def gather(self, row: Tensor) -> Tensor:
        """Send a row of N bytes to every rank; return the rows of all ranks, [P, N]."""
        message = self.ask(row.numel(), row)
        self.all_gather(message, row)
        return message.wait().view(self.size, row.numel())

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks in place, and wait."""
        if self.size > 1 and x.numel():
            self._note("all_reduce", collectives.all_reduce_bytes(x.nbytes, self.size))
            dist.all_reduce(x, group=self._group)

    def keep(self, x: Tensor) -> None:
        """Copy a tensor that is about to change, so that `undo` can restore it."""
        self._kept.append((x, x.clone()))

    def undo(self) -> None:
        """Restore the kept tensors after a failure."""
        for changed, saved in self._kept:
            changed.copy_(saved)

    def _send(self, kind: str, message: Message, row: Tensor, parts: Tensor) -> None:
        message.sent = row
        if row.numel() and self.size > 1 and row.device.type != "cpu":
            call = (
                getattr(dist, c10d.ALL_GATHER) if kind == "all_gather" else dist.all_to_all_single
            )
            work = call(message.received, row, group=self._group, async_op=True)
            message.works.append(work)
        elif row.numel():
            for step in range(1, self.size):
                peer = (self.rank + step) % self.size
                work = dist.isend(parts[peer], None, self._group, message.tag, group_dst=peer)
                message.works.append(work)
            message.received.view(self.size, -1)[self.rank] = parts[self.rank]
        self._note(kind, (self.size - 1) * parts.shape[1])

    def _note(self, kind: str, num_bytes: int) -> None:
        if self._on_sent is not None:
            self._on_sent(kind, num_bytes)


Twin = Callable[[Messages], list[Tensor]]


def start(
    twin: Callable[..., list[Tensor]],
    args: Sequence[Any],
    group: ProcessGroup | None,
    operation: str,
    *,
    compiled: Sequence[Any] = (),
    finish: Callable[[list[Tensor]], T],
    async_op: bool,
) -> Pending[T]:
    """Run a collective, in this thread or in the background.

    Args:
        twin: Python version of the collective, called with `args` and the messages.
        args: numbers, and all tensors that it reads and writes, single or in tuples, on one device.
        group: the ranks; None is this process alone.
        operation: name for error messages.
        compiled: name of the method of `CollectiveWorker`, followed by the arguments that precede
            `args`. Empty if the collective has no compiled version.
        finish: computes the result from the returned tensors.
        async_op: return at once. The collectives of a group then run one after the other in a
            thread of the group, or on CUDA on a side stream. If False, wait for the end.

    Raises:
        RankFailureError: a rank died or did not answer. With `async_op` the handle raises it.
    """
    module = _compiled() if compiled else None
    on_sent: OnSent | None = record_traffic if open_counts else None
    run_twin = functools.partial(twin, *args)

    def run_in(worker: Any) -> Any:
        if isinstance(worker, _PythonWorker):
            return worker.start(run_twin, on_sent)
        name, *first = compiled
        return getattr(worker, name)(*first, *args, on_sent)

    def run_here() -> list[Tensor]:
        if module is None or group is None:
            return _run(run_twin, group, on_sent)
        return run_in(module.CollectiveWorker(group, False))

    if not async_op or group is None:
        with naming_failed_ranks(group, operation):
            found = run_here()
        return Pending.done(finish(found))
    flat = (x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,)))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    device = tensors[0].device
    with naming_failed_ranks(group, operation):
        if streams.has_streams(device):
            # On CUDA the collective is queued from the caller's thread, so that messages stay in
            # order.
            future: Any = torch.futures.Future(devices=[device])
            work = streams.run_beside(
                lambda: future.set_result(run_here()), *tensors, purpose="gradients"
            )

            def join_and_finish(found: list[Tensor]) -> T:
                work.join()
                return finish(found)

            return Pending(future, join_and_finish, group, operation)
        future = run_in(_worker(group, module, device))
    return Pending(future, finish, group, operation)


def _run(twin: Twin, group: ProcessGroup | None, on_sent: OnSent | None) -> list[Tensor]:
    messages = Messages(group, on_sent)
    try:
        with torch.no_grad():
            return twin(messages)
    except BaseException:
        messages.undo()
        raise


class Tasks:
    """A thread that runs functions in order. The process waits for them at exit."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True).start()

    def __del__(self) -> None:
        self._tasks.put(None)

    def start(self, task: Callable[[], None]) -> None:
        """Queue a function. It must not raise."""
        _unfinished.add(1)
        self._tasks.put(task)


class _PythonWorker:
    """A thread that runs collectives in Python one after the other, over a separate group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._tasks = Tasks("moe_ext.compression")

    def start(self, twin: Twin, on_sent: OnSent | None) -> Future:
        """Queue a collective, and return a future of its tensors."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        run = functools.partial(_run, twin, self._group, on_sent)
        num_threads, is_inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

        def task() -> None:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            try:
                with torch.inference_mode(is_inference):
                    found = run()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(found)

        self._tasks.start(task)
        return future


class _Unfinished:
    """Counts the unfinished collectives of all Python workers."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def add(self, count: int) -> None:
        with self._changed:
            self._count += count
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for up to `seconds` until no collective is unfinished."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, seconds)


_unfinished = _Unfinished()


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        # Freeing the objects of the task may enter C++, so they are freed before the task counts
        # as finished and the process may exit.
        del task
        _unfinished.add(-1)


# Caller's group to its workers. The key True is the compiled worker, False the Python worker.
_workers: WeakKeyDictionary[ProcessGroup, dict[bool, Any]] = WeakKeyDictionary()


def _worker(group: ProcessGroup, module: Any, device: torch.device) -> Any:
    """Return the worker of a group. All ranks of the group make the first call together."""
    found = _workers.setdefault(group, {})
    compiled = module is not None
    if compiled not in found:
        # The worker gets its own group, so that its messages cannot match those of the caller.
        own = c10d.twin_group(group, device)
        found[compiled] = module.CollectiveWorker(own, True) if compiled else _PythonWorker(own)
    return found[compiled]


def _compiled() -> Any:
    """Return `moe_ext._runtime`, or None if it is missing or older than these sources."""
    module = _runtime_library.load()
    return module if hasattr(module, "CollectiveWorker") else None


def _wait_for_workers(seconds: float) -> None:
    # The loaded module is looked up directly, because the environment variable that disables it
    # may have been set since it was loaded.
    module: Any = sys.modules.get("moe_ext._runtime")
    if hasattr(module, "wait_for_workers"):
        module.wait_for_workers(seconds)
    _unfinished.wait(seconds)


at_exit.call_at_exit(_wait_for_workers)
