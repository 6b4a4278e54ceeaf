"""The dynamic program that planners of pipelines share: the last stage, and the best before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from planner_searches.problem import Nodes, Pipeline, Stage

# Operators, devices, ways, and stages from this one to the last; None where none fits.
Fill = Callable[[Nodes, tuple[int, ...], int, int], Stage | None]


def best_stages(
    pipeline: Pipeline,
    ideals: Sequence[Nodes],
    shapes: Sequence[tuple[int, int]],
    fill: Fill,
    combine: Callable[[float, float], float] = max,
) -> tuple[float, tuple[Stage, ...]]:
    """Stages whose seconds, put together by `combine` from the last to the first, are least.

    Args:
        pipeline: to cut.
        ideals: where it may be cut.
        shapes: (devices, ways) that a stage may have.
        fill: makes a stage.
        combine: of the seconds of a stage with what those before it take; grows with both.

    Returns:
        The least value, inf where there is none, and the stages from the first to the last.
    """

    @cache
    def seconds(stage: Stage) -> float:
        return pipeline.seconds(stage)

    @cache
    def best(rest: Nodes, free: tuple[int, ...], behind: int) -> tuple[float, tuple[Stage, ...]]:
        if not rest:
            return 0.0, ()
        least: tuple[float, tuple[Stage, ...]] = (math.inf, ())
        for before in ideals:
            if not before < rest:
                continue
            for count, ways in shapes:
                if count > len(free):
                    continue
                for devices in pipeline.device_sets(free, count):
                    stage = fill(rest - before, devices, ways, behind + 1)
                    if stage is None:
                        continue
                    left = tuple(d for d in free if d not in devices)
                    value, others = best(before, left, behind + 1)
                    value = combine(seconds(stage), value)
                    if value < least[0]:
                        least = value, (*others, stage)
        return least

    return best(pipeline.all_nodes, tuple(range(len(pipeline.speeds))), 0)
