"""OptCNN: operators are eliminated until few are left, with what they cost kept in edges.

Paper: Jia et al., "Exploring Hidden Dimensions in Parallelizing CNNs" (arXiv:1802.04924)
Class: exact where seconds add up and memory does not bind
Complexity: n o^3 of graphs that reduce (chains, series-parallel); o^k more for k operators left
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from planner_searches.problem import Choice, Problem

# Seconds, bytes, and the options (operator, option) that they are of.
Point = tuple[float, float, tuple[tuple[int, int], ...]]
Keep = Callable[[Iterable[Point]], list[Point]]


def _sums(*parts: list[Point]) -> Iterable[Point]:
    for points in itertools.product(*parts):
        chosen = tuple(pair for point in points for pair in point[2])
        yield sum(p[0] for p in points), sum(p[1] for p in points), chosen


def eliminate(problem: Problem, keep: Keep) -> list[Point]:
    """Points of the whole graph, where `keep` says which points of a part can be of the best.

    An operator with one neighbour goes into that one's own table, one with two into the edge
    between these, beside the edge that is there. Those that are left are enumerated.
    """
    own: dict[int, list[list[Point]]] = {
        i: [[(s, problem.memory[i][o], ((i, o),))] for o, s in enumerate(problem.seconds[i])]
        for i in problem.nodes
    }
    edges: dict[int, dict[int, list[list[list[Point]]]]] = {
        i: {j: [[[(s, 0.0, ())] for s in row] for row in t] for j, t in problem.neighbours[i]}
        for i in problem.nodes
    }
    while len(own) > 1:
        k = min(own, key=lambda i: (len(edges[i]), i))
        around = edges[k]
        if len(around) > 2:
            break
        # An operator without edges joins any other one's table.
        ends = [*around] or [next(i for i in own if i != k)]
        away = [around.get(end, [[[(0.0, 0.0, ())]] * len(own[end])] * len(own[k])) for end in ends]
        if len(ends) == 1:
            a = ends[0]
            own[a] = [
                keep(
                    p
                    for o, points in enumerate(own[k])
                    for p in _sums(own[a][x], points, away[0][o][x])
                )
                for x in range(len(own[a]))
            ]
        else:
            a, b = ends
            there = edges[a].get(b, [[[(0.0, 0.0, ())]] * len(own[b])] * len(own[a]))
            table = [
                [
                    keep(
                        p
                        for o, points in enumerate(own[k])
                        for p in _sums(there[x][y], points, away[0][o][x], away[1][o][y])
                    )
                    for y in range(len(own[b]))
                ]
                for x in range(len(own[a]))
            ]
            edges[a][b] = table
            edges[b][a] = [list(column) for column in zip(*table, strict=True)]
        for end in around:
            del edges[end][k]
        del own[k], edges[k]
    left = sorted(own)
    found: list[Point] = []
    for options in itertools.product(*(range(len(own[i])) for i in left)):
        at = dict(zip(left, options, strict=True))
        tables = [edges[i][j][at[i]][at[j]] for i in left for j in edges[i] if i < j]
        found = keep([*found, *_sums(*(own[i][at[i]] for i in left), *tables)])
    return found


def search(problem: Problem) -> Choice:
    """The options of least seconds, with no look at memory."""
    (best,) = eliminate(problem, lambda points: [min(points)])
    return problem.choice([option for _, option in sorted(best[2])])
