"""Plans by which a rank computes one action while another waits for an exchange of its stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_ext._checks import check_sizes
from moe_ext.pipeline.check import check_table, in_flight
from moe_ext.pipeline.simulate import Clock, Costs
from moe_ext.pipeline.table import COMPUTE, Action, ActionTable


class _Rule(NamedTuple):
    """Choice of the next action: of so many of a rank, those that are free to begin.

    Those of a kind keep their order, or those of a kind and a stage. Of several, the first one goes
    that nobody waits for less (`weights_last`), or whose kind is not underway (`mixed`).
    """

    ahead: int
    by_stage: bool = True
    mixed: bool = False
    weights_last: bool = False


# None is the best for all tables, numbers of micro-batches and room for them.
_RULES = (
    _Rule(4, by_stage=False),
    *(_Rule(ahead, mixed=True) for ahead in (4, 6, 8)),
    *(_Rule(ahead, weights_last=True) for ahead in (4, 8)),
)


class Start(NamedTuple):
    """An action, and the earlier ones of its rank that need not have ended when it begins."""

    action: Action
    beside: tuple[Action, ...]


@dataclass(frozen=True)
class TurnPlan:
    """Result of `plan_turns`, for `Pipeline`.

    Attributes:
        table: what is run.
        lanes: actions of a rank that are underway at once, at most.
        starts: of each rank, its actions in the order in which they begin.
        makespan: by the costs.
    """

    table: ActionTable
    lanes: int
    starts: tuple[tuple[Start, ...], ...]
    makespan: float


@dataclass
class _Lane:
    action: Action
    course: Iterator[float]
    ready: float
    given: float


@dataclass
class _Rank:
    left: list[Action]
    most_held: int
    lanes: list[_Lane | None]
    clock: Clock = field(default_factory=Clock)
    turn: int = 0
    held: int = 0
    starts: list[Start] = field(default_factory=list)

    @property
    def underway(self) -> tuple[Action, ...]:
        return tuple(lane.action for lane in self.lanes if lane is not None)


def plan_turns(
    table: ActionTable, costs: Costs, *, lanes: int = 2, max_in_flight: int | None = None
) -> TurnPlan:
    """Plan which actions of each rank are underway at once, by the costs of their exchanges.

    The turn to compute passes in a circle over the lanes of a rank, at each wait for an exchange
    between the ranks of a stage. A free lane begins the next action whose input has come; of the
    next ones, one goes ahead of those of another kind, or another stage, that wait. Several rules
    by which it is chosen are tried, and the plan that takes least by the costs is kept. Which ones
    go beside which is decided here, by the costs, so that all ranks of a stage send the same
    messages in the same order whatever their times are.

    Args:
        table: of one chain, whole micro-batches and one version of weights; messages are left out.
        costs: of its actions, with the exchanges.
        lanes: actions of a rank that are underway at once, at most.
        max_in_flight: micro-batches that a rank holds at most, counted for each of its stages; None
            is one more than the table holds on that rank.

    Returns:
        For `Pipeline`, in the place of the table.

    Raises:
        ValueError: the table is not in order, or has chains, slices or versions of weights; lanes
            is not positive; or there is not enough room for the micro-batches in flight.
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
    tried = [_Plan(table, costs, lanes, max_in_flight, rule) for rule in _RULES]
    found = min(tried, key=lambda plan: (len(plan.left), plan.makespan))
    if left := found.left:
        raise ValueError(
            f"plan_turns: expected max_in_flight to let all actions run, got {max_in_flight}, with "
            f"which {left[0]} ({left[0].described()}) waits for ever"
        )
    starts = tuple(tuple(rank.starts) for rank in found.ranks)
    return TurnPlan(table, lanes, starts, found.makespan)


class _Plan:
    """Runs all ranks by their clocks; always that whose clock is behind the others'."""

    def __init__(
        self,
        table: ActionTable,
        costs: Costs,
        lanes: int,
        max_in_flight: int | None,
        rule: _Rule,
    ) -> None:
        self._table, self._costs, self._done = table, costs, dict[Action, float]()
        self._rule = rule
        held = in_flight(table)
        self.ranks = [
            _Rank(
                list(row), held[i] + 1 if max_in_flight is None else max_in_flight, [None] * lanes
            )
            for i, row in enumerate(table.rows)
        ]
        while any(self._step(rank) for rank in sorted(self.ranks, key=lambda r: r.clock.now)):
            pass

    @property
    def left(self) -> list[Action]:
        """Actions that wait for ever."""
        return [action for rank in self.ranks for action in rank.left]

    @property
    def makespan(self) -> float:
        return max(rank.clock.now for rank in self.ranks)

    def _step(self, rank: _Rank) -> bool:
        """Let the next lane run until it passes the turn on; whether one did."""
        for _ in rank.lanes:
            place = rank.turn % len(rank.lanes)
            lane = rank.lanes[place] or self._begin(rank, place)
            if lane is None:
                rank.turn += 1
                continue
            rank.clock.now = max(rank.clock.now, lane.ready)
            try:
                lane.ready = next(lane.course)
                rank.turn += 1
            except StopIteration:
                rank.lanes[place] = None
                rank.held -= lane.action.kind in ("B", "W")
                self._done[_as_whole(lane.action)] = max(rank.clock.now, lane.given)
            return True
        return False

    def _begin(self, rank: _Rank, place: int) -> _Lane | None:
        """The next action, in a free lane; the clock waits where no other one is underway."""
        underway, seen, found = rank.underway, set[tuple[str, int]](), None
        rule, kinds = self._rule, {action.kind.replace("I", "B") for action in rank.underway}
        for i, action in enumerate(rank.left[: rule.ahead]):
            kind = action.kind.replace("I", "B")
            line = kind, action.stage if rule.by_stage else 0
            has_room = kind != "F" or rank.held < rank.most_held
            given = self._given(action) if line not in seen and has_room else None
            seen.add(line)
            ready = None if given is None else self._ready(action, given)
            if (
                given is not None
                and ready is not None
                and (ready <= rank.clock.now or not underway)
            ):
                is_late = (rule.mixed and kind in kinds) or (rule.weights_last and kind == "W")
                now = max(ready, rank.clock.now), is_late, i, given
                found = now if found is None else min(found, now)
        if found is None:
            return None
        ready, _, i, given = found
        action = rank.left.pop(i)
        rank.clock.now = max(rank.clock.now, ready)
        rank.held += action.kind == "F"
        rank.starts.append(Start(action, underway))
        lane = _Lane(action, self._costs.course(action, rank.clock), rank.clock.now, given)
        rank.lanes[place] = lane
        return lane

    def _given(self, action: Action) -> float | None:
        """When what other stages, or I, give an action is there; None where that is not known."""
        if action.kind == "W":
            return self._done.get(action._replace(kind="B"))
        source = self._table.source(action)
        if source is None:
            return 0.0
        ended = self._done.get(source)
        hop = 0.0 if self._table.receive(action) is None else self._costs.hop
        return None if ended is None else ended + hop

    def _ready(self, action: Action, given: float) -> float | None:
        """When an action can begin; None where its forward pass has not ended."""
        own = 0.0 if action.kind == "F" else self._done.get(action._replace(kind="F"))
        return None if own is None else max(own, given - self._costs.lead(action))


def _as_whole(action: Action) -> Action:
    return action._replace(kind=action.kind.replace("I", "B"))
