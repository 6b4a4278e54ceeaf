"""Double recursion: devices are halved, and within that operators choose one after the other.

Paper: Wang et al., "Efficient and Systematic Partitioning of Large and Deep Neural Networks for
Parallelization" (Euro-Par 2021); MindSpore's recursive programming
Class: heuristic
Complexity: n a log2(devices) for a axes, and a sort
"""

from __future__ import annotations

from planner_searches.gspmd import by_weight
from planner_searches.problem import Choice, Problem
from planner_searches.tofu import by_halves


def _greedy(problem: Problem) -> Choice:
    """The operator with most to lose first; each with the least cost to those before it."""
    chosen: dict[int, int] = {}
    for i in by_weight(problem):
        costs = [
            own + sum(table[o][chosen[j]] for j, table in problem.neighbours[i] if j in chosen)
            for o, own in enumerate(problem.seconds[i])
        ]
        chosen[i] = costs.index(min(costs))
    return problem.choice([chosen[i] for i in problem.nodes])


def search(problem: Problem, axes: int = 2) -> Choice:
    """Halvings, each by a greedy choice; no look at memory."""
    return by_halves(problem, _greedy, axes)
