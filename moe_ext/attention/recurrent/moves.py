"""Rows that change places between ranks: from positions to heads, between layouts, and halos.

Shapes: B batch, H heads, S whole sequence, L positions of this rank, F elements of a row, P ranks.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext.attention.layouts import Layout
from moe_ext.comm.collectives import all_to_all
from moe_ext.comm.groups import group_rank
from moe_ext.comm.ring_exchange import Exchange


@dataclass(frozen=True)
class Spread:
    """The heads and positions that each rank holds of rows `[B, H, L, F]`.

    Attributes:
        heads: of each rank, side by side.
        layout: of the positions.
    """

    heads: tuple[range, ...]
    layout: Layout

    @classmethod
    def of_positions(cls, heads: int, layout: Layout) -> Spread:
        """All heads of the positions of a layout."""
        return cls((range(heads),) * layout.num_ranks, layout)

    @classmethod
    def of_heads(cls, heads: int, layout: Layout, shared: int | None = None) -> Spread:
        """Heads as even as they can be, each with all positions in the order of the sequence.

        Args:
            heads: of all ranks.
            layout: of the positions.
            shared: number of rows, each for heads / shared heads side by side: those that a rank's
                heads read are spread then, some of them to several ranks.
        """
        size, whole = layout.num_ranks, ((range(layout.seq_len),),)
        edges = [rank * heads // size for rank in range(size + 1)]
        parts = tuple(range(a, b) for a, b in itertools.pairwise(edges))
        if shared is not None:
            each = heads // max(1, shared)
            parts = tuple(range(p.start // each, -(-p.stop // each)) if p else p for p in parts)
        return cls(parts, _Whole("whole", layout.seq_len, whole * size))


class _Whole(Layout):
    """All positions on every rank."""

    def __post_init__(self) -> None:
        """Positions are there more than once."""


@functools.lru_cache(maxsize=128)
def _places(source: Layout, target: Layout, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Local indices of what a rank sends to each rank, and of where it puts what comes from each.

    Both follow the order in which the receiver holds the positions.
    """
    ranks = range(source.num_ranks)
    local = torch.full((source.seq_len,), -1)
    local[source.positions(rank)] = torch.arange(source.sizes[rank])
    owner = torch.empty(source.seq_len, dtype=torch.int64)
    for one in ranks:
        owner[source.positions(one)] = one
    taken = [local[target.positions(one)] for one in ranks]
    came_from = owner[target.positions(rank)]
    return (
        [index[index >= 0] for index in taken],
        [(came_from == one).nonzero()[:, 0] for one in ranks],
    )


@dataclass(frozen=True)
class Move:
    """A change of places of rows, of which each is on one rank before it.

    Attributes:
        group: the ranks.
        source: who holds what before.
        target: who holds what behind it.
        operation: name for error messages.
    """

    group: ProcessGroup | None
    source: Spread
    target: Spread
    operation: str

    @property
    def back(self) -> Move:
        """The way back."""
        return Move(self.group, self.target, self.source, f"{self.operation} backward")

    def __call__(self, x: Tensor) -> Tensor:
        """Rows `[B, H, L, F]` of the target; differentiable."""
        if self.source == self.target:
            return x
        moved: Tensor = _MovedRows.apply(x, self)
        return moved

    def run(self, x: Tensor) -> Tensor:
        """The same outside of a graph."""
        me, batch, width = group_rank(self.group), x.shape[0], x.shape[3]
        sent, places = self._places(me)
        mine, theirs = self.source.heads[me], self.target.heads
        parts, own = [], self.target.heads[me]
        for rank, index in enumerate(sent):
            heads = _common(mine, theirs[rank])
            part = x[:, heads.start - mine.start : heads.stop - mine.start]
            parts.append(part.index_select(2, index.to(x.device)).reshape(-1))
        comes = [_common(self.source.heads[rank], own) for rank in range(len(sent))]
        counts = zip(map(len, comes), map(len, places), strict=True)
        shapes = [(batch, *count, width) for count in counts]
        send = [part.numel() for part in parts]
        receive = [torch.Size(shape).numel() for shape in shapes]
        how: dict[str, Any] = {"operation": self.operation, "send": send, "receive": receive}
        arrived = all_to_all(torch.cat(parts), self.group, **how).split(receive)
        out = x.new_zeros(batch, len(own), sum(map(len, places)) // self._copies(me), width)
        for heads, index, shape, part in zip(comes, places, shapes, arrived, strict=True):
            rows = out[:, heads.start - own.start : heads.stop - own.start]
            # Gradients of a row that went to several ranks add up.
            rows.index_add_(2, index.to(x.device), part.view(shape))
        return out

    def elements(self, rank: int) -> int:
        """Rows that a rank sends to others, one for each position and head."""
        mine, shards = self.source.heads[rank], self.source.layout.shards
        held = sum(map(len, shards[rank]))
        if _is_whole(self.target.layout):
            others = (theirs for other, theirs in enumerate(self.target.heads) if other != rank)
            return held * sum(len(_common(mine, theirs)) for theirs in others)
        pairs = itertools.product(shards[rank], self.target.layout.shards[rank])
        # All heads of a position that does not stay go to one rank.
        return len(mine) * (held - sum(itertools.starmap(_num_common, pairs)))

    def _copies(self, rank: int) -> int:
        """Number of ranks that hold each position of the source, with other heads each."""
        return self.source.layout.num_ranks if _is_whole(self.source.layout) else 1

    def _places(self, rank: int) -> tuple[list[Tensor], list[Tensor]]:
        source, target = self.source.layout, self.target.layout
        if not _is_whole(source):
            return _places(source, target, rank)
        # Each rank has all positions of its heads: they go where the target has them.
        ranks = range(source.num_ranks)
        sent = [target.positions(one) for one in ranks]
        return sent, [torch.arange(target.sizes[rank]) for _ in ranks]


def _is_whole(layout: Layout) -> bool:
    return isinstance(layout, _Whole)


def _common(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def _num_common(a: range, b: range) -> int:
    """Positions that are in both ranges, whatever their steps."""
    return len(_common(a, b)) if a.step == b.step == 1 else sum(i in b for i in a)


class _MovedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move) -> Tensor:
        ctx.move = move
        return move.run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.move.back.run(grad), None


# Rank, start there, length.
_Piece = tuple[int, int, int]


@functools.lru_cache(maxsize=128)
def _halo_pieces(sizes: tuple[int, ...], width: int) -> tuple[tuple[_Piece, ...], ...]:
    """For each rank the pieces (rank, start there, length) that lie before it, in their order."""
    starts = [0, *itertools.accumulate(sizes)]
    found = []
    for rank, start in enumerate(starts[:-1]):
        first, pieces = max(0, start - width), []
        for other in range(rank):
            a, b = max(first, starts[other]), min(start, starts[other + 1])
            if a < b:
                pieces.append((other, a - starts[other], b - a))
        found.append(tuple(pieces))
    return tuple(found)


@dataclass(frozen=True)
class Halo:
    """The last positions before those of each rank of a contiguous layout.

    Attributes:
        group: the ranks.
        sizes: positions of each.
        width: positions of a halo; zeros where the sequence begins.
        operation: name for error messages.
    """

    group: ProcessGroup | None
    sizes: tuple[int, ...]
    width: int
    operation: str

    def elements(self, rank: int, backward: bool = False) -> int:
        """Positions that a rank sends to others, or gradients of those that it got."""
        found = _halo_pieces(self.sizes, self.width)
        if backward:
            return sum(length for _, _, length in found[rank])
        pieces = itertools.chain(*found)
        return sum(length for other, _, length in pieces if other == rank)

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., width]` of `[..., L]`; differentiable."""
        found: Tensor = _Haloed.apply(x, self)
        return found

    def bring(self, x: Tensor) -> Tensor:
        """The halo of this rank."""
        me, pieces = group_rank(self.group), _halo_pieces(self.sizes, self.width)
        exchange, parts = Exchange(self.group, self.operation), list[Tensor]()
        for shift in range(1, len(self.sizes)):
            sends, buffer, source = [], None, me - shift
            for other, start, length in pieces[me + shift] if me + shift < len(pieces) else ():
                if other == me:
                    sends = [(as_bytes(x[..., start : start + length].contiguous()), me + shift)]
            for other, _, length in pieces[me]:
                if other == source:
                    buffer = x.new_empty(*x.shape[:-1], length)
            if sends or buffer is not None:
                room = None if buffer is None else as_bytes(buffer)
                exchange.post(sends, room, max(source, 0), shift).wait()
            if buffer is not None:
                parts.insert(0, buffer)
        found = torch.cat(parts, -1) if parts else x[..., :0]
        return torch.nn.functional.pad(found, (self.width - found.shape[-1], 0))

    def give_back(self, grad: Tensor, like: Tensor) -> Tensor:
        """`[..., L]`: the sum of the gradients of this rank's positions in the halos of others."""
        me, pieces = group_rank(self.group), _halo_pieces(self.sizes, self.width)
        exchange = Exchange(self.group, f"{self.operation} backward")
        total, end = torch.zeros_like(like), grad.shape[-1]
        for shift in range(1, len(self.sizes)):
            sends, buffer, place, target = [], None, slice(0), me + shift
            for other, _, length in pieces[me]:
                if other == me - shift:
                    part = grad[..., end - length : end].contiguous()
                    end -= length
                    sends = [(as_bytes(part), other)]
            for other, start, length in pieces[target] if target < len(pieces) else ():
                if other == me:
                    buffer = like.new_empty(*like.shape[:-1], length)
                    place = slice(start, start + length)
            if sends or buffer is not None:
                room = None if buffer is None else as_bytes(buffer)
                exchange.post(sends, room, min(target, len(pieces) - 1), shift).wait()
            if buffer is not None:
                total[..., place] += buffer
        return total


class _Haloed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        ctx.save_for_backward(x)
        return halo.bring(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.halo.give_back(grad, x), None
