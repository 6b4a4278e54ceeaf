"""Chains of modules that keep few activations and compute the others again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ext._checks import check_sizes


def checkpoint_chain(
    modules: Sequence[Callable[[Tensor], Tensor]], x: Tensor, slots: int
) -> Tensor:
    """Run modules one after the other, keeping so many of their inputs for the backward pass.

    No less can be computed again with these slots: with
    `C(slots + r - 1, slots) < n <= C(slots + r, slots)` for n modules, a module runs r times at
    most besides the run whose activations its gradient is taken from, and all of them together
    `r n - C(slots + r, slots + 1)` times. Losses, loads and metrics of expert layers count once.

    Args:
        modules: each takes what the one before it returned.
        x: input of the first one.
        slots: inputs that are kept at any time, `x` among them; at least 1. One module's own
            activations come on top.

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
    """Runs of modules besides those whose activations are kept."""
    if num_modules == 1:
        return 0
    if slots == 0:
        return math.inf
    r = 0
    while math.comb(slots + r, slots) < num_modules:
        r += 1
    return r * num_modules - math.comb(slots + r, slots + 1)
