"""Ring self-attention as first published: a ring of keys, softmax of whole rows, a ring of values.

Shapes: B batch, H heads, G heads of keys and values (Hkv), S whole sequence, L positions of this
    rank, R rows = (H / G) * L, M positions of the rank whose keys or values are being read, D and
    Dv head dims, P ranks of the group. Columns S are in group order, shard after shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext._checks import check_numbers
from moe_ext.attention.block import accumulation_dtype
from moe_ext.attention.call import AttentionOptions, Inputs, agree_on_call
from moe_ext.attention.checks import message_device, requires
from moe_ext.attention.layouts import Layout, check_layout, make_layout, order_of
from moe_ext.attention.masks import Mask, bounds, check_cu_seqlens
from moe_ext.attention.schemes.base import Call
from moe_ext.attention.sharding import Shards, check_lengths, rotate, sum_shards
from moe_ext.attention.sharding import position_ids as position_ids_of
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import GroupHandle, check_group
from moe_ext.comm.ring_exchange import Buffers, Exchange
from moe_ext.nn.torch_state import autocast_dtype, without_autocast
from moe_ext.ops import routing_uniform
from moe_ext.ops.autograd import refuse_second_derivative

OPERATION = "ring_self_attention"
_BACKWARD = f"{OPERATION} backward"
_MODULE = "RingSelfAttention"
_DROPOUT_STREAM = 4
_NUM_PASSES = 4
_KEYS, _VALUES, _KEYS_BACKWARD, _VALUES_BACKWARD = range(_NUM_PASSES)
_require = requires(_MODULE)


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
    """Self-attention over a sharded sequence, by one ring for q k^T and one for the output.

    Keys travel round the ring once. Every rank then holds the scores of its queries over the whole
    sequence, `[B, H, L, S]`, and takes their softmax. Values travel round once. The backward pass
    sends values and keys round again and reduce-scatters dK and dV. In total a rank sends
    6 (P - 1) / P of B H S D elements if H = Hkv and D = Dv. Memory is O(S^2 / P), as published.
    `ring_attention` computes the same in O(S / P) for masks that follow from positions.

    Every rank has to run the backward pass as well.

    NOTE: device-to-host sync, because the ranks first agree on shapes in a message of fixed size.

    Args:
        q: `[B, H, L, D]`, this rank's queries. L follows from `layout`, for any S.
        k: `[B, Hkv, L, D]`; H is a multiple of Hkv.
        v: `[B, Hkv, L, Dv]`.
        group: the P ranks; None is this process alone.
        is_causal: if True, a query sees no key after it.
        scale: factor on q k^T; None for 1 / sqrt(D).
        layout: which rank holds which positions, see `make_layout`.
        window: (left, right), the number of keys before and after itself that a query sees; -1 for
            no limit.
        cu_seqlens: offsets of packed documents in the whole sequence. A query sees only keys of its
            own document.
        key_mask: `[B, L]` bool, False for those of this rank's keys that no query sees.
        attn_mask: `[B or 1, H or 1, L, S]`, from this rank's queries to all keys in the order of
            the sequence. Either bool, True for seen, or a floating-point bias that is added to the
            scores; not differentiable.
        dropout_p: share of the softmax that is dropped. The draws are those of `ring_attention`
            with the same seed, for every P and layout.
        seed: seed of the dropout, equal on every rank; None draws one from torch's generator of the
            first rank.

    Returns:
        `[B, H, L, Dv]` in the dtype of q; products are summed in float32 (float64) and rounded
        once. A query that sees no key gives zeros and zero gradients.

    Raises:
        ValueError: on every rank, if an argument is invalid on any rank or differs between ranks,
            or if lengths do not match the layout.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference:
        Li, Xue, Baranwal, Li, You: Sequence Parallelism: Long Sequence Training from System
        Perspective (2021, arXiv 2105.13120), section 3.2. The authors' code divides the scores by
        the root of the model dim, and gradients by P. Results here equal those of one process.
    """
    options = AttentionOptions(
        group,
        layout=layout,
        is_causal=is_causal,
        scale=scale,
        window=window,
        dropout_p=dropout_p,
        operation=OPERATION,
    )
    inputs = Inputs(q, k, v, key_mask, cu_seqlens=cu_seqlens, attn_mask=attn_mask)
    return _attend(inputs, options, seed)


def _attend(inputs: Inputs, options: AttentionOptions, seed: int | None) -> Tensor:
    attn_mask = inputs.attn_mask
    check_group(options.group, OPERATION)
    # An error of this rank is sent here. Without an error, the ranks compare in `agree_on_call`.
    with Agreement(OPERATION, options.group, message_device(*inputs)):
        learns = isinstance(attn_mask, Tensor) and attn_mask.requires_grad
        options.require(not learns, "attn_mask", "without gradient", "requires_grad=True")
    call = agree_on_call(inputs, options, seed)
    out: Tensor = _RingSelfAttention.apply(*inputs[:3], inputs.key_mask, attn_mask, call)
    return out


def _shards(
    call: Call, own: Tensor, kind: int, key_mask: Tensor | None = None
) -> Iterator[tuple[int, slice, Tensor, Tensor | None]]:
    """Iterate over the keys or values of all ranks, while the next ones are underway.

    Items are (rank, columns of its shard, `[B, G, M, D]` in the dtype of sums, `[B, M]` mask or
    None). The tensors of an item are valid until the next item is requested.
    """
    num_ranks, rank, lengths = call.work.layout.num_ranks, call.rank, call.work.layout.sizes
    batch, heads, _, dim = own.shape
    unit, of_mask = batch * heads * dim * own.element_size(), 0 if key_mask is None else batch
    sizes = [(unit + of_mask) * length for length in lengths]
    exchange = Exchange(call.group, OPERATION if kind in (_KEYS, _VALUES) else _BACKWARD)
    buffers = Buffers(max(sizes), own.device)
    left, right = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    held = as_bytes(own)
    if key_mask is not None:
        held = torch.cat([held, as_bytes(key_mask)])
    for step in range(num_ranks):
        sends, buffer = [], None
        if step < num_ranks - 1:
            sends = [(held, right)]
            buffer = buffers.take(step, sizes[(rank - step - 1) % num_ranks])
        hop = exchange.post(sends, buffer, left, _NUM_PASSES * step + kind)
        source = (rank - step) % num_ranks
        count, start = lengths[source], sum(lengths[:source])
        rows = held[: unit * count].view(own.dtype).view(batch, heads, count, dim)
        mask = held[unit * count :].view(torch.bool).view(batch, count) if of_mask else None
        yield source, slice(start, start + count), rows.to(accumulation_dtype(own.dtype)), mask
        hop.wait()
        held = held if buffer is None else buffer


def _kept(call: Call, weights_BGRS: Tensor) -> Tensor | None:
    """Bool mask of the weights that dropout keeps, of their shape; None without dropout.

    Draws depend on seed, head, batch, query and key, as in the attention operators.
    """
    if call.options.dropout_p == 0:
        return None
    device, seq_len = weights_BGRS.device, call.work.layout.seq_len
    queries_L = call.work.layout.positions(call.rank, device)
    order_S = order_of(call.work.layout, device)
    # The threshold is rounded to a multiple of 2^-24, the spacing of the drawn numbers.
    threshold = int(call.options.dropout_p * 2**24 + 0.5) / 2**24
    kept = []
    for batch in range(weights_BGRS.shape[0]):
        for head in range(call.work.heads):
            state = torch.tensor([call.options.seed, head, batch, 0], device=device)
            drawn_LS = routing_uniform(
                state, len(queries_L), seq_len, stream=_DROPOUT_STREAM, token_idx=queries_L
            )
            kept.append(drawn_LS.index_select(1, order_S) >= threshold)
    return torch.stack(kept).view(weights_BGRS.shape)


def _drop(call: Call, x: Tensor, kept: Tensor | None, columns: slice) -> Tensor:
    """Apply dropout to the weights of some columns, or to their gradients."""
    if kept is None:
        return x
    return x * kept[..., columns] / (1 - call.options.dropout_p)


class _RingSelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        call: Call,
    ) -> Tensor:
        """The output of this rank's queries."""
        ctx.call = call
        with without_autocast(q.device):
            if call.work.layout.seq_len == 0 or q.shape[0] * q.shape[1] == 0:
                shape = (*k.shape[:2], 0, call.work.layout.seq_len)
                weights_BGRS = q.new_zeros(shape, dtype=accumulation_dtype(q.dtype))
                out = q.new_zeros((*q.shape[:3], v.shape[3]))
            else:
                weights_BGRS = _scores(q, k, key_mask, call)
                if attn_mask is not None:
                    _add_mask_(weights_BGRS, attn_mask, call)
                _softmax_(weights_BGRS)
                out = _output(weights_BGRS, v, call)
        ctx.save_for_backward(q, k, v, weights_BGRS)
        return out

    @staticmethod
    @refuse_second_derivative(OPERATION)
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, weights_BGRS = ctx.saved_tensors
        if ctx.call.work.layout.seq_len * q.shape[0] * q.shape[1] == 0:
            return *(torch.zeros_like(x) for x in (q, k, v)), None, None, None
        with without_autocast(q.device):
            grad_scores, grad_v = _values_backward(weights_BGRS, v, grad_out, ctx.call)
            # The backward pass of the softmax works in place, because tensors with S columns take
            # most of the memory.
            sums_BGR = torch.einsum("bgrs,bgrs->bgr", grad_scores, weights_BGRS)
            grad_scores.sub_(sums_BGR[..., None]).mul_(weights_BGRS)
            grad_q, grad_k = _keys_backward(grad_scores, q, k, ctx.call)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _rows(x_BHLD: Tensor, kv_heads: int) -> Tensor:
    """`[B, G, R, D]` float32 (float64), with the rows of heads that share keys concatenated."""
    batch, heads, length, dim = x_BHLD.shape
    rows = x_BHLD.reshape(batch, kv_heads, heads // kv_heads * length, dim)
    return rows.to(accumulation_dtype(x_BHLD.dtype))


def _scores(q: Tensor, k: Tensor, key_mask: Tensor | None, call: Call) -> Tensor:
    """Scores `[B, G, R, S]`, -inf for keys that are not seen; one pass of the ring."""
    length = k.shape[2]
    q_BGRD = _rows(q, k.shape[1]) * call.options.scale
    scores_BGRS = q_BGRD.new_empty((*q_BGRD.shape[:3], call.work.layout.seq_len))
    for source, columns, k_BGMD, seen_BM in _shards(call, k, _KEYS, key_mask):
        columns_BGRM = scores_BGRS[..., columns]
        columns_BGRM.copy_(q_BGRD @ k_BGMD.mT)
        hidden_LM = _hidden(call, source, q.device)
        if hidden_LM is not None and length:
            columns_BGRM.unflatten(2, (-1, length)).masked_fill_(hidden_LM, -torch.inf)
        if seen_BM is not None:
            columns_BGRM.masked_fill_(~seen_BM[:, None, None], -torch.inf)
    return scores_BGRS


def _hidden(call: Call, source: int, device: torch.device) -> Tensor | None:
    """`[L, M]` bool, True for keys that the positional mask hides; None if it hides none."""
    if call.work.mask == Mask():
        return None
    queries_L = call.work.layout.positions(call.rank, device)
    keys_M = call.work.layout.positions(source, device)
    first_L, stop_L = bounds(call.work.mask, queries_L, call.work.layout.seq_len)
    return (keys_M < first_L[:, None]) | (keys_M >= stop_L[:, None])


def _add_mask_(scores_BGRS: Tensor, attn_mask: Tensor, call: Call) -> None:
    """Apply the caller's `attn_mask` to the scores, in place."""
    mask = attn_mask.index_select(3, order_of(call.work.layout, scores_BGRS.device))
    by_head = scores_BGRS.view(scores_BGRS.shape[0], call.work.heads, *mask.shape[2:])
    if mask.dtype == torch.bool:
        by_head.masked_fill_(~mask, -torch.inf)
    else:
        by_head.add_(mask)


def _softmax_(scores: Tensor) -> None:
    """Softmax of each row, in place. A row that is -inf everywhere becomes zeros."""
    most = scores.amax(-1, keepdim=True)
    scores.sub_(most.masked_fill(most == -torch.inf, 0)).exp_()
    total = scores.sum(-1, keepdim=True)
    scores.div_(total.masked_fill(total == 0, 1))


def _output(weights_BGRS: Tensor, v: Tensor, call: Call) -> Tensor:
    """Output `[B, H, L, Dv]`; one pass of the ring."""
    out = weights_BGRS.new_zeros((*weights_BGRS.shape[:3], v.shape[3]))
    kept = _kept(call, weights_BGRS)
    for _, columns, v_BGMD, _ in _shards(call, v, _VALUES):
        out += _drop(call, weights_BGRS[..., columns], kept, columns) @ v_BGMD
    return out.view(v.shape[0], call.work.heads, v.shape[2], v.shape[3]).to(v.dtype)


def _scattered(parts: list[Tensor], call: Call, like: Tensor) -> Tensor:
    """Sum the gradients of all keys or values over ranks, and return this rank's shard."""
    sizes = tuple(part.numel() for part in parts)
    row = torch.cat([part.reshape(-1) for part in parts])
    return sum_shards(row, Shards(call.group, sizes, _BACKWARD)).view(like.shape)


def _values_backward(
    weights_BGRS: Tensor, v: Tensor, grad_out: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """(gradient of the weights, gradient of v); one pass of the ring and a reduce-scatter."""
    grad_BGRD = _rows(grad_out, v.shape[1]).to(weights_BGRS.dtype)
    grad_weights, kept = torch.empty_like(weights_BGRS), _kept(call, weights_BGRS)
    parts = [v] * call.work.layout.num_ranks
    for source, columns, v_BGMD, _ in _shards(call, v, _VALUES_BACKWARD):
        grad_weights[..., columns] = _drop(call, grad_BGRD @ v_BGMD.mT, kept, columns)
        parts[source] = _drop(call, weights_BGRS[..., columns], kept, columns).mT @ grad_BGRD
    return grad_weights, _scattered(parts, call, v)


def _keys_backward(
    grad_scores_BGRS: Tensor, q: Tensor, k: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """(gradient of q, gradient of k); one pass of the ring and a reduce-scatter."""
    q_BGRD = _rows(q, k.shape[1]) * call.options.scale
    grad_q, parts = torch.zeros_like(q_BGRD), [k] * call.work.layout.num_ranks
    for source, columns, k_BGMD, _ in _shards(call, k, _KEYS_BACKWARD):
        columns_BGRM = grad_scores_BGRS[..., columns]
        grad_q += columns_BGRM @ k_BGMD
        parts[source] = columns_BGRM.mT @ q_BGRD
    return grad_q.mul_(call.options.scale).view(q.shape), _scattered(parts, call, k)


class RingSelfAttention(nn.Module):
    """Self-attention with projections over a sharded sequence.

    The sequence-parallel form of `nn.MultiheadAttention(batch_first=True)` for self-attention,
    with `ring_self_attention` between the projections. Every rank holds all parameters. Their
    gradients on a rank are those of its own positions, as for any replicated parameter: sum them
    over the group.

    Args:
        model_dim: dim of inputs and outputs.
        num_heads: H, a divisor of model_dim.
        group: the P ranks; None is this process alone.
        num_kv_heads: Hkv, a divisor of H; None for H.
        bias: if True, the projections have biases.
        dropout: share of the softmax that is dropped in training.
        is_causal: if True, a query sees no key after it.
        layout: which rank holds which positions, see `make_layout`.
        rotary_base: base of a rotary embedding of queries and keys, with angles
            position * rotary_base^(-2i/D) and pairs from the two halves of a head, as in Llama.
            None for no rotary embedding.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: a number out of its range.
        TypeError: this rank does not belong to `group`.

    Reference:
        Li, Xue, Baranwal, Li, You: Sequence Parallelism (2021, arXiv 2105.13120).
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        group: ProcessGroup | None,
        num_kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        is_causal: bool = False,
        layout: str | Layout = "contiguous",
        rotary_base: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_numbers("RingSelfAttention", RingSelfAttention.__init__.__annotations__, locals())
        check_group(group, _MODULE)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _require(num_heads >= 1, "num_heads", "at least 1", num_heads)
        divides = model_dim >= 1 and model_dim % num_heads == 0
        _require(divides, "model_dim", f"a multiple of the {num_heads} heads", model_dim)
        divides = kv_heads >= 1 and num_heads % kv_heads == 0
        _require(divides, "num_kv_heads", f"a divisor of the {num_heads} heads", kv_heads)
        _require(0 <= dropout < 1, "dropout", "in [0, 1)", dropout)
        check_layout(layout, _require)
        self.head_dim = model_dim // num_heads
        if rotary_base is not None:
            _require(rotary_base > 0, "rotary_base", "more than 0", rotary_base)
            _require(self.head_dim % 2 == 0, "head dim", "even for rotary_base", self.head_dim)
        self.model_dim, self.num_heads, self.num_kv_heads = model_dim, num_heads, kv_heads
        self.dropout, self.is_causal, self.layout = dropout, is_causal, layout
        self.rotary_base = rotary_base
        self._group = GroupHandle(group)
        kv_dim = kv_heads * self.head_dim
        self.q_proj = nn.Linear(model_dim, model_dim, bias, device, dtype)
        self.k_proj = nn.Linear(model_dim, kv_dim, bias, device, dtype)
        self.v_proj = nn.Linear(model_dim, kv_dim, bias, device, dtype)
        self.out_proj = nn.Linear(model_dim, model_dim, bias, device, dtype)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share a sequence."""
        return self._group.group

    @classmethod
    def from_multihead_attention(
        cls,
        module: nn.MultiheadAttention,
        *,
        group: ProcessGroup | None,
        is_causal: bool = False,
        layout: str | Layout = "contiguous",
    ) -> RingSelfAttention:
        """Copy a self-attention module of torch, with its parameters, dropout and training mode.

        Raises:
            ValueError: the module has a feature that is not supported: other dims for keys and
                values, added keys, or the sequence as first dimension.
        """
        own_dims = module.in_proj_weight is not None
        _require(own_dims, "kdim and vdim", "embed_dim", (module.kdim, module.vdim))
        added = module.bias_k is not None or module.add_zero_attn
        _require(not added, "module", "without add_bias_kv and add_zero_attn", "one of them")
        _require(module.batch_first, "module", "batch_first=True", False)
        weight, bias = module.in_proj_weight, module.in_proj_bias
        made = cls(
            module.embed_dim,
            module.num_heads,
            group=group,
            bias=bias is not None,
            dropout=module.dropout,
            is_causal=is_causal,
            layout=layout,
            device=weight.device,
            dtype=weight.dtype,
        )
        projections = (made.q_proj, made.k_proj, made.v_proj)
        with torch.no_grad():
            for i, projection in enumerate(projections):
                projection.weight.copy_(weight.chunk(3)[i]).requires_grad_(weight.requires_grad)
                if bias is not None:
                    projection.bias.copy_(bias.chunk(3)[i]).requires_grad_(bias.requires_grad)
            for name, parameter in module.out_proj.named_parameters():
                copy = made.out_proj.get_parameter(name).copy_(parameter)
                copy.requires_grad_(parameter.requires_grad)
        return made.train(module.training)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        position_ids: Tensor | None = None,
        layout: str | Layout | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Attend from this rank's positions to the positions of all ranks.

        Args:
            x: `[B, L, model_dim]`, this rank's positions.
            key_mask: `[B, L]` bool, True for real keys: the opposite of torch's key_padding_mask.
            attn_mask: see `ring_self_attention`. In a bool mask True means seen, as in
                `F.scaled_dot_product_attention`, the opposite of `nn.MultiheadAttention`.
            cu_seqlens: offsets of packed documents in the whole sequence.
            position_ids: `[L]` or `[B, L]`, for the rotary embedding. None for the positions in the
                whole sequence (from 0 in each document), which costs a small message.
            layout: replaces the layout of the module; None for the module's.
            seed: seed of the dropout, see `ring_self_attention`.

        Returns:
            `[B, L, model_dim]`.

        Raises:
            ValueError: on every rank, if `x` on any rank has another shape, dtype or device, if
                `position_ids` has another shape, or if `ring_self_attention` refuses an argument.
            RankFailureError: a rank died or did not answer; the message names it.
        """
        made = self.layout if layout is None else layout
        # An error of this rank is sent here. Without an error, the ranks compare further down.
        with Agreement(_MODULE, self.group, message_device(x, self.out_proj.weight)):
            self._check(x, position_ids, made, cu_seqlens)
        q, k, v = (
            projection(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Options that `AttentionOptions` does not have. Ranks compare them in their first message.
        rotated = self.rotary_base is not None
        own = {
            "model_dim": self.model_dim,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "bias": self.q_proj.bias is not None,
            "dropout": self.dropout,
            "rotary_base": self.rotary_base,
            "position_ids": "given" if rotated and position_ids is not None else None,
        }
        if self.rotary_base is not None:
            if position_ids is None:
                position_ids = self._positions(x, made, cu_seqlens, own)
            q, k = (rotate(y, position_ids, self.rotary_base) for y in (q, k))
        options = AttentionOptions(
            self.group,
            layout=made,
            is_causal=self.is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            told=tuple(f"{name}={value}" for name, value in own.items()),
            operation=OPERATION,
        )
        inputs = Inputs(q, k, v, key_mask, cu_seqlens=cu_seqlens, attn_mask=attn_mask)
        out = _attend(inputs, options, seed)
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected

    if TYPE_CHECKING:
        __call__ = forward

    def _check(
        self,
        x: Tensor,
        position_ids: Tensor | None,
        layout: str | Layout,
        cu_seqlens: Tensor | Sequence[int] | None,
    ) -> None:
        _require(isinstance(x, Tensor), "x", "a tensor", type(x).__name__)
        fits = x.dim() == 3 and x.shape[2] == self.model_dim
        _require(fits, "x", f"of shape [B, L, {self.model_dim}]", list(x.shape))
        weight = self.out_proj.weight
        _require(x.device == weight.device, "x", f"on {weight.device}", x.device)
        if autocast_dtype(x.device) is None:
            rule = f"{weight.dtype} like the weights"
            _require(x.dtype == weight.dtype, "x", rule, x.dtype)
        check_layout(layout, _require)
        check_cu_seqlens(cu_seqlens, _MODULE)
        if self.rotary_base is not None and position_ids is not None:
            shape, (batch, length) = position_ids.shape, x.shape[:2]
            rule = f"[{length}] or [{batch} or 1, {length}], this rank's"
            fits = shape in ((length,), (1, length), (batch, length))
            _require(fits, "position_ids", rule, list(shape))

    def _positions(
        self,
        x: Tensor,
        layout: str | Layout,
        cu_seqlens: Tensor | Sequence[int] | None,
        own: Mapping[str, object],
    ) -> Tensor:
        # If another rank has refused its arguments, this comparison raises its error. The checks
        # below depend only on values that are equal on all ranks, so all ranks raise alike.
        offsets = check_cu_seqlens(cu_seqlens, _MODULE)
        facts = {"options of the module": own, "layout": layout, "cu_seqlens": offsets}
        # The name is that of the agreement in `agree_on_call`. A rank without rotation, or with
        # `position_ids`, reaches that agreement at this point, and the ranks then compare.
        agreement = Agreement(OPERATION, self.group, x.device)
        rows = agreement.compare(facts, values=(x.shape[1],))
        lengths = [row[0] for row in rows]
        made = make_layout(layout, sum(lengths), len(lengths), cu_seqlens=cu_seqlens)
        check_lengths(made, lengths, _MODULE, self.group)
        return position_ids_of(
            made.seq_len, group=self.group, layout=made, cu_seqlens=cu_seqlens, device=x.device
        )

    def extra_repr(self) -> str:
        """Options for `repr`."""
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{heads}, is_causal={self.is_causal}, dropout={self.dropout}"
