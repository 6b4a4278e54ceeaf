"""Packing by mask in plain PyTorch."""

import torch
from torch import Tensor


def _marks(bitmap: Tensor, numel: int) -> Tensor:
    bits = (bitmap[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[:numel].bool()


def pack_bits(x: Tensor) -> Tensor:
    """Same as `moe_ext.ops.pack_bits`."""
    raw = x.flatten().view(torch.uint8).view(x.numel(), x.itemsize)
    marks = (raw != 0).any(dim=1).long()
    padded = torch.nn.functional.pad(marks, (0, -x.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8)).sum(dim=1).to(torch.uint8)


def pack_masked_(packed_n: Tensor, x: Tensor, bitmap: Tensor) -> None:
    """Same as `moe_ext.ops.pack_masked_`."""
    packed_n.copy_(x.flatten()[_marks(bitmap, x.numel())])


def unpack_masked_(out: Tensor, packed_n: Tensor, bitmap: Tensor) -> None:
    """Same as `moe_ext.ops.unpack_masked_`."""
    # Elements are copied as bytes, because a signalling NaN would not keep its bits otherwise.
    raw = out.zero_().view(-1).view(torch.uint8).view(out.numel(), out.itemsize)
    raw[_marks(bitmap, out.numel())] = packed_n.view(torch.uint8).view(-1, out.itemsize)


def masked_mm(x_TK: Tensor, values_n: Tensor, bitmap_MB: Tensor) -> Tensor:
    """Same as `moe_ext.ops.masked_mm`, in float64."""
    weight = torch.zeros(bitmap_MB.shape[0], x_TK.shape[1], dtype=values_n.dtype)
    unpack_masked_(weight, values_n, bitmap_MB.flatten())
    return x_TK.double() @ weight.double().T
