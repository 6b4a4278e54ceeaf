"""Masks: the keys that a query may see, by global positions alone, and their way round a ring.

Shapes: S sequence, P ranks of the group.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Offsets of packed documents: one row for the whole batch, or one for each row of it.
Offsets = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Mask:
    """The part of an attention mask that follows from positions.

    Attributes:
        is_causal: no key behind the query.
        left: keys before the query that it sees, -1 without limit.
        right: keys after the query that it sees, -1 without limit.
        cu_seqlens: offsets of packed documents, from 0 to S; None for one document.
    """

    is_causal: bool = False
    left: int = -1
    right: int = -1
    cu_seqlens: tuple[int, ...] | None = None

    def visible(self, position: int, seq_len: int) -> tuple[int, int]:
        """(first, past the last) of the keys that the query at `position` sees.

        Both bounds grow with the position, and the position itself is inside.
        """
        first, stop = 0, seq_len
        if self.cu_seqlens is not None:
            document = bisect.bisect_right(self.cu_seqlens, position)
            first, stop = self.cu_seqlens[document - 1], self.cu_seqlens[document]
        if self.left >= 0:
            first = max(first, position - self.left)
        right = 0 if self.is_causal else self.right
        if right >= 0:
            stop = min(stop, position + right + 1)
        return first, stop

    def areas(self, seq_len: int) -> Tensor:
        """`[S]` int64, the number of keys that each query sees."""
        positions_S = torch.arange(seq_len)
        first_S, stop_S = torch.zeros_like(positions_S), torch.full_like(positions_S, seq_len)
        if self.cu_seqlens is not None:
            offsets = torch.tensor(self.cu_seqlens)
            documents_S = torch.bucketize(positions_S, offsets, right=True)
            first_S, stop_S = offsets[documents_S - 1], offsets[documents_S]
        if self.left >= 0:
            first_S = torch.maximum(first_S, positions_S - self.left)
        right = 0 if self.is_causal else self.right
        if right >= 0:
            stop_S = torch.minimum(stop_S, positions_S + right + 1)
        return stop_S - first_S

    def seen_keys(self, queries: Iterable[range], seq_len: int) -> list[tuple[int, int]]:
        """Disjoint ascending (first, past the last) that hold every key that some query sees.

        Exact for ranges of step 1; for others the keys between may be more than are seen.
        """
        bounds = sorted(
            (self.visible(part[0], seq_len)[0], self.visible(part[-1], seq_len)[1])
            for part in queries
            if part
        )
        merged: list[tuple[int, int]] = []
        for first, stop in bounds:
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((first, stop))
        return merged


def _any_inside(keys: range, intervals: Sequence[tuple[int, int]]) -> bool:
    if not keys or not intervals:
        return False
    if keys.step == 1:
        i = bisect.bisect_right(intervals, keys.start, key=lambda interval: interval[1])
        return i < len(intervals) and intervals[i][0] < keys.stop
    for first, stop in intervals:
        skipped = max(0, -((keys.start - first) // keys.step))
        if skipped < len(keys) and keys[skipped] < stop:
            return True
    return False


def integers(values: Iterable[Any]) -> tuple[int, ...] | None:
    """None where one of them is no integer."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        return None


def check_window(window: object, operation: str) -> tuple[int, int]:
    """(left, right) of a window argument; ValueError unless None or two integers from -1 on."""
    if window is None:
        return -1, -1
    sides = integers(window) if isinstance(window, tuple | list) else None
    if sides is None or len(sides) != 2:
        raise ValueError(
            f"{operation}: expected window to be None or (left, right), integers, got {window}"
        )
    left, right = sides
    if min(left, right) < -1:
        raise ValueError(
            f"{operation}: expected both sides of window to be -1 (no limit) or more, got {window}"
        )
    return left, right


def check_cu_seqlens(cu_seqlens: Offsets | None, operation: str) -> tuple[int, ...] | None:
    """Offsets of documents as integers; ValueError unless they start at 0 and never fall.

    NOTE: device-to-host sync for a tensor on an accelerator.
    """
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"{operation}: expected cu_seqlens to be a row of integers, got "
                f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
            )
        cu_seqlens = cu_seqlens.tolist()
    offsets = integers(cu_seqlens)
    if offsets is None:
        raise ValueError(
            f"{operation}: expected cu_seqlens to be a row of integers, got {cu_seqlens}"
        )
    if not offsets or offsets[0] != 0 or list(offsets) != sorted(offsets):
        raise ValueError(
            f"{operation}: expected cu_seqlens to start at 0 and be sorted, got {list(offsets)}"
        )
    return offsets


def rows_of_offsets(cu_seqlens: object, operation: str) -> tuple[tuple[int, ...], ...] | None:
    """Offsets of each row of a batch; None where one row of offsets stands for all of them.

    ValueError unless every row starts at 0, never falls, and ends where the others end.
    """
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 2:
            return None
    elif not isinstance(cu_seqlens, Sequence) or not any(
        isinstance(row, Sequence | Tensor) and not (isinstance(row, Tensor) and row.dim() == 0)
        for row in cu_seqlens
    ):
        return None
    rows = [check_cu_seqlens(row, operation) for row in cu_seqlens]
    found = tuple(row for row in rows if row is not None)
    ends = sorted({row[-1] for row in found})
    if len(ends) != 1 or len(found) != len(rows):
        raise ValueError(
            f"{operation}: expected all rows of cu_seqlens to end at the length of the whole "
            f"sequence, got {ends}"
        )
    return found


def check_end(cu_seqlens: tuple[int, ...] | None, seq_len: int, operation: str) -> None:
    """ValueError unless the documents end with the sequence."""
    if cu_seqlens is not None and cu_seqlens[-1] != seq_len:
        raise ValueError(
            f"{operation}: expected cu_seqlens to end at the length of the whole sequence, "
            f"{seq_len}, got {cu_seqlens[-1]}"
        )


@dataclass(frozen=True)
class Route:
    """Ranks that keys have to go to, which every rank computes by itself.

    In step s of the forward pass rank r holds the keys of rank (r - s) mod P; in step s = 1 .. P of
    the backward pass, those of rank (r + s) mod P.

    Attributes:
        needs: `needs[r][c]`: some query of rank r sees some key of rank c.
        reach: `reach[c]`: hops that the keys of rank c travel to the last rank that needs them.
    """

    needs: tuple[tuple[bool, ...], ...]
    reach: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """True if the keys of every rank visit all of the ring."""
        return len(self.reach) > 1 and min(self.reach) == len(self.reach) - 1


@functools.lru_cache(maxsize=256)
def plan_route(shards: tuple[tuple[range, ...], ...], mask: Mask, seq_len: int) -> Route:
    """The route of the keys of every rank, for shards given as ranges of global positions."""
    num_ranks = len(shards)
    needs = []
    for queries in shards:
        seen = mask.seen_keys(queries, seq_len)
        needs.append(tuple(any(_any_inside(part, seen) for part in keys) for keys in shards))
    reach = tuple(
        max((s for s in range(num_ranks) if needs[(c + s) % num_ranks][c]), default=0)
        for c in range(num_ranks)
    )
    return Route(tuple(needs), reach)
