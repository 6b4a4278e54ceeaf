"""Attention over a group as an autograd function, and as an operator for compiled graphs.

The autograd function keeps the keys that arrived last on the ring for the backward pass. The
operator cannot return them, because a graph does not know the size of another rank's shard. Its
backward pass fetches those keys from their rank, in one more hop.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D and Dv head
    dims, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._compile import constant_in_graphs
from moe_ext.attention.block import Keys, accumulation_dtype
from moe_ext.attention.call import OPERATION, AttentionOptions, Inputs, agree_on_call, call_of
from moe_ext.attention.layouts import Grid, Layout
from moe_ext.attention.schemes.base import Call, Saved
from moe_ext.comm.groups import group_of_name, group_size
from moe_ext.nn.torch_state import without_autocast
from moe_ext.ops.attention import attention_delta, merge_attention_sinks
from moe_ext.ops.autograd import refuse_second_derivative


def _forward_pass(
    q: Tensor, own: Keys, sinks: Tensor | None, attn_mask: Tensor | None, call: Call
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(out, its rounding error or None, lse, keys to save in place of our own or None)."""
    call, own = replace(call, attn_mask=attn_mask), call.work.form.on_wire(own)
    exact, lse, kept = call.scheme.forward(q, own, call)
    if sinks is not None:
        exact, lse = merge_attention_sinks(exact, lse, sinks)
    out = exact.to(q.dtype)
    # A delta that is computed from the rounded output would cost dQ and dK an error of a tenth of
    # a unit in the last place. Blocks of a library are rounded anyway.
    fast = call.options.precision == "fast"
    rounded = fast and call.block(q, call.rank, own).library(call.options) is not None
    residual = None
    if out.dtype != exact.dtype and not rounded:
        residual = (exact - out).to(q.dtype)
    return out, residual, lse, kept


def _backward_pass(
    saved: Saved,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    result: tuple[Tensor, Tensor | None, Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    *,
    needs_grad_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, the sinks and the mask.

    `result` is (out, rounding error of out or None, lse) of the forward pass.
    """
    out, residual, lse = result
    grad_mask = None
    if attn_mask is not None and needs_grad_mask:
        grad_mask = torch.zeros_like(attn_mask, dtype=lse.dtype)
    call = replace(saved.call, attn_mask=attn_mask, grad_mask=grad_mask)
    own = None if saved.own is None else call.work.form.on_wire(saved.own)
    saved = replace(saved, call=call, own=own)
    exact = out.to(lse.dtype)
    if residual is not None:
        exact = exact + residual
    wide = torch.zeros_like(exact) if grad_out is None else grad_out.to(lse.dtype).contiguous()
    delta = attention_delta(wide, exact, None if grad_lse is None else grad_lse.contiguous())
    if grad_lse is not None:
        saved = replace(saved, call=saved.call.exact)
    with without_autocast(wide.device):
        grads = saved.call.scheme.backward(saved, wide, lse, delta)
    grad_q, grad_k, grad_v = (grad.to(saved.q.dtype) for grad in grads)
    grad_sinks = None
    if sinks is not None:
        # A sink of -inf has weight 0. For a query without keys lse is -inf too, and the exponential
        # of their difference would be NaN.
        sinks_H1 = sinks.to(lse.dtype)[:, None]
        weights = torch.where(sinks_H1 > -torch.inf, (sinks_H1 - lse).exp(), 0.0)
        grad_sinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
    if attn_mask is not None and grad_mask is not None:
        grad_mask = grad_mask.to(attn_mask.dtype)
    return grad_q, grad_k, grad_v, grad_sinks, grad_mask


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        attn_mask: Tensor | None,
        up_k: Tensor | None,
        up_v: Tensor | None,
        key_mask: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        if up_k is not None and up_v is not None:
            call = replace(call, up=(up_k, up_v))
        q = q.contiguous()
        own = Keys(k.contiguous(), v.contiguous(), key_mask)
        out, residual, lse, kept = _forward_pass(q, own, sinks, attn_mask, call)
        saved = (None, None, None) if kept is not None else (own.k, own.v, key_mask)
        # The backward pass reads the slopes from `call`. Saving them makes torch raise an error if
        # they are changed in place before the backward pass.
        learned = (sinks, attn_mask, up_k, up_v)
        ctx.save_for_backward(q, out, residual, lse, *learned, kept, *saved, call.alibi_slopes)
        return out, lse

    @staticmethod
    @refuse_second_derivative(OPERATION)
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, the sinks, the mask and the up-projections."""
        q, out, residual, lse, sinks, attn_mask, *rest = ctx.saved_tensors
        up_k, up_v, kept, k, v, key_mask, _ = rest
        call = ctx.call
        if up_k is not None:
            found = [torch.zeros_like(x, dtype=lse.dtype) for x in (up_k, up_v)]
            call = replace(call, up=(up_k, up_v), grad_up=(found[0], found[1]))
        own = None if kept is not None else Keys(k, v, key_mask)
        grads = _backward_pass(
            Saved(call, q, own, kept),
            sinks,
            attn_mask,
            (out, residual, lse),
            grad_out,
            grad_lse,
            needs_grad_mask=ctx.needs_input_grad[4],
        )
        of_up = (None, None) if call.grad_up is None else [x.to(q.dtype) for x in call.grad_up]
        return *grads, *of_up, None, None


def attend(inputs: Inputs, options: AttentionOptions, seed: int | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all ranks; both differentiable."""
    call = agree_on_call(inputs, options, seed)
    learned = (inputs.sinks, inputs.attn_mask, inputs.up_k, inputs.up_v)
    out, lse = _Attention.apply(*inputs[:3], *learned, inputs.key_mask, call)
    return out, lse


# Arguments of the operators, in the order of `Inputs` and of `_graph_options`.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? cu_seqlens, Tensor? prefix_len, Tensor? attn_mask"
)
_COUNT = Inputs._fields.index("attn_mask") + 1
_OPTIONS = (
    "bool is_causal, float? scale, SymInt left, SymInt right, float softcap, float dropout_p, "
    "str scheme, str precision, ScalarType? kv_grad_dtype, str? wire, str[] told, str group_name, "
    "str layout, int[] layout_ranges, int[] mesh, int mesh_columns"
)
# CUDA graphs cannot capture the operators, because the host reads the agreed lengths and waits for
# hops of the ring.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@constant_in_graphs
def _encoded(
    group: ProcessGroup | None, layout: str | Layout, mesh: Grid | None
) -> tuple[str, str, tuple[int, ...], tuple[int, ...], int]:
    """Encode group, layout and mesh as types that an operator can take.

    A `Layout` becomes (length, ranks, and (rank, start, stop, step) of each range).
    """
    ranges: tuple[int, ...] = ()
    name = layout if isinstance(layout, str) else layout.name
    if isinstance(layout, Layout):
        parts = [(i, r.start, r.stop, r.step) for i, s in enumerate(layout.shards) for r in s]
        ranges = (layout.seq_len, layout.num_ranks, *(x for part in parts for x in part))
    rows = ((), 0) if mesh is None else (mesh.order, mesh.shape[1])
    return "" if group is None else group.group_name, name, ranges, *rows


def _graph_options(options: AttentionOptions) -> tuple[Any, ...]:
    """Encode options as arguments of the operators."""
    left, right = (-1, -1) if options.window is None else options.window
    # The operators take Python numbers. A tensor or a NumPy number among the options breaks the
    # graph here.
    scale = None if options.scale is None else float(options.scale)
    cap, dropout = float(options.softcap or 0.0), float(options.dropout_p)
    numbers = (bool(options.is_causal), scale, left, right, cap, dropout)
    names = (options.scheme, options.precision, options.kv_grad_dtype, options.wire, options.told)
    return *numbers, *names, *_encoded(options.group, options.layout, options.mesh)


def _options_of_graph(values: Sequence[Any]) -> AttentionOptions:
    """Decode the result of `_graph_options`."""
    # `between` holds the fields from softcap to wire, in the order of `AttentionOptions`.
    is_causal, scale, left, right, *between, told, group_name = values[:12]
    layout, ranges, mesh, columns = values[12:]
    made: str | Layout = layout
    if ranges:
        shards: list[list[range]] = [[] for _ in range(ranges[1])]
        for i in range(2, len(ranges), 4):
            shards[ranges[i]].append(range(*ranges[i + 1 : i + 4]))
        made = Layout(layout, ranges[0], tuple(map(tuple, shards)))
    rows = tuple(tuple(mesh[i : i + columns]) for i in range(0, len(mesh), columns or 1))
    fields: list[Any] = [group_of_name(group_name), Grid(rows) if rows else None, made]
    fields += [is_causal, scale, (left, right), *between, tuple(told)]
    return AttentionOptions(*fields)


@torch.library.custom_op(
    "moe_ext::ring_attention",
    mutates_args=(),
    tags=_TAGS,
    schema=f"({_INPUTS}, Tensor? seed, bool seed_is_drawn, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, rounding error of out, seed and lengths that the ranks agreed on)."""
    inputs = Inputs(*arguments[:_COUNT])
    seed, seed_is_drawn, *graph_options = arguments[_COUNT:]
    number = None if seed is None else int(seed)
    given, drawn = (None, number) if seed_is_drawn else (number, None)
    call = agree_on_call(inputs, _options_of_graph(graph_options), given, drawn)
    q, own = inputs.q, Keys(inputs.k.contiguous(), inputs.v.contiguous(), inputs.key_mask)
    out, residual, lse, _ = _forward_pass(q.contiguous(), own, inputs.sinks, inputs.attn_mask, call)
    agreed = torch.tensor([call.options.seed, *call.work.layout.sizes])
    if residual is None:
        # The shape of the residual has to follow from shapes and dtypes alone, because the fake
        # implementation knows nothing else.
        residual = q.new_zeros(0 if out.dtype == lse.dtype else out.shape)
    return out, lse, residual, agreed


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, _, v = arguments[:3]
    shape, dtype = (*q.shape[:3], v.shape[3]), accumulation_dtype(q.dtype)
    residual = q.new_empty(0 if q.dtype == dtype else shape)
    num_ranks = group_size(group_of_name(arguments[-5]))
    agreed = torch.empty(1 + num_ranks, dtype=torch.int64)
    return q.new_empty(shape), q.new_empty(q.shape[:3], dtype=dtype), residual, agreed


@torch.library.custom_op(
    "moe_ext::_ring_attention_backward",
    mutates_args=(),
    tags=_TAGS,
    schema="(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor residual, "
    f"Tensor agreed, bool needs_grad_mask, {_INPUTS}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    agreed: Tensor,
    needs_grad_mask: bool,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks, dmask); dsinks and dmask are empty if they are not needed."""
    seed, *lengths = agreed.tolist()
    inputs = Inputs(*arguments[:_COUNT])
    options = _options_of_graph(arguments[_COUNT:])
    q, sinks = inputs.q, inputs.sinks
    call = call_of(inputs, options, options.mask(inputs), lengths, seed)
    own = Keys(inputs.k.contiguous(), inputs.v.contiguous(), inputs.key_mask)
    result = (out, residual if residual.numel() else None, lse)
    saved = Saved(call, q.contiguous(), own, None)
    *grads, grad_sinks, grad_mask = _backward_pass(
        saved,
        sinks,
        inputs.attn_mask,
        result,
        grad_out,
        grad_lse,
        needs_grad_mask=needs_grad_mask,
    )
    grad_q, grad_k, grad_v = (torch.empty_like(grad).copy_(grad) for grad in grads)
    of_sinks, of_mask = (
        q.new_empty(0) if grad is None else grad for grad in (grad_sinks, grad_mask)
    )
    return grad_q, grad_k, grad_v, of_sinks, of_mask


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs_grad_mask, inputs = arguments[6], Inputs(*arguments[7 : 7 + _COUNT])
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in inputs[:3])
    sinks, mask = inputs.sinks, inputs.attn_mask if needs_grad_mask else None
    of_sinks, of_mask = (
        grad_q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (sinks, mask)
    )
    return grad_q, grad_k, grad_v, of_sinks, of_mask


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    # A materialised gradient of zeros for an unused lse would keep blocks from library kernels,
    # because those have no gradient of lse.
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_COUNT + 2 :]
    ctx.save_for_backward(*output, *inputs[:_COUNT])


def _autograd_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_rest: Tensor | None
) -> tuple[Tensor | None, ...]:
    out, lse, residual, agreed, *tensors = ctx.saved_tensors
    grads = torch.ops.moe_ext._ring_attention_backward(
        grad_out,
        grad_lse,
        out,
        lse,
        residual,
        agreed,
        ctx.needs_input_grad[_COUNT - 1],
        *tensors,
        *ctx.options,
    )
    of_inputs = [*grads[:3], *[None] * (_COUNT - 3)]
    for name, grad in (("sinks", grads[3]), ("attn_mask", grads[4])):
        place = Inputs._fields.index(name)
        of_inputs[place] = grad if ctx.needs_input_grad[place] else None
    return (*of_inputs, None, None, *(None for _ in ctx.options))


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def attend_in_graph(
    inputs: Inputs, options: AttentionOptions, seed: int | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the operator.

    The seed is drawn outside of the operator, because an operator in a graph must not draw. The
    ranks agree inside of it, so that invalid arguments raise an error when the graph runs.
    """
    # Inside the operator tensors do not show whether they require a gradient.
    inputs.check_slopes(options.require)
    options.check_learned()
    drawn = seed is None and float(options.dropout_p) > 0
    seed_1 = None if seed is None else torch.tensor([seed])
    if drawn:
        seed_1 = torch.randint(1 << 62, (1,))
    tensors = [
        x if x is None or isinstance(x, Tensor) else torch.tensor(x) for x in inputs[:_COUNT]
    ]
    out, lse, _, _ = torch.ops.moe_ext.ring_attention(
        *tensors, seed_1, drawn, *_graph_options(options)
    )
    return out, lse
