"""Packing by mask: copies the marked elements of a tensor side by side, and back.

Shape suffixes: N elements, n marked ones; of products T tokens, K columns, M rows, B bytes.
"""

import torch
from torch import Tensor

from moe_ext.ops.fakes import register_fake_like
from moe_ext.ops.grouped_gemm import num_experts_of


def pack_bits(x: Tensor) -> Tensor:
    """Returns a bitmap of the elements that are not zero, such as the True ones of a bool mask.

    Args:
        x (Tensor[...]): contiguous, of any dtype of 8 bytes at most, N elements. An element counts
            as zero if none of its bits is set, so that -0.0 does not.

    Returns:
        Tensor[ceil(N / 8)]: uint8, the first element in the lowest bit.

    Raises:
        RuntimeError: x is strided, or has larger elements.

    Deterministic.
    """
    return torch.ops.moe_ext.pack_bits(x)


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
        RuntimeError: an argument has the wrong device, dtype, shape or layout; on CPU alone, bits
            are set past the end, or their number is not that of packed's elements. Nothing has
            changed then.

    Deterministic, with the same bits on CPU and CUDA. On CUDA nothing waits for the device: marks
    past the end are left out, and so are elements that packed has no room for.
    """
    torch.ops.moe_ext.pack_masked_(packed_n, x, bitmap)
    torch.autograd.graph.increment_version(packed_n)


register_fake_like("moe_ext::pack_masked_")


def unpack_masked_(out: Tensor, packed_n: Tensor, bitmap: Tensor) -> None:
    """Copies elements back to where `pack_masked_` took them from, with zeros everywhere else.

    Args:
        out (Tensor[...]): overwritten; contiguous, N elements.
        packed_n (Tensor[n]): contiguous, in the dtype of ``out``.
        bitmap (Tensor[ceil(N / 8)]): uint8, see `pack_bits`.

    Raises:
        RuntimeError: as `pack_masked_`; nothing has changed then.

    Deterministic, with the same bits on CPU and CUDA. On CUDA a mark without an element gives a
    zero.
    """
    torch.ops.moe_ext.unpack_masked_(out, packed_n, bitmap)
    torch.autograd.graph.increment_version(out)


register_fake_like("moe_ext::unpack_masked_")


def masked_mm(
    x_TK: Tensor, values_n: Tensor, bitmap_MB: Tensor, *, expert_offsets: Tensor | None = None
) -> Tensor:
    """Multiplies by a pruned matrix, ``x @ weight.T``, and reads its kept elements alone.

    The product is for few tokens, where reading the weight takes most of the time. A bit for each
    element is read, and the kept values. Four tokens at a time share the expanded weight.

    Args:
        x_TK (Tensor[T, K]): float32 or bfloat16, K a multiple of 8.
        values_n (Tensor[n]): in the dtype of x, the kept elements of a weight `[M, K]`, row by row.
        bitmap_MB (Tensor[M, K / 8]): uint8, see `pack_bits`.
        expert_offsets (Tensor[E + 1]): as in `quantized_mm`. Values and bitmap then belong to the
            weights of all experts.

    Returns:
        Tensor[T, M]: in the dtype of x; summed in float32. Tokens of no expert get zeros.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape; on CPU alone, the number of
            values is not that of the marks.

    Deterministic, with the same bits on every instruction set and on CUDA. Columns of x that a row
    does not keep do not change its result, even if they are NaN. No gradient.
    """
    return torch.ops.moe_ext.masked_mm(x_TK, values_n, bitmap_MB, expert_offsets)


@torch.library.register_fake("moe_ext::masked_mm")
def _(x: Tensor, values: Tensor, bitmap: Tensor, expert_offsets: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], bitmap.shape[0] // num_experts_of(expert_offsets)))
