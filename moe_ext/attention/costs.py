"""What each scheme sends and holds, by formulas that the tests compare with counted bytes.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from moe_ext.attention._block import accumulation_dtype
from moe_ext.attention.circuit import Circuit, Paths, plan_paths
from moe_ext.attention.exchange import KeysForm
from moe_ext.attention.grid import Grid, merged_layout
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import Mask, plan_route
from moe_ext.attention.ulysses import heads_each

# A byte between hosts takes as long as so many inside one: 50 GB/s beside 400 GB/s.
ABROAD_FACTOR = 8


@dataclass(frozen=True)
class Workload:
    """What the formulas need to know of an attention; the same on every rank.

    Attributes:
        batch: B.
        heads: H.
        form: of the keys.
        grad_dtype: of their gradients on the wire.
        layout: who holds which positions.
        mask: who sees which keys.
        hosts: for each rank the number of its host; exchanges inside one are taken to be faster.
    """

    batch: int
    heads: int
    form: KeysForm
    grad_dtype: torch.dtype
    layout: Layout
    mask: Mask
    hosts: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """P."""
        return self.layout.num_ranks

    def grad_bytes(self, length: int) -> int:
        """Of the gradients of the keys of so many positions, underway."""
        return self.form.num_elements(length) * self.grad_dtype.itemsize


@dataclass
class Pass:
    """What each rank sends in one direction.

    Attributes:
        hosts: see `Workload`.
        sent: bytes by rank.
        abroad: those of them that go to another host.
        awaited: bytes by rank that nothing is computed beside; those abroad `ABROAD_FACTOR` times.
        beside: the same of hops that run beside blocks.
        rounds: exchanges that one rank waits for, one after the other.
    """

    hosts: tuple[int, ...]
    rounds: int = 0
    sent: list[int] = field(init=False)
    abroad: list[int] = field(init=False)
    awaited: list[int] = field(init=False)
    beside: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Start with nothing sent."""
        for name in ("sent", "abroad", "awaited", "beside"):
            setattr(self, name, [0] * len(self.hosts))

    def add(self, sender: int, receiver: int, num_bytes: int, *, hop: bool) -> None:
        """One message; `hop`: of a ring, posted before a block and awaited behind it."""
        goes_abroad = self.hosts[sender] != self.hosts[receiver]
        self.sent[sender] += num_bytes
        self.abroad[sender] += num_bytes * goes_abroad
        weights = self.beside if hop else self.awaited
        weights[sender] += num_bytes * (ABROAD_FACTOR if goes_abroad else 1)


@dataclass(frozen=True)
class Traffic:
    """Of one scheme.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass.
        held: bytes of keys, values and their gradients, and of exchanged queries and theirs, that a
            rank holds at once beside its own shards.
    """

    forward: Pass
    backward: Pass
    held: int


def ring_traffic(work: Workload, grid: Grid) -> Traffic:
    """Keys of each rank go as far right as they are needed, and back with their gradients."""
    forward, backward = Pass(work.hosts), Pass(work.hosts)
    size, layout = work.num_ranks, work.layout
    route = plan_route(layout.shards, work.mask, layout.seq_len)
    for source, (reach, length) in enumerate(zip(route.reach, layout.sizes, strict=True)):
        keys, grads = work.form.num_bytes(length), work.grad_bytes(length)
        for hop in range(reach):
            near, far = (source + hop) % size, (source + hop + 1) % size
            forward.add(near, far, keys, hop=True)
            backward.add(far, near, grads, hop=True)
            if route.is_full or hop > 0:
                backward.add(far, near, keys, hop=True)
        if reach > 0 and not route.is_full:
            backward.add(source, (source + reach) % size, keys, hop=True)
    forward.rounds = max(route.reach)
    backward.rounds = forward.rounds + (forward.rounds > 0)
    shards = min(2, forward.rounds)
    longest = max(layout.sizes)
    held = shards * (work.form.num_bytes(longest) + work.grad_bytes(longest))
    return Traffic(forward, backward, held)


def _circuit_traffic(
    work: Workload,
    circuit: Circuit,
    layout: Layout,
    add: Callable[[Pass, int, int, int], None],
    passes: tuple[Pass, Pass],
) -> int:
    """Count what the places of a circuit send by `add(pass, sender, receiver, bytes)`; (held)."""
    forward, backward = passes
    paths: Paths = plan_paths(circuit, plan_route(layout.shards, work.mask, layout.seq_len).needs)
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
    forward.rounds += rounds
    backward.rounds += rounds + (rounds > 0)
    spare = sum(min(2, n - 1) for n in (circuit.rings, circuit.inner)) if rounds else 0
    longest = max(layout.sizes)
    return spare * (work.form.num_bytes(longest) + work.grad_bytes(longest))


def double_ring_traffic(work: Workload, grid: Grid) -> Traffic:
    """Rings of rings; the same bytes as a ring, few of them between hosts."""
    passes, ranks = (Pass(work.hosts), Pass(work.hosts)), grid.order

    def add(one: Pass, sender: int, receiver: int, num_bytes: int) -> None:
        one.add(ranks[sender], ranks[receiver], num_bytes, hop=True)

    layout = merged_layout(work.layout, tuple((rank,) for rank in ranks))
    held = _circuit_traffic(work, Circuit(*grid.shape), layout, add, passes)
    return Traffic(*passes, held)


def all_gather_traffic(work: Workload, grid: Grid) -> Traffic:
    """Every rank sends its keys to all, padded to the longest shard, and the gradients home."""
    forward, backward = Pass(work.hosts), Pass(work.hosts)
    longest = max(work.layout.sizes)
    keys, grads = work.form.num_bytes(longest), [work.grad_bytes(n) for n in work.layout.sizes]
    for sender in range(work.num_ranks):
        for receiver in range(work.num_ranks):
            if sender != receiver:
                forward.add(sender, receiver, keys, hop=False)
                backward.add(sender, receiver, keys + grads[receiver], hop=False)
    if work.num_ranks > 1 and longest:
        forward.rounds, backward.rounds = 1, 2
    # Of the gradients, those of all keys, and every rank's of its own.
    held = work.num_ranks * (keys + 2 * max(grads))
    return Traffic(forward, backward, held)


def _add_all_to_all(work: Workload, grid: Grid, passes: tuple[Pass, Pass], kept: bool) -> None:
    """Heads out, positions back, in every row."""
    forward, backward = passes
    form, inner = work.form, grid.shape[1]
    itemsize, exact = form.dtype.itemsize, accumulation_dtype(form.dtype).itemsize
    rows = work.batch * work.heads // inner
    keys_rows = work.batch * heads_each(form.heads, inner)
    wire = work.grad_dtype.itemsize if inner > form.heads else itemsize
    mask = work.batch if form.masked else 0
    keys = keys_rows * (form.dim + form.v_dim) * itemsize + mask
    queries, output = rows * form.dim * itemsize, rows * form.v_dim
    # By the positions that the sender holds, and by those that the receiver holds.
    out = queries + keys
    back = rows * (form.v_dim + 1) * exact
    out_again = queries + (0 if kept else keys) + output * itemsize + 2 * rows * exact
    back_again = queries + keys_rows * (form.dim + form.v_dim) * wire
    for row in grid.rows:
        for sender in row:
            for receiver in row:
                here, there = work.layout.sizes[sender], work.layout.sizes[receiver]
                if sender != receiver:
                    forward.add(sender, receiver, here * out + there * back, hop=False)
                    backward.add(sender, receiver, here * out_again + there * back_again, hop=False)
    forward.rounds += 2 + (mask > 0)
    backward.rounds += 4 + (mask > 0 and not kept)


def hybrid_traffic(work: Workload, grid: Grid) -> Traffic:
    """All-to-all of heads in rows, a ring of keys along each column."""
    rings, inner = grid.shape
    passes = (Pass(work.hosts), Pass(work.hosts))
    form = replace(work.form, heads=heads_each(work.form.heads, inner))
    column = replace(work, form=form)
    layout = merged_layout(work.layout, grid.rows)

    def add(one: Pass, sender: int, receiver: int, num_bytes: int) -> None:
        for index in range(inner):
            one.add(grid.rows[sender][index], grid.rows[receiver][index], num_bytes, hop=True)

    held = _circuit_traffic(column, Circuit(1, rings), layout, add, passes)
    if inner > 1:
        needs = plan_route(layout.shards, work.mask, layout.seq_len).needs
        full = rings > 1 and plan_paths(Circuit(1, rings), needs).is_full
        kept = full or (rings == 1 and inner <= work.form.heads)
        _add_all_to_all(work, grid, passes, kept)
        positions, exact = max(layout.sizes), accumulation_dtype(form.dtype).itemsize
        queries = work.batch * work.heads // inner * positions * (form.dim + form.v_dim)
        # Queries, the gradient of the output and that of the queries; keys and their gradients.
        held += queries * form.dtype.itemsize + queries * exact
        held += form.num_bytes(positions) + form.num_elements(positions) * exact
    return Traffic(*passes, held)
