"""Plans by which a rank computes one action while another waits for an exchange of its stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moe_ext._checks import check_sizes
from moe_ext.pipeline.check import check_table, in_flight
from moe_ext.pipeline.simulate import Clock, Costs
from moe_ext.pipeline.table import COMPUTE, Action, ActionTable


class _Rule(NamedTuple):
    """Rule by which a free lane of a rank chooses its next action.

    Candidates are the first `ahead` actions left whose input is there. Actions of a kind and stage
    (of a kind, unless `by_stage`) keep their order. Of candidates that can begin at the same time,
    those whose kind is underway (`mixed`) come last, and so does W (`weights_last`), for which no
    rank waits.
    """

    ahead: int
    by_stage: bool = True
    mixed: bool = False
    weights_last: bool = False


# All rules are tried. The best one depends on the table, the number of micro-batches and the room
# for them.
_RULES = (
    _Rule(4, by_stage=False),
    *(_Rule(ahead, mixed=True) for ahead in (4, 6, 8)),
    *(_Rule(ahead, weights_last=True) for ahead in (4, 8)),
)


class Start(NamedTuple):
    """An action, and the earlier actions of its rank that may be underway when it begins."""

    action: Action
    beside: tuple[Action, ...]


@dataclass(frozen=True)
class TurnPlan:
    """Result of `plan_turns`, for `Pipeline`.

    Attributes:
        table: table whose actions are run.
        lanes: largest number of actions of a rank that are underway at once.
        starts: for each rank, its actions in the order in which they begin.
        makespan: time of a step according to the costs.
    """

    table: ActionTable
    lanes: int
    starts: tuple[tuple[Start, ...], ...]
    makespan: float


@dataclass
class _Lane:
    number: int
    course: Iterator[float]
    ready: float
    given: float


@dataclass
class _Rank:
    left: list[int]
    most_held: int
    lanes: list[_Lane | None]
    # Time of the actions that have not begun, without their exchanges.
    due: float
    clock: Clock = field(default_factory=Clock)
    turn: int = 0
    held: int = 0
    # True while nothing is underway, and no action can begin before another rank goes on.
    is_blocked: bool = False
    starts: list[Start] = field(default_factory=list)


class _ActionFacts(NamedTuple):
    """Facts of an action for `_ClockRun`, found once for all rules.

    Attributes:
        action: the action.
        line: its kind, with B for I, and its stage.
        forward: number of the forward pass that ends before it begins; None for a forward pass.
        source: number of the action whose result it waits for; None if there is none.
        hop: time that this result travels.
        own: time that it computes, without exchanges.
        lead: time from its beginning to its wait for the result.
        for_ranks: ranks with actions that wait for its own result.
    """

    action: Action
    line: tuple[str, int]
    forward: int | None
    source: int | None
    hop: float
    own: float
    lead: float
    for_ranks: set[int]


def plan_turns(
    table: ActionTable, costs: Costs, *, lanes: int = 2, max_in_flight: int | None = None
) -> TurnPlan:
    """Plan which actions of each rank are underway at once, by the costs of their exchanges.

    A rank has several lanes, with an action underway in each. The turn to compute passes in a
    circle over the lanes, at each wait for an exchange between the ranks of a stage. A free lane
    begins the next action whose input has come, ahead of waiting actions of another kind or stage.
    Several rules of this choice are tried, and the plan that takes the least time by the costs is
    kept. The plan decides which actions run beside each other. All ranks of a stage therefore send
    the same messages in the same order, whatever their real times are.

    Args:
        table: table of one chain, whole micro-batches and one version of weights. Its messages are
            left out.
        costs: costs of its actions, with the exchanges.
        lanes: largest number of actions of a rank that are underway at once.
        max_in_flight: largest number of micro-batches that a rank holds, counted for each of its
            stages. None allows one more than the table holds on that rank.

    Returns:
        A plan that `Pipeline` takes instead of the table.

    Raises:
        ValueError: the table is not in order, or has several chains, slices or versions of weights;
            lanes is not positive; or max_in_flight is too small to run all actions.
    """
    check_sizes("plan_turns", lanes=lanes)
    rows = [
        [action for action in table.actions(rank) if action.kind in COMPUTE]
        for rank in range(table.num_ranks)
    ]
    for action in (action for row in rows for action in row):
        if action.chain or action.slice or action.version:
            raise ValueError(
                "plan_turns: expected table to have one chain, whole micro-batches and one version "
                f"of weights, got {action}"
            )
    table = ActionTable(rows)
    check_table(table)
    found, left = _quickest(table, costs, lanes, max_in_flight, math.inf)
    if found is None:
        raise ValueError(
            f"plan_turns: expected max_in_flight to let all actions run, got {max_in_flight}, with "
            f"which {left[0]} ({left[0].described()}) waits for ever"
        )
    return found


def plan_turns_within(table: ActionTable, costs: Costs, most: float) -> TurnPlan | None:
    """Return `plan_turns(table, costs)`; or None, found faster, if a step takes more than `most`.

    The table must be in order, as those of `make_table` are, and have no overlaps.
    """
    return _quickest(table, costs, 2, None, most)[0]


def _quickest(
    table: ActionTable, costs: Costs, lanes: int, max_in_flight: int | None, most: float
) -> tuple[TurnPlan | None, list[Action]]:
    """Return the plan of the best rule; or None, and the actions that this rule left undone."""
    rows_of, work = _works(table, costs)
    held = [each + 1 if max_in_flight is None else max_in_flight for each in in_flight(table)]
    tried, least = list[_ClockRun](), most
    for rule in _RULES:
        tried.append(_ClockRun(rows_of, work, costs, lanes, held, rule, least))
        if not tried[-1].left:
            least = min(least, tried[-1].makespan)
    found = min(tried, key=lambda plan: (len(plan.left), plan.makespan))
    # A run that ended early may have begun all of its actions, but has a makespan above `most`. The
    # factor allows for rounding.
    if found.left or found.makespan > most * (1 + 1e-9):
        return None, found.left
    starts = tuple(tuple(rank.starts) for rank in found.ranks)
    return TurnPlan(table, lanes, starts, found.makespan), []


def _works(table: ActionTable, costs: Costs) -> tuple[list[list[int]], list[_ActionFacts]]:
    """Return the numbers of the actions of each rank, and the facts of all actions."""
    every = [action for row in table.rows for action in row]
    number = {a._replace(kind=a.kind.replace("I", "B")): i for i, a in enumerate(every)}
    plain = replace(costs, exchanges={})
    times: dict[tuple[str, int], tuple[float, float]] = {}
    work, waiting = list[_ActionFacts](), [set[int]() for _ in every]
    for action, for_ranks in zip(every, waiting, strict=True):
        forward, source = None, table.source(action)
        if action.kind == "W":
            source = action._replace(kind="B")
        if action.kind != "F":
            forward = number[action._replace(kind="F")]
        from_number, hop, rank = None, 0.0, table.rank(action)
        if source is not None:
            from_number = number[source]
            waiting[from_number].add(rank)
            hop = costs.hop if table.rank(source) != rank else 0.0
        if (action.kind, action.stage) not in times:
            times[action.kind, action.stage] = plain.of(action), costs.lead(action)
        line = action.kind.replace("I", "B"), action.stage
        own = times[action.kind, action.stage]
        work.append(_ActionFacts(action, line, forward, from_number, hop, *own, for_ranks))
    numbers = iter(range(len(every)))
    return [[next(numbers) for _ in row] for row in table.rows], work


class _ClockRun:
    """Runs all ranks by their clocks; the rank whose clock is furthest behind goes on first.

    A run that takes longer than `least`, the time of the best plan so far, ends early.
    """

    def __init__(
        self,
        rows: list[list[int]],
        work: list[_ActionFacts],
        costs: Costs,
        lanes: int,
        most_held: list[int],
        rule: _Rule,
        least: float,
    ) -> None:
        self._work, self._costs, self._rule = work, costs, rule
        self._done: list[float | None] = [None] * len(work)
        self.ranks = [
            _Rank(list(row), most, [None] * lanes, sum(work[number].own for number in row))
            for row, most in zip(rows, most_held, strict=True)
        ]
        # Rounding must not end a run that takes as long as the best plan.
        least *= 1 + 1e-9
        while True:
            rank, first = None, math.inf
            for each in self.ranks:
                if not each.is_blocked and each.clock.now < first:
                    rank, first = each, each.clock.now
            if rank is None:
                break
            rank.is_blocked = not self._step(rank)
            if rank.clock.now + rank.due > least:
                break

    @property
    def left(self) -> list[Action]:
        """Actions that have not begun, because they wait for ever or the run ended early."""
        return [self._work[number].action for rank in self.ranks for number in rank.left]

    @property
    def makespan(self) -> float:
        return max(rank.clock.now for rank in self.ranks)

    def _step(self, rank: _Rank) -> bool:
        """Let the next lane run until it passes the turn on. Return False if no lane can run."""
        lanes, clock = rank.lanes, rank.clock
        for _ in lanes:
            place = rank.turn % len(lanes)
            lane = lanes[place] or self._begin(rank, place)
            if lane is None:
                rank.turn += 1
                continue
            if lane.ready > clock.now:
                clock.now = lane.ready
            ready = next(lane.course, None)
            if ready is not None:
                lane.ready = ready
                rank.turn += 1
                return True
            work = self._work[lane.number]
            lanes[place] = None
            rank.held -= work.action.kind in ("B", "W")
            self._done[lane.number] = max(clock.now, lane.given)
            for other in work.for_ranks:
                self.ranks[other].is_blocked = False
            return True
        return False

    def _begin(self, rank: _Rank, place: int) -> _Lane | None:
        """Begin the next action in a free lane, or return None.

        If no other action is underway, the clock goes on to the time at which one can begin.
        """
        works, done, rule, clock = self._work, self._done, self._rule, rank.clock.now
        underway = [lane.number for lane in rank.lanes if lane is not None]
        kinds = [works[number].line[0] for number in underway]
        seen = list[tuple[str, int] | str]()
        found: tuple[float, bool, int, float] | None = None
        for i, number in enumerate(rank.left[: rule.ahead]):
            _, line, forward, source, hop, _, lead, _ = works[number]
            kind = line[0]
            same = line if rule.by_stage else kind
            if same in seen:
                continue
            seen.append(same)
            if kind == "F" and rank.held >= rank.most_held:
                continue
            given = 0.0
            if source is not None:
                ended = done[source]
                if ended is None:
                    continue
                given = ended + hop
            own = 0.0 if forward is None else done[forward]
            if own is None:
                continue
            ready = max(own, given - lead)
            if ready <= clock or not underway:
                is_late = (rule.mixed and kind in kinds) or (rule.weights_last and kind == "W")
                now = max(ready, clock), is_late, i, given
                if found is None or now < found:
                    found = now
        if found is None:
            return None
        ready, _, i, given = found
        number = rank.left.pop(i)
        action = self._work[number].action
        rank.clock.now = max(rank.clock.now, ready)
        rank.held += action.kind == "F"
        rank.due -= self._work[number].own
        beside = tuple(self._work[each].action for each in underway)
        rank.starts.append(Start(action, beside))
        lane = _Lane(number, self._costs.course(action, rank.clock), rank.clock.now, given)
        rank.lanes[place] = lane
        return lane
