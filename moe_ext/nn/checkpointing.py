"""Chains of modules that keep few activations and recompute the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ext._checks import check_sizes


def checkpoint_chain(
    modules: Sequence[Callable[[Tensor], Tensor]], x: Tensor, slots: int
) -> Tensor:
    """Run a sequence of modules, keeping at most `slots` of their inputs for the backward pass.

    The number of recomputations is the least that is possible with so many slots. If n modules have
    `C(slots + r - 1, slots) < n <= C(slots + r, slots)`, a module runs at most r times besides the
    run whose activations its gradient uses. These are `r n - C(slots + r, slots + 1)` runs in all.
    Losses, loads and metrics of expert layers count once.

    Args:
        modules: modules, each of which takes the result of the one before.
        x: input of the first module.
        slots: most inputs that are kept at any time, including `x`; at least 1. The activations
            inside one module are kept in addition.

    Returns:
        The result of the last module.

    Raises:
        ValueError: there is no module, or no slot.

    Reference: Griewank and Walther, Algorithm 799: Revolve (2000), by nested calls of
    `torch.utils.checkpoint.checkpoint`.
    """
    check_sizes("checkpoint_chain", slots=slots)
    if not modules:
        raise ValueError("checkpoint_chain: expected modules to hold at least one, got none")
    if len(modules) == 1:
        return modules[0](x)
    first = min(
        range(1, len(modules)),
        key=lambda m: m + _extra_runs(m, slots) + _extra_runs(len(modules) - m, slots - 1),
    )
    x = checkpoint(checkpoint_chain, modules[:first], x, slots, use_reentrant=False)
    rest = modules[first:]
    return rest[0](x) if len(rest) == 1 else checkpoint_chain(rest, x, slots - 1)


def _extra_runs(num_modules: int, slots: int) -> float:
    """Return the least number of runs besides those whose activations are kept."""
    if num_modules == 1:
        return 0
    if slots == 0:
        return math.inf
    r = 0
    while math.comb(slots + r, slots) < num_modules:
        r += 1
    return r * num_modules - math.comb(slots + r, slots + 1)
