"""Describes the part of a tensor that a rank holds, by runs of indices along each dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ext.distributed.dtensor import is_dtensor

# (first index, length) of each run, in the order of their elements in the part.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Region:
    """A part of a tensor: the product of index sets, one for each dimension.

    Attributes:
        whole: shape of the tensor.
        runs: for each dimension, the runs of indices that the part has.
    """

    whole: tuple[int, ...]
    runs: tuple[Runs, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        """Return the part that this rank holds: all of a plain tensor, the shard of a DTensor."""
        whole = tuple(tensor.shape)
        indices = [torch.arange(size) for size in whole]
        if is_dtensor(tensor):
            coordinate = tensor.device_mesh.get_coordinate()
            if coordinate is None:
                raise ValueError(
                    "Region.of: expected this rank to be in the tensor's mesh, got it outside"
                )
            for axis, placement in enumerate(tensor.placements):
                if placement.is_partial():
                    raise ValueError(
                        f"Region.of: expected tensors without partial sums, got {placement}"
                    )
                if not placement.is_replicate():
                    ranks, rank = tensor.device_mesh.size(axis), coordinate[axis]
                    dim = placement.dim  # type: ignore[attr-defined]
                    # The axis of FSDP2 comes before that of tensor parallelism, but FSDP2 cuts each
                    # of the pieces that tensor parallelism has made.
                    pieces = indices[dim].chunk(getattr(placement, "split_factor", 1))
                    indices[dim] = torch.cat([_part(piece, ranks, rank) for piece in pieces])
        return cls(whole, tuple(_runs(kept) for kept in indices))

    @classmethod
    def parse(cls, whole: Sequence[int], runs: Sequence[Sequence[Sequence[int]]]) -> Region:
        """Return the region of the lists of `to_json`, after a check.

        Raises:
            ValueError: a run does not lie inside the tensor.
        """
        found = cls(tuple(whole), tuple(tuple((a, n) for a, n in dim) for dim in runs))
        numbers = [*found.whole, *(number for dim in found.runs for run in dim for number in run)]
        fits = (
            all(type(number) is int for number in numbers)
            and len(found.whole) == len(found.runs)
            and all(
                first >= 0 and length >= 0 and first + length <= size
                for size, dim in zip(found.whole, found.runs, strict=True)
                for first, length in dim
            )
        )
        if not fits:
            raise ValueError(f"Region: expected runs inside {found.whole}, got {found.runs}")
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(length for _, length in dim) for dim in self.runs)

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.shape)

    @property
    def start(self) -> int | None:
        """Place of the first element in the flattened whole; None if the part is not contiguous."""
        if not self.numel:
            return 0
        if any(len(dim) > 1 for dim in self.runs):
            return None
        for outer in range(len(self.whole) - 1, -1, -1):
            if self.shape[outer] != self.whole[outer]:
                # Dimensions outside the cut one must have a single index in a contiguous part.
                if any(n != 1 for n in self.shape[:outer]):
                    return None
                break
        place = 0
        for size, dim in zip(self.whole, self.runs, strict=True):
            place = place * size + (dim[0][0] if dim else 0)
        return place

    def overlap(self, other: Region) -> int:
        """Number of elements that both parts have."""
        return math.prod(
            sum(max(0, min(a + n, b + m) - max(a, b)) for a, n in mine for b, m in theirs)
            for mine, theirs in zip(self.runs, other.runs, strict=True)
        )

    def to_whole(self, places: Tensor) -> Tensor:
        """Convert places in the flattened part to places in the flattened whole."""
        start = self.start
        if start is not None:
            return places + start
        found, inner = torch.zeros_like(places), 1
        dims = list(zip(self.whole, self.shape, self.runs, strict=True))
        for size, length, dim in reversed(dims):
            table = torch.cat([torch.arange(a, a + n) for a, n in dim])
            found += inner * table[places % length]
            places, inner = places // length, inner * size
        return found

    def from_whole(self, places: Tensor) -> Tensor:
        """Convert places in the flattened whole to places in the flattened part; -1 outside it."""
        found, inner = torch.zeros_like(places), 1
        outside = torch.zeros_like(places, dtype=torch.bool)
        dims = list(zip(self.whole, self.shape, self.runs, strict=True))
        for size, length, dim in reversed(dims):
            table = torch.full((size,), -1)
            at = 0
            for a, n in dim:
                table[a : a + n] = torch.arange(at, at + n)
                at += n
            own = table[places % size]
            outside |= own < 0
            found += inner * own
            places, inner = places // size, inner * length
        return found.masked_fill_(outside, -1)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists for `parse`."""
        return {"whole": list(self.whole), "runs": [list(map(list, dim)) for dim in self.runs]}


def _part(indices: Tensor, ranks: int, rank: int) -> Tensor:
    """Return the part of a rank, cut as `torch.chunk` does."""
    size = -(-indices.numel() // ranks)
    return indices[size * rank : size * (rank + 1)]


def _runs(indices: Tensor) -> Runs:
    if not indices.numel():
        return ()
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    return tuple((int(run[0]), run.numel()) for run in indices.tensor_split(breaks.tolist()))
