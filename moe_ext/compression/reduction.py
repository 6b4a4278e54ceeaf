"""The handle of a collective underway, and where its stages run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.stages import Stages, run_stages
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_ranks
from moe_ext.distributed.traffic import record_traffic


class Reduction:
    """A collective of moe_ext.compression underway, as `async_op=True` returns it."""

    def __init__(self, future: torch.futures.Future[Tensor]) -> None:
        self._future = future

    @classmethod
    def done(cls, result: Tensor) -> Reduction:
        """One that has ended."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(result)
        return cls(future)

    def wait(self) -> Tensor:
        """The result, once it is there; on CUDA the current stream waits, not the host.

        Raises:
            RankFailureError: a rank died or did not answer; the message names it.
        """
        return self._future.wait()

    def is_completed(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Tensor]:
        """The same for hooks: its value is the result."""
        return self._future


class _Worker:
    """A thread that runs stages one after the other over a process group of its own."""

    def __init__(self, group: ProcessGroup) -> None:
        own = dist.new_group(list(group_ranks(group)), use_local_synchronization=True)
        assert isinstance(own, ProcessGroup)
        self._group = own
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="moe_ext.compression", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._tasks.get()()

    def submit(
        self,
        stages: Stages,
        inputs: Sequence[Tensor],
        finish: Callable[[list[Tensor]], Tensor],
        operation: str,
    ) -> torch.futures.Future[Tensor]:
        """Queue the stages; the future holds what `finish` makes of their results."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        num_threads = torch.get_num_threads()

        def task() -> None:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            try:
                with naming_failed_ranks(self._group, operation):
                    found = run_stages(stages, inputs, self._group, record_traffic)
                future.set_result(finish(found))
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self._tasks.put(task)
        return future


_workers: WeakKeyDictionary[Any, _Worker] = WeakKeyDictionary()


def run(
    stages: Stages,
    inputs: Sequence[Tensor],
    group: ProcessGroup | None,
    operation: str,
    *,
    finish: Callable[[list[Tensor]], Tensor],
    async_op: bool,
) -> Tensor | Reduction:
    """Run the stages, here or beside the caller; `finish` makes the result of what they return."""
    if not async_op:
        with naming_failed_ranks(group, operation):
            found = run_stages(stages, inputs, group, record_traffic)
        return finish(found)
    if group is None:
        return Reduction.done(finish(run_stages(stages, inputs, None, None)))
    if group not in _workers:
        _workers[group] = _Worker(group)
    return Reduction(_workers[group].submit(stages, inputs, finish, operation))
