"""Second moments that are frozen: zeros in them, and how far gradients have grown since.

Shapes: S blocks of a tensor, of so many elements in the order of its indices, the last may be
shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def fillings(second_moments: Sequence[Tensor]) -> list[Tensor]:
    """Replacements for the zeros of each tensor: the mean of its positive elements, 0-d.

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


def roots(
    group: dict[str, Any], second_moments: list[Tensor], steps: list[int], *, inside: bool = False
) -> list[Tensor]:
    """Roots of second moments of so many steps plus epsilon, which may be added inside of them."""
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


# The first means are of few gradients: a variance scaled by them would keep their noise for good.
_LEAST_LOOKS = 8


def block_squares(parameter: Tensor, grad: Tensor | None, block: int) -> Tensor:
    """Sums of squares of a gradient over its blocks, [S], float32; zeros without a gradient."""
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
    """Move the running mean of squares on; how far it has grown by that, None for too few looks.

    A block that had no gradient so far has not grown.
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
    """Multiply the blocks of a tensor in place."""
    x.mul_(factor_S.repeat_interleave(block)[: x.numel()].view(x.shape))
