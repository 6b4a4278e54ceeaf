"""Chooses, of the cases of a test with many parameters, few that still hold every pair of values.

Most faults need one value or two that meet: a dtype at a size, a format on a device. Stacked
`parametrize` marks state the whole product; `covering` keeps a part of it.
"""

import itertools
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

# Every combination, of what is chosen here and of the parameters of pytest.
FULL = os.environ.get("MOE_EXT_FULL") == "1"


def pairs(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations of the parameters' values that hold every pair, for ranks to loop over."""
    columns = [tuple(values) for values in parameters]
    rows = list(itertools.product(*columns))
    places = list(itertools.product(*(range(len(column)) for column in columns)))
    return rows if FULL else [rows[i] for i in covering(places)]


def pairs_on(num_ranks: int, counts: Iterable[int], *parameters: Iterable[Any]) -> list[Any]:
    """Cases of so many ranks, one of `counts`: the first of the parameters of `pairs`."""
    return [row for count, *row in pairs(counts, *parameters) if count == num_ranks]


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices of rows, ascending, that hold every pair of values that any row holds.

    Greedy and deterministic: the row with the most pairs that no row before it held, and of several
    the first. Rows of fewer than three columns are all kept.

    Args:
        rows: the values of each case, one column for each parameter.
    """
    columns: list[Sequence[Hashable]] = []
    for column in zip(*rows, strict=True):
        # Values of one `parametrize` mark come together: the first that tells the others stands
        # for them.
        if not any(_tells(other, column) for other in columns):
            columns = [other for other in columns if not _tells(column, other)] + [column]
    if len(columns) < 3:
        return list(range(len(rows)))
    numbers = range(len(columns))
    pairs = [
        {(i, j, row[i], row[j]) for i, j in itertools.combinations(numbers, 2)}
        for row in zip(*columns, strict=True)
    ]
    left, kept = set().union(*pairs), []
    gain = [len(of_row) for of_row in pairs]
    while left:
        best = max(range(len(pairs)), key=gain.__getitem__)
        new = len(pairs[best] & left)
        if new < gain[best]:
            # Gains only fall, so an old one is a bound: look again with the true one.
            gain[best] = new
            continue
        kept.append(best)
        left -= pairs[best]
    return sorted(kept)


def _tells(column: Sequence[Hashable], other: Sequence[Hashable]) -> bool:
    """Every value of a column stands beside one value of the other."""
    return len(set(zip(column, other, strict=True))) == len(set(column))
