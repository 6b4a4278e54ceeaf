"""Packing: documents that share rows, with even attention.

Shapes: R rows, S positions of a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_ext.attention.checks import requires
from moe_ext.attention.masks import integers, listed, make_mask

OPERATION = "pack_documents"
_require = requires(OPERATION)
# Longer documents of padding would cost as much as real ones.
_PADDING = 128
Rows = list[list[int]]


@dataclass(frozen=True)
class PackedDocuments:
    """Rows of whole documents, the costliest row first.

    Attributes:
        documents: for each row the indices of its documents, in their order in the row.
        cu_seqlens: for each row the offsets of its documents and, up to S, of padding, in documents
            of at most 128 positions; any of these rows are a `cu_seqlens` of `ring_attention`.
        areas: for each row the pairs of query and key of its documents.
    """

    documents: tuple[tuple[int, ...], ...]
    cu_seqlens: tuple[tuple[int, ...], ...]
    areas: tuple[int, ...]


def pack_documents(
    lengths: Tensor | Sequence[int],
    seq_len: int,
    *,
    num_rows: int | None = None,
    num_ranks: int = 1,
    is_causal: bool = True,
    window: tuple[int, int] | None = None,
    prefix_len: int | Tensor | Sequence[int] | None = None,
) -> PackedDocuments:
    """Assigns documents to rows of one length such that the costliest row costs little.

    The cost of a row is that of its attention: the pairs of query and key that see each other. All
    other work goes by positions, of which every row has S. The result follows from the arguments
    alone, so ranks that give the same arguments have the same rows.

    Of several assignments it takes the one whose costliest row costs least, then the most even one:
    by least cost, by first fit and by best fit, all in order of falling length. It is never worse
    than first fit into as many rows. With T tokens of area A, R rows and R > k = T // (S - longest
    + 1), no row costs more than A / (R - k) and the costliest document.

    Args:
        lengths: of the documents, from 0 to `seq_len`. Cut longer ones before.
        seq_len: S, the positions of a whole sequence.
        num_rows: R; None for the fewest that first or best fit needs, rounded up to a multiple of
            `num_ranks`.
        num_ranks: ranks, or groups that share sequences, which run a row each at the same time. R
            is a multiple of it; rows i * num_ranks to (i + 1) * num_ranks - 1 run together, and
            are neighbours in the order of cost.
        is_causal: of the attention: a query sees no key after it.
        window: (left, right) of the attention, see `ring_attention`.
        prefix_len: positions at the start of each document that all of it sees, see
            `ring_attention`: one number for all documents, or one for each.

    Raises:
        ValueError: an argument out of its range, or too few rows.
    """
    values = listed(lengths)
    sizes = integers(values) if isinstance(values, Sequence) else None
    if sizes is None:
        raise ValueError(f"{OPERATION}: expected lengths to be a row of integers, got {lengths}")
    _require(seq_len >= 1, "seq_len", "at least 1", seq_len)
    for i, size in enumerate(sizes):
        _require(0 <= size <= seq_len, f"lengths[{i}]", f"from 0 to seq_len, {seq_len}", size)
    _require(num_ranks >= 1, "num_ranks", "at least 1", num_ranks)
    offsets = tuple(itertools.accumulate(sizes, initial=0))
    mask = make_mask(OPERATION, is_causal, window, offsets, prefix_len)
    (lens,) = mask.prefix_lens or ((0,) * len(sizes),)
    costs = [
        _area(size, mask.left, 0 if is_causal else mask.right) + math.comb(min(size, prefix), 2)
        for size, prefix in zip(sizes, lens, strict=True)
    ]
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))

    def deal(by: str, count: int) -> Rows | None:
        """Each document to the first row by index, cost or room that has room; None if none has."""
        rows: Rows = [[] for _ in range(count)]
        room, spent = [seq_len] * count, [0] * count
        keys = {"index": range(count), "cost": spent, "room": room}[by]
        for i in order:
            fitting = (row for row in range(count) if room[row] >= sizes[i])
            row = min(fitting, key=keys.__getitem__, default=None)
            if row is None:
                return None
            rows[row].append(i)
            room[row] -= sizes[i]
            spent[row] += costs[i]
        return rows

    def cost(row: list[int]) -> int:
        return sum(costs[i] for i in row)

    def unevenness(rows: Rows) -> tuple[int, int]:
        spent = [cost(row) for row in rows]
        return max(spent, default=0), sum(x * x for x in spent)

    # Both open a row for what no other has room for, so that any two hold more than S together.
    enough = 2 * sum(sizes) // seq_len + 1
    fewest = min(sum(map(bool, deal(by, enough) or [])) for by in ("index", "room"))
    count = -(-fewest // num_ranks) * num_ranks if num_rows is None else num_rows
    rule = f"a multiple of num_ranks, {num_ranks}, and at least {fewest}"
    _require(count >= fewest and count % num_ranks == 0, "num_rows", rule, count)
    found = [deal(by, count) for by in ("cost", "index", "room")]
    best = min((rows for rows in found if rows is not None), key=unevenness)
    packed = sorted((sorted(row) for row in best), key=lambda row: (-cost(row), row))
    return PackedDocuments(
        tuple(map(tuple, packed)),
        tuple(_offsets([sizes[i] for i in row], seq_len) for row in packed),
        tuple(map(cost, packed)),
    )


def _area(length: int, left: int, right: int) -> int:
    """`Mask.areas` of one document, summed up: its square less a triangle at either side.

    A prefix gives the triangle of its own pairs back.
    """
    cut = [max(length - 1 - side, 0) for side in (left, right) if side >= 0]
    return length * length - sum(n * (n + 1) // 2 for n in cut)


def _offsets(sizes: list[int], seq_len: int) -> tuple[int, ...]:
    offsets = list(itertools.accumulate(sizes, initial=0))
    return (*offsets, *range(offsets[-1] + _PADDING, seq_len, _PADDING), seq_len)
