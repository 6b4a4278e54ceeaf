"""Sums of signs in blocks that hold padding: it counts in no scale, neither of a rank nor of a sum.

Shape suffixes: N elements, M of a rank's shard, K blocks of which a part is padding, B elements of
a block.
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
    """Blocks of a tensor of which a part is padding, whose values nobody reads.

    Attributes:
        numbers_K: int64, ascending.
        is_real_KB: which elements are no padding, at least one in each block.
    """

    numbers_K: Tensor
    is_real_KB: Tensor
    _of_shards: dict[tuple[int, int], PartialBlocks] = field(default_factory=dict)

    @classmethod
    def of(cls, is_padding_N: Tensor, block: int) -> PartialBlocks:
        """Partial blocks of a tensor that consists of whole blocks."""
        is_real = ~is_padding_N.view(-1, block)
        numbers_K = (is_real.any(dim=1) & ~is_real.all(dim=1)).nonzero()[:, 0]
        return cls(numbers_K, is_real[numbers_K])

    def within(self, first: int, last: int) -> PartialBlocks:
        """Partial blocks in the range [first, last), renumbered from 0."""
        if (first, last) not in self._of_shards:
            here = (self.numbers_K >= first) & (self.numbers_K < last)
            found = PartialBlocks(self.numbers_K[here] - first, self.is_real_KB[here])
            self._of_shards[first, last] = found
        return self._of_shards[first, last]

    def fill_(self, x: Tensor, beside: Tensor | None = None) -> None:
        """Make padding as large as the other elements of its block are on average.

        The scale of a block of signs, the mean of its magnitudes, is then that of its elements.

        Args:
            x: float32, of whole blocks.
            beside: what is added to x before it is coded; not changed.
        """
        if not len(self.numbers_K):
            return
        x_KB = x.view(-1, self.is_real_KB.shape[1])[self.numbers_K]
        beside_KB = torch.zeros_like(x_KB)
        if beside is not None:
            beside_KB += beside.view(-1, x_KB.shape[1])[self.numbers_K]
        counts_K1 = self.is_real_KB.sum(dim=1, keepdim=True)
        # Divided first: a sum of large numbers might be infinite.
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
    """`start_all_reduce` of signs with padding, awaited.

    The two halves run one after the other, since padding is filled anew between them. An error
    leaves x and what is owed in any state, but for ``residual_in`` and ``server_residual_in``.

    Args:
        x: float32 [N], whole blocks; in place. Padding in it, and in what is owed, has any value.
        coding: of signs.
        states: with both residuals.
        partial: blocks of x.
        group: the ranks.
        average: as there.
        operation: as there.
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
