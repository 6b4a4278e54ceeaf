"""Norms of gradients before they are sent, to find gradients that are zero or not finite.

On CPU every pass over a bucket takes time, so most functions here avoid a pass of their own.

Shape suffixes: N elements of a bucket, or of a part of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Elements of the first piece that `_is_zero` searches.
_HEAD = 2**10


def norms_of(pieces: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor as float64; infinite or NaN only if an element is."""
    if pieces[0].device.type != "cpu":
        return torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in pieces])
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    if pieces[0].dtype == wide and all(piece.dim() == 1 for piece in pieces):
        # A dot product takes half the time of a norm.
        norms = [math.sqrt(float(torch.dot(piece, piece))) for piece in pieces]
    else:
        norms = [float(torch.linalg.vector_norm(piece, dtype=wide)) for piece in pieces]
    for i, norm in enumerate(norms):
        # Squares overflow, or underflow to zero, before the elements do.
        wrong = bool(pieces[i].any()) if norm == 0.0 else not math.isfinite(norm)
        if wrong and bool(torch.isfinite(pieces[i]).all()):
            norms[i] = float(torch.linalg.vector_norm(pieces[i], dtype=torch.float64))
    return torch.tensor(norms, dtype=torch.float64)


def note_overflow(
    norms: Tensor,
    pieces: Sequence[Tensor],
    indices: Sequence[int],
    owed: Sequence[Tensor] | None = None,
) -> None:
    """Set the norm of a gradient that would overflow in float16 to infinity.

    Args:
        norms: norms of the gradients of a bucket; changed in place.
        pieces: the gradients.
        indices: numbers of the gradients to check.
        owed: residual that is added to each checked gradient before it is sent.
    """
    limit = torch.finfo(torch.float16).max
    for place, i in enumerate(indices):
        sent = pieces[i]
        if owed is not None:
            sent = sent + owed[place].view_as(sent)
        elif norms.device.type == "cpu" and float(norms[i]) <= limit:
            continue
        if sent.numel():
            norms[i] = torch.where(infinite_as_half(sent), math.inf, norms[i])


def infinite_as_half(x: Tensor) -> Tensor:
    """Return a 0-d bool tensor: at least one element overflows in float16."""
    return x.abs().amax().half().isinf()


def presence_of(flat_N: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return 0 for each piece that is zero and 1 for others, in the place of norms; on CPU.

    A piece is not read to its end if its first element is non-zero.
    """
    if flat_N.numel() == 0:
        return torch.zeros(len(sizes), dtype=torch.float64)
    present = (flat_N[_firsts(tuple(sizes))] != 0).double()
    if not bool(present.all()) or 0 in sizes:
        for i, piece in enumerate(flat_N.split(list(sizes))):
            if piece.numel() == 0 or not bool(present[i]):
                present[i] = float(not _is_zero(piece))
    return present


@functools.lru_cache(256)
def _firsts(sizes: tuple[int, ...]) -> Tensor:
    """Return the places at which pieces begin; any valid place for an empty piece."""
    starts = torch.tensor((0, *sizes[:-1])).cumsum(0)
    return starts.clamp(max=max(sum(sizes) - 1, 0))


def _is_zero(piece_N: Tensor) -> bool:
    start, length = 0, _HEAD
    while start < piece_N.numel():
        least, largest = torch.aminmax(piece_N[start : start + length])
        # The comparison is written so that NaN counts as non-zero.
        if not (float(least) == 0.0 == float(largest)):
            return False
        start, length = start + length, 4 * length
    return True


def not_finite(pieces: Sequence[Tensor]) -> list[int]:
    """Return the indices of the pieces that hold NaN or infinity."""
    return [i for i, piece in enumerate(pieces) if not bool(torch.isfinite(piece).all())]
