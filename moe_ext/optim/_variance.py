"""Second moments that are exactly zero, where the first may not be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fillings(second_moments: Sequence[Tensor]) -> list[Tensor]:
    """What to take for zeros of each tensor: the mean of its positive elements, 0-d.

    An element of a block with others gets momentum by the error of its neighbours; over a second
    moment of zero it would step by that over epsilon. A tensor of zeros takes the mean of all
    tensors, and 1 where there is none.
    """
    sums = [v.sum(dtype=torch.float64) for v in second_moments]
    counts = [torch.count_nonzero(v) for v in second_moments]
    if not sums:
        return []
    sum_of_all, count_of_all = torch.stack(sums).sum(), torch.stack(counts).sum()
    mean_of_all = torch.where(count_of_all > 0, sum_of_all / count_of_all, 1.0)
    return [
        torch.where(count > 0, total / count, mean_of_all).to(v.dtype)
        for v, total, count in zip(second_moments, sums, counts, strict=True)
    ]


def fill_zeros(second_moments: Sequence[Tensor]) -> None:
    """Replace zeros in place."""
    for v, filling in zip(second_moments, fillings(second_moments), strict=True):
        v.copy_(torch.where(v > 0, v, filling))
