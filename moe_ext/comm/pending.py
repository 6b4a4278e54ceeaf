"""Messages that are underway."""

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
    """`torch.futures.Future`, or the class in C++ below it."""

    def wait(self) -> Any:
        """The value."""

    def done(self) -> bool:
        """True if the value is there."""

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """A future of what the callback makes of this one."""


class Pending(Generic[T]):
    """A message underway; `wait` gives its result, to as many callers as ask.

    Args:
        future: ends when the message has come and gone.
        finish: makes the result of what the future holds; called once, by the first who waits.
        group: the ranks that take part, to be named when one of them fails.
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
        # `wait` and the callbacks of a future may come from two threads.
        self._lock = threading.Lock()

    @classmethod
    def done(cls, result: T) -> Pending[T]:
        """A message that has ended, with this result."""
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
        """The calls of c10d that were posted as one message; it, or `finish`, has their memory."""
        return cls(_Works(works), lambda _: finish(), group, operation)

    def wait(self) -> T:
        """The result, once it is there; on CUDA the current stream waits, not the host.

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
        """The same message with a result that `finish` makes of this one's."""
        return Pending(_Future(self), finish, self._group, self._operation)

    def is_completed(self) -> bool:
        """True if `wait` returns, or raises, at once."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[T]:
        """A future of what `wait` returns or raises, as hooks want it."""
        return self._future.then(lambda _: self.wait())


class _Future:
    """A message as the future of another one."""

    def __init__(self, pending: Pending[Any]) -> None:
        self.wait, self.done = pending.wait, pending.is_completed
        self._get_future = pending.get_future

    def then(self, callback: Callable[[Any], Any]) -> Any:
        return self._get_future().then(callback)


class _Works:
    """Several calls of c10d as one future."""

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
    """A message underway as FSDP2 wants it: a `Work` of c10d, whose `wait` makes the result."""

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """End the message; always True."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


def start_gather_into(
    found: Tensor, sent: Tensor, group: ProcessGroup, operation: str
) -> Pending[Tensor]:
    """Begin to gather a contiguous tensor of every rank, neither counted nor compared.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    # Gloo knows neither float8 nor 16-bit integers.
    rows, sent = as_bytes(found), as_bytes(sent)
    with naming_failed_ranks(group, operation):
        work = getattr(dist, c10d.ALL_GATHER)(rows, sent, group=group, async_op=True)
    # It keeps what is sent alive.
    works = [Underway(work, Collective("all_gather", group, sent))]
    return Pending.of_works(works, lambda: found, group, operation)
