"""FlexFlow: a random walk over configurations that takes worse ones now and then.

Paper: Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks"
(arXiv:1807.05358)
Class: heuristic: finds the best with certainty after infinite steps alone
Complexity: one cost a step
"""

from __future__ import annotations

import math
import random

from planner_searches.problem import Choice, Problem


def search(problem: Problem, *, steps: int = 1000, beta: float = 50.0, seed: int = 0) -> Choice:
    """The best that Metropolis' walk comes by, begun at each operator's smallest option.

    Args:
        problem: placed or not.
        steps: proposals of one operator's option, taken with exp(-beta * share that it is worse).
        beta: reluctance to take worse ones.
        seed: of the proposals.
    """
    draw = random.Random(seed)
    options = [min(range(len(row)), key=row.__getitem__) for row in problem.memory]
    now = problem.cost(options)
    best = Choice(tuple(options), now)
    for _ in range(steps):
        i = draw.randrange(len(options))
        before, options[i] = options[i], draw.randrange(len(problem.seconds[i]))
        cost = problem.cost(options)
        worse = 0.0 if cost <= now else (cost - now) / now
        if draw.random() < math.exp(-beta * worse):
            now = cost
            if now < best.cost:
                best = Choice(tuple(options), now)
        else:
            options[i] = before
    return best
