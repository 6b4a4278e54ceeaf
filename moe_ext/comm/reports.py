"""Ends the waits of the other ranks when code of this rank raises between two exchanges.

An expert, a shared expert or a function of autograd may raise on one rank while the others wait for
its rows. That rank writes a report into the job's store and waits for the others. Their waits look
there once they have taken half a second, so that nothing is sent or read where nothing fails. Each
rank then says in which collective it waits; those that do not wait in it take part with zeros, so
that the group stays usable; and all of them raise. An error that ends the process of a rank is
reported to all ranks of the job as it exits; their group is unusable then.

Waits of CPU tensors alone can look: on CUDA the host does not wait. There a rank keeps its error
for those who come to miss it, and who exchanges step by step may look in between (`look`).
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
    """Knowledge of this rank about reports, as long as the default group lives.

    Attributes:
        groups: those that it has exchanged messages over: their members may come to wait for it.
        next: number of the first report that it has not read.
        open: its own reports that others still may heed.
        num_posted: of each group, the collectives that it has posted so far.
        underway: of these, those that somebody may still wait for.
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
# Numbers of the backward passes that have exchanged rows and have not ended.
_passes: set[int] = set()


def _job() -> _Job:
    world = dist.group.WORLD
    assert world is not None
    job = _jobs.get(world)
    if job is None:
        at_exit.wait_at_exit()
        job = _jobs[world] = _Job()
    return job


# Through the memory of the neighbours, not over c10d.
SHARED_ALL_TO_ALL, SHARED_ALL_GATHER = "shared all_to_all", "shared all_gather"


class Collective(NamedTuple):
    """A collective that a rank waits in, for others to take part with zeros.

    Attributes:
        kind: "all_to_all", "all_gather", "all_reduce", "reduce_scatter", or one of those above.
        group: its ranks.
        x: what this rank gives.
        send: rows for each rank, of an all-to-all of unequal parts.
        receive: rows from each rank.
    """

    kind: str
    group: ProcessGroup | None
    x: Tensor
    send: Sequence[int] | None = None
    receive: Sequence[int] | None = None


class Underway:
    """A collective that was posted, whose wait an error of another rank ends.

    Every rank of the group posts the same ones in the same order.

    Args:
        work: of c10d; or what posts it, called with its number in the group.
        call: what is posted.
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
        """True if `wait` returns, or raises, at once."""
        return self._work.is_completed()

    def get_future(self) -> Any:
        """The future of the collective."""
        return self._work.get_future()

    def wait(self, *, passes_turn: bool = True) -> None:
        """Wait for it, or until a rank of its group reports an error.

        Args:
            passes_turn: let another function of `run_in_turns` go on meanwhile.

        Raises:
            RuntimeError: code of another rank has raised: an error of its class where that is
                ValueError or TypeError, with the rank and its words. The group stays usable, or it
                is a RankFailureError.
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
                if self._work.is_completed():
                    self._work.wait()  # ended meanwhile, or failed
                    return
                # A failed reduce-scatter of Gloo does not say that it has ended.
                if monotonic() - start < _LOOK_EVERY.total_seconds():
                    raise
            _heed(job, self.call.group)

    def described(self) -> dict[str, Any]:
        """The same in numbers and names, for other ranks."""
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
        """Wait a while for it, whatever the others report."""
        self._work.wait(_GRACE)


def wait_for_message(ended: threading.Event, group: ProcessGroup) -> None:
    """Wait for a message between two ranks, or until a rank of its group reports an error.

    Raises:
        RankFailureError: code of another rank has raised; the messages of the group are lost.
    """
    job = _joined(group)
    while not ended.wait(_LOOK_EVERY.total_seconds()):
        _heed(job, group, is_lost=True)


def look(group: ProcessGroup) -> None:
    """Raise as `wait_for_message` does, for a host that waits for no message; asks the store once.

    Raises:
        RankFailureError: code of another rank has raised; the messages of the group are lost.
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
    """Context that tells the other ranks when the code inside raises.

    Args:
        group: the ranks that then wait for this one; None tells nobody.
        device: of the tensors that they wait for.
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
    """A backward pass that has exchanged rows: the others are told if it raises.

    The engine calls it after the pass. It drops it without a call where the pass raises, before the
    error reaches the frame of Python that runs the pass.
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
    """Tell the others of the error that C++ is about to raise in a frame of this thread.

    NOTE: autograd calls nothing of ours with it, and only C++ knows it until it gets there. So the
    thread is traced up to the next event of the frame.
    """
    before = sys.gettrace(), caller.f_trace

    def trace(frame: FrameType, event: str, details: Any) -> None:
        if frame is not caller and any(f is caller for f, _ in traceback.walk_stack(frame)):
            return  # in a destructor, on the way
        sys.settrace(before[0])
        caller.f_trace = before[1]
        if frame is caller and event == "exception" and isinstance(details[1], Exception):
            _tell(details[1], "the backward pass")

    caller.f_trace = trace
    sys.settrace(trace)


def exchanged_rows(x: Tensor) -> None:
    """Note that the backward pass that runs, if any, has exchanged rows."""
    number = c10d.backward_number()
    if number != -1 and number not in _passes and not x.is_cuda:
        c10d.call_after_backward(_BackwardPass(number))


def _tell_end(_: float) -> None:
    """Report the error that ends this process; Python has printed it and keeps it."""
    error = getattr(sys, "last_value", None)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if isinstance(error, Exception) and not isinstance(error, RankFailureError):
        tell_own_error(type(error).__name__, error)
        _tell(error, "the job", ends=True)


at_exit.call_at_exit(_tell_end)


def _is_known(error: Exception) -> bool:
    """True if the others know it, or it is none."""
    return isinstance(error, (RankFailureError, c10d.END_OF_RECOMPUTATION)) or is_told(error)


def _tell(error: Exception, operation: str, *, ends: bool = False) -> None:
    """Report an error of this rank's own, unless the others know it."""
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
    # The error of this rank says more than one of the store.
    with contextlib.suppress(RuntimeError, ValueError), _lock:
        number = _publish(job, report)
        # Another rank may have been first, or the same error is everywhere.
        for other, earlier in _unread(job, number):
            if me in earlier["ranks"]:
                _take_back(job)
                if _meet(other, earlier) or earlier["ends"]:
                    return
        _meet(number, report)


def _ranks(job: _Job) -> list[int]:
    """Ranks that may wait for this one, and itself."""
    found = set[int]()
    for group in job.groups:
        with contextlib.suppress(KeyError, ValueError):  # destroyed
            found.update(group_ranks(group))
    return sorted(found)


def _publish(job: _Job, report: dict[str, Any]) -> int:
    store = c10d.default_store()
    number = store.add(f"{_KEY}/count", 1) - 1
    job.open.append(number)
    store.set(f"{_KEY}/{number}", json.dumps(report))
    return number


def _take_back(job: _Job) -> None:
    """Close this rank's reports: it takes part again."""
    with contextlib.suppress(RuntimeError, ValueError):
        while job.open:
            c10d.default_store().set(f"{_KEY}/{job.open.pop()}", _CLOSED)


def _unread(job: _Job, end: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reports that this rank has not read, by number; those before `end` come for certain."""
    store = c10d.default_store()
    while job.next < end if end is not None else store.check([f"{_KEY}/{job.next}"]):
        number, job.next = job.next, job.next + 1
        text = store.get(f"{_KEY}/{number}").decode()
        if text != _CLOSED:
            yield number, json.loads(text)


def _heed(job: _Job, group: Any, *, is_lost: bool = False) -> None:
    """Raise the error of another rank where it keeps a wait for this group from ending.

    `is_lost`: what is waited for will not come, whatever the others take part in.
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
                # Ranks that wait for this one learn of it in turn.
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
    """Wait for the ranks of a report, and end what they wait in; whether all of it has ended."""
    store, me, ranks = c10d.default_store(), dist.get_rank(), report["ranks"]
    keys = [f"{_KEY}/{number}/{rank}" for rank in ranks]
    verdict = f"{_KEY}/{number}/verdict"
    ending = sorted(
        (one for one in _job().underway if not one.is_completed()), key=lambda one: one.number
    )
    store.set(f"{_KEY}/{number}/{me}", json.dumps([one.described() for one in ending]))
    if report["ends"]:
        if me == report["rank"]:
            store.wait(keys, _GRACE)  # the store may end with this process
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
    # Reports of each rank on a collective, by group and number.
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
        # Messages of one number need not be alike.
        return False
    return True


def _take_part(
    name: str, members: Sequence[int], collectives: dict[int, dict[int, dict[str, Any]]]
) -> list[Underway]:
    """Post, with zeros, the collectives of a group that other ranks have posted."""
    group, size = group_of_name(name), len(members)
    assert group is not None
    me, found = members.index(dist.get_rank()), []
    near = shared_memory.known.get(group)
    for number in range(_job().num_posted.get(group, 0), max(collectives) + 1):
        # Nobody sends if nobody waits.
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
