"""Gaps of the searches to the best choice, on seeded problems."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from planner_searches import SEARCHES, seeded, terapipe
from planner_searches.problem import (
    Choice,
    Pipeline,
    Problem,
    Score,
    bottleneck,
    brute_force,
    latency,
)

SHARDED = (
    *("optcnn", "tofu", "flexflow", "gspmd", "automap", "tensoropt", "double_recursion"),
    *("auto_map", "alpa_intra"),
)
NUM_SEEDS = 4


class Gap(NamedTuple):
    """Shares by which a search's costs are above the least, over the problems where it fits."""

    least: float
    mean: float
    worst: float
    fitting: int
    problems: int


def gap(found: Iterable[float], best: Iterable[float]) -> Gap:
    """Mean and worst gap of costs to the least ones, and how many fit."""
    shares = [f / b - 1 for f, b in zip(found, best, strict=True)]
    fitting = [share for share in shares if math.isfinite(share)]
    mean = sum(fitting) / len(fitting) if fitting else math.inf
    least, worst = min(fitting, default=math.inf), max(fitting, default=math.inf)
    return Gap(least, mean, worst, len(fitting), len(shares))


@cache
def shardings(tight: bool = False) -> list[tuple[Problem, float]]:
    """Problems and their least cost: three kinds of graphs of 6 and 8 operators."""
    made = [
        seeded.sharding(kind, num_nodes, seed, tight=tight)
        for kind in seeded.KINDS
        for num_nodes in (6, 8)
        for seed in range(NUM_SEEDS)
    ]
    return [(problem, brute_force(problem).cost) for problem in made]


@cache
def placements() -> list[tuple[Problem, float]]:
    """The same of operators on one of three devices."""
    made = [
        seeded.placement(kind, num_nodes, seed)
        for kind in seeded.KINDS
        for num_nodes in (6, 8)
        for seed in range(NUM_SEEDS)
    ]
    return [(problem, brute_force(problem).cost) for problem in made]


@cache
def pipelines(unlike: bool = False) -> list[tuple[Pipeline, float]]:
    """Pipelines of 5 and 6 operators over four devices, half of them short of memory."""
    made = [
        seeded.staged(kind, 5 + seed % 2, seed, tight=seed // 2 % 2 == 1, unlike=unlike)
        for kind in seeded.KINDS
        for seed in range(NUM_SEEDS)
    ]
    return [(pipeline, brute_force(pipeline).cost) for pipeline in made]


def _own(
    pipeline: Pipeline,
    *,
    contiguous: bool = True,
    shapes: Callable[[int, int], bool] = lambda devices, ways: True,
    roomy: bool = False,
    edges: bool = True,
) -> Pipeline:
    """A pipeline that offers what a planner looks at, and nothing else."""
    graph = pipeline.graph
    if roomy:
        graph = dataclasses.replace(graph, capacity=math.inf)
    if not edges:
        none = {e: tuple((0.0,) * len(row) for row in t) for e, t in graph.edges.items()}
        graph = dataclasses.replace(graph, edges=none)
    return dataclasses.replace(
        pipeline,
        graph=graph,
        shapes=tuple(shape for shape in pipeline.shapes if shapes(*shape)),
        micro_batches=(1,),
        contiguous=contiguous,
    )


# The problem as each planner of pipelines sees it, and the score for which it is exact.
OWN: dict[str, tuple[Callable[[Pipeline], Pipeline], Score]] = {
    "pipedream": (lambda p: _own(p, shapes=lambda d, w: w == 1, roomy=True), bottleneck),
    "dnn_partition": (
        lambda p: _own(p, contiguous=False, shapes=lambda d, w: d == 1, roomy=True),
        bottleneck,
    ),
    "piper": (lambda p: _own(p, contiguous=False, edges=False), bottleneck),
    "alpa_inter": (lambda p: _own(p), latency),
    "hetpipe": (lambda p: _own(p, shapes=lambda d, w: d == 1, roomy=True), bottleneck),
}


def score(pipeline: Pipeline, found: Choice, by: Score) -> float:
    """The stages that a search found, by a score; infinite where they do not fit."""
    if not pipeline.fits(found.options, found.micro_batch):
        return math.inf
    times = [pipeline.seconds(stage, found.micro_batch) for stage in found.options]
    return by(times, pipeline.num_micro_batches(found.micro_batch))


def own_gap(name: str) -> Gap:
    """Gap of a planner of pipelines in what it looks at, by its own score."""
    view, by = OWN[name]
    seen = [view(pipeline) for pipeline, _ in pipelines(name == "hetpipe")]
    found = [score(pipeline, SEARCHES[name](pipeline), by) for pipeline in seen]
    return gap(found, [score(pipeline, brute_force(pipeline, by), by) for pipeline in seen])


def best_slices(pipeline: Pipeline, units: int = 8) -> float:
    """Least seconds of TeraPipe's slices, by trying all."""
    cuts = itertools.product((False, True), repeat=units - 1)
    ends = ([i + 1 for i, cut in enumerate(row) if cut] for row in cuts)
    bounds = ([0, *inner, units] for inner in ends)
    return min(
        terapipe.cost(pipeline, [b - a for a, b in itertools.pairwise(row)]) for row in bounds
    )


def full_gap(name: str) -> Gap:
    """Gap of a search by the whole cost, with everything allowed that the problem offers."""
    if name == "terapipe":
        made = [pipeline for pipeline, _ in pipelines()]
        return gap([terapipe.search(pipeline).cost for pipeline in made], map(best_slices, made))
    problems: list[tuple[Problem, float]] | list[tuple[Pipeline, float]]
    if name in SHARDED:
        problems = shardings()
    elif name == "reinforce":
        problems = placements()
    else:
        problems = pipelines(name == "hetpipe")
    return gap(
        [SEARCHES[name](problem).cost for problem, _ in problems], [cost for _, cost in problems]
    )


def about(name: str) -> dict[str, str]:
    """Title, Paper, Class and Complexity, from the docstring of a search's module."""
    text = inspect.getdoc(sys.modules[SEARCHES[name].__module__]) or ""
    title, _, rest = text.partition("\n\n")
    found = {"Title": title.partition(":")[0]}
    key = ""
    for line in rest.splitlines():
        label, colon, value = line.partition(": ")
        if colon and label in ("Paper", "Class", "Complexity"):
            key, line = label, value
        found[key] = f"{found[key]} {line}" if key in found else line
    return found


def percent(share: float) -> str:
    """A share for the table."""
    return "0" if abs(share) < 1e-12 else f"{100 * share:.1f}"


def row(name: str, texts: dict[str, str], found: Gap, own: Gap | None) -> str:
    """One line of the table."""
    gaps = f"{percent(found.mean)} | {percent(found.worst)}"
    fits = f"{found.fitting} of {found.problems}"
    within = percent(own.worst) if own else ""
    return f"| `{name}` | {texts['Paper']} | {texts['Class']} | {gaps} | {fits} | {within} |"


def table() -> str:
    """Every search, its class, and its gaps, in Markdown."""
    lines = [
        "| search | paper | class | mean gap % | worst % | fits | in its own space % |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SEARCHES:
        own = own_gap(name) if name in OWN else None
        lines.append(row(name, about(name), full_gap(name), own))
    return "\n".join(lines)
