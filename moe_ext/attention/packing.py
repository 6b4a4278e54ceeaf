"""Packing: documents are placed in rows such that all rows cost about the same attention.

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
# Padding at the end of a row is cut into documents of this length. As a single document its
# attention would cost as much as that of real tokens.
_PADDING = 128
Rows = list[list[int]]


@dataclass(frozen=True)
class PackedDocuments:
    """Rows of whole documents, the costliest row first.

    Attributes:
        documents: for each row the indices of its documents, in the order of the row.
        cu_seqlens: for each row the offsets of its documents, and of padding up to S, which is cut
            into documents of at most 128 positions. A batch of these rows can be passed as
            `cu_seqlens` to `ring_attention`.
        areas: for each row the number of (query, key) pairs of its documents.
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
    """Assign documents to rows of one length such that the costliest row costs little.

    The cost of a row is that of its attention: the number of (query, key) pairs that the mask
    leaves. All other work depends on the number of positions, which is S in every row. The result
    is a function of the arguments, so that ranks with equal arguments get equal rows.

    Three assignments are compared, all in order of falling length: to the row of least cost, by
    first fit, and by best fit. The assignment whose costliest row costs least is taken, among
    equals the most even one. It is never worse than first fit into the same number of rows. With T
    tokens of area A, R rows and R > k = T // (S - longest + 1), no row costs more than A / (R - k)
    plus the cost of the costliest document.

    Args:
        lengths: lengths of the documents, from 0 to `seq_len`. Cut longer documents before.
        seq_len: S, the positions of a whole sequence.
        num_rows: R; None for the smaller number of rows that first fit or best fit needs, rounded
            up to a multiple of `num_ranks`.
        num_ranks: number of ranks, or of groups that share sequences, that run one row each at the
            same time. R has to be a multiple of it. Rows i * num_ranks to (i + 1) * num_ranks - 1
            run together, and are neighbours in the order of cost.
        is_causal: as in the attention: if True, a query sees no key after it.
        window: (left, right) of the attention, see `ring_attention`.
        prefix_len: number of positions at the start of a document that all its queries see, see
            `ring_attention`. One number for all documents, or one for each.

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
        """Assign each document to the row with room that is least by index, cost or room.

        Return None if a document finds no row with room.
        """
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

    # First fit and best fit open a row only for a document that no open row has room for. Any two
    # rows hold more than S together then, so that `enough` rows are always enough.
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
    """Sum of `Mask.areas` over one document: its square less a triangle at each limited side.

    A prefix is left out; the caller adds the pairs of the triangle that a prefix makes visible.
    """
    cut = [max(length - 1 - side, 0) for side in (left, right) if side >= 0]
    return length * length - sum(n * (n + 1) // 2 for n in cut)


def _offsets(sizes: list[int], seq_len: int) -> tuple[int, ...]:
    offsets = list(itertools.accumulate(sizes, initial=0))
    return (*offsets, *range(offsets[-1] + _PADDING, seq_len, _PADDING), seq_len)
