"""Attention by an all-to-all from shards of the sequence to shards of the heads, and back.

Ranks lie in rows. Inside a row the all-to-all leaves each rank the whole row's positions of its own
heads; in between, keys of these heads go round the ranks of a column. One row is Ulysses.

Shapes: B batch, H heads, Hkv heads of keys and values, S positions of a row, L positions of this
    rank, D and Dv head dims, U ranks of a row, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_ext.attention._block import BlockOptions
from moe_ext.attention.circuit import Circuit
from moe_ext.attention.double_ring import Tour, circulate, circulate_back
from moe_ext.attention.exchange import Keys, KeysForm
from moe_ext.attention.grid import grid_for, merged_layout
from moe_ext.attention.plan import Plan, Saved
from moe_ext.distributed.collectives import all_to_all_rows
from moe_ext.distributed.traffic import record_traffic

_CONTIGUOUS = torch.contiguous_format


def heads_refused(heads: int, kv_heads: int, num_ranks: int) -> str | None:
    """Why so many ranks cannot share the heads; None where they can."""
    if heads % num_ranks == 0 and (kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0):
        return None
    return (
        f"the heads of q to be a multiple of the {num_ranks} ranks that share them, and those of k "
        f"a multiple or a divisor, got {heads} and {kv_heads}"
    )


def heads_each(total: int, num_ranks: int) -> int:
    """Heads that a rank of a row gets; where ranks outnumber them, several get the same one."""
    return max(total // num_ranks, min(total, 1))


@dataclass(frozen=True)
class _Row:
    """The all-to-all among the ranks of this rank's row.

    It runs on the group of all ranks, with nothing for those of other rows: no further group is
    needed, for whichever shape is asked for.
    """

    plan: Plan
    operation: str

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of the group, in the order of the row."""
        grid = grid_for(self.plan.grid, self.plan.group)
        return grid.rows[grid.place(self.plan.rank)[0]]

    @property
    def index(self) -> int:
        """Of this rank in its row."""
        return self.ranks.index(self.plan.rank)

    @property
    def sizes(self) -> list[int]:
        """Positions of each rank of the row."""
        return [self.plan.layout.sizes[rank] for rank in self.ranks]

    def heads(self, total: int, index: int) -> slice:
        """Heads of a rank of the row."""
        first = index * total // len(self.ranks)
        return slice(first, first + heads_each(total, len(self.ranks)))

    def exchange(self, messages: Sequence[Tensor], receive: Sequence[int]) -> tuple[Tensor, ...]:
        """One message to each rank of the row, one from each."""
        if self.plan.group is None or len(self.ranks) == 1:
            return tuple(messages)
        num_ranks = self.plan.layout.num_ranks
        send, due = [0] * num_ranks, [0] * num_ranks
        for rank, message, count in zip(self.ranks, messages, receive, strict=True):
            send[rank], due[rank] = len(message), count
        # The group orders messages by rank, whatever the order of the row.
        by_rank = sorted(range(len(self.ranks)), key=lambda i: self.ranks[i])
        row = torch.cat([messages[i] for i in by_rank])
        others = len(row) - send[self.plan.rank]
        record_traffic("all_to_all", others * row.element_size())
        found = all_to_all_rows(row, self.plan.group, send, due, operation=self.operation)
        parts = found.split(due)
        return tuple(parts[rank] for rank in self.ranks)

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each `[B, heads, L, D]` as `[B, heads of this rank, S, D]`, positions rank by rank."""
        num_ranks, sizes = len(self.ranks), self.sizes
        if num_ranks == 1:
            return list(tensors)
        messages = [
            torch.cat([x[:, self.heads(x.shape[1], p)].reshape(-1) for x in tensors])
            for p in range(num_ranks)
        ]
        shapes = [(x.shape[0], heads_each(x.shape[1], num_ranks), x.shape[3]) for x in tensors]
        counts = [batch * heads * dim for batch, heads, dim in shapes]
        parts: list[list[Tensor]] = [[] for _ in tensors]
        received = self.exchange(messages, [sum(counts) * size for size in sizes])
        for message, size in zip(received, sizes, strict=True):
            pieces = message.split([count * size for count in counts])
            for part, piece, (batch, heads, dim) in zip(parts, pieces, shapes, strict=True):
                part.append(piece.view(batch, heads, size, dim))
        return [torch.cat(part, dim=2) for part in parts]

    def to_positions(self, x: Tensor, total: int) -> Tensor:
        """`[B, heads of this rank, S, D]` as `[B, total, L, D]`; copies of a head are summed up."""
        num_ranks, sizes = len(self.ranks), self.sizes
        if num_ranks == 1:
            return x
        batch, each, _, dim = x.shape
        length = sizes[self.index]
        messages = [part.reshape(-1) for part in x.split(sizes, dim=2)]
        received = self.exchange(messages, [batch * each * length * dim] * num_ranks)
        found = torch.stack([m.view(batch, each, length, dim) for m in received], dim=1)
        copies = num_ranks * each // total if total else 1
        if copies > 1:
            return found.reshape(batch, total, copies, length, dim).sum(2)
        return found.reshape(batch, total, length, dim)

    def queries_and_keys(self, q: Tensor, own: Keys) -> tuple[Tensor, Keys]:
        """Of this rank's heads, of all positions of the row, in one exchange."""
        q, k, v = self.to_heads([q, own.k, own.v])
        return q, Keys(k, v, self.mask(own.key_mask))

    def mask(self, key_mask: Tensor | None) -> Tensor | None:
        """Of all positions of the row."""
        if key_mask is None:
            return None
        # As a head that every rank has.
        bytes_B1L1 = key_mask[:, None, :, None].to(torch.uint8)
        return self.to_heads([bytes_B1L1])[0][:, 0, :, 0].bool()


def _tour(plan: Plan, row: _Row, heads: int) -> Tour:
    """The ring of this rank's column, for its heads."""
    grid = grid_for(plan.grid, plan.group)
    mine = row.heads(heads, row.index)
    slopes = None if plan.alibi_slopes is None else plan.alibi_slopes[mine]
    options: BlockOptions = replace(plan.options, first_head=mine.start)
    layout = merged_layout(plan.layout, grid.rows)
    inner = replace(plan, layout=layout, options=options, alibi_slopes=slopes)
    return Tour(inner, Circuit(1, len(grid.rows)), grid.column(row.index), grid.place(plan.rank)[0])


def _keeps_keys(plan: Plan, kv_heads: int) -> bool:
    """Whether the keys of this rank's heads are kept in the place of our own; they take as much."""
    grid = grid_for(plan.grid, plan.group)
    return grid.shape[0] == 1 and 1 < grid.shape[1] <= kv_heads


class Hybrid:
    """An all-to-all of heads inside rows, a ring of keys along columns; exchanges again backward.

    Where ranks of a row outnumber the heads of keys, each head goes to every rank that needs it,
    and no farther.
    """

    @staticmethod
    def forward(q: Tensor, own: Keys, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, keys to keep in the place of our own)."""
        row, heads = _Row(plan, "ring_attention"), q.shape[1]
        q_heads, keys = row.queries_and_keys(q, own)
        out, lse, kept = circulate(q_heads, keys, _tour(plan, row, heads))
        if _keeps_keys(plan, own.form.heads):
            kept = keys.packed()
        both = row.to_positions(torch.cat([out, lse[..., None]], -1), heads)
        # Copies, even of a single row: a graph's operator must not give two views of one tensor.
        out, lse = (x.clone(memory_format=_CONTIGUOUS) for x in (both[..., :-1], both[..., -1]))
        return out, lse, kept

    @staticmethod
    def backward(
        saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        plan, q, form = saved.plan, saved.q, saved.form
        row, heads = _Row(plan, "ring_attention backward"), q.shape[1]
        tour, num_ranks = _tour(plan, row, heads), len(row.ranks)
        # The gradient of the output had the dtype of q before: nothing is lost.
        if saved.own is None:
            q_heads, grad_heads = row.to_heads([q, grad_out.to(q.dtype)])
            keys = None
        else:
            tensors = [q, saved.own.k, saved.own.v, grad_out.to(q.dtype)]
            q_heads, k, v, grad_heads = row.to_heads(tensors)
            keys = Keys(k, v, row.mask(saved.own.key_mask))
        lse_heads, delta_heads = row.to_heads([lse[..., None], delta[..., None]])
        kv_form: KeysForm = replace(form, heads=heads_each(form.heads, num_ranks))
        kept = saved.kept
        if kept is not None and _keeps_keys(plan, form.heads):
            keys, kept = kv_form.unpacked(kept, sum(row.sizes)), None
        inner = Saved(tour.plan, q_heads, kv_form, keys, kept)
        grads = circulate_back(
            inner,
            tour,
            grad_heads.to(grad_out.dtype),
            lse_heads[..., 0].contiguous(),
            delta_heads[..., 0].contiguous(),
        )
        grad_q = row.to_positions(grads[0].to(q.dtype), heads)
        # Copies of a head are summed up where they arrive.
        wire = plan.grad_dtype if num_ranks > form.heads else q.dtype
        both = row.to_positions(torch.cat([grads[1], grads[2]], dim=-1).to(wire), form.heads)
        return grad_q, both[..., : form.dim], both[..., form.dim :]
