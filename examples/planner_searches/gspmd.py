"""GSPMD: a few operators are annotated, and their sharding spreads to the others.

Paper: Xu et al., "GSPMD" (arXiv:2105.04663)
Class: heuristic: the programmer chooses; here the operator with most to lose is annotated
Complexity: n e o
"""

from __future__ import annotations

from collections.abc import Mapping

from planner_searches.problem import Choice, Problem


def by_weight(problem: Problem) -> list[int]:
    """Operators by what there is to lose with them, most first."""
    return sorted(problem.nodes, key=lambda i: min(problem.seconds[i]) - max(problem.seconds[i]))


def propagate(problem: Problem, annotations: Mapping[int, int]) -> list[int]:
    """Options of all operators from those of some.

    One at a time, where least is lost between it and those that have theirs (what loses nothing
    goes first), takes the option that loses least, and of equal ones the quickest. What no
    annotation reaches takes its quickest option.
    """
    chosen = dict(annotations)
    while len(chosen) < len(problem.seconds):
        ways = [
            (
                not any(j in chosen for j, _ in problem.neighbours[i]),
                sum(t[o][chosen[j]] for j, t in problem.neighbours[i] if j in chosen),
                problem.seconds[i][o],
                i,
                o,
            )
            for i in problem.nodes
            if i not in chosen
            for o in range(len(problem.seconds[i]))
        ]
        *_, i, option = min(ways)
        chosen[i] = option
    return [chosen[i] for i in problem.nodes]


def search(problem: Problem, annotations: Mapping[int, int] | None = None) -> Choice:
    """Annotations, spread; no look at memory.

    Args:
        problem: of shardings.
        annotations: options of some operators; without them, the quickest one of that operator
            whose slowest is slower by most.
    """
    if annotations is None:
        i = by_weight(problem)[0]
        annotations = {i: problem.seconds[i].index(min(problem.seconds[i]))}
    return problem.choice(propagate(problem, annotations))
