"""Handles of messages that are underway."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext.comm import c10d
from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.reports import Collective, Underway

T = TypeVar("T")
U = TypeVar("U")


class Future(Protocol):
    """Interface of `torch.futures.Future`, and of the C++ class that it derives from."""

    def wait(self) -> Any:
        """Wait for the value, and return it."""

    def done(self) -> bool:
        """Return True if the value is there."""

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of the result that the callback computes from this future."""


class Pending(Generic[T]):
    """A message underway. `wait` returns its result, and may be called several times.

    Args:
        future: completes when the message has been sent and received.
        finish: computes the result from the value of the future. The first `wait` calls it, once.
        group: the ranks that take part; a rank that fails is named in the error.
        operation: name for error messages.
    """

    def __init__(
        self,
        future: Future,
        finish: Callable[[Any], T],
        group: ProcessGroup | None,
        operation: str,
    ) -> None:
        self._future = future
        self._finish: Callable[[Any], T] | None = finish
        self._group, self._operation = group, operation
        self._result: list[T] = []
        # `wait` and a callback of the future may run in two threads at once.
        self._lock = threading.Lock()

    @classmethod
    def done(cls, result: T) -> Pending[T]:
        """Return a message that has completed with this result."""
        future: torch.futures.Future[T] = torch.futures.Future()
        future.set_result(result)
        return cls(future, lambda found: found, None, "")

    @classmethod
    def of_works(
        cls,
        works: Sequence[dist.Work | Underway],
        finish: Callable[[], T],
        group: ProcessGroup | None,
        operation: str,
    ) -> Pending[T]:
        """Join several calls of c10d into one message.

        The works, or `finish`, must hold references to the tensors of the calls.
        """
        return cls(_Works(works), lambda _: finish(), group, operation)

    def wait(self) -> T:
        """Wait for the result, and return it. On CUDA the current stream waits, not the host.

        Raises:
            RankFailureError: a rank died or did not answer; the message names it.
        """
        with naming_failed_ranks(self._group, self._operation):
            found = self._future.wait()
        with self._lock:
            if self._finish is not None:
                self._result.append(self._finish(found))
                self._finish = None
        return self._result[0]

    def then(self, finish: Callable[[T], U]) -> Pending[U]:
        """Return the same message with a result that `finish` computes from this result."""
        return Pending(_Future(self), finish, self._group, self._operation)

    def is_completed(self) -> bool:
        """Return True if `wait` would return or raise without waiting."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[T]:
        """Return a future with the result or the error of `wait`, for communication hooks."""
        return self._future.then(lambda _: self.wait())


class _Future:
    """Adapts a message to the interface `Future`, for `Pending.then`."""

    def __init__(self, pending: Pending[Any]) -> None:
        self.wait, self.done = pending.wait, pending.is_completed
        self._get_future = pending.get_future

    def then(self, callback: Callable[[Any], Any]) -> Any:
        return self._get_future().then(callback)


class _Works:
    """Adapts several calls of c10d to the interface `Future`."""

    def __init__(self, works: Sequence[dist.Work | Underway]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        ended = torch.futures.collect_all([work.get_future() for work in self._works])
        return ended.then(callback)


class PendingWork(dist.Work):
    """Message underway in the form that FSDP2 expects: a `Work` whose `wait` makes the result."""

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete the message. Always returns True."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


def start_gather_into(
    found: Tensor, sent: Tensor, group: ProcessGroup, operation: str
) -> Pending[Tensor]:
    """Begin to gather a contiguous tensor of every rank, without counting or comparing the call.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    # The tensors are sent as bytes, since Gloo has neither float8 nor 16-bit integers.
    rows, sent = as_bytes(found), as_bytes(sent)
    with naming_failed_ranks(group, operation):
        work = getattr(dist, c10d.ALL_GATHER)(rows, sent, group=group, async_op=True)
    # `Collective` holds a reference to the sent tensor, which must outlive the call.
    works = [Underway(work, Collective("all_gather", group, sent))]
    return Pending.of_works(works, lambda: found, group, operation)
