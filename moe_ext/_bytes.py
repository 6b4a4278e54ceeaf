"""Bytes of a tensor's elements."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(x: Tensor) -> Tensor:
    """The elements in order as one row of bytes, a view where their memory is contiguous."""
    flat = x.reshape(-1)
    # A row of one element, or of none, may have any stride, and torch then refuses the view.
    # With more elements it is a vector with gaps, which a copy closes.
    if flat.stride(0) != 1:
        flat = flat.as_strided(flat.shape, (1,)) if flat.numel() < 2 else flat.contiguous()
    return flat.view(torch.uint8)
