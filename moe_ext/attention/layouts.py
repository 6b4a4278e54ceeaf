"""Layouts: the positions of a sequence that each rank holds, and ranks that are arranged in rows.

Shapes: S whole sequence, L positions of this rank, R rows of I ranks, P = R * I ranks of the group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._checks import check_choice
from moe_ext.attention.checks import Require, refuse, requires
from moe_ext.attention.masks import (
    Mask,
    Offsets,
    PrefixLen,
    check_cu_seqlens,
    check_end,
    make_mask,
    rows_of_offsets,
)
from moe_ext.comm.groups import flat_group, group_ranks

LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "cost_balanced")
# Largest causal area of one rank of a zigzag layout, as a multiple of the mean over ranks.
_BALANCE = 1.01
# Number of chunks of a rank in a cost-balanced layout.
_CHUNKS = 16


@dataclass(frozen=True)
class Layout:
    """Division of the positions of a sequence among ranks, without padding.

    The sequence may have any length, and shards may be uneven.

    Attributes:
        name: one of `LAYOUTS`, or a name that the caller chose.
        seq_len: length of the whole sequence.
        shards: for every rank the ranges of global positions that it holds, in local order.
    """

    name: str
    seq_len: int
    shards: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless the shards hold every position exactly once."""
        parts = [part for shard in self.shards for part in shard]
        inside = all(part.step > 0 and 0 <= part.start < self.seq_len for part in parts if part)
        # Positions are marked in a bytearray, because a tensor has no values in FakeTensorMode or
        # on the meta device.
        held = bytearray(self.seq_len)
        if inside:
            for part in parts:
                places = slice(part.start, part.stop, part.step)
                held[places] = b"\1" * len(held[places])
        if sum(self.sizes) != self.seq_len or held.count(1) != self.seq_len:
            raise ValueError(
                f"Layout: expected shards to hold each of the {self.seq_len} positions once, "
                f"ascending in each range, got {sum(self.sizes)} positions, "
                f"{held.count(1)} of them different and inside"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks, each with one shard."""
        return len(self.shards)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(sum(len(part) for part in shard) for shard in self.shards)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """`[L]` int64, the global positions that a rank holds, in local order."""
        parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in self.shards[rank]]
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return torch.cat(parts) if parts else empty

    def areas(self, mask: Mask) -> tuple[int, ...]:
        """For each rank the number of (query, key) pairs that a mask leaves."""
        areas_S = mask.areas(self.seq_len)
        return tuple(int(areas_S[self.positions(r)].sum()) for r in range(self.num_ranks))

    def local_cu_seqlens(
        self, cu_seqlens: Tensor | Sequence[int], rank: int
    ) -> tuple[Tensor, Tensor]:
        """Offsets `[n + 1]` of the n local runs, and the number of each run's document, `[n]`.

        A run is a stretch of the local order inside one document and one range of positions. A
        document may have several runs on one rank.
        """
        offsets = check_cu_seqlens(cu_seqlens, "local_cu_seqlens")
        check_end(offsets, self.seq_len, "local_cu_seqlens")
        lengths: list[int] = []
        documents: list[int] = []
        for part in self.shards[rank]:
            found = torch.bucketize(
                torch.arange(part.start, part.stop, part.step), torch.tensor(offsets), right=True
            )
            values, counts = torch.unique_consecutive(found - 1, return_counts=True)
            documents += values.tolist()
            lengths += counts.tolist()
        sums = list(itertools.accumulate(lengths, initial=0))
        return torch.tensor(sums), torch.tensor(documents, dtype=torch.int64)


def check_layout(layout: str | Layout, require: Require) -> None:
    """ValueError unless `layout` is a Layout or a known name."""
    known = isinstance(layout, Layout) or layout in LAYOUTS
    require(known, "layout", f"a Layout or one of {LAYOUTS}", repr(layout))


def order_of(layout: Layout, device: torch.device) -> Tensor:
    """`[S]`, the global positions of all shards, concatenated in the order of ranks."""
    return torch.cat([layout.positions(rank, device) for rank in range(layout.num_ranks)])


def make_layout(
    layout: str | Layout,
    seq_len: int,
    num_ranks: int,
    *,
    cu_seqlens: Offsets | None = None,
    is_causal: bool = True,
    window: tuple[int, int] | None = None,
    prefix_len: PrefixLen | None = None,
) -> Layout:
    """The layout of a sequence over ranks, by name. A `Layout` is checked and returned.

    Args:
        layout: "contiguous", one stretch for each rank, with the least traffic under a window;
            "zigzag", stretches r and 2P - 1 - r of 2P for rank r, with even work under a causal
            mask; "striped", every P-th position; "per_document", a zigzag inside each document;
            "cost_balanced", stretches dealt out by the area of the mask.
        seq_len: S, any length.
        num_ranks: P, the number of ranks of the group.
        cu_seqlens: offsets of packed documents, the same for all rows of the batch. Required for
            "per_document" and "cost_balanced".
        is_causal: as in the attention; used only by "cost_balanced". Other functions take
            "cost_balanced" by name for a causal mask. For another mask, call `make_layout` and pass
            the result to them.
        window: as in the attention; used only by "cost_balanced".
        prefix_len: as in the attention, one number for all documents or one for each; used only by
            "cost_balanced".

    Raises:
        ValueError: unknown name, a `Layout` for another length or number of ranks, or an invalid
            mask for "cost_balanced".
    """
    op = "make_layout"
    if isinstance(layout, Layout):
        if (layout.seq_len, layout.num_ranks) != (seq_len, num_ranks):
            rule = f"for {seq_len} positions on {num_ranks} ranks"
            refuse(op, "layout", rule, f"{layout.seq_len} on {layout.num_ranks}")
        return layout
    check_choice(op, "layout", layout, LAYOUTS)
    if seq_len < 0 or num_ranks < 1:
        rule = "at least 0 and num_ranks at least 1"
        refuse(op, "seq_len", rule, f"{seq_len} and {num_ranks}")
    follows = layout in ("per_document", "cost_balanced")
    rows = rows_of_offsets(cu_seqlens, op)
    if rows is not None:
        rule = f"one row of offsets for {layout!r}"
        requires(op)(not follows, "cu_seqlens", rule, len(rows))
    offsets = check_cu_seqlens(cu_seqlens, op) if rows is None else rows[0]
    check_end(offsets, seq_len, op)
    # Missing offsets have no default. Otherwise a layout of one name would differ between the data
    # and the attention if only one of the two calls passes offsets.
    is_given = offsets is not None or not follows
    requires(op)(is_given, "cu_seqlens", f"given for {layout!r}", None)
    # Layouts other than "cost_balanced" depend on the offsets at most. Leaving out the rest of the
    # mask means that the cache of `_make` holds one entry for all masks.
    mask = Mask(cu_seqlens=offsets if follows else None)
    if layout == "cost_balanced":
        mask = make_mask(op, is_causal, window, offsets, prefix_len)
    return _make(layout, seq_len, num_ranks, mask)


@functools.lru_cache(maxsize=256)
def _make(layout: str, seq_len: int, num_ranks: int, mask: Mask) -> Layout:
    whole = range(seq_len)
    shards: Iterable[Iterable[range]]
    if layout == "contiguous":
        shards = [[part] for part in even_parts(whole, num_ranks)]
    elif layout == "striped":
        shards = [[range(rank, seq_len, num_ranks)] for rank in range(num_ranks)]
    elif layout == "zigzag":
        shards = _balanced(_pairs(whole, num_ranks), seq_len)
    elif layout == "per_document":
        assert mask.cu_seqlens is not None
        shards = _per_document(mask.cu_seqlens, num_ranks)
    else:
        shards = _by_cost(seq_len, num_ranks, mask)
    return Layout(layout, seq_len, tuple(tuple(r for r in shard if r) for shard in shards))


def even_parts(whole: range, parts: int) -> list[range]:
    """Cut a range of n positions at the edges floor(i * n / parts)."""
    edges = [i * len(whole) // parts for i in range(parts + 1)]
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


def _pairs(whole: range, num_ranks: int) -> list[list[range]]:
    """Stretches r and 2P - 1 - r of 2P for each rank r; those of the last rank are one range."""
    parts = even_parts(whole, 2 * num_ranks)
    pairs = [[parts[r], parts[-1 - r]] for r in range(num_ranks)]
    innermost = pairs[-1]
    pairs[-1] = [range(innermost[0].start, innermost[1].stop)]
    return pairs


def _causal_area(part: range) -> int:
    return len(part) * (part.start + part.stop + 1) // 2


def _balanced(shards: list[list[range]], seq_len: int) -> list[list[range]]:
    """Swap single positions until no rank has more than 1.01 times the mean causal area.

    No swap is needed if 2P divides S, or if S is larger than about 200 P.
    """
    num_ranks = len(shards)
    total = seq_len * (seq_len + 1) // 2
    limit = max(-(-total // num_ranks), int(_BALANCE * total / num_ranks))
    areas = [sum(_causal_area(part) for part in shard) for shard in shards]
    if seq_len < 2 * num_ranks or max(areas) <= limit:
        return shards
    held = [{p for part in shard for p in part} for shard in shards]
    while max(areas) > limit and _swap(held, areas):
        pass
    return [_joined([range(p, p + 1) for p in sorted(positions)]) for positions in held]


def _swap(held: list[set[int]], areas: list[int]) -> bool:
    """Exchange two positions so that the areas of two ranks differ less; False if none do."""
    pairs = sorted(
        itertools.permutations(range(len(areas)), 2), key=lambda p: areas[p[1]] - areas[p[0]]
    )
    for full, other in pairs:
        gap = areas[full] - areas[other]
        for amount in (*range(gap // 2, 0, -1), *range(gap // 2 + 1, gap)):
            found = [p for p in held[full] if p - amount in held[other]]
            if found:
                held[full] ^= {min(found), min(found) - amount}
                held[other] ^= {min(found), min(found) - amount}
                areas[full] -= amount
                areas[other] += amount
                return True
    return False


def _per_document(offsets: tuple[int, ...], num_ranks: int) -> list[list[range]]:
    """Deal out the pairs of each document, the largest to the rank with the least area so far."""
    rounds = []
    for start, stop in itertools.pairwise(offsets):
        dealt = []
        for pair in _pairs(range(start, stop), num_ranks):
            area = sum(_causal_area(range(p.start - start, p.stop - start)) for p in pair)
            dealt.append((area, sum(map(len, pair)), pair))
        dealt.sort(key=lambda item: item[:2], reverse=True)
        rounds.append([(area, pair) for area, _, pair in dealt])
    return _dealt(rounds, num_ranks)


def _by_cost(seq_len: int, num_ranks: int, mask: Mask) -> list[list[range]]:
    """Deal out stretches in rounds, the costliest of a round to the rank with the least cost."""
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), mask.areas(seq_len).cumsum(0)])
    parts = even_parts(range(seq_len), min(_CHUNKS * num_ranks, max(seq_len, 1)))
    edges = torch.tensor([part.start for part in parts] + [seq_len])
    costs = (sums[edges[1:]] - sums[edges[:-1]]).tolist()
    order = sorted(range(len(parts)), key=lambda i: (-costs[i], i))
    items = [(costs[i], [parts[i]]) for i in order]
    rounds = [items[first : first + num_ranks] for first in range(0, len(items), num_ranks)]
    shards = _dealt(rounds, num_ranks)
    return [_joined(sorted(shard, key=lambda part: part.start)) for shard in shards]


def _dealt(rounds: list[list[tuple[int, list[range]]]], num_ranks: int) -> list[list[range]]:
    """Ranges of each rank. In each round a rank gets at most one item (cost, ranges).

    Items of a round go to ranks in order of rising cost so far.
    """
    shards: list[list[range]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for items in rounds:
        loads.sort()
        for i, (cost, parts) in enumerate(items):
            load, rank = loads[i]
            shards[rank] += parts
            loads[i] = (load + cost, rank)
    return shards


def _joined(parts: list[range]) -> list[range]:
    """Join ascending ranges that touch."""
    joined: list[range] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


@functools.lru_cache(maxsize=256)
def merged_layout(layout: Layout, parts: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout whose shard i holds the shards of the ranks in `parts[i]`, concatenated."""
    shards = tuple(
        tuple(itertools.chain.from_iterable(layout.shards[rank] for rank in part)) for part in parts
    )
    return Layout(layout.name, layout.seq_len, shards)


@dataclass(frozen=True)
class Grid:
    """Arrangement of a group's ranks in rows. Links inside a row are the fast ones.

    Attributes:
        rows: rows of one length, which contain every rank of the group once.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(R, I)."""
        return len(self.rows), len(self.rows[0])

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, row by row."""
        return tuple(itertools.chain.from_iterable(self.rows))

    def place(self, rank: int) -> tuple[int, int]:
        """(row, column) of a rank."""
        return divmod(self.order.index(rank), self.shape[1])

    def column(self, index: int) -> tuple[int, ...]:
        """The ranks of a column, one from each row."""
        return tuple(row[index] for row in self.rows)


def even_grid(num_ranks: int, inner: int) -> Grid:
    """A grid with rows of `inner` consecutive ranks."""
    return Grid(tuple(tuple(range(i, i + inner)) for i in range(0, num_ranks, inner)))


def grid_of_hosts(hosts: Sequence[int]) -> Grid | None:
    """A grid with one row for each host; None if hosts have different numbers of ranks."""
    rows = [tuple(r for r, h in enumerate(hosts) if h == host) for host in dict.fromkeys(hosts)]
    return Grid(tuple(rows)) if len({len(row) for row in rows}) == 1 else None


def split_group(
    group: ProcessGroup | DeviceMesh | None, operation: str
) -> tuple[ProcessGroup | None, Grid | None]:
    """(group of all ranks, its rows); the rows are None unless `group` is a 2-D mesh.

    The first call with a 2-D mesh is collective over all ranks of the job, because it creates the
    group of all ranks of the mesh. torch caches that group with the mesh.

    Raises:
        TypeError: neither None nor a group or mesh that this rank belongs to.
        ValueError: a mesh of another number of dims, or with dims without names or in the wrong
            order.
    """
    if group is None or isinstance(group, ProcessGroup):
        return group, None
    if not isinstance(group, DeviceMesh) or group.get_coordinate() is None:
        # On a rank outside the group, `dist.new_group` returns a number.
        raise TypeError(
            f"{operation}: expected group to be None or a ProcessGroup or DeviceMesh that this "
            f"rank belongs to, got {group!r}"
        )
    if group.ndim == 1:
        return group.get_group(), None
    names = group.mesh_dim_names
    if group.ndim != 2 or names is None:
        raise ValueError(
            f"{operation}: expected group to be a mesh of one dim, or of two with names, the ring "
            f"first and the ranks near to each other last, got {group!r}"
        )
    if "ulysses" in names[0] or "ring" in names[1]:
        refuse(operation, "the dims of group", "('ring', 'ulysses'), in this order", names)
    whole = flat_group(group)
    place = group_ranks(whole).index
    return whole, Grid(tuple(tuple(map(place, row)) for row in group.mesh.tolist()))


def ranks_of(group: ProcessGroup | DeviceMesh | None, operation: str) -> ProcessGroup | None:
    """The group of all ranks of a group or mesh that a user passed."""
    return split_group(group, operation)[0]
