"""Bytes of a tensor's elements."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(x: Tensor) -> Tensor:
    """Return the elements in order as a vector of bytes: a view if their memory is contiguous."""
    flat = x.reshape(-1)
    # torch makes no view of bytes unless the stride is 1. A vector of less than two elements may
    # have any stride, which is set to 1. A longer one has gaps, which a copy closes.
    if flat.stride(0) != 1:
        flat = flat.as_strided(flat.shape, (1,)) if flat.numel() < 2 else flat.contiguous()
    return flat.view(torch.uint8)
