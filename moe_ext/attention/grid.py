"""Groups whose ranks are arranged in rows, and what a user may pass for a group.

Shapes: none; R rows of I ranks, P = R * I ranks of the group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.attention.layouts import Layout
from moe_ext.distributed._c10d import flat_group
from moe_ext.distributed.groups import group_size


@dataclass(frozen=True)
class Grid:
    """Rows of ranks that are near to each other; ranks are those of the group.

    Attributes:
        rows: every rank of the group once, in rows of one length.
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
        """One rank of each row."""
        return tuple(row[index] for row in self.rows)


def even_grid(num_ranks: int, inner: int) -> Grid:
    """Rows of `inner` neighbours."""
    return Grid(tuple(tuple(range(i, i + inner)) for i in range(0, num_ranks, inner)))


def grid_of_hosts(hosts: Sequence[int]) -> Grid | None:
    """One row for each host; None where some have more ranks than others."""
    rows = [tuple(r for r, h in enumerate(hosts) if h == host) for host in dict.fromkeys(hosts)]
    return Grid(tuple(rows)) if len({len(row) for row in rows}) == 1 else None


def split_group(
    group: ProcessGroup | DeviceMesh | None, operation: str
) -> tuple[ProcessGroup | None, Grid | None]:
    """(group of all ranks, its rows), the latter for a 2-D mesh alone.

    The first call with a 2-D mesh makes the group of all its ranks, on every rank of the job at
    once; torch keeps it with the mesh.

    Raises:
        TypeError: neither None nor a group or mesh that this rank belongs to.
        ValueError: a mesh of another shape, or whose rows are not what they have to be.
    """
    if group is None or isinstance(group, ProcessGroup):
        return group, None
    if not isinstance(group, DeviceMesh) or group.get_coordinate() is None:
        # new_group returns a number on ranks that do not belong to the group.
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
        raise ValueError(
            f"{operation}: expected the dims of group to be ('ring', 'ulysses'), in this order, "
            f"got {names}"
        )
    whole = flat_group(group)
    rows = tuple(
        tuple(dist.get_group_rank(whole, rank) for rank in row) for row in group.mesh.tolist()
    )
    return whole, Grid(rows)


def ranks_of(group: ProcessGroup | DeviceMesh | None, operation: str) -> ProcessGroup | None:
    """The group of all ranks of what a user passed for a group."""
    return split_group(group, operation)[0]


def grid_for(grid: Grid | None, group: ProcessGroup | None) -> Grid:
    """`grid`, or one row of all ranks."""
    return even_grid(group_size(group), group_size(group)) if grid is None else grid


@functools.lru_cache(maxsize=256)
def merged_layout(layout: Layout, parts: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout whose shard i is that of all ranks of `parts[i]`, one after the other."""
    shards = tuple(
        tuple(itertools.chain.from_iterable(layout.shards[rank] for rank in part)) for part in parts
    )
    return Layout(layout.name, layout.seq_len, shards)
