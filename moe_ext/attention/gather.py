"""All-gather and reduce-scatter of shards of unequal length, along dimension 0.

Shapes: S whole sequence, L shard of this rank, M the longest shard, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.traffic import record_traffic


def gather_shards(
    x_L: Tensor, sizes: Sequence[int], group: ProcessGroup, *, operation: str
) -> Tensor:
    """`[S, ...]`: the shards of all ranks in group order; `sizes` are their lengths."""
    longest = max(sizes)
    sent_M = x_L.new_zeros((longest, *x_L.shape[1:]))
    sent_M[: x_L.shape[0]] = x_L
    parts = [torch.empty_like(sent_M) for _ in sizes]
    if sent_M.numel():
        record_traffic("all_gather", (len(sizes) - 1) * sent_M.nbytes)
        with naming_failed_ranks(group, operation):
            dist.all_gather(parts, sent_M, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatter_shards(
    x_S: Tensor, sizes: Sequence[int], rank: int, group: ProcessGroup, *, operation: str
) -> Tensor:
    """`[L, ...]`: this rank's shard of the sum over ranks of `x_S`, shards in group order."""
    longest = max(sizes)
    sent = x_S.new_zeros((len(sizes), longest, *x_S.shape[1:]))
    for row, shard in zip(sent, x_S.split(list(sizes)), strict=True):
        row[: shard.shape[0]] = shard
    found_M = x_S.new_empty((longest, *x_S.shape[1:]))
    if found_M.numel():
        record_traffic("reduce_scatter", (len(sizes) - 1) * found_M.nbytes)
        with naming_failed_ranks(group, operation):
            dist.reduce_scatter(found_M, list(sent), group=group)
    return found_M[: sizes[rank]]
