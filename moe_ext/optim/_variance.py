"""Frozen second moments: replacing their zeros, and following the growth of gradients.

Shapes: S blocks of consecutive elements of a tensor; the last block may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def fillings(second_moments: Sequence[Tensor]) -> list[Tensor]:
    """Return a replacement for the zeros of each tensor: the mean of its positive elements, 0-d.

    Compression gives an element some momentum through the scale that it shares with its block.
    Divided by the root of a second moment of zero plus epsilon, this would be a huge step. A tensor
    of zeros gets the mean over all tensors, or 1 if all are zero.
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
    """Replace zeros of second moments in place; see `fillings`."""
    for v, filling in zip(second_moments, fillings(second_moments), strict=True):
        v.copy_(torch.where(v > 0, v, filling))


def roots(
    group: dict[str, Any], second_moments: list[Tensor], steps: list[int], *, inside: bool = False
) -> list[Tensor]:
    """Return the denominators of Adam: roots of second moments after bias correction, plus epsilon.

    Args:
        group: parameter group, for `betas`, `eps` and `bias_correction`.
        second_moments: one tensor per parameter.
        steps: number of updates of each second moment.
        inside: add epsilon before the root is taken.
    """
    corrections = [1.0] * len(steps)
    if group["bias_correction"]:
        corrections = [1 - group["betas"][1] ** step for step in steps]
    if inside:
        found = torch._foreach_div(second_moments, corrections)
        torch._foreach_add_(found, group["eps"])
        return list(torch._foreach_sqrt(found))
    found = torch._foreach_sqrt(second_moments)
    if group["bias_correction"]:
        torch._foreach_div_(found, [correction**0.5 for correction in corrections])
    torch._foreach_add_(found, group["eps"])
    return list(found)


# Calls of `follow_squares` before it returns a growth. Earlier running means hold few gradients,
# and their noise would stay in the variance, because it is only ever multiplied by the growth.
_LEAST_LOOKS = 8


def block_squares(parameter: Tensor, grad: Tensor | None, block: int) -> Tensor:
    """Return the sum of squares of each block of a gradient, [S], float32; zeros for None."""
    num_blocks = -(-parameter.numel() // block)
    if grad is None:
        return torch.zeros(num_blocks, device=parameter.device, dtype=torch.float32)
    flat_N = grad.reshape(-1)
    whole = len(flat_N) // block * block
    norms = [torch.linalg.vector_norm(flat_N[:whole].view(-1, block), dim=1)]
    if whole < len(flat_N):
        norms.append(torch.linalg.vector_norm(flat_N[whole:]).view(1))
    return torch.cat(norms).square_()


def follow_squares(state: dict[str, Any], squares_S: Tensor, beta: float) -> Tensor | None:
    """Update the running mean of squares, and return its growth per block; None in early calls.

    The growth of a block is 1 if it had no gradient so far.
    """
    looks = state["looks"] = state.get("looks", 0) + 1
    if "block_sq" not in state:
        state["block_sq"] = torch.zeros_like(squares_S)
    mean_S = state["block_sq"]
    before_S = mean_S / (1 - beta ** max(1, looks - 1))
    mean_S.lerp_(squares_S, 1 - beta)
    if looks <= _LEAST_LOOKS:
        return None
    growth_S = mean_S / (1 - beta**looks) / before_S
    return torch.where((growth_S > 0) & growth_S.isfinite(), growth_S, 1.0)


def scale_blocks(x: Tensor, factor_S: Tensor, block: int) -> None:
    """Multiply each block of a tensor by its factor, in place."""
    x.mul_(factor_S.repeat_interleave(block)[: x.numel()].view(x.shape))
