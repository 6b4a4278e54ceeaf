"""Ring attention: every rank keeps its queries, the keys and values go round.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    M positions of the rank whose keys are at hand, D head dim, P ranks of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.attention._block import Narrowed, accumulation_dtype, attend_, block_backward
from moe_ext.attention.exchange import Buffers, Exchange, Hop, Keys
from moe_ext.attention.plan import Plan, Saved

_KEYS, _GRADS = 0, 1


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
            attend_(out, lse, plan.block(q, source, keys), plan.options)
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

    def __init__(self, saved: Saved) -> None:
        plan, form, own, kept = saved.plan, saved.form, saved.own, saved.kept
        self.plan, self.form, self.own, self.kept = plan, form, own, kept
        self.num_ranks, self.rank = plan.layout.num_ranks, plan.rank
        self.left, self.right = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        self.reach, self.sizes = plan.route.reach, plan.layout.sizes
        self.exchange = Exchange(plan.group, "ring_attention backward")
        self.device = saved.q.device
        self.buffers = Buffers(form.num_bytes(max(self.sizes)), self.device)
        self.message = None
        if own is not None and self.reach[self.rank] > 0:
            self.message = own.packed()

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
        self,
        stage: int,
        keys: Keys,
        q: Tensor,
        grad_out: Tensor,
        lse: Tensor,
        delta: Tensor,
        narrowed: Narrowed,
    ) -> tuple[Tensor, Tensor]:
        """(dq, row of dk and dv) of the block of a stage."""
        block = self.plan.block(q, self.source(stage), keys)
        grad_q, grad_k, grad_v = block_backward(
            grad_out, lse, delta, block, self.plan.options, narrowed
        )
        return grad_q, torch.cat([grad_k.reshape(-1), grad_v.reshape(-1)])

    def run(
        self, q: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank, float32 (float64)."""
        grad_q, narrowed = None, Narrowed(grad_out, delta, q.dtype)
        held = self.kept if self.own is None else self.post_keys(0, None).wait()
        needs, underway, row = self.plan.route.needs[self.rank], Hop(self.plan.group, ""), None
        for stage in range(1, self.num_ranks + 1):
            source, last = self.source(stage), stage == self.num_ranks
            hop = None if last else self.post_keys(stage, held)
            row = None
            if needs[source]:
                keys = self.keys(stage, held)
                partial, row = self.block(stage, keys, q, grad_out, lse, delta, narrowed)
                grad_q = partial if grad_q is None else grad_q.add_(partial)
                del partial
            elif last or self.first_stage(source) <= stage:
                row = lse.new_zeros(self.form.num_elements(self.sizes[source]))
            arrived, underway = underway.wait(), Hop(self.plan.group, "")
            if arrived is not None and row is not None:
                row += arrived.view(self.plan.grad_dtype)
            # Its memory goes before that of the next one comes.
            del arrived
            if hop is not None:
                underway = self.post_grads(stage, row)
                held = hop.wait()
        assert row is not None
        if grad_q is None:
            grad_q = torch.zeros_like(q, dtype=lse.dtype)
        return grad_q, *self.form.split(row, self.sizes[self.rank])


class Ring:
    """Keys and values go round: P - 1 hops, then P - 1 back, and P - 1 for their gradients."""

    @staticmethod
    def forward(q: Tensor, own: Keys, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, keys to keep in the place of our own)."""
        return _forward(q, own, plan)

    @staticmethod
    def backward(
        saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        return _BackwardPass(saved).run(saved.q, grad_out, lse, delta)
