"""Deltas of tensors in plain PyTorch: places and values, without the format of a payload."""

import torch
from torch import Tensor


def delta_places(x: Tensor, base: Tensor) -> Tensor:
    """Return the places of the elements whose bits differ, ascending."""
    raw = [t.flatten().view(torch.uint8).view(t.numel(), t.itemsize) for t in (x, base)]
    return (raw[0] != raw[1]).any(dim=1).nonzero().flatten()


def delta_hash(x: Tensor, seed: int = 0) -> int:
    """Same as `moe_ext.ops.delta_hash`."""
    mask, found = (1 << 64) - 1, 0
    raw = x.flatten().view(torch.uint8).view(x.numel(), x.itemsize).tolist()
    for place, item in enumerate(raw):
        bits = int.from_bytes(bytes(item), "little")
        z = (seed + place * 0x9E3779B97F4A7C15 + (bits + 1) * 0xD1B54A32D192ED03) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found += z ^ (z >> 31)
    found &= mask
    return found - (1 << 64) if found >> 63 else found
