"""Autocast on any device; torch raises on the meta device, which has none."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast is casting to on this device, None outside autocast."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def as_autocast(x: Tensor) -> Tensor:
    """Cast as autocast casts the input of a product: everything but float64."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context in which autocast is off."""
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
