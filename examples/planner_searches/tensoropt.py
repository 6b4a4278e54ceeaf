"""TensorOpt: OptCNN's elimination, with all trade-offs of seconds and bytes kept.

Paper: Cai et al., "TensorOpt" (arXiv:2004.10856)
Class: exact where seconds add up, for every bound on memory at once
Complexity: n o^3 f^2 for frontiers of f points, which can be as many as all choices
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from planner_searches.optcnn import Point, eliminate
from planner_searches.problem import Choice, Problem


def keep_frontier(points: Iterable[Point]) -> list[Point]:
    """The Pareto frontier of time and memory, ascending in seconds."""
    kept: list[Point] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def frontier(problem: Problem) -> list[Choice]:
    """All choices than which no other is both quicker and smaller, whatever the capacity."""
    return [
        Choice(tuple(option for _, option in sorted(chosen)), seconds)
        for seconds, _, chosen in eliminate(problem, keep_frontier)
    ]


def search(problem: Problem) -> Choice:
    """The quickest of the frontier that fits."""
    for found in frontier(problem):
        if problem.fits(found.options):
            return problem.choice(found.options)
    return Choice((), math.inf)
