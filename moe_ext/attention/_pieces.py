"""A block cut into pieces of which each is whole, causal along its diagonal, or for our kernel.

Shapes: L queries and M keys of a block, by their local order.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_ext.attention.masks import Mask

Runs = tuple[range, ...]
# Beyond so many pairs of runs a block is left whole: to tell them apart would take longer.
_MOST_PAIRS = 4096


@dataclass(frozen=True)
class Piece:
    """Rows and columns of a block, and what its mask makes of them.

    Attributes:
        rows: (first, past the last) of the queries.
        cols: (first, past the last) of the keys.
        kind: "full", every query sees every key; "causal", as many queries as keys and the i-th
            sees the first i + 1; "masked", anything else.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    kind: Literal["full", "causal", "masked"]

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that are computed, seen or not."""
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])


@dataclass(frozen=True)
class _Run:
    """Ascending positions of one document that lie side by side in the local order.

    `step` is None where they are not evenly spaced.
    """

    begin: int
    end: int
    first: int
    last: int
    step: int | None
    document: int


def runs_of(positions: Tensor) -> Runs:
    """Evenly spaced ranges that make up positions in their order.

    NOTE: device-to-host sync.
    """
    values = positions.cpu()
    steps, counts = torch.unique_consecutive(values.diff(), return_counts=True)
    runs: list[range] = []
    begin = end = 0  # of the positions that are in no run yet, and past the last one looked at
    at = values.tolist()
    for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
        end += count
        if step == 1 or (step > 1 and count > 1):
            runs.append(range(at[begin], at[end] + 1, step))
            begin = end + 1
        else:
            runs += [range(position, position + 1) for position in at[begin:end]]
            begin = max(begin, end)
    return (*runs, *(range(position, position + 1) for position in at[begin:]))


def _cut(runs: Runs, offsets: tuple[int, ...] | None) -> list[_Run]:
    """Runs that end with their documents."""
    cut, local = [], 0
    for run in runs:
        while run:
            document, length = 0, len(run)
            if offsets is not None:
                document = bisect.bisect_right(offsets, run.start)
                length = len(range(run.start, min(run.stop, offsets[document]), run.step))
            step = run.step if length > 1 else None
            part = run[:length]
            cut.append(_Run(local, local + length, part[0], part[-1], step, document))
            run, local = run[length:], local + length
    return cut


def _joined(runs: list[_Run]) -> list[_Run]:
    """Neighbours of one document in ascending order as one run."""
    joined: list[_Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.document == run.document and last.last < run.first:
            joined[-1] = _Run(last.begin, run.end, last.first, run.last, None, run.document)
        else:
            joined.append(run)
    return joined


def _visible(q: _Run, k: _Run, left: int, right: int) -> str:
    if q.document != k.document:
        return "empty"
    if (right >= 0 and k.first > q.last + right) or (left >= 0 and k.last < q.first - left):
        return "empty"
    before = left < 0 or k.first >= q.last - left
    if before and (right < 0 or k.last <= q.first + right):
        return "full"
    return "right" if before else "masked"


def _aligned(q: _Run, k: _Run, right: int) -> Iterator[Piece]:
    """Pieces of two evenly spaced runs of which the keys' is cut at the right of each query."""
    step = q.step or k.step or 1
    # The i-th query sees the first i + shift + 1 keys.
    shift = (q.first + right - k.first) // step
    row, col = q.begin + max(0, -shift), k.begin + max(0, shift)
    if col > k.begin:
        yield Piece((row, q.end), (k.begin, col), "full")
    square = min(q.end - row, k.end - col)
    yield Piece((row, row + square), (col, col + square), "causal")
    if row + square < q.end:
        yield Piece((row + square, q.end), (col, k.end), "full")


def _pair(q: _Run, k: _Run, left: int, right: int) -> Iterator[Piece]:
    kind = _visible(q, k, left, right)
    if kind == "full":
        yield Piece((q.begin, q.end), (k.begin, k.end), "full")
    elif kind == "right" and _evenly(q, k):
        yield from _aligned(q, k, right)
    elif kind != "empty":
        yield Piece((q.begin, q.end), (k.begin, k.end), "masked")


def _evenly(q: _Run, k: _Run) -> bool:
    """Whether both have one spacing; a single position has any."""
    steps = [run.step for run in (q, k) if run.end - run.begin > 1]
    return None not in steps and len(set(steps)) <= 1


def _merge_full(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Full pieces side by side as one, first along the keys and then along the queries."""
    merged: list[Piece] = []
    for rows_of_piece in (False, True):
        found: dict[tuple[object, ...], int] = {}
        merged = []
        for piece in pieces:
            first, rest = (piece.rows, piece.cols) if rows_of_piece else (piece.cols, piece.rows)
            at = found.pop((rest, first[0]), None) if piece.kind == "full" else None
            if at is None:
                at = len(merged)
                merged.append(piece)
            else:
                start = merged[at].rows if rows_of_piece else merged[at].cols
                both = (start[0], first[1])
                pair = (both, rest) if rows_of_piece else (rest, both)
                merged[at] = Piece(*pair, "full")
            if piece.kind == "full":
                found[rest, first[1]] = at
        pieces = merged
    return tuple(merged)


@functools.lru_cache(maxsize=256)
def cut_block(q_runs: Runs, k_runs: Runs, mask: Mask) -> tuple[Piece, ...]:
    """Pieces that hold every pair of query and key that is seen, each pair once.

    No piece is without rows or columns, and in a full or causal one every query sees some key.

    Args:
        q_runs: positions of the queries, in their local order.
        k_runs: the same of the keys.
        mask: of the whole sequence.
    """
    right = 0 if mask.is_causal else mask.right
    queries, keys = _cut(q_runs, mask.cu_seqlens), _cut(k_runs, mask.cu_seqlens)
    if q_runs == k_runs and right == 0 and mask.left < 0:
        runs = _joined(queries)
        if all(a.document != b.document for a, b in zip(runs, runs[1:], strict=False)):
            queries = keys = runs
    if len(queries) * len(keys) > _MOST_PAIRS:
        return (Piece((0, queries[-1].end), (0, keys[-1].end), "masked"),)
    pieces: list[Piece] = []
    for q in queries:
        for k in keys:
            if q == k and right == 0 and mask.left < 0:
                pieces.append(Piece((q.begin, q.end), (k.begin, k.end), "causal"))
            else:
                pieces += _pair(q, k, mask.left, right)
    return _merge_full(pieces)
