"""Checks of the arguments of collectives.

Functions named `*_problem` return an error text for `check_call`, or None if nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm.agreement import Agreement, is_nonfinite

# Dtypes that collectives can sum without a codec.
DENSE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_call(
    operation: str,
    x: Tensor,
    ranks: ProcessGroup | None,
    problem: str | None,
    facts: Mapping[str, object],
    *,
    validate: bool,
) -> None:
    """Raise on every rank if one has a problem, or if numel or dtype of x, or facts, differ."""
    agreement = Agreement(operation, ranks, x.device, validate=validate)
    agreement.compare({"numel": x.numel(), "dtype": x.dtype, **facts}, problem=problem)


def tensor_problem(
    x: Tensor, name: str, dtypes: tuple[torch.dtype, ...] = DENSE_DTYPES
) -> str | None:
    """Check dtype, layout and strides of a tensor that is reduced."""
    if x.dtype in dtypes and x.layout == torch.strided and x.is_contiguous():
        return None
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    strides = f" and strides {x.stride()}" if x.layout == torch.strided else ""
    return (
        f"expected {name} to be contiguous {', '.join(names)} or {last}, got {x.dtype} of shape "
        f"{tuple(x.shape)}{strides}"
    )


def flat_problem(x: Tensor | None, name: str, numel: int) -> str | None:
    """Check a residual, or another float32 tensor that accompanies the one that is reduced."""
    if x is None or (x.dtype == torch.float32 and x.numel() == numel and x.is_contiguous()):
        return None
    return (
        f"expected {name} to be contiguous float32 of {numel} elements, got {x.dtype} of "
        f"shape {tuple(x.shape)}"
    )


def finite_problem(x: Tensor, name: str) -> str | None:
    """Search a tensor for NaN and infinity. NOTE: device-to-host sync."""
    return f"expected {name} to be finite, got NaN or infinity" if is_nonfinite(x) else None


def range_problem(indices: Tensor, what: str, numel: int) -> str | None:
    """Check that indices lie in [0, numel). NOTE: device-to-host sync."""
    if indices.shape[0] == 0:
        return None
    low, high = int(indices.min()), int(indices.max())
    if low >= 0 and high < numel:
        return None
    return f"expected {what} in [0, {numel}), got {low if low < 0 else high}"


def choice_problem(value: object, name: str, allowed: tuple[object, ...]) -> str | None:
    """Check that an option has one of the allowed values."""
    return None if value in allowed else f"expected {name} to be one of {allowed}, got {value!r}"
