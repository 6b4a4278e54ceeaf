"""Alpa between stages: runs of layers on parts of the mesh, each solved by `alpa_intra`.

Paper: Zheng et al., "Alpa" (arXiv:2201.12023), section 5
Class: exact of runs of operators at a given micro-batch
Complexity: n^2 d^2 s for each of the n^2 d seconds that the slowest stage could take
"""

from __future__ import annotations

import math
from functools import cache

from planner_searches import alpa_intra
from planner_searches.problem import Choice, Nodes, Pipeline, Stage
from planner_searches.stages import best_stages


def search(pipeline: Pipeline) -> Choice:
    """Runs of operators with ways, replicas and recompute, within memory, for the whole step."""

    @cache
    def options(nodes: Nodes, ways: int, behind: int) -> tuple[int, ...] | None:
        return pipeline.fill(nodes, ways, behind, 1, alpa_intra.search)

    seen: dict[Stage, float] = {}

    def fill(nodes: Nodes, devices: tuple[int, ...], ways: int, behind: int) -> Stage | None:
        found = options(nodes, ways, behind)
        if found is None:
            return None
        stage = Stage(nodes, found, devices)
        if stage not in seen:
            seen[stage] = pipeline.seconds(stage)
        return stage if seen[stage] <= slowest else None

    def total() -> tuple[float, tuple[Stage, ...]]:
        return best_stages(
            pipeline, pipeline.prefixes, pipeline.shapes, fill, lambda own, others: own + others
        )

    slowest = math.inf
    best = pipeline.choice(total()[1])
    for slowest in sorted(set(seen.values())):
        if (pipeline.batch - 1) * slowest >= best.cost:
            break
        found = pipeline.choice(total()[1])
        best = min(best, found, key=lambda choice: choice.cost)
    return best
