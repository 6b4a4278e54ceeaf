"""Exact sparsity: blocks that are not zero, and rows that were touched.

Shape suffixes: N rows, D their width, U different rows, B blocks.
"""

import torch
from torch import Tensor

from moe_ext.ops.fakes import register_fake_like


def nonzero_blocks(x: Tensor, *, block: int = 256) -> Tensor:
    """Marks the blocks of neighbouring elements that have an element other than zero.

    Maps of several ranks are joined by a bitwise or; `block_indices` lists their blocks.

    Args:
        x (Tensor): float32, float64, bfloat16 or float16, of any shape. -0.0 counts as zero, NaN
            does not.
        block (int): elements of a block, at least 1; the last may be shorter.

    Returns:
        Tensor[ceil(B / 8)]: uint8; bit ``b % 8`` of byte ``b // 8`` belongs to block b.

    Raises:
        RuntimeError: an argument has the wrong dtype or value.

    Deterministic.

    Reference: Fei et al., OmniReduce, SIGCOMM 2021, section 3.
    """
    return torch.ops.moe_ext.nonzero_blocks(x, block)


@torch.library.register_fake("moe_ext::nonzero_blocks")
def _(x: Tensor, block: int) -> Tensor:
    num_blocks = (x.numel() + block - 1) // block
    return x.new_empty(((num_blocks + 7) // 8,), dtype=torch.uint8)


def block_indices(bitmap: Tensor) -> Tensor:
    """Returns the numbers of the blocks that a map of `nonzero_blocks` marks.

    Args:
        bitmap (Tensor): uint8, as `nonzero_blocks` returns it, or the bitwise or of several.

    Returns:
        Tensor[B]: int64, ascending.

    Deterministic; synchronises the device, since the number of blocks depends on the data.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return ((bitmap[:, None] >> bits) & 1).flatten().nonzero().squeeze(1)


def gather_blocks(x: Tensor, block_idx_B: Tensor, *, block: int = 256) -> Tensor:
    """Copies blocks of neighbouring elements into one tensor.

    Args:
        x (Tensor): float32, float64, bfloat16 or float16, of any shape.
        block_idx_B (Tensor[B]): int64, in any order.
        block (int): elements of a block, at least 1.

    Returns:
        Tensor[B, block]: in the dtype of x; a short last block is filled up with zeros.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value.

    Deterministic.
    """
    return torch.ops.moe_ext.gather_blocks(x, block_idx_B, block)


@torch.library.register_fake("moe_ext::gather_blocks")
def _(x: Tensor, block_idx: Tensor, block: int) -> Tensor:
    return x.new_empty((block_idx.shape[0], block))


def scatter_blocks_(out: Tensor, packed: Tensor, block_idx_B: Tensor, *, block: int = 256) -> None:
    """Copies blocks back to where `gather_blocks` took them from; other blocks stay as they are.

    Args:
        out (Tensor): contiguous, of any shape; changed in place.
        packed (Tensor[B, block]): in the dtype of ``out``; elements past the end of ``out`` are
            left out.
        block_idx_B (Tensor[B]): int64, ascending and all different.
        block (int): elements of a block, at least 1.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; nothing has changed
            then.

    Deterministic.
    """
    torch.ops.moe_ext.scatter_blocks_(out, packed, block_idx_B, block)
    torch.autograd.graph.increment_version(out)


register_fake_like("moe_ext::scatter_blocks_")


def sum_rows(rows_ND: Tensor, row_idx_N: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Adds up rows with the same index, such as gradients of the touched rows of an embedding.

    A row whose sum is zero stays in the result, because the indices tell which rows were touched.

    Args:
        rows_ND (Tensor[N, D]): float32, float64, bfloat16 or float16.
        row_idx_N (Tensor[N]): int64 in [0, num_rows), or -1 for a row that is left out.
        num_rows (int): rows of the embedding.

    Returns:
        tuple[Tensor[U, D], Tensor[U]]: the sums, taken in float32 (float64 for float64) in the
        order of the rows and rounded once, and their different indices, ascending.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value.

    Deterministic, with the same bits for any number of threads; U depends on the data.
    """
    return torch.ops.moe_ext.sum_rows(rows_ND, row_idx_N, num_rows)


@torch.library.register_fake("moe_ext::sum_rows")
def _(rows: Tensor, row_idx: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    num_unique = torch.library.get_ctx().new_dynamic_size()
    return rows.new_empty((num_unique, rows.shape[1])), row_idx.new_empty((num_unique,))
