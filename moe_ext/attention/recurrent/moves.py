"""Exchanges of rows between ranks: from positions to heads, between layouts, and of halos.

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
    """Distribution of rows `[B, H, L, F]`: the heads and the positions that each rank holds.

    Attributes:
        heads: for each rank its heads, consecutive.
        layout: layout of the positions.
    """

    heads: tuple[range, ...]
    layout: Layout

    @classmethod
    def of_positions(cls, heads: int, layout: Layout) -> Spread:
        """Each rank holds all heads, of its positions in a layout."""
        return cls((range(heads),) * layout.num_ranks, layout)

    @classmethod
    def of_heads(cls, heads: int, layout: Layout, shared: int | None = None) -> Spread:
        """Each rank holds some heads, as evenly as possible, with all positions in sequence order.

        Args:
            heads: number of heads over all ranks.
            layout: layout of the positions before.
            shared: if given, the rows have this number of entries instead, each for heads / shared
                consecutive heads. A rank then holds the entries of its heads, and an entry may be
                on several ranks.
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
        """Skip the check of `Layout` that each position is held once."""


@functools.lru_cache(maxsize=128)
def _places(source: Layout, target: Layout, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """For each rank, local indices of the positions to send, and of the places of those received.

    Both are in the order in which the receiver holds the positions.
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
    """An exchange that changes the distribution of rows.

    Attributes:
        group: the ranks.
        source: distribution before.
        target: distribution after.
        operation: name for error messages.
    """

    group: ProcessGroup | None
    source: Spread
    target: Spread
    operation: str

    @property
    def back(self) -> Move:
        """The exchange from `target` to `source`."""
        return Move(self.group, self.target, self.source, f"{self.operation} backward")

    def __call__(self, x: Tensor) -> Tensor:
        """Exchange rows `[B, H, L, F]` of the source for those of the target; differentiable."""
        if self.source == self.target:
            return x
        return linear_map(x, self.run, self.back.run)

    def run(self, x: Tensor) -> Tensor:
        """Exchange rows as `__call__` does, without autograd."""
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
        # If every rank held all positions, every rank sends all of this rank's positions, for other
        # heads each. `places` then counts a position once for every rank.
        copies = len(sent) if _is_whole(self.source.layout) else 1
        out = x.new_zeros(batch, len(own), sum(map(len, places)) // copies, width)
        for heads, index, shape, part in zip(comes, places, shapes, arrived, strict=True):
            rows = out[:, heads.start - own.start : heads.stop - own.start]
            # In a backward pass, the gradients of a row that went to several ranks are summed.
            rows.index_add_(2, index.to(x.device), part.view(shape))
        return out

    def elements(self, rank: int) -> int:
        """Number of rows that a rank sends to other ranks, one for each position and head."""
        mine, shards = self.source.heads[rank], self.source.layout.shards
        held = sum(map(len, shards[rank]))
        if _is_whole(self.target.layout):
            others = (theirs for other, theirs in enumerate(self.target.heads) if other != rank)
            return held * sum(len(_common(mine, theirs)) for theirs in others)
        pairs = itertools.product(shards[rank], self.target.layout.shards[rank])
        # A position that leaves the rank goes to one other rank, with all its heads.
        return len(mine) * (held - sum(itertools.starmap(_num_common, pairs)))

    def _places(self, rank: int) -> tuple[list[Tensor], list[Tensor]]:
        source, target = self.source.layout, self.target.layout
        if not _is_whole(source):
            return _places(source, target, rank)
        # This rank holds all positions, and sends to each rank the positions of `target`.
        ranks = range(source.num_ranks)
        sent = [target.positions(one) for one in ranks]
        return sent, [torch.arange(target.sizes[rank]) for _ in ranks]


def _is_whole(layout: Layout) -> bool:
    return isinstance(layout, _Whole)


def _common(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def _num_common(a: range, b: range) -> int:
    """Number of positions that are in both ranges, for any steps."""
    return len(_common(a, b)) if a.step == b.step == 1 else sum(i in b for i in a)


@functools.lru_cache(maxsize=128)
def _halo_pieces(sizes: tuple[int, ...], width: int) -> tuple[dict[int, range], ...]:
    """For each rank the pieces of its halo: from the rank that holds a piece to positions there."""
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
    """Exchange of halos: the last positions before those of each rank, in a contiguous layout.

    Attributes:
        group: the ranks.
        sizes: number of positions of each rank.
        width: number of positions of a halo. Positions before the sequence are zeros.
        operation: name for error messages.
    """

    group: ProcessGroup | None
    sizes: tuple[int, ...]
    width: int
    operation: str

    def elements(self, rank: int, backward: bool = False) -> int:
        """Number of positions that a rank sends to other ranks, in the forward or backward pass."""
        pieces = _halo_pieces(self.sizes, self.width)
        if backward:
            return sum(map(len, pieces[rank].values()))
        return sum(len(before.get(rank, ())) for before in pieces)

    def __call__(self, x: Tensor) -> Tensor:
        """Send positions of x `[..., L]`, and return this rank's halo `[..., width]`.

        Differentiable: gradients of a halo return to the ranks of its positions.
        """
        return linear_map(x, self.bring, functools.partial(self.give_back, x.shape[-1]))

    def bring(self, x: Tensor) -> Tensor:
        """Exchange halos as `__call__` does, without autograd."""
        mine, theirs = self._pieces()
        sent = {rank: x[..., part.start : part.stop] for rank, part in theirs.items()}
        came = self._exchanged(sent, mine, x, step=1)
        found = torch.cat([came[other] for other in mine], -1) if mine else x[..., :0]
        return torch.nn.functional.pad(found, (self.width - found.shape[-1], 0))

    def give_back(self, length: int, grad: Tensor) -> Tensor:
        """Send gradients of halos back; return their sum for this rank, `[..., length]`."""
        mine, theirs = self._pieces()
        lengths = [len(part) for part in mine.values()]
        parts = grad[..., self.width - sum(lengths) :].split(lengths, -1)
        total = grad.new_zeros(*grad.shape[:-1], length)
        came = self._exchanged(dict(zip(mine, parts, strict=True)), theirs, grad, step=-1)
        for rank, part in came.items():
            total[..., theirs[rank].start : theirs[rank].stop] += part
        return total

    def _pieces(self) -> tuple[dict[int, range], dict[int, range]]:
        """Pieces of this rank's halo, and pieces of others' halos on this rank, by other rank."""
        me, pieces = group_rank(self.group), _halo_pieces(self.sizes, self.width)
        theirs = {rank: before[me] for rank, before in enumerate(pieces) if me in before}
        return pieces[me], theirs

    def _exchanged(
        self, sent: Mapping[int, Tensor], due: Mapping[int, range], like: Tensor, *, step: int
    ) -> dict[int, Tensor]:
        """Exchange pieces with other ranks, the nearest first; return those received, by rank.

        Args:
            sent: pieces to send, by rank.
            due: pieces to receive, by rank.
            like: a tensor with the dtype of the pieces, and their shape except the last dimension.
            step: 1 to send to ranks after this one, -1 to send to ranks before it.
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
