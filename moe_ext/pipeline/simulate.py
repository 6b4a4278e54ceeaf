"""When each action of a table begins and ends, by the costs of actions and messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from moe_ext._checks import check_numbers_of_fields, check_rule
from moe_ext.pipeline.table import MESSAGES, UPDATE, Action, ActionTable

PerStage = float | Sequence[float]
T = TypeVar("T")


@dataclass
class Clock:
    """Time of a rank, and the time at which its link to the ranks of its stage is free."""

    now: float = 0.0
    link: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Costs of each kind of action, in seconds or any unit: a number, or one for each stage.

    Attributes:
        forward: cost of a micro-batch's forward pass through a stage.
        input_gradient: cost of its backward pass without the gradients of weights.
        weight_gradient: cost of the gradients of weights. A whole backward pass costs the sum of
            `input_gradient` and `weight_gradient`.
        hop: time from a send to its receive on another rank. Messages from one rank to another
            travel one after the other.
        overlap: time of an overlapped forward and backward pass, as a share of the sum of both.
            Unused if there are exchanges.
        update: cost of an update of the weights, in tables that have updates.
        slices: a factor for each slice of a micro-batch, if their costs differ.
        transfer: time of each exchange between the ranks of a stage, one after the other. A number,
            or one for each kind of action or kind in a stage, with keys as in `exchanges`.
        exchanges: (begin, end) of the exchanges of each kind of action ("F"), or of a kind in one
            stage ("0W"), as shares of the action's own time. At begin the exchange is sent, and at
            end the action waits for it. Parts of an overlap run in turn, the forward pass first:
            one computes while the other one waits.
        ahead: for each kind of action, or kind in a stage, the share of its own time that runs
            before it waits for the result of another stage. An example is the forward pass that
            is run again before a backward pass. With 1 the action ends before the result comes, and
            W waits for it, as in a first stage that computes all gradients in W.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    hop: float = 0.0
    overlap: float = 1.0
    update: PerStage = 0.0
    slices: Sequence[float] = ()
    transfer: float | Mapping[str, float] = 0.0
    exchanges: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    ahead: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_numbers_of_fields(self)
        names = ("forward", "input_gradient", "weight_gradient", "hop", "overlap", "update")
        for name in (*names, "slices", "transfer"):
            cost = getattr(self, name)
            is_number = isinstance(cost, (int, float)) or getattr(cost, "ndim", 1) == 0
            each = cost.values() if isinstance(cost, Mapping) else [cost] if is_number else cost
            fits = all(0 <= value < math.inf for value in each)
            check_rule("Costs", name, cost, "at least 0 and finite", fits)
        for name, pairs in self.exchanges.items():
            fits = all(0 <= begin <= end <= 1 for begin, end in pairs)
            check_rule("Costs", f"exchanges[{name!r}]", pairs, "shares, begin before end", fits)
        fits = all(0 <= share <= 1 for share in self.ahead.values())
        check_rule("Costs", "ahead", self.ahead, "shares", fits)

    def of(self, action: Action) -> float:
        """Return the cost of an action; 0 for messages, which do not occupy the rank."""
        if self.exchanges:
            return self._in_turns(action.in_turn())
        if action.parts:
            return self.overlap * sum(map(self._own, action.parts))
        return self._own(action)

    def _own(self, action: Action) -> float:
        terms = {
            "F": (self.forward,),
            "I": (self.input_gradient,),
            "W": (self.weight_gradient,),
            "B": (self.input_gradient, self.weight_gradient),
            UPDATE: (self.update,),
        }.get(action.kind, ())
        factor = self.slices[action.slice] if len(self.slices) and action.kind != UPDATE else 1.0
        return factor * sum(_at_stage(c, action.stage) for c in terms)

    def lead(self, action: Action) -> float:
        """Return the time from the beginning of an action to its wait for another stage."""
        share, clock = _of_stage(self.ahead, action, 0.0), Clock()
        if share == 1.0:
            return math.inf
        if share == 0.0:
            # An exchange at the beginning transfers the result of the other stage, so that it comes
            # after the wait for that result.
            return 0.0
        for arrival in self.course(action, clock, until=share):
            clock.now = max(clock.now, arrival)
        return clock.now

    def course(self, action: Action, clock: Clock, *, until: float = 1.0) -> Iterator[float]:
        """Advance a clock through an action. At each wait, yield the time when the wait ends."""
        marks, rest = self._marks(action, until)
        arrivals, transfer = dict[int, float](), self.transfer
        if isinstance(transfer, Mapping):
            transfer = _of_stage(transfer, action, 0.0)
        for work, is_end, i in marks:
            clock.now += work
            if is_end:
                yield arrivals[i]
            else:
                arrivals[i] = clock.link = max(clock.now, clock.link) + transfer
        clock.now += rest

    @cached_property
    def _known_marks(self) -> dict[tuple[Any, ...], tuple[list[tuple[float, int, int]], float]]:
        return {}

    def _marks(self, action: Action, until: float) -> tuple[list[tuple[float, int, int]], float]:
        """Return the work before each begin and end of an exchange, and after the last of them."""
        key = action.kind, action.stage, action.slice, until
        if key not in self._known_marks:
            shares = sorted(
                (share, is_end, i)
                for i, exchange in enumerate(_of_stage(self.exchanges, action, ()))
                for is_end, share in enumerate(exchange)
                if share <= until
            )
            own, done, marks = self._own(action), 0.0, []
            for share, is_end, i in shares:
                marks.append((own * (share - done), is_end, i))
                done = share
            self._known_marks[key] = marks, own * (until - done)
        return self._known_marks[key]

    def _in_turns(self, actions: Sequence[Action]) -> float:
        """Return the time of actions that pass the turn on at each wait, as in `run_in_turns`."""
        clock = Clock()
        left = [(self.course(action, clock), [0.0]) for action in actions]
        turn = 0
        while left:
            turn %= len(left)
            course, ready = left[turn]
            clock.now = max(clock.now, ready[0])
            try:
                ready[0] = next(course)
                turn += 1
            except StopIteration:
                del left[turn]
        return clock.now


def _at_stage(cost: Any, stage: int) -> float:
    """Return the cost of a stage: a number for all stages, 0-d arrays included, or one of each."""
    is_number = isinstance(cost, (int, float)) or getattr(cost, "ndim", 1) == 0
    return float(cost if is_number else cost[stage])


def _of_stage(values: Mapping[str, T], action: Action, default: T) -> T:
    """Return the value for an action's kind in its stage ("0F"), or else for its kind ("F")."""
    of_kind = values.get(action.kind, default)
    return values.get(f"{action.stage}{action.kind}", of_kind)


class Span(NamedTuple):
    """An action, with the times at which it starts and ends."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """Result of `simulate`.

    Attributes:
        spans: for each rank, the actions that compute, in order.
    """

    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the first action to the end of the last one."""
        return max((span.end for row in self.spans for span in row), default=0.0)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """For each rank, the part of the makespan in which it does not compute."""
        return tuple(
            self.makespan - sum(span.end - span.start for span in row) for row in self.spans
        )

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks, as a share of their number times the makespan."""
        return sum(self.idle) / (self.makespan * len(self.spans)) if self.makespan else 0.0


class Replay:
    """Runs a table by clocks: each rank in its order, each action as soon as its input is there.

    Args:
        table: table with or without messages. The rows of each stage are complete and in order.
        costs: costs of the actions.
        blocking: True for messages without a buffer: a send and its receive wait for each other.
            Otherwise messages are posted, and the action that needs a received tensor waits.
    """

    def __init__(self, table: ActionTable, costs: Costs, *, blocking: bool = False) -> None:
        self._table, self._costs, self._blocking = table, costs, blocking
        self._next = [0] * table.num_ranks
        self._free = [0.0] * table.num_ranks
        # Times at which forward and backward passes have ended, and receives have their tensor.
        self._done: dict[Action, float] = {}
        # Times at which sends and receives were posted.
        self._posted: dict[Action, float] = {}
        # Times from which the link of each (sender, receiver) is free.
        self._links: dict[tuple[int, int], float] = {}
        # (rank, span) of the actions that compute, each after those whose results it needs.
        self.order: list[tuple[int, Span]] = []
        while any([self._advance(rank) for rank in range(table.num_ranks)]):
            pass

    def stuck(self) -> dict[int, Action]:
        """Map each rank that has not come to its end to the action in which it waits."""
        rows = zip(self._table.rows, self._next, strict=True)
        return {rank: row[i] for rank, (row, i) in enumerate(rows) if i < len(row)}

    def _advance(self, rank: int) -> bool:
        """Run actions of a rank until one must wait. Return True if any ran."""
        row, before = self._table.rows[rank], self._next[rank]
        while self._next[rank] < len(row) and self._run(rank, row[self._next[rank]]):
            self._next[rank] += 1
        return self._next[rank] > before

    def _run(self, rank: int, action: Action) -> bool:
        if action.kind in MESSAGES:
            return self._meet(rank, action) if self._blocking else self._post(rank, action)
        parts, start, given = action.parts or (action,), self._free[rank], 0.0
        for part in parts:
            ready = self._ready(part)
            if ready is None:
                return False
            start, given = max(start, ready - self._costs.lead(part)), max(given, ready)
        self._free[rank] = end = start + self._costs.of(action)
        for part in parts:
            if part.kind in ("F", "B", "I"):
                kind = part.kind.replace("I", "B")
                self._done[part._replace(kind=kind, version=0)] = max(end, given)
        self.order.append((rank, Span(start, end, action)))
        return True

    def _ready(self, action: Action) -> float | None:
        """Return the time at which an action's input is there, or None if it is not known yet."""
        receive = self._table.receive(action)
        if receive is not None and self._table.has_messages:
            return self._done.get(receive)
        if action.kind == "W":
            return self._done.get(action._replace(kind="B", version=0), 0.0)
        source = self._table.source(action)
        if source is None:
            return 0.0
        ended = self._done.get(source)
        hop = 0.0 if receive is None else self._costs.hop
        return None if ended is None else ended + hop

    def _post(self, rank: int, action: Action) -> bool:
        self._posted[action] = self._free[rank]
        peer = self._table.peer(action)
        if peer in self._posted:
            pair = (action, peer) if action.kind.startswith("SEND") else (peer, action)
            link = (self._table.rank(pair[0]), self._table.rank(pair[1]))
            posted = max(*(self._posted[each] for each in pair), self._links.get(link, 0.0))
            self._links[link] = self._done[pair[1]] = posted + self._costs.hop
        return True

    def _meet(self, rank: int, action: Action) -> bool:
        peer = self._table.peer(action)
        other = self._table.rank(peer)
        row, i = self._table.rows[other], self._next[other]
        if other == rank or i == len(row) or row[i] != peer:
            return False
        end = max(self._free[rank], self._free[other]) + self._costs.hop
        self._free[rank] = self._free[other] = self._done[action] = self._done[peer] = end
        self._next[other] += 1
        return True


def simulate(table: ActionTable, costs: Costs | None = None) -> Timeline:
    """Compute the times at which the actions of a table run, from their costs.

    A rank begins an action when the one before has ended and the input is there. Messages take no
    time of a rank. A message leaves when both ranks have posted it and the link is free, and
    arrives a hop later.

    Args:
        table: as `check_table` accepts it. In a table without messages, results travel to the next
            stage as soon as they are made.
        costs: costs of actions and messages; actions cost 1 and messages 0 by default.

    Returns:
        The times at which each rank runs its actions.

    Raises:
        ValueError: the ranks wait for each other.
    """
    replay = Replay(table, costs or Costs())
    if replay.stuck():
        stuck = ", ".join(f"{action} (rank {rank})" for rank, action in replay.stuck().items())
        raise ValueError(
            "simulate: expected table to come to its end, got ranks that wait for each other in "
            f"{stuck}; check_table says why"
        )
    spans: list[list[Span]] = [[] for _ in table.rows]
    for rank, span in replay.order:
        spans[rank].append(span)
    return Timeline(tuple(map(tuple, spans)))


def makespan(table: ActionTable, costs: Costs) -> float:
    """Return `simulate(table, costs).makespan`, in a tenth of the time if nothing is exchanged.

    The shorter time is that for a table without messages, and costs without `exchanges` and
    `ahead`. No spans of actions are made then.

    Args:
        table: as `simulate` takes it.
        costs: costs of actions and messages.

    Raises:
        ValueError: the ranks wait for each other.
    """
    plain = not (table.has_messages or costs.exchanges or costs.ahead)
    if not plain or table.steps is None:
        return simulate(table, costs).makespan
    seconds: list[float] = []
    free, ended, hop = [0.0] * table.num_ranks, [0.0] * len(table.steps), costs.hop
    for i, (rank, action, like, needs) in enumerate(table.steps):
        if like == len(seconds):
            seconds.append(costs.of(action))
        start = free[rank]
        for source, is_away in needs:
            ready = ended[source] + hop if is_away else ended[source]
            start = max(start, ready)
        free[rank] = ended[i] = start + seconds[like]
    return max(free, default=0.0)
