"""Search of the placement that takes least time: enumeration, bounds, and simulated pipelines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ext.pipeline import Costs, make_table, simulate
from moe_ext.planner.cost import (
    CHUNKS,
    COMBINES,
    DISPATCHERS,
    SCHEDULES,
    WIRES,
    Columns,
    CostModel,
    divisors,
)

AXES = (
    *("pp", "tp", "cp", "ep", "micro_batch", "schedule", "zero", "recompute"),
    *("dispatcher", "wire", "combine"),
)
# Values of axes that are numbers of a tuple.
NAMES: Mapping[str, tuple[str | None, ...]] = {
    "schedule": SCHEDULES,
    "dispatcher": DISPATCHERS,
    "wire": WIRES,
    "combine": COMBINES,
}
# Placements whose pipeline is simulated, and points that are costed at once.
SIMULATED = 50
_AT_ONCE = 2**18
_MICRO_BATCHES = (1, 2, 4, 8, 16)

Choice = dict[str, "int | str | None"]


@dataclass(frozen=True)
class Found:
    """A placement and what it takes.

    Attributes:
        choice: values by axis.
        seconds: of a step.
        memory: bytes of the fullest rank.
    """

    choice: Choice
    seconds: float
    memory: float


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search.

    Attributes:
        best: least time among those that fit; None where none fits.
        pareto: no other is both quicker and smaller, by closed forms; ascending in time.
        least: the smallest of those that do not fit, where none does.
        num_points: placements whose time was computed.
        num_too_large: of these, those that do not fit.
        proven: no placement that was left out can be better, by the bound and the simulation.
    """

    best: Found | None
    pareto: tuple[Found, ...]
    least: Found | None
    num_points: int
    num_too_large: int
    proven: bool


def choice_of(columns: Columns, i: int) -> Choice:
    """Values of one candidate, with their names."""
    found: Choice = {}
    for name in AXES:
        value = int(columns[name][i])
        found[name] = NAMES[name][value] if name in NAMES else value
    return found


def columns_of(choices: Sequence[Mapping[str, int | str | None]]) -> Columns:
    """Candidates as columns.

    Raises:
        ValueError: an axis has no such value.
    """
    return {
        name: torch.tensor([_number(name, choice[name]) for choice in choices]) for name in AXES
    }


def _number(name: str, value: int | str | None) -> int:
    if name not in AXES:
        raise ValueError(f"plan: expected fixed to name axes of {AXES}, got {name!r}")
    if name in NAMES:
        if value not in NAMES[name]:
            raise ValueError(f"plan: expected {name} to be one of {NAMES[name]}, got {value!r}")
        return NAMES[name].index(value)
    if not isinstance(value, int):
        raise ValueError(f"plan: expected {name} to be an int, got {value!r}")
    return value


def meshes(cost: CostModel) -> Tensor:
    """`[C, 5]`: pp, tp, cp, ep and micro-batch that divide ranks, heads, experts and the batch."""
    m, job = cost.model, cost.job
    rows = []
    heads = m.num_kv_heads or m.num_heads
    for pp in divisors(job.num_ranks):
        if pp > m.num_layers:
            break
        stage = job.num_ranks // pp
        tps = [d for d in divisors(stage) if m.num_heads % d == 0 and heads % min(d, heads) == 0]
        # Tensor parallelism stays on the quickest links.
        tps = [d for d in tps if d <= cost.cluster.levels[0].size]
        eps = [d for d in divisors(stage) if m.num_experts % d == 0] if m.num_experts else [1]
        for tp in tps:
            for cp in divisors(stage // tp):
                if job.seq_len % (2 * cp * tp):
                    continue
                data = stage // (tp * cp)
                for micro in _MICRO_BATCHES:
                    if job.global_batch % (data * micro) == 0:
                        rows += [(pp, tp, cp, ep, micro) for ep in eps]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)


def _options(cost: CostModel, wires: Sequence[int]) -> Tensor:
    """`[O, 6]`: schedule, ZeRO stage, recompute, dispatcher, wire and combine."""
    ways = [
        (DISPATCHERS.index(way), wire, COMBINES.index(back))
        for way in DISPATCHERS
        for wire in wires
        for back in COMBINES
        if way != "alltoall" or back == "exact"
    ]
    ways = ways if cost.model.num_experts else [(0, 0, 0)]
    rows = itertools.product(range(len(SCHEDULES)), (0, 1, 2, 3), (0, 1), ways)
    return torch.tensor([(s, z, r, *way) for s, z, r, way in rows])


def _expand(cost: CostModel, mesh: Tensor, options: Tensor) -> Columns:
    left = mesh.repeat_interleave(len(options), 0)
    both = torch.cat([left, options.repeat(len(mesh), 1)], 1)
    c = {name: both[:, i] for i, name in enumerate(AXES)}
    inner = cost.cluster.levels[0].size
    micro = cost.num_micro_batches(c)
    keep = (c["pp"] > 1) | (c["schedule"] == 0)
    keep &= (c["schedule"] != SCHEDULES.index("interleaved")) | (
        (micro % c["pp"] == 0) & (c["pp"] * CHUNKS <= cost.model.num_layers)
    )
    # Of one rank nothing travels; a hierarchy has nodes inside and outside.
    plain = (c["dispatcher"] == 0) & (c["wire"] == 0) & (c["combine"] == 0)
    keep &= (c["ep"] > 1) | plain
    nodes = (c["ep"] > inner) & (c["ep"] % inner == 0)
    keep &= (c["dispatcher"] != DISPATCHERS.index("hierarchical")) | nodes
    # Our pipelines run stages without FSDP2: it would reduce for each micro-batch.
    keep &= (c["zero"] < 2) | (c["pp"] == 1)
    return {name: column[keep] for name, column in c.items()}


def _fixed(rows: Tensor, names: Sequence[str], fixed: Mapping[str, int | str | None]) -> Tensor:
    for i, name in enumerate(names):
        if name in fixed:
            rows = rows[rows[:, i] == _number(name, fixed[name])]
    return rows


@functools.lru_cache(4096)
def _pipeline(schedule: str, ranks: int, micro: int, costs: tuple[float, ...]) -> float:
    """Seconds of a pipeline, by simulation of the table that the executor runs."""
    chunks = CHUNKS if schedule == "interleaved" else 1
    table = make_table(schedule, ranks, micro)
    forward, inputs, weights, output, hop = costs
    last = [0.0] * (ranks * chunks - 1) + [output]

    def stages(part: float) -> list[float]:
        return [part / chunks + more for more in last]

    each = Costs(stages(forward), stages(inputs), stages(weights), hop=hop)
    return simulate(table, each).makespan


def simulated(cost: CostModel, columns: Columns) -> float:
    """Seconds of a step of one candidate, its pipeline simulated."""
    forward, inputs, weights = cost.split(columns)
    micro, ranks = int(cost.num_micro_batches(columns)), int(columns["pp"])
    if ranks == 1:
        return float(cost.seconds(columns))
    parts = (forward, inputs, weights, cost.output(columns), cost.hop(columns))
    costs = tuple(float(x) for x in parts)
    schedule = SCHEDULES[int(columns["schedule"])]
    ends = float(cost.gradients(columns) + cost.update(columns))
    return _pipeline(schedule, ranks, micro, costs) + ends


def search(
    cost: CostModel,
    *,
    fixed: Mapping[str, int | str | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    exhaustive: bool = False,
) -> SearchResult:
    """Find the placement of least time that fits into memory.

    Meshes go in ascending order of a bound, products alone; the search ends with the first whose
    bound is beyond the times found. The best 50 by closed forms, which leave out hops, then have
    their pipelines simulated in ascending order, until the next one's closed form is beyond the
    best simulated one. Equal times go to the first in the order of enumeration.

    Args:
        cost: of placements.
        fixed: values that axes must have.
        progress: called with the meshes done and all of them.
        exhaustive: simulate everything and stop nowhere: for tests.

    Raises:
        ValueError: an axis is not known, or no mesh divides the job.
    """
    fixed = fixed or {}
    for name, value in fixed.items():
        _number(name, value)
    mesh = _fixed(meshes(cost), AXES[:5], fixed)
    # Rounded rows change results: taken where they are asked for.
    wires = range(len(WIRES)) if "wire" in fixed else (0,)
    options = _fixed(_options(cost, wires), AXES[5:], fixed)
    if not len(mesh) or not len(options):
        raise ValueError(
            f"plan: expected ranks, heads, experts, sequence and batch to have a mesh of "
            f"{cost.job.num_ranks} ranks with {dict(fixed)}, got none; change global_batch or fixed"
        )
    c = {name: mesh[:, i] for i, name in enumerate(AXES[:5])}
    bounds = cost.bound({**c, "recompute": torch.zeros_like(c["pp"])})
    order = torch.argsort(bounds, stable=True)
    mesh, bounds = mesh[order], bounds[order]
    at_once = max(1, _AT_ONCE // len(options))
    kept: list[tuple[Columns, Tensor, Tensor]] = []
    points = too_large = 0
    limit, least, ended = float("inf"), None, True
    for start in range(0, len(mesh), at_once):
        if float(bounds[start]) > limit and not exhaustive:
            ended = False
            break
        columns = _expand(cost, mesh[start : start + at_once], options)
        if progress is not None:
            progress(min(start + at_once, len(mesh)), len(mesh))
        if not len(columns["pp"]):
            continue
        seconds, memory = cost.seconds(columns), cost.memory(columns)
        points += len(seconds)
        fits = memory <= cost.cluster.memory
        too_large += int((~fits).sum())
        i = int(memory.argmin())
        if least is None or float(memory[i]) < least.memory:
            least = Found(choice_of(columns, i), float(seconds[i]), float(memory[i]))
        kept.append(_best({n: x[fits] for n, x in columns.items()}, seconds[fits], memory[fits]))
        times = torch.cat([times for _, times, _ in kept]).sort().values
        if len(times) >= SIMULATED:
            limit = float(times[SIMULATED - 1])
        if exhaustive:
            kept[-1] = ({n: x[fits] for n, x in columns.items()}, seconds[fits], memory[fits])
    columns = {name: torch.cat([part[0][name] for part in kept]) for name in AXES} if kept else {}
    times = torch.cat([part[1] for part in kept]) if kept else torch.empty(0)
    if not len(times):
        return SearchResult(None, (), least, points, too_large, True)
    memory = torch.cat([part[2] for part in kept])
    by_time = torch.argsort(times, stable=True).tolist()
    best: Found | None = None
    proven = False
    for i in by_time if exhaustive else by_time[:SIMULATED]:
        if best is not None and float(times[i]) >= best.seconds and not exhaustive:
            proven = True
            break
        one = {name: column[i : i + 1] for name, column in columns.items()}
        seconds_i = simulated(cost, one)
        if best is None or seconds_i < best.seconds:
            best = Found(choice_of(columns, i), seconds_i, float(memory[i]))
    front, smallest = [], float("inf")
    for i in by_time:
        if float(memory[i]) < smallest:
            smallest = float(memory[i])
            front.append(Found(choice_of(columns, i), float(times[i]), smallest))
    whole = len(by_time) <= SIMULATED and ended
    return SearchResult(best, tuple(front), least, points, too_large, proven or whole or exhaustive)


def _best(columns: Columns, seconds: Tensor, memory: Tensor) -> tuple[Columns, Tensor, Tensor]:
    """The quickest, and those that are smaller than all quicker ones."""
    order = torch.argsort(seconds, stable=True)
    if len(order):
        falls = memory[order].cummin(0).values
        front = torch.cat([torch.tensor([True]), falls[1:] < falls[:-1]])
        front[: 2 * SIMULATED] = True
        order = order[front]
    return {n: x[order] for n, x in columns.items()}, seconds[order], memory[order]
