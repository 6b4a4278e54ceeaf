"""Rows that change places between ranks: from positions to heads, between layouts, and halos.

Shapes: B batch, H heads, S whole sequence, L positions of this rank, F elements of a row, P ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext.attention.layouts import Layout, even_parts
from moe_ext.attention.sharding import linear_map
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
        parts = tuple(even_parts(range(heads), size))
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
        return linear_map(x, self.run, self.back.run)

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
        # Every rank has all positions of a whole source, with other heads each.
        copies = len(sent) if _is_whole(self.source.layout) else 1
        out = x.new_zeros(batch, len(own), sum(map(len, places)) // copies, width)
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


@functools.lru_cache(maxsize=128)
def _halo_pieces(sizes: tuple[int, ...], width: int) -> tuple[dict[int, range], ...]:
    """For each rank the pieces of its halo, by the rank that holds them: positions there."""
    starts = [0, *itertools.accumulate(sizes)]
    found = []
    for rank, start in enumerate(starts[:-1]):
        halo, pieces = range(max(0, start - width), start), {}
        for other in range(rank):
            part = _common(halo, range(starts[other], starts[other + 1]))
            if part:
                pieces[other] = range(part.start - starts[other], part.stop - starts[other])
        found.append(pieces)
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
        pieces = _halo_pieces(self.sizes, self.width)
        if backward:
            return sum(map(len, pieces[rank].values()))
        return sum(len(before.get(rank, ())) for before in pieces)

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., width]` of `[..., L]`; differentiable."""
        return linear_map(x, self.bring, functools.partial(self.give_back, x.shape[-1]))

    def bring(self, x: Tensor) -> Tensor:
        """The halo of this rank."""
        mine, theirs = self._pieces()
        sent = {rank: x[..., part.start : part.stop] for rank, part in theirs.items()}
        came = self._exchanged(sent, mine, x, step=1)
        found = torch.cat([came[other] for other in mine], -1) if mine else x[..., :0]
        return torch.nn.functional.pad(found, (self.width - found.shape[-1], 0))

    def give_back(self, length: int, grad: Tensor) -> Tensor:
        """`[..., length]`: the sum of the gradients of this rank's positions in other halos."""
        mine, theirs = self._pieces()
        lengths = [len(part) for part in mine.values()]
        parts = grad[..., self.width - sum(lengths) :].split(lengths, -1)
        total = grad.new_zeros(*grad.shape[:-1], length)
        came = self._exchanged(dict(zip(mine, parts, strict=True)), theirs, grad, step=-1)
        for rank, part in came.items():
            total[..., theirs[rank].start : theirs[rank].stop] += part
        return total

    def _pieces(self) -> tuple[dict[int, range], dict[int, range]]:
        """Pieces of this rank's halo, and those that it holds of others, by the other rank."""
        me, pieces = group_rank(self.group), _halo_pieces(self.sizes, self.width)
        theirs = {rank: before[me] for rank, before in enumerate(pieces) if me in before}
        return pieces[me], theirs

    def _exchanged(
        self, sent: Mapping[int, Tensor], due: Mapping[int, range], like: Tensor, *, step: int
    ) -> dict[int, Tensor]:
        """Positions from each rank that has some for this one, the nearest first.

        Args:
            sent: to each rank.
            due: from each rank.
            like: of their dtype, and of their shape but for the last dimension.
            step: 1 to send to the ranks behind this one, -1 to those before it.
        """
        exchange = Exchange(self.group, self.operation + " backward" * (step < 0))
        me, came = group_rank(self.group), dict[int, Tensor]()
        for shift in range(1, len(self.sizes)):
            target, source, buffer = me + step * shift, me - step * shift, None
            sends = [(as_bytes(sent[target].contiguous()), target)] if target in sent else []
            if source in due:
                came[source] = like.new_empty(*like.shape[:-1], len(due[source]))
                buffer = as_bytes(came[source])
            if sends or buffer is not None:
                exchange.post(sends, buffer, source % len(self.sizes), shift).wait()
        return came
