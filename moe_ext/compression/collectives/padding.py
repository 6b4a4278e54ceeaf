"""All-reduce of signs that keeps padding out of the scales, those of ranks and those of sums.

Shape suffixes: N elements, M elements of a rank's shard, K partial blocks, B elements of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from moe_ext.comm.groups import group_rank, group_size
from moe_ext.compression.collectives.coding import Coding
from moe_ext.compression.collectives.quantized import (
    States,
    shard_numel,
    start_all_gather,
    start_reduce_scatter,
)


@dataclass(frozen=True)
class PartialBlocks:
    """Partial blocks of a tensor: blocks that hold both elements and padding.

    The values of padding are never read.

    Attributes:
        numbers_K: int64, ascending: the numbers of the partial blocks.
        is_real_KB: False for padding; each block has at least one True.
    """

    numbers_K: Tensor
    is_real_KB: Tensor
    _of_shards: dict[tuple[int, int], PartialBlocks] = field(default_factory=dict)

    @classmethod
    def of(cls, is_padding_N: Tensor, block: int) -> PartialBlocks:
        """Find the partial blocks of a tensor whose length is a multiple of `block`."""
        is_real = ~is_padding_N.view(-1, block)
        numbers_K = (is_real.any(dim=1) & ~is_real.all(dim=1)).nonzero()[:, 0]
        return cls(numbers_K, is_real[numbers_K])

    def within(self, first: int, last: int) -> PartialBlocks:
        """Return the partial blocks in the range [first, last) of blocks, renumbered from 0."""
        if (first, last) not in self._of_shards:
            here = (self.numbers_K >= first) & (self.numbers_K < last)
            found = PartialBlocks(self.numbers_K[here] - first, self.is_real_KB[here])
            self._of_shards[first, last] = found
        return self._of_shards[first, last]

    def fill_(self, x: Tensor, beside: Tensor | None = None) -> None:
        """Set padding so that its magnitude is the mean magnitude of the elements of its block.

        The scale of a block of signs is the mean of all magnitudes in it. With this padding the
        scale equals the mean over the elements alone.

        Args:
            x: float32, a whole number of blocks.
            beside: residual that is added to x before it is coded; not changed. The sum of x and
                beside gets the mean magnitude.
        """
        if not len(self.numbers_K):
            return
        x_KB = x.view(-1, self.is_real_KB.shape[1])[self.numbers_K]
        beside_KB = torch.zeros_like(x_KB)
        if beside is not None:
            beside_KB += beside.view(-1, x_KB.shape[1])[self.numbers_K]
        counts_K1 = self.is_real_KB.sum(dim=1, keepdim=True)
        # Each term is divided before the sum, because a sum of large numbers might overflow.
        share_KB = torch.where(self.is_real_KB, (x_KB + beside_KB).abs() / counts_K1, 0.0)
        padding_KB = share_KB.sum(dim=1, keepdim=True) - beside_KB
        filled_KB = torch.where(self.is_real_KB, x_KB, padding_KB)
        x.view(-1, x_KB.shape[1])[self.numbers_K] = filled_KB


def padded_all_reduce_(
    x: Tensor,
    coding: Coding,
    states: States,
    partial: PartialBlocks,
    group: ProcessGroup | None,
    average: bool,
    *,
    operation: str,
) -> None:
    """Run `start_all_reduce` on signs with padding, and wait for the result.

    The reduce-scatter ends before the all-gather begins, because padding is filled again between
    the two. After an error x and the residuals that are written are undefined; ``residual_in`` and
    ``server_residual_in`` are unchanged.

    Args:
        x: float32 [N], a whole number of blocks; changed in place. Padding in x and in the
            residuals may have any value.
        coding: coding of signs.
        states: both residuals must be given.
        partial: the partial blocks of x.
        group: the ranks.
        average: as `start_all_reduce`.
        operation: as `start_all_reduce`.
    """
    residual, server, _, residual_in, server_in = states
    assert residual is not None and server is not None
    size, numel, block = group_size(group), x.numel(), coding.align
    partial.fill_(x, residual if residual_in is None else residual_in)
    shard = shard_numel(numel, size, block)
    missing = size * shard - numel
    whole, owed, owed_in = (
        functional.pad(tensor, (0, missing)) if tensor is not None and missing else tensor
        for tensor in (x, residual, residual_in)
    )
    assert whole is not None and owed is not None
    total_M = x.new_empty(shard)
    start_reduce_scatter(
        total_M,
        whole,
        coding,
        States(residual=owed, residual_in=owed_in),
        group,
        False,
        operation=operation,
        async_op=False,
    ).wait()
    total_M += server if server_in is None else server_in
    start = group_rank(group) * shard
    partial.within(start // block, (start + shard) // block).fill_(total_M)
    start_all_gather(
        whole, total_M, coding, None, group, operation=operation, async_op=False
    ).wait()
    torch.sub(total_M, whole[start : start + shard], out=server)
    if average:
        whole.div_(size)
    if missing:
        x.copy_(whole[:numel])
        residual.copy_(owed[:numel])
