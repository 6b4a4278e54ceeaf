"""ToFu: devices are halved again and again, and each time every operator gets its best split.

Paper: Wang, Huang and Li, "Supporting Very Large Models using Automatic Dataflow Graph
Partitioning" (arXiv:1807.08887)
Class: approximate: each halving is exact, none is taken back
Complexity: n a^3 log2(devices) for a axes, in the place of n a^(3 log2(devices))
"""

from __future__ import annotations

from collections.abc import Callable

from planner_searches import optcnn
from planner_searches.problem import Choice, Problem


def by_halves(problem: Problem, solve: Callable[[Problem], Choice], axes: int) -> Choice:
    """Solve one halving after the other, the later ones taken to be as the one in hand.

    Args:
        problem: option o is the axis of each halving, the first in the highest digit of o in
            base `axes`.
        solve: search of one halving.
        axes: along which an operator can be split.

    Raises:
        ValueError: operators have unlike numbers of options, or no power of `axes`.
    """
    size = problem.num_options
    levels = next((k for k in range(1, 65) if axes**k == size), 0)
    if not levels:
        raise ValueError(f"search: expected options to be a power of {axes}, got {size}")
    chosen = [0] * len(problem.seconds)
    for level in reversed(range(levels)):
        # A digit of ones at this level and at all that follow.
        step = sum(axes**k for k in range(level + 1))
        allowed = [[base + axis * step for axis in range(axes)] for base in chosen]
        found = solve(
            Problem(
                tuple(tuple(problem.seconds[i][o] for o in allowed[i]) for i in problem.nodes),
                {
                    (i, j): tuple(tuple(table[a][b] for b in allowed[j]) for a in allowed[i])
                    for (i, j), table in problem.edges.items()
                },
                tuple(tuple(problem.memory[i][o] for o in allowed[i]) for i in problem.nodes),
            )
        )
        chosen = [c + axis * axes**level for c, axis in zip(chosen, found.options, strict=True)]
    return problem.choice(chosen)


def search(problem: Problem, axes: int = 2) -> Choice:
    """Halvings, each by elimination; no look at memory."""
    return by_halves(problem, optcnn.search, axes)
