"""Attention by an all-to-all from shards of the sequence to shards of the heads, and back.

Ranks lie in rows. An all-to-all inside each row gives a rank all positions of the row for some of
the heads. Keys of these heads then travel round the ranks of a column. A single row is Ulysses.

Shapes: B batch, H heads, Hkv heads of keys and values, S positions of a row, L positions of this
    rank, D and Dv head dims, U ranks of a row, P ranks of the group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext.attention.block import Keys, accumulation_dtype
from moe_ext.attention.layouts import Grid, even_grid, even_parts, merged_layout
from moe_ext.attention.schemes.base import (
    Call,
    Gradients,
    Pass,
    Saved,
    Scheme,
    SchemeTraffic,
    Workload,
)
from moe_ext.attention.schemes.ring import (
    Circuit,
    Tour,
    add_ring_traffic,
    circulate,
    circulate_back,
    plan_paths,
)
from moe_ext.comm.collectives import all_to_all

_CONTIGUOUS = torch.contiguous_format


class _Share(NamedTuple):
    """Heads that a rank of a row gets.

    Attributes:
        queries: heads of queries, consecutive.
        keys: heads of keys in ascending order. If the queries are of several groups, of which some
            are cut between ranks, one for each head of queries, with repetitions.
    """

    queries: range
    keys: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _shares(heads: int, kv_heads: int, num_ranks: int) -> tuple[_Share, ...]:
    """Heads of each rank, as even as possible.

    With fewer heads of keys than ranks, several ranks get a copy of the same head of keys.
    """
    whole = kv_heads >= num_ranks or heads == 0
    group = heads // kv_heads if kv_heads else 1
    parts = even_parts(range(kv_heads if whole else heads), num_ranks)
    if whole:
        return tuple(_Share(range(p.start * group, p.stop * group), tuple(p)) for p in parts)
    shares = []
    for queries in parts:
        keys = tuple(head // group for head in queries)
        shares.append(_Share(queries, keys[:1] if len(set(keys)) == 1 else keys))
    return tuple(shares)


class Ulysses(Scheme):
    """An all-to-all of heads inside rows, and a ring of keys along columns, in both passes.

    In this class all ranks form one row. If a row has more ranks than there are heads of keys, a
    head of keys is sent only to the ranks that need it. If the ranks do not divide the heads, ranks
    get whole heads of keys with their queries, as evenly as possible. With fewer heads of keys than
    ranks, they get whole heads of queries.
    """

    name = "ulysses"
    leaves_heads = False

    def refusal(self, heads: int, num_ranks: int, mesh: Grid | None) -> str | None:
        """Refuse fewer heads than ranks in a row."""
        if heads >= num_ranks or heads == 0:
            return None
        return f"the heads of q to be at least as many as the {num_ranks} ranks, got {heads}"

    def traffic(self, work: Workload, grid: Grid) -> SchemeTraffic:
        """All-to-all of heads in rows, and a ring of keys along each column."""
        rings, inner = grid.shape
        passes, form = (Pass(work.hosts), Pass(work.hosts)), work.form
        shares = _shares(work.heads, form.heads, inner)
        most = max(len(share.queries) for share in shares)
        layout, held = merged_layout(work.layout, grid.rows), 0
        for index, share in enumerate(shares):
            column = replace(work, form=replace(form, heads=len(share.keys)))
            ranks = grid.column(index)
            held = max(held, add_ring_traffic(column, Circuit(1, rings), layout, passes, ranks))
        if inner > 1:
            needs = replace(work, layout=layout).needs
            full = rings > 1 and plan_paths(Circuit(1, rings), needs).is_full
            kept = full or (rings == 1 and inner <= form.heads)
            _add_all_to_all(work, grid, passes, kept)
            form = replace(form, heads=max(len(share.keys) for share in shares))
            exact, positions = accumulation_dtype(form.dtype).itemsize, max(layout.sizes)
            queries = form.batch * most * positions * (form.dim + form.v_dim)
            # A rank holds queries, the gradients of the output and of the queries, and keys with
            # their gradients.
            held += queries * form.dtype.itemsize + queries * exact
            held += form.num_bytes(positions) + form.num_elements(positions) * exact
        excess = most * inner / work.heads - 1 if work.heads else 0.0
        return SchemeTraffic(*passes, held, excess)

    def forward(self, q: Tensor, own: Keys, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, packed keys to save instead of `own`, or None)."""
        row, heads = _Row(call, "ring_attention"), q.shape[1]
        q_heads, k, v = row.to_heads([q, own.k, own.v])
        keys = Keys(k, v, row.mask(own.key_mask))
        out, lse, kept = circulate(q_heads, keys, row.tour())
        if row.keeps_keys:
            kept = keys.packed()
        both = row.to_positions(torch.cat([out, lse[..., None]], -1), heads)
        # Both results are copied, even in a row of one rank, because an operator in a graph must
        # not return two views of one tensor.
        out, lse = (x.clone(memory_format=_CONTIGUOUS) for x in (both[..., :-1], both[..., -1]))
        return out, lse, kept

    def backward(self, saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Gradients:
        """(dq, dk, dv)."""
        call, q, own, form = saved.call, saved.q, saved.own, saved.call.work.form
        row, heads = _Row(call, "ring_attention backward"), q.shape[1]
        # `grad_out` was converted from the dtype of q, so converting it back loses nothing.
        narrow = grad_out.to(q.dtype)
        if own is None:
            q_heads, grad_heads = row.to_heads([q, narrow])
            keys = None
        else:
            q_heads, k, v, grad_heads = row.to_heads([q, own.k, own.v, narrow])
            keys = Keys(k, v, row.mask(own.key_mask))
        lse_heads, delta_heads = row.to_heads([lse[..., None], delta[..., None]])
        tour, kept = row.tour(), saved.kept
        if kept is not None and row.keeps_keys:
            keys, kept = tour.keys(kept, 0), None
        grad_q, grad_k, grad_v = circulate_back(
            Saved(tour.call, q_heads, keys, kept),
            tour,
            grad_heads.to(grad_out.dtype),
            lse_heads[..., 0].contiguous(),
            delta_heads[..., 0].contiguous(),
        )
        grad_q = row.to_positions(grad_q.to(q.dtype), heads)
        # If ranks have copies of a head of keys, gradients travel in `grad_dtype`, because those of
        # the copies are summed on arrival.
        wire = call.work.grad_dtype if len(row.ranks) > form.heads else q.dtype
        both = row.to_positions(torch.cat([grad_k, grad_v], dim=-1).to(wire), form.heads)
        return grad_q, both[..., : form.dim], both[..., form.dim :]


class Hybrid(Ulysses):
    """Ulysses in each row of a 2-D mesh, and a ring in each column."""

    name = "hybrid"

    def refusal(self, heads: int, num_ranks: int, mesh: Grid | None) -> str | None:
        """Refuse a group without rows, or fewer heads than ranks in a row."""
        if mesh is None and num_ranks > 1:
            return (
                "group to be a 2-D DeviceMesh ('ring', 'ulysses') for scheme 'hybrid', got a group "
                f"of {num_ranks} ranks"
            )
        row = num_ranks if mesh is None else mesh.shape[1]
        return super().refusal(heads, row, mesh)

    def rows(self, hosts: Sequence[int], mesh: Grid | None) -> Grid:
        """The user's rows."""
        return super().rows(hosts, mesh) if mesh is None else mesh

    def candidates(self, hosts: Sequence[int], mesh: Grid | None) -> list[Grid]:
        """The user's rows, or rows of every length that divides the number of ranks."""
        size = len(hosts)
        if mesh is not None:
            return [mesh]
        return [even_grid(size, inner) for inner in range(2, size) if size % inner == 0]


@dataclass(frozen=True)
class _Row:
    """The all-to-all among the ranks of this rank's row.

    The all-to-all runs on the group of all ranks, with empty messages to other rows, so that no
    shape of a grid needs further groups.
    """

    call: Call
    operation: str

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group, in the order of the row."""
        return self.call.grid.rows[self.call.grid.place(self.call.rank)[0]]

    @property
    def index(self) -> int:
        """Place of this rank in its row."""
        return self.ranks.index(self.call.rank)

    @property
    def sizes(self) -> list[int]:
        """Number of positions of each rank of the row."""
        return [self.call.work.layout.sizes[rank] for rank in self.ranks]

    @property
    def keeps_keys(self) -> bool:
        """True if the keys of this rank's heads are saved for the backward pass instead of `own`.

        Without copies of heads, both have the same size.
        """
        rings, inner = self.call.grid.shape
        return rings == 1 and 1 < inner <= self.call.work.form.heads

    def tour(self) -> Tour:
        """The ring of this rank's column, for this rank's heads."""
        call, work, grid = self.call, self.call.work, self.call.grid
        share = self.shares[self.index]
        form = replace(work.form, heads=len(share.keys))
        mine = slice(share.queries.start, share.queries.stop)
        inner = replace(
            call,
            work=replace(work, form=form, layout=merged_layout(work.layout, grid.rows)),
            options=replace(call.options, first_head=mine.start),
            alibi_slopes=None if call.alibi_slopes is None else call.alibi_slopes[mine],
        )
        place = grid.place(call.rank)[0]
        return Tour(inner, Circuit(1, len(grid.rows)), grid.column(self.index), place)

    @cached_property
    def shares(self) -> tuple[_Share, ...]:
        """Heads of each rank of the row."""
        work = self.call.work
        return _shares(work.heads, work.form.heads, len(self.ranks))

    def heads(self, total: int, index: int) -> tuple[int, ...]:
        """Heads that a rank of the row gets of a tensor with `total` heads.

        The total tells queries from keys. Any other tensor has one head, which every rank gets.
        """
        if total == self.call.work.heads:
            return tuple(self.shares[index].queries)
        return self.shares[index].keys if total == self.call.work.form.heads else (0,)

    def exchange(self, messages: Sequence[Tensor], receive: Sequence[int]) -> tuple[Tensor, ...]:
        """Send one message to each rank of the row, and receive one from each."""
        group = self.call.group
        if group is None or len(self.ranks) == 1:
            return tuple(messages)
        num_ranks = self.call.work.layout.num_ranks
        send, due = [0] * num_ranks, [0] * num_ranks
        for rank, message, count in zip(self.ranks, messages, receive, strict=True):
            send[rank], due[rank] = len(message), count
        # The all-to-all takes messages in the order of the group, which may not be that of the row.
        by_rank = sorted(range(len(self.ranks)), key=lambda i: self.ranks[i])
        row = torch.cat([messages[i] for i in by_rank])
        found = all_to_all(row, group, operation=self.operation, send=send, receive=due)
        parts = found.split(due)
        return tuple(parts[rank] for rank in self.ranks)

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange each `[B, heads, L, D]` for `[B, heads of this rank, S, D]`.

        Positions S are those of the ranks of the row, concatenated.
        """
        num_ranks, sizes = len(self.ranks), self.sizes
        if num_ranks == 1:
            return list(tensors)
        messages = [
            torch.cat([_taken(x, self.heads(x.shape[1], p)).reshape(-1) for x in tensors])
            for p in range(num_ranks)
        ]
        mine = [len(self.heads(x.shape[1], self.index)) for x in tensors]
        shapes = [(x.shape[0], each, x.shape[3]) for x, each in zip(tensors, mine, strict=True)]
        counts = [batch * heads * dim for batch, heads, dim in shapes]
        parts: list[list[Tensor]] = [[] for _ in tensors]
        received = self.exchange(messages, [sum(counts) * size for size in sizes])
        for message, size in zip(received, sizes, strict=True):
            pieces = message.split([count * size for count in counts])
            for part, piece, (batch, heads, dim) in zip(parts, pieces, shapes, strict=True):
                part.append(piece.view(batch, heads, size, dim))
        return [torch.cat(part, dim=2) for part in parts]

    def to_positions(self, x: Tensor, total: int) -> Tensor:
        """Exchange `[B, heads of this rank, S, D]` for `[B, total, L, D]`, the sum over copies."""
        num_ranks, sizes = len(self.ranks), self.sizes
        if num_ranks == 1:
            return x
        batch, _, _, dim = x.shape
        length = sizes[self.index]
        messages = [part.reshape(-1) for part in x.split(sizes, dim=2)]
        heads = [self.heads(total, p) for p in range(num_ranks)]
        received = self.exchange(messages, [batch * len(h) * length * dim for h in heads])
        parts = [m.view(batch, len(h), length, dim) for m, h in zip(received, heads, strict=True)]
        found, order = torch.cat(parts, dim=1), tuple(head for h in heads for head in h)
        if order == tuple(range(total)):
            return found
        copies = len(order) // total
        if order == tuple(head for head in range(total) for _ in range(copies)):
            return found.view(batch, total, copies, length, dim).sum(2)
        index = torch.tensor(order, device=x.device)
        return found.new_zeros(batch, total, length, dim).index_add_(1, index, found)

    def mask(self, key_mask: Tensor | None) -> Tensor | None:
        """Exchange a key mask `[B, L]` for `[B, S]`, the mask of all positions of the row."""
        if key_mask is None:
            return None
        # The mask travels as a single head that every rank gets.
        bytes_B1L1 = key_mask[:, None, :, None].to(torch.uint8)
        return self.to_heads([bytes_B1L1])[0][:, 0, :, 0].bool()


def _taken(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Select heads of `[B, heads, L, D]`, as a view if they are consecutive."""
    first = heads[0] if heads else 0
    if heads == tuple(range(first, first + len(heads))):
        return x[:, first : first + len(heads)]
    return x.index_select(1, torch.tensor(heads, device=x.device))


def _add_all_to_all(work: Workload, grid: Grid, passes: tuple[Pass, Pass], kept: bool) -> None:
    """Add the all-to-alls of every row to `passes`, to heads and back to positions."""
    forward, backward = passes
    form, inner = work.form, grid.shape[1]
    itemsize, exact = form.dtype.itemsize, accumulation_dtype(form.dtype).itemsize
    wire = work.grad_dtype.itemsize if inner > form.heads else itemsize
    mask = form.batch if form.masked else 0
    # Bytes for each position in the four exchanges, by the index of a rank in its row. `out` is for
    # positions of the sender and heads of the receiver, `back` the other way round.
    out, back, out_again, back_again = [], [], [], []
    for share in _shares(work.heads, form.heads, inner):
        rows, keys_rows = form.batch * len(share.queries), form.batch * len(share.keys)
        keys = keys_rows * (form.dim + form.v_dim) * itemsize + mask
        queries, output = rows * form.dim * itemsize, rows * form.v_dim
        out.append(queries + keys)
        back.append(rows * (form.v_dim + 1) * exact)
        out_again.append(queries + (0 if kept else keys) + output * itemsize + 2 * rows * exact)
        back_again.append(queries + keys_rows * (form.dim + form.v_dim) * wire)
    for row in grid.rows:
        for (i, sender), (j, receiver) in itertools.permutations(enumerate(row), 2):
            here, there = work.layout.sizes[sender], work.layout.sizes[receiver]
            forward.add(sender, receiver, here * out[j] + there * back[i], hop=False)
            again = here * out_again[j] + there * back_again[i]
            backward.add(sender, receiver, again, hop=False)
    forward.rounds += 2 + (mask > 0)
    backward.rounds += 4 + (mask > 0 and not kept)
