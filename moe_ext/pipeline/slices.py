"""Plans the lengths of the slices in which a sequence goes through a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable

from moe_ext._checks import check_rule, check_sizes


def plan_slices(
    length: int, num_ranks: int, cost: Callable[[int, int], float], *, multiple: int = 1
) -> list[int]:
    """Cut a sequence into slices so that it takes the least time through a pipeline.

    A slice attends to all slices before it, so that later slices of the same length cost more. The
    time is the sum of the slices' costs, plus (num_ranks - 1) times the largest of them. For each
    possible largest cost, a dynamic program finds the smallest sum.

    Args:
        length: length of the sequence.
        num_ranks: number of ranks of the pipeline, with a stage each.
        cost: function from the length of a slice, and the length of all slices before it, to the
            cost of the slice in a stage. It may return measured times.
        multiple: every slice is a multiple of this. The number of calls of `cost` grows with
            (length / multiple)^2.

    Returns:
        The lengths, in order.

    Raises:
        ValueError: a number is out of range, or `length` is no multiple of `multiple`.

    Reference:
        TeraPipe (arXiv:2102.07988), section 3.3.
    """
    check_sizes("plan_slices", length=length, num_ranks=num_ranks, multiple=multiple)
    rule, fits = f"a multiple of {multiple}", length % multiple == 0
    check_rule("plan_slices", "length", length, rule, fits)
    count = length // multiple
    # `costs[end][start]` is the cost of the slice from `start` to `end`, in units of `multiple`.
    costs = [
        [cost((end - start) * multiple, start * multiple) for start in range(end)]
        for end in range(count + 1)
    ]
    best, lengths = math.inf, [length]
    for largest in sorted({each for row in costs for each in row}):
        if (num_ranks - 1) * largest >= best:
            break
        total, parts = _smallest_sum(costs, largest)
        if total + (num_ranks - 1) * largest < best:
            best, lengths = total + (num_ranks - 1) * largest, [each * multiple for each in parts]
    return lengths


def _smallest_sum(costs: list[list[float]], largest: float) -> tuple[float, list[int]]:
    """Return the smallest sum of costs of slices that cost `largest` at most, and their lengths."""
    # For each end, the smallest sum of slices up to that end, and their lengths.
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(costs)):
        ways = [
            (best[start][0] + each, start)
            for start, each in enumerate(costs[end])
            if each <= largest
        ]
        total, start = min(ways, default=(math.inf, 0))
        best.append((total, [*best[start][1], end - start]))
    return best[-1]
