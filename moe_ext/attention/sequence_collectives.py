"""Between a tensor whole and in shards of the sequence: the collectives of Megatron's scheme.

Shapes: S whole sequence, L shard of this rank, M the longest shard, P ranks of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext.distributed.collectives import all_to_all_rows
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import check_group, group_rank, group_size
from moe_ext.distributed.traffic import record_traffic

# torch 2.13 warns of the names that earlier versions have.
ALL_GATHER, REDUCE_SCATTER = (
    new if hasattr(dist, new) else old
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)


@dataclass(frozen=True)
class Shards:
    """Lengths of the shards of all ranks, in group order.

    Attributes:
        group: the ranks; None is this process alone.
        sizes: length of each rank's shard.
        operation: name for error messages.
    """

    group: ProcessGroup | None
    sizes: tuple[int, ...]
    operation: str

    @property
    def own(self) -> slice:
        """Where this rank's shard is in the whole."""
        rank = group_rank(self.group)
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])

    @property
    def is_even(self) -> bool:
        """Whether all shards have one length."""
        return min(self.sizes) == max(self.sizes)


@dataclass(frozen=True)
class Underway:
    """A collective that was posted; `wait` gives its result, once."""

    wait: Callable[[], Tensor]


def start_all_gather(x_L: Tensor, shards: Shards) -> Underway:
    """Post the all-gather of shards along dimension 0; one message a rank, padded if uneven."""
    group, sizes = shards.group, shards.sizes
    if group is None or len(sizes) == 1 or not sum(sizes):
        return Underway(lambda: x_L)
    longest = max(sizes)
    sent_M = x_L.contiguous() if shards.is_even else _padded(x_L, longest)
    found = x_L.new_empty((len(sizes) * longest, *x_L.shape[1:]))
    record_traffic("all_gather", (len(sizes) - 1) * sent_M.nbytes)
    with naming_failed_ranks(group, shards.operation):
        work = getattr(dist, ALL_GATHER)(found, sent_M, group=group, async_op=True)

    def wait() -> Tensor:
        with naming_failed_ranks(group, shards.operation):
            work.wait()
        # Only now may what was sent be freed.
        nonlocal sent_M
        sent_M = sent_M[:0]
        if shards.is_even:
            return found
        parts = found.split(longest)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return Underway(wait)


def sum_shards(x_S: Tensor, shards: Shards) -> Tensor:
    """This rank's shard of the sum over ranks, added up here in group order.

    Gloo's reduce-scatter sends every shard twice; this sends it once, to the rank that it is for.
    """
    group, sizes = shards.group, shards.sizes
    if group is None or len(sizes) == 1:
        return x_S
    each, own = math.prod(x_S.shape[1:]), sizes[group_rank(group)]
    record_traffic("reduce_scatter", (sum(sizes) - own) * each * x_S.element_size())
    send, receive = [size * each for size in sizes], [own * each] * len(sizes)
    found = all_to_all_rows(x_S.reshape(-1), group, send, receive, operation=shards.operation).view(
        len(sizes), own, *x_S.shape[1:]
    )
    total_L = found[0].to(torch.promote_types(x_S.dtype, torch.float32), copy=True)
    for part_L in found[1:]:
        total_L += part_L
    return total_L.to(x_S.dtype)


def start_reduce_scatter(x_S: Tensor, shards: Shards) -> Underway:
    """Post the reduce-scatter along dimension 0: this rank's shard of the sum over ranks."""
    group, sizes = shards.group, shards.sizes
    if group is None or len(sizes) == 1 or not sum(sizes):
        return Underway(lambda: x_S)
    longest = max(sizes)
    sent = x_S.contiguous()
    if not shards.is_even:
        sent = torch.cat([_padded(part, longest) for part in x_S.split(list(sizes))])
    found_M = x_S.new_empty((longest, *x_S.shape[1:]))
    record_traffic("reduce_scatter", (len(sizes) - 1) * found_M.nbytes)
    with naming_failed_ranks(group, shards.operation):
        work = getattr(dist, REDUCE_SCATTER)(found_M, sent, group=group, async_op=True)

    def wait() -> Tensor:
        with naming_failed_ranks(group, shards.operation):
            work.wait()
        nonlocal sent
        sent = sent[:0]
        return found_M[: sizes[group_rank(group)]]

    return Underway(wait)


def _padded(x_L: Tensor, length: int) -> Tensor:
    padded = x_L.new_zeros((length, *x_L.shape[1:]))
    padded[: x_L.shape[0]] = x_L
    return padded


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_L: Tensor, shards: Shards, whole_grad: bool) -> Tensor:
        ctx.shards, ctx.whole_grad = shards, whole_grad
        whole_S = start_all_gather(x_L, shards).wait()
        # An input that is handed on unchanged needs a tensor of its own in the graph.
        return whole_S.view_as(whole_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None, None]:
        if ctx.whole_grad:
            return grad_S[ctx.shards.own], None, None
        return start_reduce_scatter(grad_S, ctx.shards).wait(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_S: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        found_L = start_reduce_scatter(x_S, shards).wait()
        return found_L.view_as(found_L)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_L: Tensor) -> tuple[Tensor, None]:
        return start_all_gather(grad_L, ctx.shards).wait(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_S: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return x_S[shards.own].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_L: Tensor) -> tuple[Tensor, None]:
        return start_all_gather(grad_L, ctx.shards).wait(), None


def gather_from_sequence(
    x: Tensor,
    *,
    group: ProcessGroup | None,
    dim: int,
    sizes: Sequence[int] | None = None,
    whole_grad: bool = False,
) -> Tensor:
    """All-gather the shards of a sequence, in group order: before a column-parallel product.

    The ranks compare nothing: shapes that do not fit each other are for the backend to find.

    Args:
        x: this rank's shard, L long in `dim`.
        group: the P ranks; None is this process alone.
        dim: dimension of the sequence.
        sizes: length of every rank's shard; None for shards of one length.
        whole_grad: False where ranks go on with different parts of the result, so that the
            gradients of a position have to be summed (reduce-scatter); True where each rank
            computes the same from it and already holds the whole gradient (no communication).

    Returns:
        S long in `dim`, equal on every rank.

    Raises:
        ValueError: `sizes` does not fit, before any communication.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
    2022 (arXiv 2205.05198), section 4.2.2: g, and its backward.
    """
    op = "gather_from_sequence"
    shards = _shards(x, group, dim, sizes, op, whole=False)
    gathered: Tensor = _Gather.apply(x.movedim(dim, 0), shards, whole_grad)
    return gathered.movedim(0, dim)


def reduce_scatter_to_sequence(
    x: Tensor, *, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum over the ranks, of which each keeps its shard: after a row-parallel product.

    The backward pass is an all-gather. The ranks compare nothing, as `gather_from_sequence`.

    Args:
        x: this rank's summand, S long in `dim`.
        group: the P ranks; None is this process alone.
        dim: dimension of the sequence.
        sizes: length of every rank's shard; None for S / P.

    Returns:
        L long in `dim`.

    Raises:
        ValueError: `sizes` does not fit, before any communication.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference: as `gather_from_sequence`: g-bar.
    """
    op = "reduce_scatter_to_sequence"
    shards = _shards(x, group, dim, sizes, op, whole=True)
    reduced: Tensor = _ReduceScatter.apply(x.movedim(dim, 0), shards)
    return reduced.movedim(0, dim)


def scatter_to_sequence(
    x: Tensor, *, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's shard of a tensor that all ranks hold whole; the backward pass is an all-gather.

    Unlike `shard_sequence`, for tensors that were computed alike on every rank: the whole gradient
    comes back to each of them.

    Args:
        x: equal on every rank, S long in `dim`.
        group: the P ranks; None is this process alone.
        dim: dimension of the sequence.
        sizes: length of every rank's shard; None for S / P.

    Returns:
        L long in `dim`.

    Raises:
        ValueError: `sizes` does not fit, before any communication.
        RankFailureError: a rank died or did not answer; the message names it.
    """
    shards = _shards(x, group, dim, sizes, "scatter_to_sequence", whole=True)
    shard: Tensor = _Scatter.apply(x.movedim(dim, 0), shards)
    return shard.movedim(0, dim)


def _shards(
    x: Tensor,
    group: ProcessGroup | None,
    dim: int,
    sizes: Sequence[int] | None,
    operation: str,
    *,
    whole: bool,
) -> Shards:
    """The shards of a tensor that is whole, or one of them."""
    check_group(group, operation)
    num_ranks, length = group_size(group), x.shape[dim]
    if sizes is None:
        if whole and length % num_ranks:
            raise ValueError(
                f"{operation}: expected the length to be a multiple of the {num_ranks} ranks, or "
                f"sizes to be given, got {length}"
            )
        sizes = [length // num_ranks if whole else length] * num_ranks
    found = tuple(int(size) for size in sizes)
    own = sum(found) if whole else (*found, -1)[min(group_rank(group), len(found))]
    if len(found) != num_ranks or min(found) < 0 or own != length:
        rule = "sum to" if whole else "have for this rank"
        raise ValueError(
            f"{operation}: expected sizes to be {num_ranks} lengths that {rule} {length}, "
            f"got {list(found)}"
        )
    return Shards(group, found, operation)
