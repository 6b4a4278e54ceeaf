"""Sharded sequences: how to shard and gather them, and their positions, labels and loss.

Shapes: S whole sequence, L shard of this rank, M the longest shard, P ranks of the group.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.attention.checks import refuse, requires, wants_grad
from moe_ext.attention.layouts import Layout, make_layout, order_of, ranks_of
from moe_ext.attention.masks import Offsets, check_cu_seqlens, check_end, rows_of_offsets
from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement, SummedOptions
from moe_ext.comm.groups import check_group, group_rank, group_ranks, group_size
from moe_ext.comm.pending import Pending
from moe_ext.comm.reports import telling
from moe_ext.comm.streams import is_capturing
from moe_ext.comm.traffic import record_traffic


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
        """Range of this rank's shard in the whole."""
        rank = group_rank(self.group)
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])

    @property
    def is_even(self) -> bool:
        """True if all shards have one length."""
        return min(self.sizes) == max(self.sizes)

    def without_padding(self, found: Tensor) -> Tensor:
        """`[S, ...]` of gathered shards, each of which is padded to the longest."""
        parts = zip(found.split(max(self.sizes)), self.sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def gathered(self, x_L: Tensor) -> Tensor:
        """The whole sequence, gathered from all ranks."""
        return start_all_gather(x_L, self).wait()

    def reduced(self, x_S: Tensor) -> Tensor:
        """This rank's shard of the sum over ranks."""
        return start_reduce_scatter(x_S, self).wait()

    def part(self, x_S: Tensor) -> Tensor:
        """This rank's shard of the whole, as a copy, because a view would keep the whole alive."""
        return x_S[self.own].clone()


def start_all_gather(x_L: Tensor, shards: Shards) -> Pending[Tensor]:
    """Post the all-gather of shards along dimension 0. Uneven shards travel padded."""
    if len(shards.sizes) == 1 or not sum(shards.sizes):
        return Pending.done(x_L)
    sent_M = x_L if shards.is_even else _padded(x_L, max(shards.sizes))
    gather = collectives.start_all_gather(sent_M, shards.group, operation=shards.operation)
    return gather if shards.is_even else gather.then(shards.without_padding)


def sum_shards(x_S: Tensor, shards: Shards) -> Tensor:
    """This rank's shard of the sum over ranks, added up on this rank in group order.

    Gloo's reduce-scatter would send every shard twice. The all-to-all here sends every shard once,
    to the rank that holds it.
    """
    group, sizes, operation = shards.group, shards.sizes, shards.operation
    if len(sizes) == 1:
        return x_S
    each, own = math.prod(x_S.shape[1:]), sizes[group_rank(group)]
    record_traffic("reduce_scatter", (sum(sizes) - own) * each * x_S.element_size())
    send, receive = [size * each for size in sizes], [own * each] * len(sizes)
    row = x_S.reshape(-1)
    row = collectives.all_to_all(
        row, group, operation=operation, send=send, receive=receive, counted=False
    )
    found = row.view(len(sizes), own, *x_S.shape[1:])
    total_L = found[0].to(torch.promote_types(x_S.dtype, torch.float32), copy=True)
    for part_L in found[1:]:
        total_L += part_L
    return total_L.to(x_S.dtype)


def start_reduce_scatter(x_S: Tensor, shards: Shards) -> Pending[Tensor]:
    """Post the reduce-scatter along dimension 0, for this rank's shard of the sum over ranks."""
    sizes = shards.sizes
    if len(sizes) == 1 or not sum(sizes):
        return Pending.done(x_S)
    sent = x_S
    if not shards.is_even:
        sent = torch.cat([_padded(part, max(sizes)) for part in x_S.split(list(sizes))])
    scatter = collectives.start_reduce_scatter(sent, shards.group, operation=shards.operation)
    own = sizes[group_rank(shards.group)]
    return scatter if shards.is_even else scatter.then(lambda found_M: found_M[:own])


def shard_sequence(
    x: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
    dim: int,
    layout: str | Layout = "zigzag",
    cu_seqlens: Offsets | None = None,
) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole, without communication.

    Args:
        x: any shape and dtype.
        group: the ranks that share the sequence, see `ring_attention`; None is this process alone.
        dim: dimension of the sequence, S long.
        layout: see `make_layout`.
        cu_seqlens: offsets of packed documents, for layouts that follow documents.

    Returns:
        A copy with L in place of S; differentiable.
    """
    group = ranks_of(group, "shard_sequence")
    made = make_layout(layout, x.shape[dim], group_size(group), cu_seqlens=cu_seqlens)
    return x.index_select(dim, made.positions(group_rank(group), x.device))


def unshard_sequence(
    x: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
    dim: int,
    layout: str | Layout = "zigzag",
    cu_seqlens: Offsets | None = None,
) -> Tensor:
    """Gather a sharded tensor on every rank, the inverse of `shard_sequence`.

    Differentiable: the gradient of a shard is the sum over ranks of the gradients of its copies.

    Args:
        x: this rank's shard, L long in `dim`.
        group: see `shard_sequence`.
        dim: dimension of the sequence.
        layout: as in `shard_sequence`.
        cu_seqlens: as in `shard_sequence`.

    Raises:
        ValueError: on every rank, if the lengths do not match the layout, or an argument differs
            between ranks.
        RankFailureError: a rank died or did not answer; the message names it.
    """
    op = "unshard_sequence"
    group = ranks_of(group, op)
    with Agreement(op, group, x.device) as agreement:
        rows = rows_of_offsets(cu_seqlens, op)
        rest = list(x.movedim(dim, 0).shape[1:])
        facts = {
            "layout": layout,
            "cu_seqlens": check_cu_seqlens(cu_seqlens, op) if rows is None else rows,
            "dim": dim % x.dim(),
            "dtype and other dimensions of x": (x.dtype, *rest),
            "requiring a gradient": wants_grad(x),
        }
        told = agreement.compare(facts, values=[x.shape[dim]])
    lengths = [row[0] for row in told]
    made = make_layout(layout, sum(lengths), len(lengths), cu_seqlens=cu_seqlens)
    check_lengths(made, lengths, op, group)

    def there(x_L: Tensor) -> Tensor:
        found_S = Shards(group, made.sizes, op).gathered(x_L)
        return found_S.index_select(0, order_of(made, x_L.device).argsort())

    def back(grad_S: Tensor) -> Tensor:
        shards = Shards(group, made.sizes, f"{op} backward")
        return sum_shards(grad_S.index_select(0, order_of(made, grad_S.device)), shards)

    return _along(x, dim, there, back)


def check_lengths(
    layout: Layout, lengths: Sequence[int], operation: str, group: ProcessGroup | None
) -> None:
    """ValueError that names the ranks whose shards have another length than in the layout."""
    if tuple(lengths) == layout.sizes:
        return
    ranks = (0,) if group is None else group_ranks(group)
    wrong = ", ".join(
        f"{found} in the place of {size} on rank {rank}"
        for rank, found, size in zip(ranks, lengths, layout.sizes, strict=True)
        if found != size
    )
    shards = f"the shards of a {layout.name} layout of {layout.seq_len} positions"
    refuse(operation, shards, f"{list(layout.sizes)} long", f"{list(lengths)}: {wrong}")


def position_ids(
    seq_len: int,
    *,
    group: ProcessGroup | DeviceMesh | None,
    layout: str | Layout = "zigzag",
    cu_seqlens: Offsets | None = None,
    restart: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """`[L]` int64, the positions that this rank holds, for example for rotary embeddings.

    `[B, L]` if `cu_seqlens` has offsets for each row of a batch.

    Args:
        seq_len: S, the number of positions of the whole sequence.
        group: see `shard_sequence`.
        layout: see `make_layout`.
        cu_seqlens: offsets of packed documents, or a list of offsets for each row of a batch.
        restart: if True, positions count from 0 in each document; if False, in the whole sequence.
        device: device of the result.
    """
    group = ranks_of(group, "position_ids")
    made = make_layout(layout, seq_len, group_size(group), cu_seqlens=cu_seqlens)
    ids_L = made.positions(group_rank(group), device)
    rows = rows_of_offsets(cu_seqlens, "position_ids")
    if rows is not None and restart:
        options: dict[str, Any] = {"group": group, "layout": made, "device": device}
        return torch.stack([position_ids(seq_len, cu_seqlens=row, **options) for row in rows])
    if cu_seqlens is None or not restart:
        return ids_L
    offsets = check_cu_seqlens(cu_seqlens, "position_ids")
    assert offsets is not None
    edges = torch.tensor(offsets, device=device)
    return ids_L - edges[torch.bucketize(ids_L, edges, right=True) - 1]


def rotate(x_BHLC: Tensor, position_ids: Tensor, base: float) -> Tensor:
    """Rotary embedding: rotates the pairs of channels c and c + C / 2 by angles of the positions.

    Args:
        x_BHLC: queries or keys, C even.
        position_ids: `[L]` or `[B, L]`.
        base: base of the frequencies.
    """
    half = x_BHLC.shape[-1] // 2
    # Angles are computed in float64. In float32 an angle at position 10^6 has an error of 0.05.
    exponent = torch.arange(half, dtype=torch.float64, device=x_BHLC.device) / half
    angle = position_ids[..., None].double() * base**-exponent
    angle = angle if position_ids.dim() == 1 else angle[:, None]
    cos, sin = angle.cos().to(x_BHLC.dtype), angle.sin().to(x_BHLC.dtype)
    real, imag = x_BHLC.chunk(2, dim=-1)
    return torch.cat([real * cos - imag * sin, real * sin + imag * cos], dim=-1)


def document_ids(
    cu_seqlens: Offsets,
    *,
    group: ProcessGroup | DeviceMesh | None,
    layout: str | Layout = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """`[L]` int64, the document of each position that this rank holds, counted from 0.

    `[B, L]` if `cu_seqlens` has offsets for each row of a batch. The result is an argument of
    `MoELayer.forward`.

    Args:
        cu_seqlens: offsets of packed documents in the whole sequence, or a list of offsets for each
            row of a batch.
        group: see `shard_sequence`.
        layout: see `make_layout`.
        device: device of the result.
    """
    op = "document_ids"
    where: dict[str, Any] = {"group": group, "layout": layout, "device": device}
    rows = rows_of_offsets(cu_seqlens, op)
    if rows is not None:
        return torch.stack([document_ids(row, **where) for row in rows])
    offsets = check_cu_seqlens(cu_seqlens, op)
    assert offsets is not None
    ids_L = position_ids(offsets[-1], cu_seqlens=offsets, restart=False, **where)
    return torch.bucketize(ids_L, torch.tensor(offsets, device=device), right=True) - 1


def shift_labels(
    labels: Tensor,
    *,
    dim: int = -1,
    cu_seqlens: Offsets | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Shift labels of a whole sequence so that the label of a position is the next token.

    Shift before `shard_sequence`, because the token after the last one of a shard is on another
    rank. The last position of each document has no label.

    Args:
        labels: token ids, S long in `dim`.
        dim: dimension of the sequence.
        cu_seqlens: offsets of packed documents, or a list of offsets for each row of labels.
        ignore_index: value that stands for no label.
    """
    rows = rows_of_offsets(cu_seqlens, "shift_labels")
    if rows is not None:
        fits = dim % labels.dim() > 0 and len(rows) == len(labels)
        rule = f"a row of offsets, or one for each of the {len(labels)} rows of labels"
        requires("shift_labels")(fits, "cu_seqlens", rule, len(rows))
        shift = functools.partial(shift_labels, dim=dim, ignore_index=ignore_index)
        pairs = zip(labels.split(1), rows, strict=True)
        return torch.cat([shift(part, cu_seqlens=row) for part, row in pairs])
    offsets = check_cu_seqlens(cu_seqlens, "shift_labels")
    check_end(offsets, labels.shape[dim], "shift_labels")
    shifted = labels.roll(-1, dim)
    ends = {labels.shape[dim], *(offsets or ())} - {0}
    last = torch.tensor(sorted(end - 1 for end in ends), dtype=torch.int64, device=labels.device)
    return shifted.index_fill_(dim, last, ignore_index)


# Comparison of the options of `token_mean_loss`, for each group of ranks that share a loss.
_compared: weakref.WeakKeyDictionary[ProcessGroup, SummedOptions] = weakref.WeakKeyDictionary()


class _TokenMean(torch.autograd.Function):
    """Loss over the group divided by tokens over the group.

    The gradient of this rank's `loss_sum` is `scale` / tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, loss_sum: Tensor, num_tokens: Tensor, group: ProcessGroup | None, scale: float
    ) -> Tensor:
        sums = torch.stack([loss_sum.double(), num_tokens.double()])
        compared = None
        # The comparison is left out of a CUDA graph, because the host reads its result.
        if group is not None and not is_capturing(sums.device):
            compared = _compared.setdefault(group, SummedOptions("token_mean_loss"))
            compared.begin()
            compared.now = {"grad_scale": float(scale)}
            sums = torch.cat([sums, compared.marks(sums.dtype, sums.device)])
        collectives.all_reduce_(sums, group, operation="token_mean_loss", counted=False)
        if group is not None and compared is not None:
            compared.check([sums[2:]], [[group]])
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
    """Mean of the loss over the tokens of all ranks, as in one process, equal on every rank.

    The mean of the means of the ranks is another number if shards have unequal numbers of labels.
    Gradients of replicated parameters are those of this mean after they are *summed* over the
    group. `moe_ext.distributed.sync_gradients` averages over ranks instead; for it, set
    `grad_scale` to the number of ranks.

    Args:
        loss_sum: 0-d, sum of the losses of this rank's tokens.
        num_tokens: how many they are; may be 0.
        group: ranks that share the sequence.
        grad_scale: factor on the gradient, the same on every rank.

    Raises:
        ValueError: on every rank, if an argument of a rank is not a scalar, or if `grad_scale`
            differs. On a device with streams, a difference is raised by the next call, so that the
            host does not wait.
        RankFailureError: a rank died or did not answer.
    """
    op = "token_mean_loss"
    group = ranks_of(group, op)
    with telling(group, loss_sum.device, op):
        count = torch.as_tensor(num_tokens, device=loss_sum.device)
        fits = loss_sum.dim() == 0 and count.dim() == 0
        found = f"shapes {list(loss_sum.shape)} and {list(count.shape)}"
        requires(op)(fits, "loss_sum and num_tokens", "scalars", found)
    mean: Tensor = _TokenMean.apply(loss_sum, count, group, grad_scale)
    return mean


def _padded(x_L: Tensor, length: int) -> Tensor:
    padded = x_L.new_zeros((length, *x_L.shape[1:]))
    padded[: x_L.shape[0]] = x_L
    return padded


Map = Callable[[Tensor], Tensor]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        found = there(x)
        # `there` may return its input unchanged, but the node's output must be a tensor of its own.
        return found.view_as(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def linear_map(x: Tensor, there: Map, back: Map) -> Tensor:
    """`there(x)`, with `back` as the map of its gradient. No tensor is saved for the backward."""
    found: Tensor = _LinearMap.apply(x, there, back)
    return found


def _along(x: Tensor, dim: int, there: Map, back: Map) -> Tensor:
    """`linear_map` along dimension `dim`, for maps that act on the first dimension."""
    return linear_map(x.movedim(dim, 0), there, back).movedim(0, dim)


def gather_from_sequence(
    x: Tensor,
    *,
    group: ProcessGroup | None,
    dim: int,
    sizes: Sequence[int] | None = None,
    whole_grad: bool = False,
) -> Tensor:
    """All-gather the shards of a sequence in group order, for a column-parallel product after it.

    The ranks compare nothing. Shapes that do not match are left to the backend.

    Args:
        x: this rank's shard, L long in `dim`.
        group: the P ranks; None is this process alone.
        dim: dimension of the sequence.
        sizes: length of every rank's shard; None for shards of equal length.
        whole_grad: False if ranks compute different things from the result, so that their gradients
            have to be summed (reduce-scatter). True if all ranks compute the same from the result,
            and each already has the whole gradient (no communication).

    Returns:
        S long in `dim`, equal on every rank.

    Raises:
        ValueError: `sizes` does not match x or the group; raised before any communication.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
    2022 (arXiv 2205.05198), section 4.2.2: g, and its backward.
    """
    shards = _shards(x, group, dim, sizes, "gather_from_sequence", whole=False)
    return _along(x, dim, shards.gathered, shards.part if whole_grad else shards.reduced)


def reduce_scatter_to_sequence(
    x: Tensor, *, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum over ranks and keep this rank's shard of the sum, after a row-parallel product.

    The backward pass is an all-gather. The ranks compare nothing.

    Args:
        x: this rank's summand, S long in `dim`.
        group: the P ranks; None is this process alone.
        dim: dimension of the sequence.
        sizes: length of every rank's shard; None for S / P.

    Returns:
        L long in `dim`.

    Raises:
        ValueError: `sizes` does not match x or the group; raised before any communication.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference: as for `gather_from_sequence`: g-bar.
    """
    shards = _shards(x, group, dim, sizes, "reduce_scatter_to_sequence", whole=True)
    return _along(x, dim, shards.reduced, shards.gathered)


def scatter_to_sequence(
    x: Tensor, *, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's shard of a tensor that all ranks hold whole. The backward pass is an all-gather.

    Unlike `shard_sequence`, this function is for a tensor that every rank has computed, because its
    backward pass returns the whole gradient to every rank. The ranks compare nothing.

    Args:
        x: equal on every rank, S long in `dim`.
        group: the P ranks; None is this process alone.
        dim: dimension of the sequence.
        sizes: length of every rank's shard; None for S / P.

    Returns:
        L long in `dim`.

    Raises:
        ValueError: `sizes` does not match x or the group; raised before any communication.
        RankFailureError: a rank died or did not answer; the message names it.
    """
    shards = _shards(x, group, dim, sizes, "scatter_to_sequence", whole=True)
    return _along(x, dim, shards.part, shards.gathered)


def _shards(
    x: Tensor,
    group: ProcessGroup | None,
    dim: int,
    sizes: Sequence[int] | None,
    operation: str,
    *,
    whole: bool,
) -> Shards:
    """`Shards` for an x that is the `whole` sequence, or else this rank's shard of it."""
    check_group(group, operation)
    num_ranks, length = group_size(group), x.shape[dim]
    require = requires(operation)
    if sizes is None:
        rule = f"a multiple of the {num_ranks} ranks, or sizes to be given"
        require(not whole or length % num_ranks == 0, "the length", rule, length)
        sizes = [length // num_ranks if whole else length] * num_ranks
    found = tuple(int(size) for size in sizes)
    own = sum(found) if whole else (*found, -1)[min(group_rank(group), len(found))]
    fits = len(found) == num_ranks and min(found) >= 0 and own == length
    rule = f"{num_ranks} lengths that {'sum to' if whole else 'have for this rank'} {length}"
    require(fits, "sizes", rule, list(found))
    return Shards(group, found, operation)
