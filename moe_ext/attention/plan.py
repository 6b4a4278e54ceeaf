"""What the schemes of sequence parallelism share: the plan of a call, and its place in autograd.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention._block import Block, BlockOptions, block_library
from moe_ext.attention._pieces import Runs
from moe_ext.attention.exchange import Keys, KeysForm
from moe_ext.attention.grid import Grid
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import Route, plan_route
from moe_ext.distributed.groups import group_rank
from moe_ext.ops._autograd import refuse_second_derivative
from moe_ext.ops.attention import attention_delta, document_ids, merge_attention_sinks


@dataclass(frozen=True)
class Plan:
    """All of an attention over a group that is not a tensor of its graph.

    Attributes:
        group: the ranks; None is this process alone.
        layout: who holds which positions.
        options: of every block.
        offsets: cu_seqlens of the mask on the device, or None.
        alibi_slopes: `[H]` or None.
        grad_dtype: of the gradients of keys and values on the wire.
        grid: the ranks in rows, for the schemes that have them.
    """

    group: ProcessGroup | None
    layout: Layout
    options: BlockOptions
    offsets: Tensor | None
    alibi_slopes: Tensor | None
    grad_dtype: torch.dtype
    grid: Grid | None = None

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return group_rank(self.group)

    @property
    def route(self) -> Route:
        """Where the keys of each rank have to go."""
        return plan_route(self.layout.shards, self.options.mask, self.layout.seq_len)

    @property
    def exact(self) -> Plan:
        """Without library blocks, which have no gradient of a log-sum-exp."""
        return replace(self, options=replace(self.options, precision="exact"))

    def block(self, q: Tensor, source: int, keys: Keys, *, place: int | None = None) -> Block:
        """This rank's queries against the keys of rank `source`.

        `place` is the shard of the queries, where shards are not those of the ranks.
        """
        place, shards = self.rank if place is None else place, self.layout.shards
        positions_L = self.layout.positions(place, q.device)
        k_positions = self.layout.positions(source, q.device)
        return self.block_at(
            q, positions_L, keys, k_positions, q_runs=shards[place], k_runs=shards[source]
        )

    def block_at(
        self,
        q: Tensor,
        q_positions: Tensor,
        keys: Keys,
        k_positions: Tensor,
        *,
        q_runs: Runs | None = None,
        k_runs: Runs | None = None,
    ) -> Block:
        """Queries against keys, wherever they are in the sequence; runs are their positions."""
        documents: list[Tensor | None] = [None, None]
        if self.offsets is not None:
            documents = [document_ids(x, self.offsets) for x in (q_positions, k_positions)]
        return Block(
            q,
            keys.k,
            keys.v,
            q_positions,
            k_positions,
            documents[0],
            documents[1],
            keys.key_mask,
            self.alibi_slopes,
            q_runs,
            k_runs,
        )


@dataclass(frozen=True)
class Saved:
    """What a backward pass starts from.

    Attributes:
        plan: of the call.
        q: `[B, H, L, D]`.
        form: of the keys.
        own: this rank's keys; None where `kept` stands for them.
        kept: what the forward pass asked to keep.
    """

    plan: Plan
    q: Tensor
    form: KeysForm
    own: Keys | None
    kept: Tensor | None


class Scheme(Protocol):
    """A way to bring queries and keys together; everything is float32 (float64) but q and keys."""

    @staticmethod
    def forward(q: Tensor, own: Keys, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, keys to keep in the place of our own)."""

    @staticmethod
    def backward(
        saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""


def forward_pass(
    q: Tensor,
    own: Keys,
    sinks: Tensor | None,
    plan: Plan,
    scheme: Scheme,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(out, what rounding took from it or None, lse, keys to keep in the place of our own)."""
    exact, lse, kept = scheme.forward(q, own, plan)
    if sinks is not None:
        exact, lse = merge_attention_sinks(exact, lse, sinks)
    out = exact.to(q.dtype)
    # delta from the rounded output would cost dQ and dK a tenth of their last place.
    rounded = block_library(plan.block(q, plan.rank, own), plan.options) is not None
    residual = None
    if out.dtype != exact.dtype and not rounded:
        residual = (exact - out).to(q.dtype)
    return out, residual, lse, kept


def backward_pass(
    saved: Saved,
    scheme: Scheme,
    sinks: Tensor | None,
    result: tuple[Tensor, Tensor | None, Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks; `result` is what `forward_pass` gave."""
    out, residual, lse = result
    exact = out.to(lse.dtype)
    if residual is not None:
        exact = exact + residual
    wide = torch.zeros_like(exact) if grad_out is None else grad_out.to(lse.dtype).contiguous()
    delta = attention_delta(wide, exact, None if grad_lse is None else grad_lse.contiguous())
    if grad_lse is not None:
        saved = replace(saved, plan=saved.plan.exact)
    grad_q, grad_k, grad_v = (
        grad.to(saved.q.dtype) for grad in scheme.backward(saved, wide, lse, delta)
    )
    grad_sinks = None if sinks is None else _sinks_backward(lse, delta, sinks)
    return grad_q, grad_k, grad_v, grad_sinks


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        key_mask: Tensor | None,
        plan: Plan,
        scheme: Scheme,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ctx.set_materialize_grads(False)
        q = q.contiguous()
        own = Keys(k.contiguous(), v.contiguous(), key_mask)
        out, residual, lse, kept = forward_pass(q, own, sinks, plan, scheme)
        saved = (None, None, None) if kept is not None else (own.k, own.v, key_mask)
        ctx.save_for_backward(q, out, residual, lse, sinks, kept, *saved)
        ctx.plan, ctx.form, ctx.scheme = plan, own.form, scheme
        return out, lse

    @staticmethod
    @refuse_second_derivative("ring_attention")
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Of q, k, v and the sinks."""
        q, out, residual, lse, sinks, kept, k, v, key_mask = ctx.saved_tensors
        own = None if kept is not None else Keys(k, v, key_mask)
        saved = Saved(ctx.plan, q, ctx.form, own, kept)
        grads = backward_pass(saved, ctx.scheme, sinks, (out, residual, lse), grad_out, grad_lse)
        return *grads, None, None, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    plan: Plan,
    scheme: Scheme,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all ranks; both differentiable."""
    out, lse = _Attention.apply(q, k, v, sinks, key_mask, plan, scheme)
    return out, lse


def _sinks_backward(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of `sinks` from this rank's queries."""
    # A sink of -inf is none; beside a row without keys it would give NaN.
    sinks_H1 = sinks.to(lse.dtype)[:, None]
    weights = torch.where(sinks_H1 > -torch.inf, (sinks_H1 - lse).exp(), 0.0)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)
