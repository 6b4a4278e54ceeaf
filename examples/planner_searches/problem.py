"""Operators with options on devices, pipelines of them, what a choice costs, and the best of all.

One cost model for every search: `Problem.cost` and `Pipeline.cost`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

Matrix = tuple[tuple[float, ...], ...]
Edge = tuple[int, int]
Nodes = frozenset[int]


@dataclass(frozen=True)
class Choice:
    """Outcome of a search.

    Attributes:
        options: of a `Problem`, one number for each operator; of a `Pipeline`, each `Stage` from
            the first to the last; of TeraPipe, lengths of slices.
        cost: seconds; inf where it does not fit, or where nothing was found.
        micro_batch: samples of a micro-batch, of pipelines.
    """

    options: tuple[Any, ...]
    cost: float
    micro_batch: int = 1


@dataclass(frozen=True)
class Problem:
    """Operators, in an order in which they can run, each with options.

    Attributes:
        seconds: `[n][o]`, of each option of each operator.
        edges: of (producer, consumer), the seconds between them for each pair of options.
        memory: `[n][o]`, bytes on a device.
        capacity: bytes of a device.
        placed: option o runs on device o, operators of other devices at the same time. Otherwise
            options are ways to shard, all devices run every operator, and seconds add up.

    Raises:
        ValueError: a table has not the size of its operators' options, or an edge goes backwards.
    """

    seconds: Matrix
    edges: Mapping[Edge, Matrix]
    memory: Matrix
    capacity: float = math.inf
    placed: bool = False

    def __post_init__(self) -> None:
        sizes = [len(row) for row in self.seconds]
        if [len(row) for row in self.memory] != sizes:
            raise ValueError(
                "Problem: expected memory to have the shape of seconds, "
                f"{sizes}, got {[len(row) for row in self.memory]}"
            )
        for (i, j), table in self.edges.items():
            shaped = 0 <= i < j < len(sizes) and [len(row) for row in table] == [sizes[j]] * len(
                table
            )
            if not shaped or len(table) != sizes[i]:
                raise ValueError(
                    "Problem: expected edges to go to later operators, with a row for each option "
                    f"of the first and a column for each of the second, got {(i, j)}: {table}"
                )

    @cached_property
    def inputs(self) -> list[list[tuple[int, Matrix]]]:
        """(producer, table) of each operator."""
        return [[(i, t) for (i, j), t in self.edges.items() if j == k] for k in self.nodes]

    @property
    def nodes(self) -> range:
        """All operators."""
        return range(len(self.seconds))

    @property
    def num_options(self) -> int:
        """Options of every operator.

        Raises:
            ValueError: operators have unlike numbers of options.
        """
        sizes = {len(row) for row in self.seconds}
        if len(sizes) != 1:
            raise ValueError(
                "search: expected operators to have equal numbers of options, "
                f"got {[len(row) for row in self.seconds]}"
            )
        return sizes.pop()

    @cached_property
    def neighbours(self) -> list[list[tuple[int, Matrix]]]:
        """(operator, table by own and its option) of all that share an edge with each."""
        found: list[list[tuple[int, Matrix]]] = [[] for _ in self.nodes]
        for (i, j), table in self.edges.items():
            found[i].append((j, table))
            found[j].append((i, tuple(zip(*table, strict=True))))
        return found

    def fits(self, options: Sequence[int]) -> bool:
        """No device has more than it can hold."""
        held: dict[int, float] = {}
        for row, option in zip(self.memory, options, strict=True):
            device = option if self.placed else 0
            held[device] = held.get(device, 0.0) + row[option]
        return max(held.values()) <= self.capacity

    def cost(self, options: Sequence[int]) -> float:
        """Seconds; inf where it does not fit."""
        if not self.fits(options):
            return math.inf
        if not self.placed:
            own = sum(row[o] for row, o in zip(self.seconds, options, strict=True))
            return own + sum(t[options[i]][options[j]] for (i, j), t in self.edges.items())
        free: dict[int, float] = {}
        done: list[float] = []
        for j, device in enumerate(options):
            ready = [done[i] + table[options[i]][device] for i, table in self.inputs[j]]
            done.append(max([free.get(device, 0.0), *ready]) + self.seconds[j][device])
            free[device] = done[-1]
        return max(done)

    def choice(self, options: Sequence[int]) -> Choice:
        """The choice of these options, with its cost."""
        return Choice(tuple(options), self.cost(options))


class Way(NamedTuple):
    """An option of an operator of a pipeline: devices that share it, and what is kept of it."""

    ways: int
    recompute: bool


@dataclass(frozen=True)
class Stage:
    """Operators, the option of each in ascending order, and the devices that run them."""

    nodes: Nodes
    options: tuple[int, ...]
    devices: tuple[int, ...]


Score = Callable[[Sequence[float], int], float]


def latency(times: Sequence[float], micro_batches: int) -> float:
    """Seconds of a step with a flush: once through all stages, then one more by the slowest."""
    return sum(times) + (micro_batches - 1) * max(times)


def bottleneck(times: Sequence[float], micro_batches: int) -> float:
    """Seconds of the slowest stage, what counts without a flush."""
    return max(times)


@dataclass(frozen=True)
class Pipeline:
    """Operators to cut into stages: sets that, with all before, hold every producer of theirs.

    A stage of d devices shares each operator over `ways` of them and has d / ways replicas.

    Attributes:
        graph: seconds of one sample, forward and backward; `memory` is that of its activations.
        ways: of each option, alike for all operators; in a stage, all options have equal `ways`.
        weights: bytes of each operator's weights and what the optimizer holds of them.
        cut: seconds of each edge whose ends are in two stages.
        speeds: of each device; 1 is that of `graph`.
        shapes: (devices, ways) that a stage may have.
        batch: samples of a step.
        micro_batches: sizes of a micro-batch that may be taken.
        sync: seconds a byte of averaging gradients.
        launch: seconds of a micro-batch in a stage, whatever its size.
        contiguous: stages are runs of operators in their order.
    """

    graph: Problem
    ways: tuple[Way, ...]
    weights: tuple[float, ...]
    cut: Mapping[Edge, float]
    speeds: tuple[float, ...]
    shapes: tuple[tuple[int, int], ...]
    batch: int
    micro_batches: tuple[int, ...] = (1,)
    sync: float = 0.0
    launch: float = 0.0
    contiguous: bool = False
    all_nodes: Nodes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_nodes", frozenset(self.graph.nodes))

    @cached_property
    def prefixes(self) -> list[Nodes]:
        """The first operators, all numbers of them."""
        return [frozenset(range(end)) for end in range(len(self.graph.seconds) + 1)]

    @cached_property
    def ideals(self) -> list[Nodes]:
        """Sets that hold every producer of theirs, by size; of a contiguous one, prefixes."""
        if self.contiguous:
            return self.prefixes
        found = {frozenset[int]()}
        for j in self.graph.nodes:
            producers = {i for i, _ in self.graph.inputs[j]}
            found |= {ideal | {j} for ideal in found if producers <= ideal}
        return sorted(found, key=lambda ideal: (len(ideal), sorted(ideal)))

    def num_micro_batches(self, micro_batch: int) -> int:
        """Micro-batches of a step, over all replicas."""
        return self.batch // micro_batch

    def device_sets(self, free: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
        """So many devices of those that are free; of equal ones, the first."""
        if len({self.speeds[device] for device in free}) == 1:
            yield free[:count]
        else:
            yield from itertools.combinations(free, count)

    def one_way(self, ways: int = 1, recompute: bool = False) -> int:
        """The first option of this kind."""
        return self.ways.index(Way(ways, recompute))

    def stage(
        self, nodes: Nodes, devices: Sequence[int], ways: int = 1, recompute: bool = False
    ) -> Stage:
        """A stage with the first option of one kind for all operators."""
        return Stage(nodes, (self.one_way(ways, recompute),) * len(nodes), tuple(devices))

    def equal(self, depth: int, ways: int = 1, recompute: bool = False) -> tuple[Stage, ...]:
        """Stages of as many operators and devices each."""
        ends = [round(k * len(self.all_nodes) / depth) for k in range(depth + 1)]
        width = len(self.speeds) // depth
        return tuple(
            self.stage(
                self.prefixes[ends[k + 1]] - self.prefixes[ends[k]],
                range(k * width, (k + 1) * width),
                ways,
                recompute,
            )
            for k in range(depth)
        )

    def replicas(self, stage: Stage) -> int:
        """Copies of a stage."""
        return len(stage.devices) // self.ways[stage.options[0]].ways

    def pass_seconds(self, stage: Stage, micro_batch: int = 1) -> float:
        """Seconds of a micro-batch through one replica, forward and backward."""
        option = dict(zip(sorted(stage.nodes), stage.options, strict=True))
        each = sum(self.graph.seconds[i][o] for i, o in option.items())
        for (i, j), table in self.graph.edges.items():
            if j in option:
                each += table[option[i]][option[j]] if i in option else self.cut[i, j]
        slowest = min(self.speeds[device] for device in stage.devices)
        return (self.launch + micro_batch * each) / slowest

    def sync_seconds(self, stage: Stage) -> float:
        """Seconds of averaging gradients over a stage's replicas, once a step."""
        r = self.replicas(stage)
        held = sum(self.weights[i] for i in stage.nodes) / self.ways[stage.options[0]].ways
        return self.sync * held * 2 * (r - 1) / r

    def seconds(self, stage: Stage, micro_batch: int = 1) -> float:
        """Seconds a micro-batch of a stage: its replicas take turns."""
        shared = self.pass_seconds(stage, micro_batch) / self.replicas(stage)
        return shared + self.sync_seconds(stage) / self.num_micro_batches(micro_batch)

    def stage_memory(
        self, stage: Stage, in_flight: int, micro_batch: int = 1, versions: int = 1
    ) -> float:
        """Bytes on a device, of so many micro-batches begun and versions of weights."""
        return sum(
            versions * self.weights[i] / self.ways[o].ways
            + in_flight * micro_batch * self.graph.memory[i][o]
            for i, o in zip(sorted(stage.nodes), stage.options, strict=True)
        )

    def fits(self, stages: Sequence[Stage], micro_batch: int = 1) -> bool:
        """All stages have room for what 1F1B keeps: one micro-batch a stage that is to come."""
        limit = self.num_micro_batches(micro_batch)
        return all(
            self.stage_memory(stage, min(len(stages) - k, limit), micro_batch)
            <= self.graph.capacity
            for k, stage in enumerate(stages)
        )

    def cost(self, stages: Sequence[Stage], micro_batch: int = 1) -> float:
        """Seconds of a step; inf where it does not fit."""
        if not stages or not self.fits(stages, micro_batch):
            return math.inf
        times = [self.seconds(stage, micro_batch) for stage in stages]
        return latency(times, self.num_micro_batches(micro_batch))

    def choice(self, stages: Sequence[Stage], micro_batch: int = 1) -> Choice:
        """The choice of these stages, with its cost."""
        return Choice(tuple(stages), self.cost(stages, micro_batch), micro_batch)

    def fill(
        self,
        nodes: Nodes,
        ways: int,
        in_flight: int,
        micro_batch: int,
        solve: Callable[[Problem], Choice],
    ) -> tuple[int, ...] | None:
        """Options of a stage's operators by a search of their own; None where none fit."""
        order = sorted(nodes)
        allowed = [o for o, way in enumerate(self.ways) if way.ways == ways]
        held = min(in_flight, self.num_micro_batches(micro_batch)) * micro_batch
        graph = self.graph
        inner = Problem(
            tuple(tuple(graph.seconds[i][o] for o in allowed) for i in order),
            {
                (order.index(i), order.index(j)): tuple(
                    tuple(table[a][b] for b in allowed) for a in allowed
                )
                for (i, j), table in graph.edges.items()
                if i in nodes and j in nodes
            },
            tuple(
                tuple(self.weights[i] / ways + held * graph.memory[i][o] for o in allowed)
                for i in order
            ),
            graph.capacity,
        )
        found = solve(inner)
        return None if math.isinf(found.cost) else tuple(allowed[o] for o in found.options)


def brute_force(problem: Problem | Pipeline, score: Score = latency) -> Choice:
    """The best choice of all, by trying each; the first of equals.

    Args:
        problem: of at most some 10 operators: all products of options, or all ways to cut stages,
            to give them devices and options, and sizes of micro-batches, are tried.
        score: of pipelines, what is to be least; the choice's cost is `Pipeline.cost`.
    """
    if isinstance(problem, Problem):
        return _best_options(problem)
    return _best_stages(problem, score)


def _best_options(problem: Problem) -> Choice:
    grid = [torch.arange(len(row)) for row in problem.seconds]
    rows = torch.cartesian_prod(*grid).view(-1, len(grid))
    own = [torch.tensor(t, dtype=torch.float64)[rows[:, i]] for i, t in enumerate(problem.seconds)]
    held = [torch.tensor(t, dtype=torch.float64)[rows[:, i]] for i, t in enumerate(problem.memory)]
    between = {
        (i, j): torch.tensor(t, dtype=torch.float64)[rows[:, i], rows[:, j]]
        for (i, j), t in problem.edges.items()
    }
    if problem.placed:
        devices = len(problem.seconds[0])
        free = torch.zeros(len(rows), devices, dtype=torch.float64)
        used = torch.zeros_like(free)
        done: list[torch.Tensor] = []
        for j in problem.nodes:
            device = rows[:, j, None]
            start = free.gather(1, device)[:, 0]
            for i, _ in problem.inputs[j]:
                start = torch.maximum(start, done[i] + between[i, j])
            done.append(start + own[j])
            free.scatter_(1, device, done[j][:, None])
            used.scatter_add_(1, device, held[j][:, None])
        cost, memory = free.amax(1), used.amax(1)
    else:
        cost = torch.stack([*own, *between.values()]).sum(0)
        memory = torch.stack(held).sum(0)
    cost = cost.masked_fill(memory > problem.capacity, math.inf)
    return problem.choice(rows[int(cost.argmin())].tolist())


def _best_stages(pipeline: Pipeline, score: Score) -> Choice:
    @cache
    def options(nodes: Nodes, ways: int, in_flight: int, size: int) -> tuple[int, ...] | None:
        return pipeline.fill(nodes, ways, in_flight, size, _best_options)

    @cache
    def timed(
        nodes: Nodes, devices: tuple[int, ...], ways: int, in_flight: int, size: int
    ) -> tuple[Stage, float] | None:
        found = options(nodes, ways, in_flight, size)
        if found is None:
            return None
        stage = Stage(nodes, found, devices)
        return stage, pipeline.seconds(stage, size)

    def all_stages(
        rest: Nodes, free: tuple[int, ...], behind: tuple[tuple[Stage, float], ...], size: int
    ) -> Iterator[tuple[tuple[Stage, float], ...]]:
        """All pipelines that end with the stages `behind`."""
        if not rest:
            yield behind
        for before in pipeline.ideals:
            if not before < rest:
                continue
            for count, ways in pipeline.shapes:
                if count > len(free):
                    continue
                for devices in pipeline.device_sets(free, count):
                    found = timed(rest - before, devices, ways, len(behind) + 1, size)
                    if found is not None:
                        left = tuple(d for d in free if d not in devices)
                        yield from all_stages(before, left, (found, *behind), size)

    best: tuple[tuple[Stage, float], ...] = ()
    least, size_found = math.inf, 1
    everything = tuple(range(len(pipeline.speeds)))
    for size in pipeline.micro_batches:
        for stages in all_stages(pipeline.all_nodes, everything, (), size):
            value = score([seconds for _, seconds in stages], pipeline.num_micro_batches(size))
            if value < least:
                best, least, size_found = stages, value, size
    return pipeline.choice([stage for stage, _ in best], size_found)
