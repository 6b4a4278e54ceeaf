"""Masks: the keys that a query may see, as functions of global positions.

Shapes: S sequence, L some of its positions.
"""

from __future__ import annotations

import bisect
import functools
import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ext.attention.checks import requires

# Offsets of packed documents: one list for the whole batch, or one for each of its rows.
Offsets = Tensor | Sequence[int] | Sequence[Sequence[int]]
# Length of every document's prefix. A list has one length for each document (without documents, for
# each row of the batch), or for each row of the batch a list with one length for each document.
PrefixLen = int | Offsets


@dataclass(frozen=True)
class Mask:
    """The part of an attention mask that follows from positions.

    Attributes:
        is_causal: if True, a query sees no key at a later position.
        left: number of keys before a query that the query sees, -1 for no limit.
        right: number of keys after a query that the query sees, -1 for no limit.
        cu_seqlens: offsets of packed documents, from 0 to S; None for one document.
        prefix_lens: lengths of the documents' prefixes, once for the whole batch or for each of its
            rows; None for no prefixes. Every query of a document sees all positions of its prefix,
            even later ones. If rows differ, a key counts as seen if a query sees it in any row.
    """

    is_causal: bool = False
    left: int = -1
    right: int = -1
    cu_seqlens: tuple[int, ...] | None = None
    prefix_lens: tuple[tuple[int, ...], ...] | None = None

    @functools.cached_property
    def prefixes(self) -> tuple[tuple[int, int], ...]:
        """(first, past the last) position of each document's prefix; () without `prefix_lens`."""
        if self.prefix_lens is None:
            return ()
        starts = (0,) if self.cu_seqlens is None else self.cu_seqlens[:-1]
        stops = (sys.maxsize,) if self.cu_seqlens is None else self.cu_seqlens[1:]
        longest = map(max, zip(*self.prefix_lens, strict=True))
        ends = (min(a + n, b) for a, n, b in zip(starts, longest, stops, strict=True))
        return tuple(zip(starts, ends, strict=True))

    def has_prefix(self, keys: Iterable[range]) -> bool:
        """True if any of the positions is inside a prefix."""
        filled = [(first, stop) for first, stop in self.prefixes if first < stop]
        return any(_any_inside(part, filled) for part in keys)

    def visible(self, position: int, seq_len: int) -> tuple[int, int]:
        """(first, past the last) of the keys that the query at `position` sees.

        Neither bound falls as the position grows, and a query always sees its own position.
        """
        first_1, stop_1 = bounds(self, _row([position]), seq_len)
        return int(first_1), int(stop_1)

    def areas(self, seq_len: int) -> Tensor:
        """`[S]` int64, the number of keys that each query sees."""
        first_S, stop_S = bounds(self, torch.arange(seq_len), seq_len)
        return stop_S - first_S

    def seen_keys(self, queries: Iterable[range], seq_len: int) -> list[tuple[int, int]]:
        """Disjoint ascending intervals (first, past the last) of the keys that any query sees.

        Exact for ranges of step 1. For a larger step the intervals may contain keys between two
        queries that no query sees.
        """
        parts = [part for part in queries if part]
        firsts, _ = bounds(self, _row(part[0] for part in parts), seq_len)
        _, stops = bounds(self, _row(part[-1] for part in parts), seq_len)
        merged: list[tuple[int, int]] = []
        for first, stop in sorted(zip(firsts.tolist(), stops.tolist(), strict=True)):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((first, stop))
        return merged


def _row(numbers: Iterable[Any]) -> Tensor:
    return torch.tensor([*numbers], dtype=torch.int64, device="cpu")


def bounds(mask: Mask, positions_L: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """`Mask.visible` for a tensor of positions; the results are on the same device."""
    first_L, stop_L = torch.zeros_like(positions_L), torch.full_like(positions_L, seq_len)
    documents_L = first_L
    if mask.cu_seqlens is not None:
        offsets = on_device(mask.cu_seqlens, positions_L.device)
        documents_L = torch.bucketize(positions_L, offsets, right=True) - 1
        first_L, stop_L = offsets[documents_L], offsets[documents_L + 1]
    if mask.left >= 0:
        first_L = torch.maximum(first_L, positions_L - mask.left)
    right = 0 if mask.is_causal else mask.right
    if right >= 0:
        last_L = positions_L + right + 1
        if mask.prefixes:
            ends = on_device(tuple(stop for _, stop in mask.prefixes), positions_L.device)
            last_L = torch.maximum(last_L, ends[documents_L])
        stop_L = torch.minimum(stop_L, last_L)
    return first_L, stop_L


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


def listed(values: Any) -> Any:
    """Convert a tensor or a NumPy array to a list; return anything else unchanged."""
    return values.tolist() if hasattr(values, "tolist") else values


def integers(values: Iterable[Any]) -> tuple[int, ...] | None:
    """The values as integers, or None if any of them is not an integer."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        return None


def check_window(window: object, operation: str) -> tuple[int, int]:
    """(left, right) of a window argument; ValueError unless None or two integers, at least -1."""
    if window is None:
        return -1, -1
    require = requires(operation)
    sides = integers(window) or () if isinstance(window, tuple | list) else ()
    require(len(sides) == 2, "window", "None or (left, right), integers", window)
    left, right = sides
    require(min(sides) >= -1, "both sides of window", "-1 (no limit) or more", window)
    return left, right


def on_device(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    """A tensor of integers, read-only because the copy on an accelerator is cached."""
    return _row(numbers) if device.type == "cpu" else _copied(numbers, device)


@functools.lru_cache(maxsize=64)
def _copied(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    # Autograd cannot save a tensor that was made in inference mode. The first call may be in that
    # mode, and later calls that get the cached tensor may need a backward pass.
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


def check_cu_seqlens(cu_seqlens: Offsets | None, operation: str) -> tuple[int, ...] | None:
    """Offsets of documents as integers; ValueError unless they start at 0 and are sorted.

    NOTE: device-to-host sync for a tensor on an accelerator.
    """
    if cu_seqlens is None:
        return None
    require, rule = requires(operation), "a row of integers"
    if isinstance(cu_seqlens, Tensor):
        fits = cu_seqlens.dim() == 1 and not cu_seqlens.is_floating_point()
        found = f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        require(fits, "cu_seqlens", rule, found)
        cu_seqlens = cu_seqlens.tolist()
    offsets = integers(cu_seqlens)
    require(offsets is not None, "cu_seqlens", rule, cu_seqlens)
    assert offsets is not None
    if not offsets or offsets[0] != 0 or list(offsets) != sorted(offsets):
        raise ValueError(
            f"{operation}: expected cu_seqlens to start at 0 and be sorted, got {list(offsets)}"
        )
    return offsets


def rows_of_offsets(cu_seqlens: object, operation: str) -> tuple[tuple[int, ...], ...] | None:
    """Offsets of each row of a batch; None if a single list of offsets is for all rows.

    ValueError unless every list starts at 0, is sorted, and all end at the same position.
    """
    if not isinstance(cu_seqlens, Tensor):
        cu_seqlens = listed(cu_seqlens)
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


def make_mask(
    operation: str,
    is_causal: bool,
    window: object,
    offsets: tuple[int, ...] | None,
    prefix_len: PrefixLen | None,
    batch: int = 1,
) -> Mask:
    """The mask that the arguments of a call describe; `offsets` come from `check_cu_seqlens`.

    NOTE: device-to-host sync if `prefix_len` is a tensor on an accelerator.

    ValueError for an invalid window or prefix.
    """
    mask = Mask(is_causal, *check_window(window, operation), offsets)
    if prefix_len is None:
        return mask
    given = listed(prefix_len)
    documents = 1 if offsets is None else len(offsets) - 1
    rows: list[tuple[int, ...] | None]
    if not isinstance(given, Sequence):
        one = integers([given])
        rows = [one and one * documents]
    elif any(isinstance(row, Sequence) for row in given):
        rows = [integers(row) if isinstance(row, Sequence) else None for row in given]
    else:
        row = integers(given)
        rows = [row] if offsets is not None or row is None else [(n,) for n in row]
    found = tuple(row for row in rows if row is not None)
    fits = len(found) == len(rows) and len(rows) in (1, batch)
    fits = fits and all(len(row) == documents and min(row, default=0) >= 0 for row in found)
    rule = f"{batch}, one for each row of q"
    if offsets is not None:
        rule = f"{documents}, one for each document, or {batch} rows of {documents}"
    require, sides = requires(operation), (mask.left, mask.right)
    require(fits, "prefix_len", f"an integer from 0 on, or {rule}", prefix_len)
    require(is_causal, "is_causal", "True with prefix_len", False)
    # Models do not agree on whether a query sees a prefix that is outside its window.
    require(max(sides) < 0, "window", "None with prefix_len", sides)
    return replace(mask, prefix_lens=found[:1] if len(set(found)) == 1 else found)


def prefixes_of_rows(
    prefix_len: PrefixLen | None, rows: Sequence[tuple[int, ...]], operation: str
) -> tuple[tuple[int, ...], ...] | None:
    """Lengths of the documents' prefixes for each row of a batch whose rows have own offsets."""
    if prefix_len is None:
        return None
    given = listed(prefix_len)
    each = given if isinstance(given, Sequence) else [given] * len(rows)
    rule = f"an integer, or {len(rows)} or as many rows, one for each row of q"
    requires(operation)(len(each) == len(rows), "prefix_len", rule, prefix_len)
    pairs = zip(each, rows, strict=True)
    found = (make_mask(operation, True, None, row, n).prefix_lens for n, row in pairs)
    return tuple(lens[0] for lens in found if lens is not None)


@functools.lru_cache(maxsize=256)
def needed_keys(
    shards: tuple[tuple[range, ...], ...], mask: Mask, seq_len: int
) -> tuple[tuple[bool, ...], ...]:
    """`[r][c]` is True if any query of rank r sees any key of rank c."""
    needs = []
    for queries in shards:
        seen = mask.seen_keys(queries, seq_len)
        needs.append(tuple(any(_any_inside(part, seen) for part in keys) for keys in shards))
    return tuple(needs)
