"""Ends the waits of the other ranks when code of this rank raises between two exchanges.

An expert, a shared expert or an autograd function may raise on one rank while the other ranks wait
for its rows. The rank that raised writes a report into the job's store and waits for the others. A
wait looks into the store each time it has lasted half a second, so a job without errors sends and
reads nothing. Each rank then says in which collectives it waits. The ranks that do not wait in one
of them take part in it with zeros, so that the group stays usable. Then all ranks raise the error.
An error that ends the process of a rank is reported to all ranks of the job at its exit. The group
is unusable after that.

Only waits for CPU tensors can look into the store, because on CUDA the host does not wait. There a
rank stores its error for ranks that later find it missing. Code on CUDA that exchanges step by step
may call `look` between its steps.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import at_exit, c10d, shared_memory
from moe_ext.comm.failures import (
    GRACE_SECONDS,
    RankFailureError,
    first_line,
    is_told,
    mark_told,
    same_class,
    tell_own_error,
    with_layer,
)
from moe_ext.comm.groups import group_of_name, group_ranks
from moe_ext.comm.interleaving import lane, pass_turn

_LOOK_EVERY = timedelta(seconds=0.5)
_GRACE = timedelta(seconds=GRACE_SECONDS)
_KEY = "moe_ext/raised"
_CLOSED = "-"


@dataclass
class _Job:
    """State of this rank's reports, for one default group.

    Attributes:
        groups: groups over which this rank has exchanged messages. Their members may wait for it.
        next: number of the first report that this rank has not read.
        open: numbers of this rank's reports that other ranks may still act on.
        num_posted: group to the number of collectives that this rank has posted over it.
        underway: posted collectives that somebody may still wait for.
    """

    groups: weakref.WeakSet[ProcessGroup] = field(default_factory=weakref.WeakSet)
    next: int = 0
    open: list[int] = field(default_factory=list)
    num_posted: weakref.WeakKeyDictionary[ProcessGroup, int] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    underway: weakref.WeakSet[Underway] = field(default_factory=weakref.WeakSet)


_jobs: weakref.WeakKeyDictionary[ProcessGroup, _Job] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
# Numbers of the running backward passes that have exchanged rows.
_passes: set[int] = set()


def _job() -> _Job:
    world = dist.group.WORLD
    assert world is not None
    job = _jobs.get(world)
    if job is None:
        at_exit.wait_at_exit()
        job = _jobs[world] = _Job()
    return job


# Kinds of collectives that go through shared memory instead of c10d.
SHARED_ALL_TO_ALL, SHARED_ALL_GATHER = "shared all_to_all", "shared all_gather"


class Collective(NamedTuple):
    """Arguments of a posted collective, from which other ranks can take part with zeros.

    Attributes:
        kind: "all_to_all", "all_gather", "all_reduce", "reduce_scatter", SHARED_ALL_TO_ALL or
            SHARED_ALL_GATHER.
        group: ranks of the collective.
        x: tensor that this rank sends.
        send: number of rows for each rank, in an all-to-all of unequal parts.
        receive: number of rows from each rank.
    """

    kind: str
    group: ProcessGroup | None
    x: Tensor
    send: Sequence[int] | None = None
    receive: Sequence[int] | None = None


class Underway:
    """A posted collective, whose wait ends when another rank reports an error.

    Every rank of the group posts the same collectives in the same order.

    Args:
        work: work of c10d, or a function that posts the collective. The function is called with
            the number of the collective in its group.
        call: arguments of the collective.
    """

    def __init__(self, work: dist.Work | Callable[[int], dist.Work], call: Collective) -> None:
        if call.group is None:
            call = call._replace(group=dist.group.WORLD)
        assert call.group is not None
        self.call = call
        world = dist.group.WORLD
        assert world is not None
        job = _jobs.get(world) or _job()
        self._job = None if call.x.is_cuda else job
        self.number = job.num_posted.get(call.group, 0)
        self._work = work(self.number) if callable(work) else work
        if self._job is not None:
            job.groups.add(call.group)
            job.num_posted[call.group] = self.number + 1
            job.underway.add(self)

    def is_completed(self) -> bool:
        """Return True if `wait` would return or raise without waiting."""
        return self._work.is_completed()

    def get_future(self) -> Any:
        """Return the future of the collective."""
        return self._work.get_future()

    def wait(self, *, passes_turn: bool = True) -> None:
        """Wait for the collective, or until a rank of its group reports an error.

        Args:
            passes_turn: let another function of `run_in_turns` run during the wait.

        Raises:
            RuntimeError: code of another rank has raised; the message has its text and the rank. A
                ValueError or TypeError keeps its class. If the group is unusable afterwards, the
                error is a RankFailureError.
        """
        job = self._job
        if job is None:
            self._work.wait()
            return
        if passes_turn and lane.turns is not None:
            pass_turn()
        if job.open:
            _take_back(job)
        while True:
            start = monotonic()
            try:
                self._work.wait(_LOOK_EVERY)
                return
            except RuntimeError:
                # The work may have ended, or failed, since the wait timed out.
                if self._work.is_completed():
                    self._work.wait()
                    return
                # A failed reduce-scatter of Gloo never reports completion. An error before the
                # timeout is such a failure.
                if monotonic() - start < _LOOK_EVERY.total_seconds():
                    raise
            _heed(job, self.call.group)

    def described(self) -> dict[str, Any]:
        """Return the arguments of the collective as numbers and names, for other ranks."""
        kind, group, x, send, receive = self.call
        assert group is not None
        row = x.shape[1:].numel()
        return {
            "kind": kind,
            "group": group.group_name,
            "number": self.number,
            "ranks": group_ranks(group),
            "dtype": str(x.dtype).removeprefix("torch."),
            "numel": x.numel(),
            "sizes": [row * size for size in (*(send or ()), *(receive or ()))],
        }

    def end(self) -> None:
        """Wait for the collective for a limited time, without looking for reports."""
        self._work.wait(_GRACE)


def wait_for_message(ended: threading.Event, group: ProcessGroup) -> None:
    """Wait for a message between two ranks, or until a rank of its group reports an error.

    Raises:
        RankFailureError: code of another rank has raised. Messages of the group are lost.
    """
    job = _joined(group)
    while not ended.wait(_LOOK_EVERY.total_seconds()):
        _heed(job, group, is_lost=True)


def look(group: ProcessGroup) -> None:
    """Ask the store once for errors of other ranks, where the host waits for no message.

    Raises:
        RankFailureError: code of another rank has raised. Messages of the group are lost.
    """
    _heed(_joined(group), group, is_lost=True)


def _joined(group: ProcessGroup) -> _Job:
    job = _job()
    job.groups.add(group)
    if job.open:
        _take_back(job)
    return job


@dataclass(frozen=True)
class telling(contextlib.AbstractContextManager[object]):
    """Context that reports an error of the code inside to the other ranks.

    Args:
        group: ranks that would wait for this rank; None reports to nobody.
        device: device of the tensors that they would wait for.
        operation: name for messages.
    """

    group: ProcessGroup | None
    device: torch.device
    operation: str

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or self.group is None or _is_known(error):
            return
        if self.device.type == "cuda":
            tell_own_error(with_layer(self.operation), error)
            return
        _job().groups.add(self.group)
        _tell(error, with_layer(self.operation))


class _BackwardPass:
    """Callback that reports the error of a backward pass that has exchanged rows.

    The autograd engine calls it after the pass. If the pass raises, the engine destroys it without
    a call, before the error reaches the Python frame that runs the pass.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        _passes.add(number)

    def __call__(self) -> None:
        _passes.discard(self._number)

    def __del__(self) -> None:
        caller = sys._getframe().f_back
        if self._number in _passes:
            _passes.discard(self._number)
            if caller is not None:
                _tell_error_in(caller)


def _tell_error_in(caller: FrameType) -> None:
    """Report the error that C++ is about to raise in a Python frame of this thread.

    NOTE: The error is known only to C++ until it reaches the frame, and the autograd engine has no
    hook for it. The thread is therefore traced up to the next event of the frame.
    """
    before = sys.gettrace(), caller.f_trace

    def trace(frame: FrameType, event: str, details: Any) -> None:
        # A destructor may run on the way to the frame; its events are not the error.
        if frame is not caller and any(f is caller for f, _ in traceback.walk_stack(frame)):
            return
        sys.settrace(before[0])
        caller.f_trace = before[1]
        if frame is caller and event == "exception" and isinstance(details[1], Exception):
            _tell(details[1], "the backward pass")

    caller.f_trace = trace
    sys.settrace(trace)


def exchanged_rows(x: Tensor) -> None:
    """Note that the current backward pass, if there is one, has exchanged rows."""
    number = c10d.backward_number()
    if number != -1 and number not in _passes and not x.is_cuda:
        c10d.call_after_backward(_BackwardPass(number))


def _tell_end(_: float) -> None:
    """Report the uncaught error that ends this process, which Python keeps in `sys.last_value`."""
    error = getattr(sys, "last_value", None)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if isinstance(error, Exception) and not isinstance(error, RankFailureError):
        tell_own_error(type(error).__name__, error)
        _tell(error, "the job", ends=True)


at_exit.call_at_exit(_tell_end)


def _is_known(error: Exception) -> bool:
    """Return True if the other ranks know the error, or if it only ends a recomputation."""
    return isinstance(error, (RankFailureError, c10d.END_OF_RECOMPUTATION)) or is_told(error)


def _tell(error: Exception, operation: str, *, ends: bool = False) -> None:
    """Report an error of this rank, unless the other ranks know it."""
    if _is_known(error):
        return
    mark_told(error)
    job, me = _job(), dist.get_rank()
    report = {
        "rank": me,
        "ranks": list(range(dist.get_world_size())) if ends else _ranks(job),
        "ends": ends,
        "origin": me,
        "operation": operation,
        "class": same_class(type(error).__name__).__name__,
        "text": f"{type(error).__name__}: {first_line(error)}",
    }
    # Errors of the store are dropped, so that the caller raises the original error.
    with contextlib.suppress(RuntimeError, ValueError), _lock:
        number = _publish(job, report)
        # Another rank may have reported first, for example the same error. Then this rank takes
        # part in ending the waits of that report.
        for other, earlier in _unread(job, number):
            if earlier["rank"] != me and me in earlier["ranks"]:
                _take_back(job)
                if _meet(other, earlier) or earlier["ends"]:
                    return
        _meet(number, report)


def _ranks(job: _Job) -> list[int]:
    """Return the ranks that may wait for this one, including this rank."""
    found = set[int]()
    for group in job.groups:
        with contextlib.suppress(KeyError, ValueError):  # raised for a destroyed group
            found.update(group_ranks(group))
    return sorted(found)


def _publish(job: _Job, report: dict[str, Any]) -> int:
    store = c10d.default_store()
    number = store.add(f"{_KEY}/count", 1) - 1
    job.open.append(number)
    store.set(f"{_KEY}/{number}", json.dumps(report))
    return number


def _take_back(job: _Job) -> None:
    """Close the reports of this rank, which takes part in collectives again."""
    with contextlib.suppress(RuntimeError, ValueError):
        while job.open:
            c10d.default_store().set(f"{_KEY}/{job.open.pop()}", _CLOSED)


def _unread(job: _Job, end: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of the reports that this rank has not read.

    With `end`, wait for all reports of smaller numbers. Otherwise stop at the first missing report.
    """
    store = c10d.default_store()
    while job.next < end if end is not None else store.check([f"{_KEY}/{job.next}"]):
        number, job.next = job.next, job.next + 1
        text = store.get(f"{_KEY}/{number}").decode()
        if text != _CLOSED:
            yield number, json.loads(text)


def _heed(job: _Job, group: Any, *, is_lost: bool = False) -> None:
    """Raise the error of another rank if a wait for this group cannot end because of it.

    `is_lost`: the awaited message is lost, even if the collectives of the group can be completed.
    """
    me, found = dist.get_rank(), None
    with contextlib.suppress(RuntimeError, ValueError), _lock:
        for number, report in _unread(job):
            if report["rank"] == me:
                continue
            if me in report["ranks"]:
                found = report, _meet(number, report)
                break
            if set(report["ranks"]) & set(group_ranks(group)):
                found = report, False
                # This rank will raise as well, so it reports the error to the ranks that wait
                # for it in other groups.
                _publish(job, {**report, "rank": me, "ranks": [me]})
                break
    if found is None:
        return
    report, is_usable = found
    text = (
        f"{report['operation']}: expected every rank to take part, but rank {report['origin']} "
        f"raised {report['text']}{', which ends its process' * report['ends']}"
    )
    error = same_class(report["class"])(text)
    if is_lost or not is_usable:
        error = RankFailureError(f"{text}; the group is unusable now", (report["origin"],))
    mark_told(error)
    raise error


def _meet(number: int, report: dict[str, Any]) -> bool:
    """Wait for the ranks of a report and complete the collectives in which they wait.

    Returns True if all of these collectives have ended, so that the groups stay usable.
    """
    store, me, ranks = c10d.default_store(), dist.get_rank(), report["ranks"]
    keys = [f"{_KEY}/{number}/{rank}" for rank in ranks]
    verdict = f"{_KEY}/{number}/verdict"
    ending = sorted(
        (one for one in _job().underway if not one.is_completed()), key=lambda one: one.number
    )
    store.set(f"{_KEY}/{number}/{me}", json.dumps([one.described() for one in ending]))
    if report["ends"]:
        if me == report["rank"]:
            # This process may host the store, so it lives until the other ranks have read.
            store.wait(keys, _GRACE)
        return False
    if me == report["rank"]:
        try:
            store.wait(keys, _GRACE)
            store.set(verdict, "all")
        except RuntimeError:
            store.set(verdict, "some")
    store.wait([verdict], 2 * _GRACE)
    if store.get(verdict) != b"all":
        return False
    # Group name, number of the collective and rank, to the description by that rank.
    posted: dict[str, dict[int, dict[int, dict[str, Any]]]] = {}
    for rank, key in zip(ranks, keys, strict=True):
        for found in json.loads(store.get(key)):
            posted.setdefault(found["group"], {}).setdefault(found["number"], {})[rank] = found
    try:
        for name, collectives in sorted(posted.items()):
            members = next(iter(next(iter(collectives.values())).values()))["ranks"]
            if me in members and set(members) <= set(ranks):
                ending += _take_part(name, members, collectives)
        for each in ending:
            each.end()
    except (RuntimeError, IndexError):
        # Ranks may have posted different collectives under the same number.
        return False
    return True


def _take_part(
    name: str, members: Sequence[int], collectives: dict[int, dict[int, dict[str, Any]]]
) -> list[Underway]:
    """Post with zeros the collectives of a group that other ranks have posted."""
    group, size = group_of_name(name), len(members)
    assert group is not None
    me, found = members.index(dist.get_rank()), []
    near = shared_memory.known.get(group)
    for number in range(_job().num_posted.get(group, 0), max(collectives) + 1):
        # No rank may wait in the collective of this number; then all send empty messages.
        waiting = collectives.get(number, {})
        nothing: dict[str, Any] = {
            "kind": SHARED_ALL_TO_ALL if near is not None and near.are_all else "all_to_all",
            "dtype": "uint8",
            "numel": 0,
            "sizes": [0] * 2 * size,
        }
        like = next(iter(waiting.values()), nothing)
        kind, numel, send, receive = like["kind"], like["numel"], None, None
        given = torch.zeros(numel, dtype=getattr(torch, like["dtype"]))
        work: Any
        if kind in ("all_to_all", SHARED_ALL_TO_ALL) and like["sizes"]:
            sizes = [waiting.get(rank, nothing)["sizes"] for rank in members]
            send, receive = [s[size + me] for s in sizes], [s[me] for s in sizes]
            given, taken = given.new_zeros(sum(send)), given.new_empty(sum(receive))
        else:
            taken = torch.empty_like(given)
        if kind == SHARED_ALL_TO_ALL and near is not None:
            work = partial(near.memory.all_to_all, taken, given, receive or (), send or ())
        elif kind == SHARED_ALL_GATHER and near is not None:
            taken = given.new_empty(size * numel)
            work = partial(near.memory.all_gather, taken, given)
        elif kind == "all_to_all":
            work = dist.all_to_all_single(taken, given, receive, send, group=group, async_op=True)
        elif kind == "all_gather":
            taken = given.new_empty(size * numel)
            work = getattr(dist, c10d.ALL_GATHER)(taken, given, group=group, async_op=True)
        elif kind == "reduce_scatter":
            taken = given.new_empty(numel // size)
            work = getattr(dist, c10d.REDUCE_SCATTER)(taken, given, group=group, async_op=True)
        else:
            work = dist.all_reduce(given, group=group, async_op=True)
        found.append(Underway(work, Collective(kind, group, given, send, receive)))
    return found
