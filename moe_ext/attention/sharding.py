"""What training on sharded sequences needs around the attention: shards, positions, labels, loss.

Shapes: S whole sequence, L positions of this rank, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.attention.layouts import Layout, make_layout, ranks_of
from moe_ext.attention.masks import check_cu_seqlens, check_end
from moe_ext.attention.sequence_collectives import Shards, start_all_gather, sum_shards
from moe_ext.distributed.collectives import share
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_rank, group_ranks, group_size


def shard_sequence(
    x: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
    dim: int,
    layout: str | Layout = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """This rank's part of a tensor that every rank holds whole; no communication.

    Args:
        x: any shape and dtype.
        group: the ranks that share the sequence, see `ring_attention`; None is this process alone.
        dim: dimension of the sequence, S long.
        layout: see `make_layout`.
        cu_seqlens: offsets of packed documents, for the layouts that follow them.

    Returns:
        A copy with L in the place of S; differentiable.
    """
    group = ranks_of(group, "shard_sequence")
    made = make_layout(layout, x.shape[dim], group_size(group), cu_seqlens=cu_seqlens)
    return x.index_select(dim, made.positions(group_rank(group), x.device))


class _Unshard(torch.autograd.Function):
    """All-gather into the order of the sequence; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x_L: Tensor, layout: Layout, group: ProcessGroup | None) -> Tensor:
        ctx.layout, ctx.group = layout, group
        order_S = torch.cat([layout.positions(r, x_L.device) for r in range(layout.num_ranks)])
        found_S = start_all_gather(x_L, Shards(group, layout.sizes, "unshard_sequence")).wait()
        return torch.empty_like(found_S).index_copy_(0, order_S, found_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None, None]:
        layout: Layout = ctx.layout
        order_S = torch.cat([layout.positions(r, grad_S.device) for r in range(layout.num_ranks)])
        shards = Shards(ctx.group, layout.sizes, "unshard_sequence backward")
        return sum_shards(grad_S.index_select(0, order_S), shards), None, None


def unshard_sequence(
    x: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
    dim: int,
    layout: str | Layout = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The whole of a sharded tensor, on every rank; undoes `shard_sequence`.

    Differentiable: the gradient of a shard is the sum over ranks of the gradients of its copies.

    Args:
        x: this rank's part, L long in `dim`.
        group: see `shard_sequence`.
        dim: dimension of the sequence.
        layout: as it was sharded.
        cu_seqlens: as it was sharded.

    Raises:
        ValueError: on every rank, where the lengths are not those of the layout.
        RankFailureError: a rank died or did not answer; the message names it.
    """
    op = "unshard_sequence"
    group = ranks_of(group, op)
    lengths = gathered_lengths(x.shape[dim], group, x.device, operation=op)
    made = make_layout(layout, sum(lengths), len(lengths), cu_seqlens=cu_seqlens)
    check_lengths(made, lengths, op, group)
    whole: Tensor = _Unshard.apply(x.movedim(dim, 0), made, group)
    return whole.movedim(0, dim)


def gathered_lengths(
    length: int, group: ProcessGroup | None, device: torch.device, *, operation: str
) -> list[int]:
    """Length of every rank's shard, in group order."""
    if group is None:
        return [length]
    return [row[0] for row in share([length], group, device, operation=operation)]


def check_lengths(
    layout: Layout, lengths: Sequence[int], operation: str, group: ProcessGroup | None
) -> None:
    """ValueError, naming the ranks, unless every rank's shard is as long as its layout says."""
    if tuple(lengths) == layout.sizes:
        return
    ranks = (0,) if group is None else group_ranks(group)
    wrong = ", ".join(
        f"{found} in the place of {size} on rank {rank}"
        for rank, found, size in zip(ranks, lengths, layout.sizes, strict=True)
        if found != size
    )
    raise ValueError(
        f"{operation}: expected the shards of a {layout.name} layout of {layout.seq_len} "
        f"positions to be {list(layout.sizes)} long, got {list(lengths)}: {wrong}"
    )


def position_ids(
    seq_len: int,
    *,
    group: ProcessGroup | DeviceMesh | None,
    layout: str | Layout = "zigzag",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    restart: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """`[L]` int64, the positions that this rank holds: what rotary embeddings take.

    Args:
        seq_len: S.
        group: see `shard_sequence`.
        layout: see `make_layout`.
        cu_seqlens: offsets of packed documents.
        restart: count from 0 in each document; False for positions in the whole sequence.
        device: of the result.
    """
    group = ranks_of(group, "position_ids")
    made = make_layout(layout, seq_len, group_size(group), cu_seqlens=cu_seqlens)
    ids_L = made.positions(group_rank(group), device)
    offsets = check_cu_seqlens(cu_seqlens, "position_ids")
    if offsets is None or not restart:
        return ids_L
    edges = torch.tensor(offsets, device=device)
    return ids_L - edges[torch.bucketize(ids_L, edges, right=True) - 1]


def shift_labels(
    labels: Tensor,
    *,
    dim: int = -1,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The label of each position = the token after it, of the whole sequence.

    It has to happen before `shard_sequence`: the token after the last of a shard is elsewhere. The
    last position of each document has no label.

    Args:
        labels: token ids, S long in `dim`.
        dim: dimension of the sequence.
        cu_seqlens: offsets of packed documents.
        ignore_index: stands for no label.
    """
    offsets = check_cu_seqlens(cu_seqlens, "shift_labels")
    check_end(offsets, labels.shape[dim], "shift_labels")
    shifted = labels.roll(-1, dim)
    ends = {labels.shape[dim], *(offsets or ())} - {0}
    last = torch.tensor(sorted(end - 1 for end in ends), dtype=torch.int64, device=labels.device)
    return shifted.index_fill_(dim, last, ignore_index)


class _TokenMean(torch.autograd.Function):
    """Sum over the group of (loss, tokens); the gradient of the local loss is 1 / tokens."""

    @staticmethod
    def forward(
        ctx: Any, loss_sum: Tensor, num_tokens: Tensor, group: ProcessGroup | None, scale: float
    ) -> Tensor:
        sums = torch.stack([loss_sum.double(), num_tokens.double()])
        if group is not None:
            with naming_failed_ranks(group, "token_mean_loss"):
                dist.all_reduce(sums, group=group)
        ctx.factor, ctx.dtype = scale / sums[1].clamp_min(1.0), loss_sum.dtype
        return (sums[0] / sums[1].clamp_min(1.0)).to(loss_sum.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (grad.double() * ctx.factor).to(ctx.dtype), None, None, None


def token_mean_loss(
    loss_sum: Tensor,
    num_tokens: Tensor | int,
    *,
    group: ProcessGroup | DeviceMesh | None,
    grad_scale: float = 1.0,
) -> Tensor:
    """Mean of the loss over the tokens of all ranks, as one process has it, equal on every rank.

    The mean of the ranks' own means is another number wherever shards hold unequal counts of
    labels. Gradients of parameters that every rank holds are those of this mean once they are
    *summed* over the group; with `moe_ext.distributed.sync_gradients`, which takes the mean of the
    ranks, `grad_scale` = number of ranks makes up for it.

    Args:
        loss_sum: 0-d, sum of the losses of this rank's tokens.
        num_tokens: how many they are; 0 is legal.
        group: ranks that share the sequence.
        grad_scale: factor on the gradient.
    """
    group = ranks_of(group, "token_mean_loss")
    count = torch.as_tensor(num_tokens, device=loss_sum.device)
    if loss_sum.dim() != 0 or count.dim() != 0:
        raise ValueError(
            "token_mean_loss: expected loss_sum and num_tokens to be scalars, got shapes "
            f"{list(loss_sum.shape)} and {list(count.shape)}"
        )
    mean: Tensor = _TokenMean.apply(loss_sum, count, group, grad_scale)
    return mean
