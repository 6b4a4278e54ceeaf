"""Packing by mask: the marked elements of a tensor side by side, and back.

Shape suffixes: N elements, n marked ones; of products T tokens, K columns, M rows, B bytes.
"""

import torch
from torch import Tensor

from moe_ext.ops.fakes import register_fake_like
from moe_ext.ops.sparse_blocks import block_indices


def pack_bits(x: Tensor) -> Tensor:
    """Bitmap of the elements that are not zero: of a bool mask, its own.

    Args:
        x (Tensor[...]): contiguous, of any dtype of 8 bytes at most, N elements. An element counts
            as zero where none of its bits is set: -0.0 does not.

    Returns:
        Tensor[ceil(N / 8)]: uint8, the first element in the lowest bit.

    Raises:
        RuntimeError: x is strided, or has larger elements.

    Deterministic.
    """
    if x.is_cuda:
        sized = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
        marks = torch.nn.functional.pad((sized != 0).flatten(), (0, -x.numel() % 8)).view(-1, 8)
        weights = torch.tensor([1 << i for i in range(8)], device=x.device)
        return (marks * weights).sum(dim=1).to(torch.uint8)
    bitmap: Tensor = torch.ops.moe_ext.pack_bits(x)
    return bitmap


@torch.library.register_fake("moe_ext::pack_bits")
def _(x: Tensor) -> Tensor:
    return x.new_empty(((x.numel() + 7) // 8,), dtype=torch.uint8)


def pack_masked_(packed_n: Tensor, x: Tensor, bitmap: Tensor) -> None:
    """Copies the elements that a bitmap marks into one row, in their order, bit for bit.

    Args:
        packed_n (Tensor[n]): overwritten; contiguous, in the dtype of x, with room for exactly the
            marked elements.
        x (Tensor[...]): contiguous, of any dtype of 8 bytes at most, N elements.
        bitmap (Tensor[ceil(N / 8)]): uint8, see `pack_bits`.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or layout, or bits are set past
            the end; nothing has changed then.

    Deterministic. On CUDA it waits for the device, since the places depend on the data.
    """
    if x.is_cuda:
        packed_n.copy_(x.flatten()[block_indices(bitmap)])
        return
    torch.ops.moe_ext.pack_masked_(packed_n, x, bitmap)


register_fake_like("moe_ext::pack_masked_")


def unpack_masked_(out: Tensor, packed_n: Tensor, bitmap: Tensor) -> None:
    """Copies elements back to where `pack_masked_` took them from, with zeros everywhere else.

    Args:
        out (Tensor[...]): overwritten; contiguous, N elements.
        packed_n (Tensor[n]): contiguous, in the dtype of ``out``.
        bitmap (Tensor[ceil(N / 8)]): uint8, see `pack_bits`.

    Raises:
        RuntimeError: as `pack_masked_`; nothing has changed then.

    Deterministic. On CUDA it waits for the device, since the places depend on the data.
    """
    if out.is_cuda:
        out.zero_().view(-1).index_copy_(0, block_indices(bitmap), packed_n)
        return
    torch.ops.moe_ext.unpack_masked_(out, packed_n, bitmap)


register_fake_like("moe_ext::unpack_masked_")


def masked_mm(x_TK: Tensor, values_n: Tensor, bitmap_MB: Tensor) -> Tensor:
    """Product with a pruned matrix of which the kept elements alone are read: ``x @ weight.T``.

    For few tokens, where reading the weight is what takes time: a bit an element, and the kept
    values. Four tokens at a time share what is expanded.

    Args:
        x_TK (Tensor[T, K]): float32 or bfloat16, K a multiple of 8, on CPU.
        values_n (Tensor[n]): in the dtype of x, the kept elements of a weight `[M, K]`, row by row.
        bitmap_MB (Tensor[M, K / 8]): uint8, see `pack_bits`.

    Returns:
        Tensor[T, M]: in the dtype of x; summed in float32.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape.

    Deterministic, with the same bits on every instruction set. Columns that are not kept are not
    looked at, whatever x holds there. No gradient.
    """
    out: Tensor = torch.ops.moe_ext.masked_mm(x_TK, values_n, bitmap_MB)
    return out


@torch.library.register_fake("moe_ext::masked_mm")
def _(x: Tensor, values: Tensor, bitmap: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], bitmap.shape[0]))
