"""Automap: tree search over annotations, each leaf completed by propagation.

Paper: Schaarschmidt et al., "Automap" (arXiv:2112.02958)
Class: heuristic; the paper's learned ranker of operators is the spread of their seconds here
Complexity: one propagation a rollout
"""

from __future__ import annotations

import math
import random

from planner_searches.gspmd import by_weight, propagate
from planner_searches.problem import Choice, Problem


def search(
    problem: Problem,
    *,
    rollouts: int = 200,
    annotated: int = 4,
    explore: float = 0.5,
    seed: int = 0,
) -> Choice:
    """The best leaf that UCT comes by; no look at memory.

    Args:
        problem: of shardings.
        rollouts: leaves that are costed.
        annotated: operators that decisions are about, those with most to lose; each can also be
            left to propagation.
        explore: weight of what was tried seldom, as a share of the costs' spread.
        seed: of the random ends of rollouts.
    """
    draw = random.Random(seed)
    order = by_weight(problem)[:annotated]
    # Visits and sum of costs, by path of decisions.
    seen: dict[tuple[int, ...], tuple[int, float]] = {}
    best = worst = problem.choice(propagate(problem, {}))
    for _ in range(rollouts):
        path: tuple[int, ...] = ()
        is_new = False
        for i in order:
            # The last action leaves the operator to propagation.
            nexts = [(*path, action) for action in range(len(problem.seconds[i]) + 1)]
            fresh = [node for node in nexts if node not in seen]
            if fresh or is_new:
                path = draw.choice(fresh or nexts)
                is_new = True
                continue
            spread = (worst.cost - best.cost) or 1.0
            total = math.log(sum(seen[node][0] for node in nexts))
            path = min(
                nexts,
                key=lambda node: (
                    seen[node][1] / seen[node][0]
                    - explore * spread * math.sqrt(total / seen[node][0])
                ),
            )
        asked = {
            i: action
            for i, action in zip(order, path, strict=True)
            if action < len(problem.seconds[i])
        }
        found = problem.choice(propagate(problem, asked))
        best = min(best, found, key=lambda choice: choice.cost)
        worst = max(worst, found, key=lambda choice: choice.cost)
        for end in range(1, len(path) + 1):
            visits, costs = seen.get(path[:end], (0, 0.0))
            seen[path[:end]] = visits + 1, costs + found.cost
    return best
