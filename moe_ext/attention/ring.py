"""Ring attention: every rank keeps its queries, the keys and values go round.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    M positions of the rank whose keys are at hand, D head dim, P ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext.attention._block import (
    Block,
    BlockOptions,
    accumulation_dtype,
    block_backward,
    block_forward,
    merge,
)
from moe_ext.attention.exchange import Buffers, Exchange, Hop, Keys, KeysForm
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import Route, plan_route
from moe_ext.distributed.groups import group_rank

_KEYS, _GRADS = 0, 1


@dataclass(frozen=True)
class Plan:
    """All of an attention over a group that is not a tensor of its graph.

    Attributes:
        group: the ranks; None is this process alone.
        layout: who holds which positions.
        options: of every block.
        alibi_slopes: `[H]` or None.
        grad_dtype: of the gradients of keys and values on the wire.
    """

    group: ProcessGroup | None
    layout: Layout
    options: BlockOptions
    alibi_slopes: Tensor | None
    grad_dtype: torch.dtype

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return group_rank(self.group)

    @property
    def route(self) -> Route:
        """Where the keys of each rank have to go."""
        return plan_route(self.layout.shards, self.options.mask, self.layout.seq_len)

    def block(self, q: Tensor, source: int, keys: Keys) -> Block:
        """This rank's queries against the keys of rank `source`."""
        return Block(
            q,
            keys.k,
            keys.v,
            self.layout.positions(self.rank, q.device),
            self.layout.positions(source, q.device),
            keys.key_mask,
            self.alibi_slopes,
        )


def _forward(q: Tensor, own: Keys, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse) of this rank, and the keys that came last, packed, where all keys go all round."""
    num_ranks, rank, route = plan.layout.num_ranks, plan.rank, plan.route
    sizes = plan.layout.sizes
    exchange = Exchange(plan.group, "ring_attention")
    form = own.form
    buffers = Buffers(form.num_bytes(max(sizes)), q.device)
    dtype = accumulation_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], own.v.shape[3]), dtype=dtype)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    held = own.packed() if max(route.reach) > 0 else None
    empty = True
    for step in range(num_ranks):
        source, following = (rank - step) % num_ranks, (rank - step - 1) % num_ranks
        goes_on = held is not None and route.reach[source] > step
        buffer = None
        if step < num_ranks - 1 and route.reach[following] > step:
            buffer = buffers.take(step, form.num_bytes(sizes[following]))
        sends = [(held, (rank + 1) % num_ranks)] if goes_on and held is not None else []
        hop = exchange.post(sends, buffer, (rank - 1) % num_ranks, 2 * step + _KEYS)
        if route.needs[rank][source]:
            keys = own if step == 0 else form.unpacked(_present(held), sizes[source])
            partial = block_forward(plan.block(q, source, keys), plan.options)
            out, lse = partial if empty else merge(out, lse, *partial)
            empty = False
        last, held = held, hop.wait()
    return out, lse, last if route.is_full else None


def _present(message: Tensor | None) -> Tensor:
    assert message is not None, "every rank agrees on what travels"
    return message


class _BackwardPass:
    """The ring of the backward pass: keys go left, their gradients with them until they are home.

    At stage s = 1 .. P rank r has the keys of rank c = (r + s) mod P, if they came as far in the
    forward pass. They start where they were last: there they were kept, or, where keys stop
    anywhere on the ring, they get there from home in one long hop.
    """

    def __init__(self, plan: Plan, form: KeysForm, own: Keys | None, kept: Tensor | None) -> None:
        self.plan, self.form, self.own, self.kept = plan, form, own, kept
        self.num_ranks, self.rank = plan.layout.num_ranks, plan.rank
        self.left, self.right = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        self.reach, self.sizes = plan.route.reach, plan.layout.sizes
        self.exchange = Exchange(plan.group, "ring_attention backward")
        self.device = kept.device if own is None else own.k.device
        self.buffers = Buffers(form.num_bytes(max(self.sizes)), self.device)
        travels = own is not None and self.reach[self.rank] > 0
        self.message = own.packed() if travels else None

    def source(self, stage: int) -> int:
        """Whose keys are here at a stage."""
        return (self.rank + stage) % self.num_ranks

    def first_stage(self, source: int) -> int:
        """Stage at which keys are at the rank that they start from."""
        return self.num_ranks - self.reach[source]

    def post_keys(self, stage: int, held: Tensor | None) -> Hop:
        """Bring about the keys of stage + 1; `held` are those of this stage."""
        following, sends, buffer, origin = stage + 1, [], None, self.right
        comes_home = following == self.num_ranks and self.kept is not None
        if held is not None and (following < self.num_ranks or comes_home):
            sends.append((held, self.left))
        if self.message is not None and self.first_stage(self.rank) == following:
            sends.append((self.message, (self.rank + self.reach[self.rank]) % self.num_ranks))
        source = self.source(following)
        if following < self.num_ranks and self.first_stage(source) <= following:
            begins = self.first_stage(source) == following
            if not (begins and self.kept is not None):
                origin = source if begins else self.right
                buffer = self._buffer(following, source)
        elif comes_home:
            buffer = self._buffer(following, source)
        return self.exchange.post(sends, buffer, origin, 2 * stage + _KEYS)

    def _buffer(self, stage: int, source: int) -> Tensor:
        return self.buffers.take(stage, self.form.num_bytes(self.sizes[source]))

    def post_grads(self, stage: int, grads: Tensor | None) -> Hop:
        """Hand on the gradients of this stage's keys, and expect those of the next stage."""
        source, dtype = self.source(stage + 1), self.plan.grad_dtype
        buffer = None
        if self.first_stage(source) <= stage:
            count = self.form.num_elements(self.sizes[source])
            buffer = torch.empty(count, dtype=dtype, device=self.device).view(torch.uint8)
        sends = [] if grads is None else [(grads.to(dtype).view(torch.uint8), self.left)]
        return self.exchange.post(sends, buffer, self.right, 2 * stage + _GRADS)

    def keys(self, stage: int, held: Tensor | None) -> Keys:
        """Those of a stage."""
        if stage == self.num_ranks and self.own is not None:
            return self.own
        return self.form.unpacked(_present(held), self.sizes[self.source(stage)])

    def block(
        self, stage: int, keys: Keys, q: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(dq, row of dk and dv) of the block of a stage."""
        block = self.plan.block(q, self.source(stage), keys)
        grad_q, grad_k, grad_v = block_backward(grad_out, lse, delta, block, self.plan.options)
        return grad_q, torch.cat([grad_k.reshape(-1), grad_v.reshape(-1)])

    def run(
        self, q: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank, float32 (float64)."""
        grad_q = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
        held = self.kept if self.own is None else self.post_keys(0, None).wait()
        needs, underway, row = self.plan.route.needs[self.rank], Hop(self.plan.group, ""), None
        for stage in range(1, self.num_ranks + 1):
            source, last = self.source(stage), stage == self.num_ranks
            hop = None if last else self.post_keys(stage, held)
            row = None
            if needs[source]:
                keys = self.keys(stage, held)
                partial, row = self.block(stage, keys, q, grad_out, lse, delta)
                grad_q += partial
            elif last or self.first_stage(source) <= stage:
                row = grad_q.new_zeros(self.form.num_elements(self.sizes[source]))
            arrived = underway.wait()
            if arrived is not None and row is not None:
                row += arrived.view(self.plan.grad_dtype)
            if hop is not None:
                underway = self.post_grads(stage, row)
                held = hop.wait()
        assert row is not None
        return grad_q, *self.form.split(row, self.sizes[self.rank])


class _Ring(torch.autograd.Function):
    """(out, lse) of this rank's queries; lse is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        key_mask: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor]:
        q = q.contiguous()
        own = Keys(k.contiguous(), v.contiguous(), key_mask)
        out, lse, kept = _forward(q, own, plan)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        # Where the keys go all round, those that came last stand for our own.
        saved = (None, None, None) if kept is not None else (own.k, own.v, key_mask)
        ctx.save_for_backward(q, out, lse, sinks, kept, *saved)
        ctx.plan, ctx.form = plan, own.form
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, sinks, kept, k, v, key_mask = ctx.saved_tensors
        own = None if kept is not None else Keys(k, v, key_mask)
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - grad_lse
        ring = _BackwardPass(ctx.plan, ctx.form, own, kept)
        grads = [grad.to(q.dtype) for grad in ring.run(q, grad_out, lse, delta)]
        grad_sinks = None if sinks is None else sinks_backward(lse, delta, sinks)
        return *grads, grad_sinks, None, None


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Put a key with score `sinks[h]` and value zero before every query of head h."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - total).exp()[..., None], total


def sinks_backward(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of `sinks` from this rank's queries."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def ring(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_mask: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """(out, lse) by P - 1 hops of keys and values; as many each way back with their gradients."""
    out, lse = _Ring.apply(q, k, v, sinks, key_mask, plan)
    return out, lse
