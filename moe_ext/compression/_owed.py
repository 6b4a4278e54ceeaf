"""Arithmetic on what is owed: in the units of a step, and at a place of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def add_at(flat: Tensor, owed: Tensor, start: int, scale: float = 1.0) -> None:
    """Add what is owed from an element on, in place; what lies before or past it is left out."""
    owed, start = owed[max(-start, 0) :], max(start, 0)
    stop = min(start + owed.numel(), flat.numel())
    if stop > start:
        flat[start:stop].add_(owed[: stop - start].to(flat.device), alpha=scale)


def unit_factors(before: Mapping[str, float], marks: Mapping[str, float]) -> dict[str, float]:
    """Factors on what is kept from a step with some marks, for a step with others, by kind."""
    velocity = residual = 1.0
    if "loss_scale" in before and "loss_scale" in marks:
        velocity = residual = marks["loss_scale"] / before["loss_scale"]
    if "rate" in before and "rate" in marks:
        residual *= before["rate"] / marks["rate"]
    return {"residual": residual, "server": residual, "velocity": velocity}


def joined(
    kind: str,
    names: Sequence[str],
    shapes: Sequence[torch.Size],
    kept: Sequence[Tensor | None],
    factors: Sequence[float],
    device: torch.device,
) -> Tensor:
    """What is kept by name times a factor each, side by side; zeros where it is None.

    Raises:
        ValueError: it has not the shape of its parameter.
    """
    found = []
    for name, shape, tensor, factor in zip(names, shapes, kept, factors, strict=True):
        if tensor is None:
            found.append(torch.zeros(shape.numel(), device=device))
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"CompressionState: expected the {kind} of {name} to be of shape "
                f"{tuple(shape)}, got {tuple(tensor.shape)}"
            )
        found.append(tensor.reshape(-1).to(device) * factor)
    return torch.cat(found)


def fold_into(
    loose: dict[str, dict[str, Tensor]], names: Sequence[str], extras: Mapping[str, Any]
) -> None:
    """Add a shard's residual to the residuals by name that its group is made of."""
    if "server" not in extras["tensors"]:
        return
    start = 0
    for name in names:
        residual = loose[name]["residual"]
        flat = residual.reshape(-1).clone()
        add_at(flat, extras["tensors"]["server"], extras["server_start"] - start)
        loose[name]["residual"] = flat.view(residual.shape)
        start += flat.numel()
