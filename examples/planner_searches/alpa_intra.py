"""Alpa within a stage: one option an operator, the least sum, within memory.

Paper: Zheng et al., "Alpa" (arXiv:2201.12023), section 4: an integer linear program
Class: exact where seconds add up, memory included; by branch and bound, without a solver
Complexity: exponential in the worst case; the bound prunes
"""

from __future__ import annotations

import math

from planner_searches.problem import Choice, Problem


def search(problem: Problem) -> Choice:
    """The options of least seconds that fit."""
    n = len(problem.seconds)
    # The least that operators from i on can add: their own, and edges by the consumer's option.
    rests, small = [0.0] * (n + 1), [0.0] * (n + 1)
    for i in reversed(range(n)):
        rests[i] = rests[i + 1] + min(
            own + sum(min(row[o] for row in table) for _, table in problem.inputs[i])
            for o, own in enumerate(problem.seconds[i])
        )
        small[i] = small[i + 1] + min(problem.memory[i])
    best = Choice((), math.inf)

    def branch(chosen: tuple[int, ...], seconds: float, memory: float) -> None:
        nonlocal best
        i = len(chosen)
        if i == n:
            best = problem.choice(chosen)
            return
        steps = [
            (seconds + own + sum(table[chosen[j]][o] for j, table in problem.inputs[i]), o)
            for o, own in enumerate(problem.seconds[i])
        ]
        for after, o in sorted(steps):
            held = memory + problem.memory[i][o]
            if after + rests[i + 1] < best.cost and held + small[i + 1] <= problem.capacity:
                branch((*chosen, o), after, held)

    branch((), 0.0, 0.0)
    return best
