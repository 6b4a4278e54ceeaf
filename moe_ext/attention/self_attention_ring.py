"""Ring self-attention as first published: a ring of keys, softmax of whole rows, a ring of values.

Shapes: B batch, H heads, G heads of keys and values, S whole sequence, L positions of this rank, R
    rows = (H / G) * L, M positions of the rank whose keys or values are at hand, D and Dv head
    dims, P ranks of the group. Columns S are in group order, shard after shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention._block import accumulation_dtype
from moe_ext.attention._options import scale_of
from moe_ext.attention.exchange import Buffers, Exchange
from moe_ext.attention.layouts import Layout, make_layout
from moe_ext.attention.masks import Mask, check_cu_seqlens, check_end, check_window
from moe_ext.attention.self_attention_checks import (
    OPERATION,
    agree_on_call,
    check_arguments,
    check_attn_mask,
)
from moe_ext.attention.sequence_collectives import Shards, sum_shards
from moe_ext.attention.sharding import check_lengths
from moe_ext.distributed.groups import check_group, group_rank
from moe_ext.nn.torch_state import without_autocast
from moe_ext.ops import routing_uniform
from moe_ext.ops._autograd import refuse_second_derivative
from moe_ext.ops.attention import document_ids

_DROPOUT_STREAM = 4
_NUM_PASSES = 4
_KEYS, _VALUES, _KEYS_BACKWARD, _VALUES_BACKWARD = range(_NUM_PASSES)


def ring_self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str | Layout = "contiguous",
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Self-attention over a sequence in shards, by one ring for q k^T and one for the output.

    Keys go round once; every rank then holds the scores of its queries over the whole sequence,
    `[B, H, L, S]`, and takes their softmax; values go round once. The backward pass sends values
    and keys round again and reduce-scatters dK and dV: 6 (P - 1) / P of B H S D elements altogether
    where H = Hkv and D = Dv. Memory is O(S^2 / P), as published: `ring_attention` gives the same
    numbers in O(S / P), for masks that follow from positions; this one takes any `attn_mask`.

    Every rank has to run the backward pass too.

    NOTE: device-to-host sync, since the ranks agree on shapes in a message of fixed size first.

    Args:
        q: `[B, H, L, D]`, this rank's queries; L as `layout` says for any S.
        k: `[B, Hkv, L, D]`; H is a multiple of Hkv.
        v: `[B, Hkv, L, Dv]`.
        group: the P ranks; None is this process alone.
        is_causal: a query sees no key after it.
        scale: factor on q k^T; None for 1 / sqrt(D).
        layout: who holds which positions, see `make_layout`.
        window: (left, right): a query sees that many keys before and after it; -1 is no limit.
        cu_seqlens: offsets of packed documents in the whole sequence; a query sees its own alone.
        key_mask: `[B, L]` bool, False for this rank's keys that no query sees.
        attn_mask: `[B or 1, H or 1, L, S]`, this rank's queries by all keys in the order of the
            sequence: bool, True for seen, or floating, added to the scores; not differentiable.
        dropout_p: share of the softmax dropped: with one seed the same numbers as `ring_attention`
            drops, for every P and layout.
        seed: of the dropout, equal on every rank; None draws one from torch's generator of the
            first rank.

    Returns:
        `[B, H, L, Dv]` in the dtype of q; products are summed in float32 (float64) and rounded
        once. A query that sees no key gives zeros and zero gradients.

    Raises:
        ValueError: an argument that is wrong by itself, before any communication; arguments that
            differ between ranks or lengths that are not those of the layout, on every rank.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference:
        Li, Xue, Baranwal, Li, You: Sequence Parallelism: Long Sequence Training from System
        Perspective (2021, arXiv 2105.13120), section 3.2. The authors' code divides the scores by
        the root of the model dim and gradients by P; here they are those of one process.
    """
    check_group(group, OPERATION)
    check_arguments(q, k, v, key_mask, attn_mask, layout, scale, dropout_p, seed)
    mask = Mask(
        is_causal, *check_window(window, OPERATION), check_cu_seqlens(cu_seqlens, OPERATION)
    )
    factor = scale_of(scale, q.shape[3])
    lengths, seed = agree_on_call(
        (q, k, v), group, layout, mask, factor, dropout_p, seed, key_mask, attn_mask
    )
    check_end(mask.cu_seqlens, sum(lengths), OPERATION)
    check_attn_mask(attn_mask, sum(lengths))
    made = make_layout(layout, sum(lengths), len(lengths), cu_seqlens=mask.cu_seqlens)
    check_lengths(made, lengths, OPERATION, group)
    call = _Call(group, made, mask, factor, dropout_p, seed)
    out: Tensor = _RingSelfAttention.apply(q, k, v, key_mask, attn_mask, call)
    return out


@dataclass(frozen=True)
class _Call:
    """All of a call that is not a tensor of its graph."""

    group: ProcessGroup | None
    layout: Layout
    mask: Mask
    scale: float
    dropout_p: float
    seed: int

    @property
    def rank(self) -> int:
        return group_rank(self.group)

    def columns(self, source: int) -> slice:
        """Of the shard of a rank."""
        start = sum(self.layout.sizes[:source])
        return slice(start, start + self.layout.sizes[source])

    def positions(self, device: torch.device) -> Tensor:
        """`[S]`, global position of each column."""
        ranks = range(self.layout.num_ranks)
        return torch.cat([self.layout.positions(rank, device) for rank in ranks])

    def shards(
        self, own: Tensor, bytes_of_position: int, kind: int, operation: str
    ) -> Iterator[tuple[int, Tensor]]:
        """(rank, its message) of every rank in the order of the ring, while the next is underway.

        A message is valid until the next one is asked for.
        """
        num_ranks, rank = self.layout.num_ranks, self.rank
        sizes = [bytes_of_position * length for length in self.layout.sizes]
        exchange = Exchange(self.group, operation)
        buffers = Buffers(max(sizes), own.device)
        left, right = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        held = own
        for step in range(num_ranks):
            sends, buffer = [], None
            if step < num_ranks - 1:
                sends = [(held, right)]
                buffer = buffers.take(step, sizes[(rank - step - 1) % num_ranks])
            hop = exchange.post(sends, buffer, left, _NUM_PASSES * step + kind)
            yield (rank - step) % num_ranks, held
            hop.wait()
            held = held if buffer is None else buffer

    def kept(self, weights_BGRS: Tensor, heads: int) -> Tensor | None:
        """What dropout keeps, bool of the shape of the weights; None where it keeps all.

        Drawn as the attention operators draw: by seed, head, batch, query and key.
        """
        if self.dropout_p == 0:
            return None
        device, seq_len = weights_BGRS.device, self.layout.seq_len
        queries_L = self.layout.positions(self.rank, device)
        order_S = self.positions(device)
        # In units of 2^-24, the distance between the numbers that are drawn.
        threshold = int(self.dropout_p * 2**24 + 0.5) / 2**24
        kept = []
        for batch in range(weights_BGRS.shape[0]):
            for head in range(heads):
                state = torch.tensor([self.seed, head, batch, 0], device=device)
                drawn_LS = routing_uniform(
                    state, len(queries_L), seq_len, stream=_DROPOUT_STREAM, token_idx=queries_L
                )
                kept.append(drawn_LS.index_select(1, order_S) >= threshold)
        return torch.stack(kept).view(weights_BGRS.shape)

    def drop(self, x: Tensor, kept: Tensor | None, columns: slice) -> Tensor:
        """Weights (or their gradients) of some columns after dropout."""
        if kept is None:
            return x
        return x * kept[..., columns] / (1 - self.dropout_p)


class _RingSelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        call: _Call,
    ) -> Tensor:
        """The output of this rank's queries."""
        ctx.call, ctx.num_heads = call, q.shape[1]
        with without_autocast(q.device):
            if call.layout.seq_len == 0 or q.shape[0] * q.shape[1] == 0:
                shape = (*k.shape[:2], 0, call.layout.seq_len)
                weights_BGRS = q.new_zeros(shape, dtype=accumulation_dtype(q.dtype))
                out = q.new_zeros((*q.shape[:3], v.shape[3]))
            else:
                weights_BGRS = _scores(q, k, key_mask, call)
                if attn_mask is not None:
                    _add_mask_(weights_BGRS, attn_mask, q.shape[1], call)
                _softmax_(weights_BGRS)
                out = _output(weights_BGRS, v, q.shape[1], call)
        ctx.save_for_backward(q, k, v, weights_BGRS)
        return out

    @staticmethod
    @refuse_second_derivative(OPERATION)
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Of q, k and v."""
        q, k, v, weights_BGRS = ctx.saved_tensors
        if ctx.call.layout.seq_len * q.shape[0] * q.shape[1] == 0:
            return *(torch.zeros_like(x) for x in (q, k, v)), None, None, None
        with without_autocast(q.device):
            grad_scores, grad_v = _values_backward(weights_BGRS, v, grad_out, ctx)
            # In place: rows of S numbers are what memory goes to.
            sums_BGR = torch.einsum("bgrs,bgrs->bgr", grad_scores, weights_BGRS)
            grad_scores.sub_(sums_BGR[..., None]).mul_(weights_BGRS)
            grad_q, grad_k = _keys_backward(grad_scores, q, k, ctx.call)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _rows(x_BHLD: Tensor, kv_heads: int) -> Tensor:
    """`[B, G, R, D]` float32 (float64): the heads that share keys, one below the other."""
    batch, heads, length, dim = x_BHLD.shape
    rows = x_BHLD.reshape(batch, kv_heads, heads // kv_heads * length, dim)
    return rows.to(accumulation_dtype(x_BHLD.dtype))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _shard(message: Tensor, like_BGLD: Tensor, length: int) -> Tensor:
    """`[B, G, M, D]` of a message, ready for products."""
    batch, heads, _, dim = like_BGLD.shape
    shard = message.view(like_BGLD.dtype).view(batch, heads, length, dim)
    return shard.to(accumulation_dtype(like_BGLD.dtype))


def _bytes_of_position(x_BGLD: Tensor) -> int:
    return x_BGLD.shape[0] * x_BGLD.shape[1] * x_BGLD.shape[3] * x_BGLD.element_size()


def _scores(q: Tensor, k: Tensor, key_mask: Tensor | None, call: _Call) -> Tensor:
    """`[B, G, R, S]`, -inf where a key is not seen; one pass of the ring."""
    batch, kv_heads, length, _ = k.shape
    q_BGRD = _rows(q, kv_heads) * call.scale
    scores_BGRS = q_BGRD.new_empty((*q_BGRD.shape[:3], call.layout.seq_len))
    unit, masked = _bytes_of_position(k), key_mask is not None
    own = _bytes(k) if key_mask is None else torch.cat([_bytes(k), _bytes(key_mask)])
    for source, message in call.shards(own, unit + batch * masked, _KEYS, OPERATION):
        count = call.layout.sizes[source]
        k_BGMD = _shard(message[: unit * count], k, count)
        columns_BGRM = scores_BGRS[..., call.columns(source)]
        columns_BGRM.copy_(q_BGRD @ k_BGMD.mT)
        by_query = columns_BGRM.unflatten(2, (-1, length)) if length else columns_BGRM
        hidden_LM = _hidden(call, source, q.device)
        if hidden_LM is not None and length:
            by_query.masked_fill_(hidden_LM, -torch.inf)
        if masked:
            seen_BM = message[unit * count :].view(torch.bool).view(batch, 1, 1, count)
            columns_BGRM.masked_fill_(~seen_BM, -torch.inf)
    return scores_BGRS


def _hidden(call: _Call, source: int, device: torch.device) -> Tensor | None:
    """`[L, M]` bool, True for keys that a query may not see by their positions."""
    mask = call.mask
    if mask == Mask():
        return None
    queries_L = call.layout.positions(call.rank, device)[:, None]
    keys_M = call.layout.positions(source, device)
    right = 0 if mask.is_causal else mask.right
    hidden_LM = torch.zeros((len(queries_L), len(keys_M)), dtype=torch.bool, device=device)
    if mask.left >= 0:
        hidden_LM |= keys_M < queries_L - mask.left
    if right >= 0:
        hidden_LM |= keys_M > queries_L + right
    if mask.cu_seqlens is not None:
        offsets = torch.tensor(mask.cu_seqlens, device=device)
        documents_L = document_ids(queries_L[:, 0], offsets)
        hidden_LM |= documents_L[:, None] != document_ids(keys_M, offsets)
    return hidden_LM


def _add_mask_(scores_BGRS: Tensor, attn_mask: Tensor, heads: int, call: _Call) -> None:
    """The caller's own mask, in place."""
    mask = attn_mask.index_select(3, call.positions(scores_BGRS.device))
    by_head = scores_BGRS.view(scores_BGRS.shape[0], heads, *mask.shape[2:])
    if mask.dtype == torch.bool:
        by_head.masked_fill_(~mask, -torch.inf)
    else:
        by_head.add_(mask)


def _softmax_(scores: Tensor) -> None:
    """Of each row, in place; a row of nothing but -inf becomes zeros."""
    most = scores.amax(-1, keepdim=True)
    scores.sub_(most.masked_fill(most == -torch.inf, 0)).exp_()
    total = scores.sum(-1, keepdim=True)
    scores.div_(total.masked_fill(total == 0, 1))


def _output(weights_BGRS: Tensor, v: Tensor, heads: int, call: _Call) -> Tensor:
    """`[B, H, L, Dv]`; one pass of the ring."""
    out = weights_BGRS.new_zeros((*weights_BGRS.shape[:3], v.shape[3]))
    kept = call.kept(weights_BGRS, heads)
    for source, message in call.shards(_bytes(v), _bytes_of_position(v), _VALUES, OPERATION):
        columns = call.columns(source)
        v_BGMD = _shard(message, v, call.layout.sizes[source])
        out += call.drop(weights_BGRS[..., columns], kept, columns) @ v_BGMD
    return out.view(v.shape[0], heads, v.shape[2], v.shape[3]).to(v.dtype)


def _scattered(parts: list[Tensor], call: _Call, like: Tensor) -> Tensor:
    """This rank's shard of the sum over ranks of gradients of all keys or values."""
    sizes = tuple(part.numel() for part in parts)
    row = torch.cat([part.reshape(-1) for part in parts])
    return sum_shards(row, Shards(call.group, sizes, f"{OPERATION} backward")).view(like.shape)


def _values_backward(
    weights_BGRS: Tensor, v: Tensor, grad_out: Tensor, ctx: Any
) -> tuple[Tensor, Tensor]:
    """(gradient of the weights, that of v); one pass of the ring and a reduce-scatter."""
    call: _Call = ctx.call
    grad_BGRD = _rows(grad_out, v.shape[1]).to(weights_BGRS.dtype)
    grad_weights, kept = torch.empty_like(weights_BGRS), call.kept(weights_BGRS, ctx.num_heads)
    parts = [v] * call.layout.num_ranks
    unit, operation = _bytes_of_position(v), f"{OPERATION} backward"
    for source, message in call.shards(_bytes(v), unit, _VALUES_BACKWARD, operation):
        columns = call.columns(source)
        v_BGMD = _shard(message, v, call.layout.sizes[source])
        grad_weights[..., columns] = call.drop(grad_BGRD @ v_BGMD.mT, kept, columns)
        parts[source] = call.drop(weights_BGRS[..., columns], kept, columns).mT @ grad_BGRD
    return grad_weights, _scattered(parts, call, v)


def _keys_backward(
    grad_scores_BGRS: Tensor, q: Tensor, k: Tensor, call: _Call
) -> tuple[Tensor, Tensor]:
    """(gradient of q, that of k); one pass of the ring and a reduce-scatter."""
    q_BGRD = _rows(q, k.shape[1]) * call.scale
    grad_q, parts = torch.zeros_like(q_BGRD), [k] * call.layout.num_ranks
    unit, operation = _bytes_of_position(k), f"{OPERATION} backward"
    for source, message in call.shards(_bytes(k), unit, _KEYS_BACKWARD, operation):
        columns_BGRM = grad_scores_BGRS[..., call.columns(source)]
        grad_q += columns_BGRM @ _shard(message, k, call.layout.sizes[source])
        parts[source] = columns_BGRM.mT @ q_BGRD
    return grad_q.mul_(call.scale).view(q.shape), _scattered(parts, call, k)
