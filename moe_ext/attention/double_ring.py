"""Attention over rings of rings: keys go round near ranks, and seldom between them.

Ranks are those of a `Circuit`, whose file says when which keys are where. A rank that needs keys
from another ring expects them as many stages ahead as a ring has ranks.

Both ends of a message post it in the same stage and in the same order, which is what NCCL asks for.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, M positions of the
    rank whose keys are at hand, D and Dv head dims, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_ext.attention._block import Block, accumulation_dtype, attend_, block_backward
from moe_ext.attention.circuit import Circuit, Paths, plan_paths
from moe_ext.attention.exchange import Buffers, Exchange, Hop, Keys, KeysForm
from moe_ext.attention.grid import grid_for, merged_layout
from moe_ext.attention.plan import Plan, Saved

_KEYS, _GRADS, _GRADS_HOME, _KINDS = 0, 1, 2, 3


@dataclass(frozen=True)
class Tour:
    """A circuit whose places are ranks of a group.

    Attributes:
        plan: of the call, with one shard for each place.
        circuit: the way of the keys.
        ranks: rank in the group of each place.
        place: of this rank.
    """

    plan: Plan
    circuit: Circuit
    ranks: tuple[int, ...]
    place: int

    @cached_property
    def paths(self) -> Paths:
        """Of the keys of every place."""
        return plan_paths(self.circuit, self.plan.route.needs)

    @cached_property
    def needs(self) -> tuple[bool, ...]:
        """Whether a query of this rank sees a key of each place."""
        return self.plan.route.needs[self.place]

    def holder(self, source: int, stage: int) -> int:
        """Rank in the group that has the keys of a source."""
        return self.ranks[self.circuit.holder(source, stage)]

    def source(self, stage: int) -> int:
        """Whose keys this rank has."""
        return self.circuit.source(self.place, stage)

    def block(self, q: Tensor, source: int, keys: Keys) -> Block:
        """This rank's queries against the keys of a place."""
        return self.plan.block(q, source, keys, place=self.place)


class _KeysUnderway:
    """Posts and receives the keys of one pass.

    Of the keys of another ring and of those of this one, two messages each are in memory at most.
    """

    def __init__(
        self,
        tour: Tour,
        form: KeysForm,
        own: Keys | None,
        device: torch.device,
        *,
        kept: Tensor | None = None,
        backward: bool = False,
    ) -> None:
        self.tour, self.form, self.backward = tour, form, backward
        self.paths, self.root, self.first = tour.paths.forward, 0, tour.place
        name = "ring_attention"
        if backward:
            self.paths, self.root = tour.paths.home, tour.circuit.num_places
            name = "ring_attention backward"
        if backward and own is None:
            self.paths, self.root = tour.paths.kept, self.root - 1
            self.first = tour.source(self.root)
        self.exchange = Exchange(tour.plan.group, name)
        largest = form.num_bytes(max(tour.plan.layout.sizes))
        # Of this ring, and of the others.
        self.buffers = (Buffers(largest, device), Buffers(largest, device))
        # The keys that are here as the pass begins, those of `first`.
        self.start = own.packed() if own is not None and self.paths[tour.place] else kept
        self.hops: dict[int, Hop] = {}

    def post(self, stage: int, held: Tensor | None) -> None:
        """All messages that are due for posting in this stage; `held` are its keys."""
        circuit = self.tour.circuit
        for target in circuit.preceding(stage) if self.backward else circuit.following(stage):
            self._post(stage, target, held)

    def _post(self, stage: int, target: int, held: Tensor | None) -> None:
        tour = self.tour
        sends: list[tuple[Tensor, int]] = []
        if held is not None and stage != self.root:
            source = tour.source(stage)
            if self.paths[source].get(target) == stage:
                sends.append((held, tour.holder(source, target)))
        if self.start is not None and self.paths[self.first].get(target) == self.root:
            sends.append((self.start, tour.holder(self.first, target)))
        self._expect(target, sends)

    def _expect(self, target: int, sends: list[tuple[Tensor, int]]) -> None:
        tour, buffer, origin = self.tour, None, 0
        source = tour.source(target)
        if target in self.paths[source]:
            stage = self.paths[source][target]
            at_home = stage == tour.circuit.num_places
            origin = tour.ranks[source] if at_home else tour.holder(source, stage)
            buffer = self._buffer(target, tour.plan.layout.sizes[source])
        if sends or buffer is not None:
            tag = _KINDS * target + _KEYS
            self.hops[target] = self.exchange.post(sends, buffer, origin, tag)

    def _buffer(self, target: int, length: int) -> Tensor:
        circuit = self.tour.circuit
        crosses = circuit.crosses(target, backward=self.backward)
        turn = target // circuit.inner if crosses else target
        return self.buffers[crosses].take(turn, self.form.num_bytes(length))

    def arrived(self, stage: int) -> Tensor | None:
        """The keys of a stage, once they are here; None where nothing comes."""
        hop = self.hops.pop(stage, None)
        return None if hop is None else hop.wait()


def circulate(q: Tensor, own: Keys, tour: Tour) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse) of this rank, and the keys that came last, packed, where all keys go all round."""
    dtype = accumulation_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], own.v.shape[3]), dtype=dtype)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    underway = _KeysUnderway(tour, own.form, own, q.device)
    held = None
    for stage in range(tour.circuit.num_places):
        held, source = underway.arrived(stage), tour.source(stage)
        underway.post(stage, held)
        if tour.needs[source]:
            keys = own if stage == 0 else _keys(own.form, held, tour, source)
            attend_(out, lse, tour.block(q, source, keys), tour.plan.options)
    return out, lse, held if tour.paths.is_full else None


def _keys(form: KeysForm, held: Tensor | None, tour: Tour, source: int) -> Keys:
    assert held is not None, "keys go where they are needed"
    return form.unpacked(held, tour.plan.layout.sizes[source])


class _GradsUnderway:
    """Posts and receives gradients of keys on the way back to their source."""

    def __init__(self, tour: Tour, form: KeysForm, device: torch.device) -> None:
        self.tour, self.form, self.device = tour, form, device
        self.exchange = Exchange(tour.plan.group, "ring_attention backward")
        self.hops: dict[int, list[Hop]] = {}
        self.outgoing: list[Hop] = []

    def post(self, stage: int, row: Tensor | None) -> None:
        """Hand on the gradients of the keys of this stage, and expect what others hand on."""
        tour, circuit, paths = self.tour, self.tour.circuit, self.tour.paths.forward
        before, source, me = circuit.before(stage), tour.source(stage), tour.place
        target = paths[source].get(stage)
        sends = []
        if row is not None and target is not None:
            message = row.to(tour.plan.grad_dtype).view(torch.uint8)
            sends = [(message, tour.holder(source, target))]
        ours = tour.source(before)
        arrives = before if paths[ours].get(stage) == before else None
        self._post(stage, _GRADS, sends if target == before else [], ours, arrives)
        if before != 0:
            # Where only some places on the way see the keys, their gradients jump the others.
            arrives = 0 if paths[me].get(stage) == 0 else None
            self._post(stage, _GRADS_HOME, sends if target == 0 else [], me, arrives)

    def _post(
        self,
        stage: int,
        kind: int,
        sends: list[tuple[Tensor, int]],
        source: int,
        target: int | None,
    ) -> None:
        tour, plan, buffer = self.tour, self.tour.plan, None
        if target is not None:
            count = self.form.num_elements(plan.layout.sizes[source])
            buffer = torch.empty(count, dtype=plan.grad_dtype, device=self.device)
            buffer = buffer.view(torch.uint8)
        if not sends and buffer is None:
            return
        origin, tag = tour.holder(source, stage), _KINDS * stage + kind
        hop = self.exchange.post(sends, buffer, origin, tag)
        if target is None:
            self.outgoing.append(hop)
            if len(self.outgoing) > 2:
                self.outgoing.pop(0).wait()
        else:
            self.hops.setdefault(target, []).append(hop)

    def add_arrived(self, stage: int, row: Tensor | None) -> Tensor | None:
        """`row` and the gradients that came to this stage, summed up."""
        for hop in self.hops.pop(stage, []):
            arrived = hop.wait()
            assert arrived is not None
            part = arrived.view(self.tour.plan.grad_dtype)
            if row is None:
                row = part.to(accumulation_dtype(self.form.dtype))
            else:
                row += part
        return row

    def finish(self) -> None:
        """Wait for all that was sent."""
        for hop in self.outgoing:
            hop.wait()
        self.outgoing.clear()


def circulate_back(
    saved: Saved, tour: Tour, grad_out: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank, float32 (float64); `saved` in terms of the tour."""
    q, form, own, last = saved.q, saved.form, saved.own, tour.circuit.num_places - 1
    grad_q = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    underway = _KeysUnderway(tour, form, own, q.device, kept=saved.kept, backward=True)
    grads = _GradsUnderway(tour, form, q.device)
    row = None
    if own is not None:
        underway.post(last + 1, None)
    for stage in range(last, -1, -1):
        source = tour.source(stage)
        held = saved.kept if own is None and stage == last else underway.arrived(stage)
        underway.post(stage, held)
        row = None
        if tour.needs[source]:
            keys = own if own is not None and stage == 0 else _keys(form, held, tour, source)
            block = tour.block(q, source, keys)
            partial, *parts = block_backward(grad_out, lse, delta, block, tour.plan.options)
            grad_q += partial
            row = torch.cat([part.reshape(-1) for part in parts])
            del partial, parts
        row = grads.add_arrived(stage, row)
        if stage > 0:
            grads.post(stage, row)
    grads.finish()
    if row is None:
        row = grad_q.new_zeros(form.num_elements(tour.plan.layout.sizes[tour.place]))
    return grad_q, *form.split(row, tour.plan.layout.sizes[tour.place])


def _tour(plan: Plan) -> Tour:
    grid = grid_for(plan.grid, plan.group)
    ranks = grid.order
    layout = merged_layout(plan.layout, tuple((rank,) for rank in ranks))
    return Tour(replace(plan, layout=layout), Circuit(*grid.shape), ranks, ranks.index(plan.rank))


class DoubleRing:
    """P - 1 hops like a ring: R - 1 between rings, posted I stages ahead, and R (I - 1) inside."""

    @staticmethod
    def forward(q: Tensor, own: Keys, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, keys to keep in the place of our own)."""
        return circulate(q, own, _tour(plan))

    @staticmethod
    def backward(
        saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        return circulate_back(saved, _tour(saved.plan), grad_out, lse, delta)
