"""Attention over a group as an operator, which a compiled graph can hold.

The keys that came last on the ring are not kept for the backward pass: their size, that of another
rank's shard, is not known to a graph. They come from home instead, in one hop more.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D and Dv head
    dims, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ext._compile import constant_in_graphs
from moe_ext.attention._block import accumulation_dtype
from moe_ext.attention._options import Inputs, Options, group_of_text, options_text
from moe_ext.attention.exchange import Keys
from moe_ext.attention.plan import Plan, Saved, Scheme, backward_pass, forward_pass
from moe_ext.distributed.groups import group_size

# Plans a call from its tensors, the options, a seed given, one drawn, and what ranks agreed on
Planner = Callable[..., tuple[Plan, list[int], Scheme]]
_planner: list[Planner] = []


def set_planner(planner: Planner) -> None:
    """Have the operator plan its calls by the function that the public one uses, above us."""
    _planner[:] = [planner]


# The host takes part: lengths are agreed on, and hops awaited.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("moe_ext::ring_attention", mutates_args=(), tags=_TAGS)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    seed_is_drawn: bool,
    is_causal: bool,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    dropout_p: float,
    text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, what rounding took from out, seed and lengths that the ranks agreed on)."""
    inputs = Inputs(q, k, v, key_mask, alibi_slopes, sinks, cu_seqlens)
    number = None if seed is None else int(seed)
    given, drawn = (None, number) if seed_is_drawn else (number, None)
    options = Options.of_text(text, is_causal, scale, (left, right), softcap, dropout_p)
    plan, lengths, scheme = _planner[0](inputs, options, given, drawn)
    own = Keys(k.contiguous(), v.contiguous(), key_mask)
    out, residual, lse, _ = forward_pass(q.contiguous(), own, sinks, plan, scheme)
    agreed = torch.tensor([plan.options.seed, *lengths])
    if residual is None:
        # Its shape has to follow from the dtype alone, as a graph knows no more.
        residual = q.new_zeros(0 if out.dtype == lse.dtype else out.shape)
    return out, lse, residual, agreed


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, dtype = (*q.shape[:3], v.shape[3]), accumulation_dtype(q.dtype)
    residual = q.new_empty(0 if q.dtype == dtype else shape)
    num_ranks = group_size(group_of_text(rest[-1]))
    agreed = torch.empty(1 + num_ranks, dtype=torch.int64)
    return q.new_empty(shape), q.new_empty(q.shape[:3], dtype=dtype), residual, agreed


@torch.library.custom_op("moe_ext::_ring_attention_backward", mutates_args=(), tags=_TAGS)
def _backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    agreed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    is_causal: bool,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    dropout_p: float,
    text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); the last is empty without sinks."""
    seed, *lengths = agreed.tolist()
    inputs = Inputs(q, k, v, key_mask, alibi_slopes, sinks, cu_seqlens)
    options = Options.of_text(text, is_causal, scale, (left, right), softcap, dropout_p)
    plan, _, scheme = _planner[0](inputs, options, None, 0, (lengths, seed))
    own = Keys(k.contiguous(), v.contiguous(), key_mask)
    saved = Saved(plan, q.contiguous(), own.form, own, None)
    result = (out, residual if residual.numel() else None, lse)
    *grads, grad_sinks = backward_pass(saved, scheme, sinks, result, grad_out, grad_lse)
    grad_q, grad_k, grad_v = (torch.empty_like(grad).copy_(grad) for grad in grads)
    return grad_q, grad_k, grad_v, q.new_empty(0) if grad_sinks is None else grad_sinks


@_backward.register_fake
def _(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    agreed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *_rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    return grad_q, grad_k, grad_v, q.new_empty(0 if sinks is None else sinks.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    # A gradient of lse, even of zeros, keeps blocks from kernels that have none.
    ctx.set_materialize_grads(False)
    tensors, ctx.options = inputs[:7], inputs[9:]
    ctx.save_for_backward(*output, *tensors)


def _autograd_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_rest: Tensor | None
) -> tuple[Tensor | None, ...]:
    out, lse, residual, agreed, *tensors = ctx.saved_tensors
    grads = torch.ops.moe_ext._ring_attention_backward(
        grad_out, grad_lse, out, lse, residual, agreed, *tensors, *ctx.options
    )
    grad_sinks = None if tensors[5] is None else grads[3]
    return (*grads[:3], None, None, grad_sinks, None, None, None, *(None for _ in ctx.options))


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


_text = constant_in_graphs(options_text)


def attend_in_graph(inputs: Inputs, options: Options, seed: int | None) -> tuple[Tensor, Tensor]:
    """(out, lse) by the operator; a seed is drawn outside of it, since a graph's operator must not.

    The ranks agree inside the operator, so what they refuse is raised when the graph runs.
    """
    drawn = seed is None and options.dropout_p > 0
    seed_1 = None
    if drawn:
        seed_1 = torch.randint(1 << 62, (1,))
    elif seed is not None:
        seed_1 = torch.tensor([seed])
    *tensors, cu_seqlens = inputs
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(list(cu_seqlens))
    left, right = (-1, -1) if options.window is None else options.window
    cap = options.softcap or 0.0
    numbers = (options.is_causal, options.scale, left, right, cap, options.dropout_p)
    names = (options.scheme, options.precision, options.kv_grad_dtype, options.grid)
    text = _text(options.group, options.layout, *names)
    out, lse, _, _ = torch.ops.moe_ext.ring_attention(
        *tensors, cu_seqlens, seed_1, drawn, *numbers, text
    )
    return out, lse
