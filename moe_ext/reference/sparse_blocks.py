"""Block and row sparsity in plain PyTorch.

Shape suffixes: N rows, D their width, U different rows, B blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return `[B, block]`, the last block filled up with zeros."""
    return F.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block)


def nonzero_blocks(x: Tensor, *, block: int = 256) -> Tensor:
    """Same as `moe_ext.ops.nonzero_blocks`."""
    marked_B = (_blocks(x, block) != 0).any(dim=1)
    bytes_ = F.pad(marked_B.long(), (0, -len(marked_B) % 8)).view(-1, 8)
    return (bytes_ << torch.arange(8, device=x.device)).sum(dim=1).to(torch.uint8)


def gather_blocks(x: Tensor, block_idx_B: Tensor, *, block: int = 256) -> Tensor:
    """Same as `moe_ext.ops.gather_blocks`."""
    return _blocks(x, block)[block_idx_B]


def scatter_blocks_(out: Tensor, packed: Tensor, block_idx_B: Tensor, *, block: int = 256) -> None:
    """Same as `moe_ext.ops.scatter_blocks_`."""
    blocks = _blocks(out, block).clone()
    blocks[block_idx_B] = packed
    out.copy_(blocks.flatten()[: out.numel()].view(out.shape))


def sum_rows(rows_ND: Tensor, row_idx_N: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Same as `moe_ext.ops.sum_rows`."""
    acc = torch.float64 if rows_ND.dtype == torch.float64 else torch.float32
    unique_idx_U = row_idx_N[row_idx_N >= 0].unique()
    sums_UD = rows_ND.new_zeros((len(unique_idx_U), rows_ND.shape[1]), dtype=acc)
    for i, row in enumerate(unique_idx_U):
        for row_D in rows_ND[row_idx_N == row]:
            sums_UD[i] += row_D.to(acc)
    return sums_UD.to(rows_ND.dtype), unique_idx_U
