"""Division of layers into pipeline stages, with the fewest layers computed again.

A dynamic program over the layers finds the division of a chain of stages with the least
T_1 + ... + T_S + (M - 1) max(T_s) over M micro-batches (Alpa, arXiv:2201.12023, equation 2). T_s is
the least time of a stage that fits into memory, over the layers that the stage may recompute.

Shapes: S stages, L layers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ext._checks import check_fields
from moe_ext.pipeline import ActionTable, Costs, TurnPlan, make_table
from moe_ext.pipeline.simulate import makespan
from moe_ext.pipeline.turn_plan import plan_turns_within
from moe_ext.planner.axes import AGAIN, CHUNKS, PARTS, SCHEDULES, STAGE, Columns, runs
from moe_ext.planner.cost import StepCost
from moe_ext.planner.presets import LayerParts

# Most layers with experts of a pass whose exchanges are simulated separately. Exchanges of more
# layers are merged.
_LAYERS = 4


@dataclass(frozen=True)
class StageLayers:
    """Consecutive layers of a stage.

    Attributes:
        start: number of the first layer, from 0.
        end: number after the last layer.
        again: layers that are computed again in the backward pass, ascending.
    """

    start: int
    end: int
    again: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        check_fields(self, may_be_zero=("start", "again"))


def split_evenly(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """Return start and end of each stage, with lengths that differ by at most one."""
    at = [i * num_layers // num_stages for i in range(num_stages + 1)]
    return list(itertools.pairwise(at))


def stage_columns(cost: StepCost, c: Columns, stages: Sequence[StageLayers]) -> Columns:
    """Expand a candidate to one candidate per stage, with the columns of the stage."""
    parts = cost.model.parts
    rows = [
        (*_sum(parts[stage.start : stage.end]), *_sum(parts[i] for i in stage.again))
        for stage in stages
    ]
    counts = torch.tensor(rows, dtype=torch.float64)
    return _with(c, torch.cat([counts, _rest(cost, c, len(stages))], 1))


def _sum(parts: Iterable[LayerParts]) -> LayerParts:
    """Return the number of layers, and of layers with each part."""
    return LayerParts(*map(sum, zip(LayerParts(0, 0, 0, 0, 0), *parts, strict=True)))


def rank_columns(cost: StepCost, c: Columns, stages: Sequence[StageLayers]) -> Columns:
    """Expand a candidate to one candidate per pipeline rank, with the layers of all its stages."""
    each, ranks = stage_columns(cost, c, stages), int(c["pp"])
    rows = torch.stack([each[name].view(-1, ranks) for name in STAGE], 2)
    both = rows.sum(0)
    # Held micro-batches are counted in all stages of a rank already, so they are not summed.
    for name in ("in_flight", "late"):
        both[:, STAGE.index(name)] = rows[0, :, STAGE.index(name)]
    return _with(c, both)


def divide(
    cost: StepCost, c: Columns, *, all_again: bool = False
) -> tuple[StageLayers, ...] | None:
    """Return the layers of each stage of a candidate; None if no division fits into memory.

    With "1f1b", "gpipe" and "zb-h1" each rank has one stage of any length. With "interleaved" each
    rank has two stages, and all have even lengths. With recompute as few layers are computed again
    as fit, but all with "zb-h1", because its stages run again as a whole.

    Args:
        cost: cost model of the job.
        c: the candidate.
        all_again: compute all layers again, with recompute.
    """
    if bool(runs(c, "interleaved")) and int(c["pp"]) > 1:
        return _even(cost, c, all_again)
    return _Chain(cost, c, all_again).divided()


def divisible(cost: StepCost, c: Columns) -> Tensor:
    """Return True for pipelines whose layers fit into memory with some division.

    Stages in order each take as many layers as fit.

    Args:
        cost: cost model of the job.
        c: candidates; False is returned for those without a pipeline.
    """
    num_layers = cost.model.num_layers
    before = torch.tensor([_sum(cost.model.parts[:i]) for i in range(num_layers + 1)])
    end, found = torch.zeros_like(c["pp"]), c["pp"] > 1
    for rank in range(int(c["pp"].max())):
        rows = (found & (c["pp"] > rank)).nonzero().view(-1)
        if not len(rows):
            break
        here, start = {name: column[rows] for name, column in c.items()}, end[rows]
        behind = here["pp"] - 1 - rank
        least, high = torch.where(behind > 0, start + 1, num_layers), num_layers - behind
        low = least - 1
        while bool((low < high).any()):
            middle = (low + high + 1) // 2
            fits = _take(cost, here, rank, before, start, middle)
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
        found[rows], end[rows] = low >= least, low
    return found


def _take(
    cost: StepCost, c: Columns, rank: int, before: Tensor, start: Tensor, end: Tensor
) -> Tensor:
    """Return True if a rank has room for layers `start` to `end`.

    With "interleaved" the layers are those of the rank's even stages instead.
    """
    counts, pp = before[end] - before[start], c["pp"]
    chunks = torch.zeros_like(counts)
    for i in (rank + pp * chunk for chunk in range(CHUNKS)):
        cuts = [(i + more) * cost.model.num_layers // (pp * CHUNKS) for more in (0, 1)]
        chunks += before[cuts[1]] - before[cuts[0]]
    counts = torch.where(runs(c, "interleaved")[:, None], chunks, counts).double()
    micro, is_last = cost.sizes.num_micro_batches(c).double(), (pp == rank + 1).double()
    late = torch.where(runs(c, "zb-h1") & (rank > 0), micro.clamp(max=rank + 1), 0.0)
    ends, in_flight = is_last + (rank == 0), cost.memory.in_flight(c, rank)
    some = torch.stack([*counts.T, *counts.T, ends, in_flight, late, is_last])
    none = some.clone()
    some[len(PARTS) : 2 * len(PARTS)] *= c["recompute"]
    none[len(PARTS) : 2 * len(PARTS)] = 0.0
    # Both cases are checked in one call, because the time of a call hardly depends on the number of
    # candidates.
    both = {name: column.repeat(2) for name, column in c.items()}
    rows = torch.cat([some, none], 1)
    return cost.memory.fits({**both, **dict(zip(STAGE, rows, strict=True))}).view(2, -1).any(0)


def simulated(
    cost: StepCost,
    c: Columns,
    stages: Sequence[StageLayers] | None = None,
    *,
    most: float = math.inf,
) -> float:
    """Return the seconds of a step of a candidate, by simulation of its pipeline's action table.

    With "turns" the result is infinite if the plan delays gradients of weights of more
    micro-batches than the candidate's memory counts.

    Args:
        cost: cost model of the job.
        c: the candidate.
        stages: layers of each stage; None for stages that all equal the largest stage.
        most: with "turns" the result may be infinite if it exceeds this number.
    """
    ranks, micro = int(c["pp"]), int(cost.sizes.num_micro_batches(c))
    if ranks > 1 and bool(c["turns"]):
        stages = stages or even_stages(cost.model.num_layers, c)
        own = rank_columns(cost, c, stages)
        ends = float(cost.end.seconds(own).max())
        found = _passes_in_turn(cost, c, stages).within(most - ends)
        is_counted = found is not None and _counted(found, own["late"].tolist())
        return found.makespan + ends if found is not None and is_counted else math.inf
    if stages is None:
        count = ranks * (CHUNKS if ranks > 1 and bool(runs(c, "interleaved")) else 1)
        own, each = c, {name: column.expand(count) for name, column in c.items()}
        parts = [part * ranks / count for part in cost.passes.split(each)]
    else:
        own = rank_columns(cost, c, stages)
        parts = list(cost.passes.split(stage_columns(cost, c, stages)))
    ends = float(cost.end.seconds(own).max())
    forward, inputs, weights = _with_output(cost, c, parts)
    if ranks == 1:
        return micro * (forward[0] + inputs[0] + weights[0]) + ends
    costs = Costs(forward, inputs, weights, hop=float(cost.exchange.hop(c)))
    return makespan(_table(SCHEDULES[int(c["schedule"])], ranks, micro), costs) + ends


def _with_output(
    cost: StepCost, c: Columns, parts: Iterable[Tensor]
) -> Iterator[tuple[float, ...]]:
    """Yield the seconds of parts of a pass per stage, with the output added to the last stage."""
    output = float(cost.compute.output(c))
    for part in parts:
        loss = torch.zeros_like(part)
        loss[-1] = output
        yield tuple((part + loss).tolist())


def _counted(plan: TurnPlan, late: Sequence[float]) -> bool:
    """Return True if no rank delays gradients of weights of more micro-batches than `late` says.

    The first rank delays none, because it computes no gradients of inputs.
    """
    for starts, most in list(zip(plan.starts, late, strict=True))[1:]:
        steps = ((s.action.kind == "I") - (s.action.kind == "W") for s in starts)
        if max(itertools.accumulate(steps)) > most:
            return False
    return True


def even_stages(num_layers: int, c: Columns) -> tuple[StageLayers, ...]:
    """Return stages of even lengths of a candidate; all layers are recomputed with recompute."""
    again, pp = bool(c["recompute"]), int(c["pp"])
    chunked = bool(runs(c, "interleaved")) and pp > 1
    cuts = split_evenly(num_layers, pp * (CHUNKS if chunked else 1))
    return tuple(StageLayers(i, j, tuple(range(i, j)) if again else ()) for i, j in cuts)


def turn_plan(cost: StepCost, c: Columns, stages: Sequence[StageLayers]) -> TurnPlan:
    """Return the order of overlapping passes of a candidate with "turns", by its costs.

    Equal arguments give equal plans, because nothing is measured.

    Args:
        cost: cost model of the job.
        c: the candidate.
        stages: layers of each stage.
    """
    found = _passes_in_turn(cost, c, stages).within(math.inf)
    assert found is not None
    return found


def _passes_in_turn(cost: StepCost, c: Columns, stages: Sequence[StageLayers]) -> _PassesInTurn:
    schedule, micro = SCHEDULES[int(c["schedule"])], int(cost.sizes.num_micro_batches(c))
    costs = turn_costs(cost, c, stages)
    facts = (costs.forward, costs.input_gradient, costs.weight_gradient, costs.hop)
    travel = (tuple(costs.transfer.items()), tuple(costs.exchanges.items()))  # type: ignore[union-attr]
    return _known_passes(schedule, int(c["pp"]), micro, (*facts, *travel))


@functools.lru_cache(maxsize=256)
def _known_passes(schedule: str, ranks: int, micro: int, facts: tuple[Any, ...]) -> _PassesInTurn:
    """Return passes from a cache, which placements share if, say, only their optimizers differ."""
    forward, inputs, weights, hop, transfer, exchanges = facts
    costs = Costs(
        *(forward, inputs, weights), hop=hop, transfer=dict(transfer), exchanges=dict(exchanges)
    )
    return _PassesInTurn(_table(schedule, ranks, micro), costs)


class _PassesInTurn:
    """Plans overlapping passes, and remembers the plan or a lower bound of its time."""

    def __init__(self, table: ActionTable, costs: Costs) -> None:
        self._table, self._costs = table, costs
        self._plan: TurnPlan | None = None
        # Lower bound of the plan's seconds, from calls that found no plan.
        self._more_than = 0.0

    def within(self, most: float) -> TurnPlan | None:
        """Return the plan; None may be returned if it takes longer than `most` seconds."""
        if self._plan is None and most > self._more_than:
            self._plan = plan_turns_within(self._table, self._costs, most)
            self._more_than = most
        return self._plan


def turn_costs(cost: StepCost, c: Columns, stages: Sequence[StageLayers]) -> Costs:
    """Return the costs of the passes of a candidate, with its exchanges as separate costs."""
    each = stage_columns(cost, c, stages)
    _, seconds = cost.passes.apart(each)
    exchanges: dict[str, tuple[tuple[float, float], ...]] = {}
    transfer: dict[str, float] = {}
    for s, travel in enumerate(seconds.tolist()):
        moe, again = (float(each[name][s]) for name in ("moe", "again_moe"))
        if not travel:
            continue
        for kind, layers in (("F", moe), ("B", moe + again), ("I", moe + again)):
            count = 2 * min(round(layers), _LAYERS)
            # Exchanges follow attention and experts in the forward pass, and precede them in the
            # backward pass.
            at = [(k + (kind == "F")) / count for k in range(count)]
            exchanges[f"{s}{kind}"] = tuple((share, share) for share in at)
            transfer[f"{s}{kind}"] = travel * layers / (2 * moe + again) / count
    forward, inputs, weights = _with_output(cost, c, cost.passes.split(each))
    hop = float(cost.exchange.hop(c))
    return Costs(forward, inputs, weights, hop=hop, transfer=transfer, exchanges=exchanges)


@functools.lru_cache(maxsize=64)
def _table(schedule: str, ranks: int, micro: int) -> ActionTable:
    return make_table(schedule, ranks, micro)


def _with(c: Columns, rows: Tensor) -> Columns:
    whole = {name: column.expand(len(rows)) for name, column in c.items() if name not in STAGE}
    return {**whole, **dict(zip(STAGE, rows.unbind(1), strict=True))}


def _rest(cost: StepCost, c: Columns, num_stages: int) -> Tensor:
    """Return the last columns of `STAGE`, `[S, 4]`: "ends", "in_flight", "late" and "loss"."""
    micro, pp = cost.sizes.num_micro_batches(c).double(), int(c["pp"])
    stage = torch.arange(num_stages)
    rank, is_last = stage % pp, (stage == num_stages - 1).double()
    ends = (stage == 0) + is_last
    # A pipeline holds tied weights on both of its ends, but a single stage holds them once.
    if num_stages == 1 and cost.model.tied:
        ends = is_last
    # The first stage computes no gradients of inputs, so it never delays gradients of weights.
    in_two = runs(c, "zb-h1") & (rank > 0)
    late = torch.where(in_two, micro.minimum(rank + 1), 0.0)
    return torch.stack([ends, cost.memory.in_flight(c, rank), late, is_last], 1)


def _choices(c: Columns, all_again: bool, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the numbers of layers of each kind that a stage with `counts` layers may recompute."""
    if not int(c["recompute"]):
        return [(0,) * len(counts)]
    if all_again:
        return [counts]
    return list(itertools.product(*(range(count + 1) for count in counts)))


def _first(cost: StepCost, layers: Iterable[int], again: tuple[int, ...]) -> list[int]:
    """Return the first of these layers, with as many of each kind as `again` says."""
    left, found = dict(zip(cost.model.kinds, again, strict=True)), []
    for i in layers:
        if left[cost.model.parts[i]] > 0:
            left[cost.model.parts[i]] -= 1
            found.append(i)
    return found


def _counts(cost: StepCost, layers: Iterable[int]) -> tuple[int, ...]:
    """Count the layers of each kind."""
    found = [cost.model.parts[i] for i in layers]
    return tuple(found.count(kind) for kind in cost.model.kinds)


def _even(cost: StepCost, c: Columns, all_again: bool) -> tuple[StageLayers, ...] | None:
    """Return stages of even lengths, in which each rank recomputes as few layers as fit."""
    pp = int(c["pp"])
    cuts = split_evenly(cost.model.num_layers, pp * CHUNKS)
    layers = [[i for cut in cuts[rank::pp] for i in range(*cut)] for rank in range(pp)]
    tried = [_choices(c, all_again, _counts(cost, own)) for own in layers]
    ranks = torch.tensor([rank for rank, each in enumerate(tried) for _ in each])
    plain = rank_columns(cost, c, [StageLayers(*cut) for cut in cuts])
    columns = {name: column[ranks] for name, column in plain.items()}
    again = torch.tensor([one for each in tried for one in each], dtype=torch.float64)
    parts = again @ torch.tensor(cost.model.kinds, dtype=torch.float64)
    columns |= dict(zip(AGAIN, parts.unbind(1), strict=True))
    seconds = cost.passes.seconds(columns).masked_fill(~cost.memory.fits(columns), torch.inf)
    chosen = set[int]()
    for own, each, times in zip(
        layers, tried, seconds.split([len(each) for each in tried]), strict=True
    ):
        best = int(times.argmin())
        if not times[best] < torch.inf:
            return None
        chosen.update(_first(cost, own, each[best]))
    return tuple(StageLayers(*cut, tuple(i for i in range(*cut) if i in chosen)) for cut in cuts)


@functools.lru_cache(maxsize=16)
def _spans(
    parts: tuple[LayerParts, ...], kinds: tuple[LayerParts, ...], stages: int
) -> list[dict[tuple[int, int], tuple[int, ...]]]:
    """Return, for each stage, its possible (start, end) with the numbers of layers of each kind."""
    before = [[0, *itertools.accumulate(layer == kind for layer in parts)] for kind in kinds]
    last, longest = stages - 1, len(parts) - stages + 1
    return [
        {
            (i, j): tuple(counts[j] - counts[i] for counts in before)
            for i in ([0] if s == 0 else range(s, s + longest))
            for j in ([len(parts)] if s == last else range(i + 1, s + longest + 1))
        }
        for s in range(stages)
    ]


# Number of a stage, numbers of its layers of each kind, and how many of each are recomputed.
_Option = tuple[int, tuple[int, ...], tuple[int, ...]]


class _Chain:
    """The dynamic program for one candidate."""

    def __init__(self, cost: StepCost, c: Columns, all_again: bool) -> None:
        self._cost, self._c, self._all_again = cost, c, all_again
        self._layers, self._stages = cost.model.num_layers, int(c["pp"])
        self._kinds = cost.model.kinds
        self._micro = float(cost.sizes.num_micro_batches(c))
        self._spans = _spans(cost.model.parts, self._kinds, self._stages)
        self._rest = _rest(cost, c, self._stages)

    def divided(self) -> tuple[StageLayers, ...] | None:
        """Return the quickest division; None if no division fits into memory."""
        kinds = [sorted({*spans.values()}) for spans in self._spans]
        none = (0,) * len(self._kinds)
        alone: list[_Option] = [(s, kind, none) for s, each in enumerate(kinds) for kind in each]
        even = self._even()
        # `alone` and `even` share a call, because its time hardly depends on the number of rows.
        costs = self._costed(alone + even)
        spent, _, all_fit = (column[len(alone) :] for column in costs)
        # No stage of the best division takes longer than this bound: M times its slowest stage is
        # at most the time of the best division, and so of the even division.
        bound = float((spent.sum() + (self._micro - 1) * spent.max()) / self._micro)
        bound = bound if bool(all_fit.all()) else math.inf
        # The factor allows for rounding errors of the bound.
        is_quick = (costs[0][: len(alone)] <= bound * (1 + 1e-9)).nonzero().view(-1)
        options = [alone[i] for i in is_quick.tolist()]
        if int(self._c["recompute"]):
            options = self._fewest_again(options)
            seconds, memory, fits = self._costed(options)
        else:
            seconds, memory, fits = (column[is_quick] for column in costs)
        seconds = seconds.masked_fill(~fits, torch.inf)
        best: dict[tuple[int, tuple[int, ...]], int] = {}
        times, bytes_ = seconds.tolist(), memory.tolist()
        for row, (s, kind, _) in enumerate(options):
            known = best.get((s, kind))
            if known is None or (times[row], bytes_[row]) < (times[known], bytes_[known]):
                best[s, kind] = row
        widest = max(sum(kind) for _, kind in best) if best else 1
        table = torch.full((self._stages, self._layers, widest), torch.inf, dtype=torch.float64)
        for s, spans in enumerate(self._spans):
            for (i, j), kind in spans.items():
                if (s, kind) in best:
                    table[s, i, j - i - 1] = times[best[s, kind]]
        cuts = self._cuts(table)
        if cuts is None:
            return None
        found = []
        for s, (i, j) in enumerate(itertools.pairwise(cuts)):
            again = options[best[s, self._spans[s][i, j]]][2]
            found.append(StageLayers(i, j, tuple(_first(self._cost, range(i, j), again))))
        return tuple(found)

    def _fewest_again(self, options: list[_Option]) -> list[_Option]:
        """Add recomputed layers to options.

        Every number is tried for all kinds but the most frequent one, of which as few layers are
        recomputed as fit.
        """
        if self._all_again or bool(runs(self._c, "zb-h1")):
            return [(s, kind, kind) for s, kind, _ in options]
        parts = self._cost.model.parts
        most = max(range(len(self._kinds)), key=lambda i: parts.count(self._kinds[i]))
        found = [
            (s, kind, again)
            for s, kind, _ in options
            for again in itertools.product(
                *(range(1 if i == most else count + 1) for i, count in enumerate(kind))
            )
        ]

        def with_most(numbers: Tensor) -> list[_Option]:
            return [
                (s, kind, (*again[:most], n, *again[most + 1 :]))
                for (s, kind, again), n in zip(found, numbers.tolist(), strict=True)
            ]

        # Binary search finds the least number, because each recomputed layer frees memory.
        none = self._fits(found)
        count = torch.tensor([kind[most] for _, kind, _ in found])
        high = torch.where(none, 0, count)
        low = torch.where(none, 0, 1).minimum(high)
        while bool((low < high).any()):
            middle = (low + high) // 2
            fits = self._fits(with_most(middle))
            high = torch.where(fits, middle, high)
            low = torch.where(fits, low, middle + 1).minimum(high)
        return with_most(low)

    def _even(self) -> list[_Option]:
        """Return stages of even lengths; all layers are recomputed with recompute."""
        found = list[_Option]()
        for s, (i, j) in enumerate(split_evenly(self._layers, self._stages)):
            kind = _counts(self._cost, range(i, j))
            found.append((s, kind, kind if int(self._c["recompute"]) else (0,) * len(kind)))
        return found

    def _costed(self, options: list[_Option]) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each option, seconds of a micro-batch, bytes, and whether the bytes fit."""
        columns, cost = self._columns(options), self._cost
        output, memory = cost.compute.output(columns), cost.memory.fullest(columns)
        seconds = sum(cost.passes.terms(columns).values(), 3.0 * output * columns["loss"])
        return seconds, memory, cost.memory.fits(columns, memory)

    def _fits(self, options: list[_Option]) -> Tensor:
        return self._cost.memory.fits(self._columns(options))

    def _columns(self, options: list[_Option]) -> Columns:
        # Numbers of layers of each kind times the parts of a kind are the columns of a stage.
        parts = torch.tensor(self._kinds, dtype=torch.float64)
        counts = torch.tensor([each[1:] for each in options], dtype=torch.float64) @ parts
        rest = self._rest[[s for s, _, _ in options]]
        return _with(self._c, torch.cat([counts.flatten(1), rest], 1))

    def _cuts(self, times: Tensor) -> list[int] | None:
        """Return the first layers of all stages, and L; None if no division fits.

        Args:
            times: seconds `[S, L, W]` of stage s with 1 to W layers from layer l on.
        """
        slowest = self._least(times, largest=True)[0]
        if slowest == torch.inf:
            return None
        total = self._least(times)[0]
        best, found = float("inf"), list[int]()
        bounds = times[(times >= slowest) & (times < torch.inf)].unique().tolist()
        for bound in bounds:
            if total + (self._micro - 1) * bound >= best:
                break
            seconds, cuts = self._least(times.masked_fill(times > bound, torch.inf))
            seconds += (self._micro - 1) * bound
            if seconds < best:
                best, found = seconds, cuts
        return found

    def _least(self, times: Tensor, *, largest: bool = False) -> tuple[float, list[int]]:
        """Return the least sum of stages, or with `largest` the least slowest stage, and cuts."""
        layers, widest = times.shape[1:]
        # Seconds of the stages from a layer on. No stage starts after the last layer.
        behind = torch.full((layers + widest,), torch.inf, dtype=torch.float64)
        behind[layers] = 0.0
        widths = []
        for each in times.flip(0):
            rest = behind[1:].unfold(0, widest, 1)
            both = torch.maximum(each, rest) if largest else each + rest
            # `min` would use several threads and wait for them if they are busy.
            width = both.argmin(1)
            least = both.gather(1, width[:, None])[:, 0]
            behind[:layers], behind[layers] = least, torch.inf
            widths.append(width + 1)
        if not behind[0] < torch.inf:
            return float("inf"), []
        cuts = [0]
        for width in reversed(widths):
            cuts.append(cuts[-1] + int(width[cuts[-1]]))
        return float(behind[0]), cuts
