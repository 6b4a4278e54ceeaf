"""The handle of a collective underway, and where its stages run."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library
from moe_ext.compression.stages import Slot, Stages, run_stages
from moe_ext.distributed import _exit, streams
from moe_ext.distributed.comm import Future, Pending, twin_group
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.traffic import is_counted, record_traffic

_OnSent = Callable[[str, int], None]
# What a collective underway is called among the public names of moe_ext.compression.
if TYPE_CHECKING:
    Reduction = Pending[Tensor]
else:
    # A class, for isinstance.
    Reduction = Pending

_Finish = Callable[[list[Tensor]], Tensor]


class _Worker(Protocol):
    """A thread that runs stages one after the other, over one process group."""

    def submit(self, stages: Any, inputs: list[Tensor], on_sent: _OnSent | None) -> Future:
        """Queue the stages; returns a future of the tensors of their results."""


class PythonWorker:
    """`moe_ext._runtime.StageWorker` in Python."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(
            target=_serve, args=(self._tasks,), name="moe_ext.compression", daemon=True
        ).start()

    def __del__(self) -> None:
        self._tasks.put(_stop)

    def submit(self, stages: Stages, inputs: list[Tensor], on_sent: _OnSent | None) -> Future:
        """As `_Worker.submit`."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        num_threads, group = torch.get_num_threads(), self._group

        def task() -> None:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            try:
                found = run_stages(stages, inputs, group, on_sent)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(found)

        _tally.add(1)
        self._tasks.put(task)
        return future


class _Tally:
    """Counts the tasks of all workers in Python."""

    def __init__(self) -> None:
        self._num_tasks = 0
        self._changed = threading.Condition()

    def add(self, num_tasks: int) -> None:
        with self._changed:
            self._num_tasks += num_tasks
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until none is left, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_tasks == 0, seconds)


_tally = _Tally()


def _serve(tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        task = tasks.get()
        if task is _stop:
            return
        task()
        # What it holds may take C++ to go.
        del task
        _tally.add(-1)


def _stop() -> None:
    """Ends the thread of a worker that is gone."""


# Of the caller's groups, by whether it is the compiled one.
_workers: WeakKeyDictionary[ProcessGroup, dict[bool, _Worker]] = WeakKeyDictionary()


def _worker(group: ProcessGroup, module: Any, device: torch.device) -> _Worker:
    """The worker of a group, made at its first use, which all ranks of the group take part in."""
    found = _workers.setdefault(group, {})
    compiled = module is not None
    if compiled not in found:
        # Messages of the caller and of the worker must not meet.
        own = twin_group(group, device)
        found[compiled] = module.StageWorker(own) if compiled else PythonWorker(own)
    return found[compiled]


def _compiled() -> Any:
    """`moe_ext._runtime`, or None: what is built in place may be older than these sources."""
    module = _runtime_library.load()
    return module if hasattr(module, "StageProgram") else None


def _wait_for_workers(seconds: float) -> None:
    # Whatever the environment says by now.
    module: Any = sys.modules.get("moe_ext._runtime")
    if hasattr(module, "wait_for_workers"):
        module.wait_for_workers(seconds)
    _tally.wait(seconds)


_exit.call_at_exit(_wait_for_workers)


def _program(stages: Stages, module: Any) -> Any:
    """The stages as `moe_ext._runtime` takes them."""

    def argument(arg: Any) -> tuple[int, Any]:
        if isinstance(arg, Slot):
            return 1, arg.index
        if isinstance(arg, list) and arg and isinstance(arg[0], Slot):
            return 2, [slot.index for slot in arg]
        return 0, arg

    if stages.compiled is None:
        steps = [
            (step.name, [argument(arg) for arg in step.args], list(step.outputs))
            for step in stages.steps
        ]
        stages.compiled = module.StageProgram(steps, stages.num_slots, stages.undo, stages.results)
    return stages.compiled


def _run_here(
    stages: Stages, inputs: list[Tensor], group: ProcessGroup | None, module: Any
) -> list[Tensor]:
    on_sent = record_traffic if is_counted() else None
    if module is None or group is None:
        return run_stages(stages, inputs, group, on_sent)
    found: list[Tensor] = _program(stages, module).run(inputs, group, on_sent)
    return found


def _run_on_stream(
    stages: Stages, inputs: list[Tensor], group: ProcessGroup, module: Any, device: torch.device
) -> Future:
    """Enqueue the stages on the side stream, in the caller's thread: messages stay in order."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[device])

    def work() -> None:
        future.set_result(_run_here(stages, inputs, group, module))

    streams.run_beside(work, *inputs)
    return future


def run(
    stages: Stages,
    inputs: Sequence[Tensor],
    group: ProcessGroup | None,
    operation: str,
    *,
    finish: _Finish,
    async_op: bool,
) -> Tensor | Reduction:
    """Run the stages, here or beside the caller; `finish` makes the result of what they return."""
    tensors = list(inputs)
    module = _compiled()
    if not async_op or group is None:
        with naming_failed_ranks(group, operation):
            found = _run_here(stages, tensors, group, module)
        result = finish(found)
        return Reduction.done(result) if async_op else result
    device = tensors[0].device
    with naming_failed_ranks(group, operation):
        if streams.has_streams(device):
            future = _run_on_stream(stages, tensors, group, module, device)
        else:
            on_sent = record_traffic if is_counted() else None
            program = stages if module is None else _program(stages, module)
            future = _worker(group, module, device).submit(program, tensors, on_sent)
    return Reduction(future, finish, group, operation)
