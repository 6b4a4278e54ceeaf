"""Ring attention: queries stay on their rank, keys and values travel round one or several rings.

P = R * I places lie in R rings of I. In stage t = o * I + i every place has the keys of one source
place: place (n, j) has those of place (n - o, j - i). In the forward pass keys travel round inside
a ring, i = 0 .. I - 1. At i = 0 they are also sent to the next ring, where they are needed I stages
later. The backward pass runs through the stages in reverse: keys are sent to the previous ring at
i = I - 1, and gradients travel the paths of the forward pass back to their source. R = 1 is the
plain ring.

Messages that the mask makes unnecessary are left out. The keys of a source visit only the stages
between their first and their last use, and skip stages that would only pass them on from home.

Every rank computes from the mask and the layout what it sends and receives in each stage. Both ends
of a message post it in the same stage and in the same order, as NCCL requires.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, M positions of the
    place whose keys are being read, D and Dv head dims, P places, R rings of I.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_ext._bytes import as_bytes
from moe_ext.attention.block import (
    Block,
    Keys,
    Narrowed,
    accumulation_dtype,
    attend_,
    block_backward,
)
from moe_ext.attention.layouts import Grid, Layout, merged_layout
from moe_ext.attention.schemes.base import (
    Call,
    Gradients,
    Pass,
    Saved,
    Scheme,
    SchemeTraffic,
    Workload,
    empty_sums,
)
from moe_ext.comm.pending import Pending
from moe_ext.comm.ring_exchange import Buffers, Exchange

_KEYS, _GRADS, _GRADS_HOME, _KINDS = 0, 1, 2, 3


@dataclass(frozen=True)
class Circuit:
    """R rings of I places. With R = 1 or I = 1 the circuit is a plain ring."""

    rings: int
    inner: int

    @property
    def num_places(self) -> int:
        """P, the number of places."""
        return self.rings * self.inner

    def holder(self, source: int, stage: int) -> int:
        """Place that has the keys of a source in a stage."""
        ring, index = divmod(source, self.inner)
        outer, step = divmod(stage, self.inner)
        return (ring + outer) % self.rings * self.inner + (index + step) % self.inner

    def source(self, place: int, stage: int) -> int:
        """Source of the keys that a place has in a stage."""
        ring, index = divmod(place, self.inner)
        outer, step = divmod(stage, self.inner)
        return (ring - outer) % self.rings * self.inner + (index - step) % self.inner

    def before(self, stage: int) -> int:
        """Stage that keys come from in the forward pass, at whose beginning they are posted."""
        return stage - (1 if stage % self.inner else self.inner)

    def after(self, stage: int) -> int:
        """Stage that keys come from in the backward pass; P stands for home."""
        goes_round = stage % self.inner != self.inner - 1
        return min(stage + (1 if goes_round else self.inner), self.num_places)

    def crosses(self, stage: int, *, backward: bool = False) -> bool:
        """True if keys come to `stage` from another ring."""
        return self.rings > 1 and stage % self.inner == (self.inner - 1 if backward else 0)

    def following(self, stage: int) -> list[int]:
        """Stages whose keys are posted in `stage` of the forward pass, nearest first."""
        found = (stage + 1, stage + self.inner)
        return [t for t in dict.fromkeys(found) if t < self.num_places and self.before(t) == stage]

    def preceding(self, stage: int) -> list[int]:
        """Stages whose keys are posted in `stage` of the backward pass, which begins with P."""
        found = (stage - 1, stage - self.inner)
        return [t for t in dict.fromkeys(found) if t >= 0 and self.after(t) == stage]


@dataclass(frozen=True)
class Paths:
    """Paths of keys: for every source a dict from each stage to the stage that sends keys to it.

    Attributes:
        forward: paths of the forward pass, from stage 0 at home. Gradients travel back on them.
        is_full: True if all keys visit every stage. The keys that arrive last on a rank can then be
            kept for the backward pass.
        kept: paths of a backward pass that begins with the kept keys, in stage P - 1.
        home: paths of a backward pass that begins with each place's own keys, as stage P. Stage 0
            uses the own keys without a message.
    """

    forward: tuple[dict[int, int], ...]
    is_full: bool
    kept: tuple[dict[int, int], ...]
    home: tuple[dict[int, int], ...]


def _tree(needed: Iterable[int], parent: Callable[[int], int], root: int) -> dict[int, int]:
    """Paths from the root to needed stages, as a dict from a stage to the stage before it.

    A stage next to the root that is not needed, and has one successor, is skipped.
    """
    wanted = set(needed) - {root}
    edges: dict[int, int] = {}
    for stage in wanted:
        while stage != root and stage not in edges:
            edges[stage] = parent(stage)
            stage = edges[stage]
    for first in [stage for stage, origin in edges.items() if origin == root]:
        children = [stage for stage, origin in edges.items() if origin == first]
        while first not in wanted and len(children) == 1:
            del edges[first]
            first = children[0]
            edges[first] = root
            children = [stage for stage, origin in edges.items() if origin == first]
    return edges


@functools.lru_cache(maxsize=256)
def plan_paths(circuit: Circuit, needs: tuple[tuple[bool, ...], ...]) -> Paths:
    """The paths of all keys. `needs[r][c]` is True if a query of place r sees a key of place c."""
    last = circuit.num_places - 1
    used = [
        [t for t in range(last + 1) if needs[circuit.holder(source, t)][source]]
        for source in range(last + 1)
    ]
    forward = tuple(_tree(stages, circuit.before, 0) for stages in used)
    is_full = last > 0 and all(len(edges) == last for edges in forward)
    kept = tuple(_tree(stages, circuit.after, last) for stages in used) if is_full else ()
    home = tuple(_tree(set(stages) - {0}, circuit.after, last + 1) for stages in used)
    return Paths(forward, is_full, kept, home)


@dataclass(frozen=True)
class Tour:
    """A circuit whose places are ranks of a group.

    Attributes:
        call: the call, with one shard for each place.
        circuit: rings that the places form.
        ranks: for each place its rank in the group.
        place: place of this rank.
    """

    call: Call
    circuit: Circuit
    ranks: tuple[int, ...]
    place: int

    @cached_property
    def paths(self) -> Paths:
        """Paths of the keys of every place."""
        return plan_paths(self.circuit, self.call.work.needs)

    @cached_property
    def needs(self) -> tuple[bool, ...]:
        """For each place, True if a query of this rank sees any of its keys."""
        return self.call.work.needs[self.place]

    def holder(self, source: int, stage: int) -> int:
        """Rank in the group that has the keys of a source in a stage."""
        return self.ranks[self.circuit.holder(source, stage)]

    def source(self, stage: int) -> int:
        """Place whose keys this rank has in a stage."""
        return self.circuit.source(self.place, stage)

    def length(self, source: int) -> int:
        """Number of positions of a place."""
        return self.call.work.layout.sizes[source]

    def keys(self, held: Tensor | None, source: int) -> Keys:
        """The keys of a place, unpacked from their message."""
        assert held is not None, "keys go where they are needed"
        return self.call.work.form.unpacked(held, self.length(source))

    def block(self, q: Tensor, source: int, keys: Keys) -> Block:
        """The block of this rank's queries and the keys of a place."""
        return self.call.block(q, source, keys, place=self.place)


class _KeysUnderway:
    """Posts and receives the keys of one pass.

    At most two messages from inside the ring and two from another ring are in memory.
    """

    def __init__(
        self,
        tour: Tour,
        own: Keys | None,
        device: torch.device,
        *,
        kept: Tensor | None = None,
        backward: bool = False,
    ) -> None:
        self.tour, self.backward = tour, backward
        self.paths, self.root, self.first = tour.paths.forward, 0, tour.place
        if backward:
            self.paths, self.root = tour.paths.home, tour.circuit.num_places
        if backward and own is None:
            self.paths, self.root = tour.paths.kept, self.root - 1
            self.first = tour.source(self.root)
        self.exchange = Exchange(tour.call.group, "ring_attention" + " backward" * backward)
        largest = tour.call.work.form.num_bytes(max(tour.call.work.layout.sizes))
        # Buffers for hops inside a ring, and for hops from another ring.
        self.buffers = (Buffers(largest, device), Buffers(largest, device))
        # The keys that this rank has at the beginning of the pass, which belong to place `first`.
        self.start = own.packed() if own is not None and self.paths[tour.place] else kept
        self.hops: dict[int, Pending[Tensor | None]] = {}

    def post(self, stage: int, held: Tensor | None) -> None:
        """Post all messages of a stage. `held` are the keys that arrived for the stage."""
        circuit = self.tour.circuit
        for target in circuit.preceding(stage) if self.backward else circuit.following(stage):
            self._post(stage, target, held)

    def _post(self, stage: int, target: int, held: Tensor | None) -> None:
        tour, buffer, origin = self.tour, None, 0
        sends: list[tuple[Tensor, int]] = []
        if held is not None and stage != self.root:
            source = tour.source(stage)
            if self.paths[source].get(target) == stage:
                sends.append((held, tour.holder(source, target)))
        if self.start is not None and self.paths[self.first].get(target) == self.root:
            sends.append((self.start, tour.holder(self.first, target)))
        source = tour.source(target)
        if target in self.paths[source]:
            begin = self.paths[source][target]
            at_home = begin == tour.circuit.num_places
            origin = tour.ranks[source] if at_home else tour.holder(source, begin)
            buffer = self._buffer(target, tour.length(source))
        if sends or buffer is not None:
            tag = _KINDS * target + _KEYS
            self.hops[target] = self.exchange.post(sends, buffer, origin, tag)

    def _buffer(self, target: int, length: int) -> Tensor:
        circuit = self.tour.circuit
        crosses = circuit.crosses(target, backward=self.backward)
        turn = target // circuit.inner if crosses else target
        return self.buffers[crosses].take(turn, self.tour.call.work.form.num_bytes(length))

    def arrived(self, stage: int) -> Tensor | None:
        """Wait for the keys of a stage; None if no message brings keys."""
        hop = self.hops.pop(stage, None)
        return None if hop is None else hop.wait()


def circulate(q: Tensor, own: Keys, tour: Tour) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, packed keys that arrived last or None) of this rank.

    The keys are None if some keys skip stages, because a backward pass could not begin with them.
    """
    out, lse = empty_sums(q, tour.call.work.dims[1])
    underway, held = _KeysUnderway(tour, own, q.device), None
    for stage in range(tour.circuit.num_places):
        held, source = underway.arrived(stage), tour.source(stage)
        underway.post(stage, held)
        if tour.needs[source]:
            keys = own if stage == 0 else tour.keys(held, source)
            attend_(out, lse, tour.block(q, source, keys), tour.call.options)
    return out, lse, held if tour.paths.is_full else None


class _GradsUnderway:
    """Posts and receives gradients of keys on the way back to their source."""

    def __init__(self, tour: Tour, device: torch.device) -> None:
        self.tour, self.device = tour, device
        self.exchange = Exchange(tour.call.group, "ring_attention backward")
        self.hops: dict[int, list[Pending[Tensor | None]]] = {}
        self.outgoing: list[Pending[Tensor | None]] = []

    def post(self, stage: int, row: Tensor | None) -> None:
        """Send on the gradients of this stage's keys, and post receives for those due here."""
        tour, circuit, paths = self.tour, self.tour.circuit, self.tour.paths.forward
        before, source, me = circuit.before(stage), tour.source(stage), tour.place
        target = paths[source].get(stage)
        sends = []
        if row is not None and target is not None:
            message = as_bytes(row.to(tour.call.work.grad_dtype))
            sends = [(message, tour.holder(source, target))]
        ours = tour.source(before)
        arrives = before if paths[ours].get(stage) == before else None
        self._post(stage, _GRADS, sends if target == before else [], ours, arrives)
        if before != 0:
            # Keys that skipped the first stages came directly from home, and their gradients go
            # directly home.
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
        tour, call, buffer = self.tour, self.tour.call, None
        if target is not None:
            count = call.work.form.num_elements(tour.length(source))
            buffer = torch.empty(count, dtype=call.work.grad_dtype, device=self.device)
            buffer = as_bytes(buffer)
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
        """Sum of `row` and of the gradients that arrived for this stage."""
        for hop in self.hops.pop(stage, []):
            arrived = hop.wait()
            assert arrived is not None
            part = arrived.view(self.tour.call.work.grad_dtype)
            if row is None:
                row = part.to(accumulation_dtype(self.tour.call.work.form.dtype))
            else:
                row += part
        return row

    def finish(self) -> None:
        """Wait until everything is sent."""
        for hop in self.outgoing:
            hop.wait()
        self.outgoing.clear()


def circulate_back(
    saved: Saved, tour: Tour, grad_out: Tensor, lse: Tensor, delta: Tensor
) -> Gradients:
    """(dq, dk, dv) of this rank, float32 (float64)."""
    q, own, last = saved.q, saved.own, tour.circuit.num_places - 1
    form, narrowed = tour.call.work.form, Narrowed(grad_out, delta, q.dtype)
    underway = _KeysUnderway(tour, own, q.device, kept=saved.kept, backward=True)
    grads = _GradsUnderway(tour, q.device)
    grad_q, row = None, None
    if own is not None:
        underway.post(last + 1, None)
    for stage in range(last, -1, -1):
        source = tour.source(stage)
        held = saved.kept if own is None and stage == last else underway.arrived(stage)
        underway.post(stage, held)
        row = None
        if tour.needs[source]:
            keys = own if own is not None and stage == 0 else tour.keys(held, source)
            block = tour.block(q, source, keys)
            partial, grad_k, grad_v = block_backward(
                grad_out, lse, delta, block, tour.call.options, narrowed
            )
            grad_q = partial if grad_q is None else grad_q.add_(partial)
            parts = tour.call.contracted(keys, grad_k, grad_v)
            row = torch.cat([part.reshape(-1) for part in parts])
            # The gradients of this block are freed before those of the next block are allocated.
            del partial, grad_k, grad_v, parts
        row = grads.add_arrived(stage, row)
        if stage > 0:
            grads.post(stage, row)
    grads.finish()
    if grad_q is None:
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
    if row is None:
        row = lse.new_zeros(form.num_elements(tour.length(tour.place)))
    return grad_q, *form.split(row, tour.length(tour.place))


def add_ring_traffic(
    work: Workload,
    circuit: Circuit,
    layout: Layout,
    passes: tuple[Pass, Pass],
    ranks: Sequence[int],
) -> int:
    """Add the messages of a circuit to `passes`, (forward, backward).

    Several circuits of one shape may share `passes`. They run at the same time, so that the rounds
    of only one of them count. Returns the bytes that a place holds in addition to its own keys.
    """
    forward, backward = passes

    def add(one: Pass, sender: int, receiver: int, num_bytes: int) -> None:
        one.add(ranks[sender], ranks[receiver], num_bytes, hop=True)

    paths = plan_paths(circuit, replace(work, layout=layout).needs)
    returning = paths.kept if paths.is_full else paths.home
    for source, length in enumerate(layout.sizes):
        keys, grads = work.form.num_bytes(length), work.grad_bytes(length)
        for stage, origin in paths.forward[source].items():
            near, far = circuit.holder(source, origin), circuit.holder(source, stage)
            add(forward, near, far, keys)
            add(backward, far, near, grads)
        for stage, origin in returning[source].items():
            at_home = origin == circuit.num_places
            begin = source if at_home else circuit.holder(source, origin)
            add(backward, begin, circuit.holder(source, stage), keys)
    rounds = len({stage for edges in paths.forward for stage in edges})
    forward.rounds, backward.rounds = rounds, rounds + (rounds > 0)
    spare = sum(min(2, n - 1) for n in (circuit.rings, circuit.inner)) if rounds else 0
    longest = max(layout.sizes)
    return spare * (work.form.num_bytes(longest) + work.grad_bytes(longest))


class Ring(Scheme):
    """Keys and values travel round a ring.

    The forward pass has P - 1 hops, the backward pass P - 1 for keys and P - 1 for gradients.
    """

    name = "ring"

    def traffic(self, work: Workload, grid: Grid) -> SchemeTraffic:
        """Keys of each rank go as far as they are needed, and back, as do their gradients."""
        passes = Pass(work.hosts), Pass(work.hosts)
        layout = merged_layout(work.layout, tuple((rank,) for rank in grid.order))
        held = add_ring_traffic(work, Circuit(*grid.shape), layout, passes, grid.order)
        return SchemeTraffic(*passes, held)

    def forward(self, q: Tensor, own: Keys, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, packed keys to save instead of `own`, or None)."""
        return circulate(q, own, self._tour(call))

    def backward(self, saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Gradients:
        """(dq, dk, dv)."""
        return circulate_back(saved, self._tour(saved.call), grad_out, lse, delta)

    @staticmethod
    def _tour(call: Call) -> Tour:
        ranks = call.grid.order
        place = ranks.index(call.rank)
        if ranks != tuple(range(len(ranks))):
            layout = merged_layout(call.work.layout, tuple((rank,) for rank in ranks))
            call = replace(call, work=replace(call.work, layout=layout))
        return Tour(call, Circuit(*call.grid.shape), ranks, place)
