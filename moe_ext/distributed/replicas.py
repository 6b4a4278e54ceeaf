"""Replicas: ranks that hold the same parts of parameters as others, and shards of one expert.

A `MoEMesh` declares them; of groups that were made otherwise they are found out.
"""

from __future__ import annotations

import weakref

import torch
from torch.distributed import ProcessGroup

from moe_ext.comm import collectives
from moe_ext.comm.agreement import share
from moe_ext.comm.groups import group_rank, group_ranks, group_size, resolve_group

# Ranks with the same coordinate in a group; None where this rank has no such peer.
_replica_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup | None]
_replica_groups = weakref.WeakKeyDictionary()
# Ranks with the same shards, and neighbours, of a group whose neighbours share each expert.
_expert_shards: weakref.WeakKeyDictionary[ProcessGroup, tuple[ProcessGroup, ProcessGroup]]
_expert_shards = weakref.WeakKeyDictionary()
# The groups that divide the ranks as this one does: a row each, with the ranks of its parts.
_grids: weakref.WeakKeyDictionary[ProcessGroup, list[list[int]]] = weakref.WeakKeyDictionary()


def declare_replicas(
    group: ProcessGroup, replicas: ProcessGroup | None, grid: list[list[int]]
) -> None:
    """Note which ranks hold the same parts, for parameters divided over `group`.

    Args:
        group: that of this rank.
        replicas: ranks with the part of this rank; None where there are no others.
        grid: global ranks, a row for each group that divides as this one does, in order of parts.
    """
    _replica_groups[group], _grids[group] = replicas, grid


def declare_expert_shards(group: ProcessGroup, same: ProcessGroup, shards: ProcessGroup) -> None:
    """Note that neighbours in a group of experts hold shards of each expert.

    Args:
        group: ranks that share a set of experts.
        same: those of them that hold the same shard of different experts.
        shards: those that hold shards of the same experts.
    """
    _expert_shards[group] = same, shards


def groups_of_shards(group: ProcessGroup) -> tuple[ProcessGroup, ProcessGroup]:
    """The groups that `declare_expert_shards` was given."""
    return _expert_shards[group]


def shards_of_experts(group: ProcessGroup | None) -> int:
    """Ranks that each expert of a group is divided over; 1 for a group without etp."""
    return 1 if group is None or group not in _expert_shards else _expert_shards[group][1].size()


def replica_group(group: ProcessGroup, device: torch.device) -> ProcessGroup | None:
    """Ranks that hold the same parts as this one of what `group` divides; None if there is none.

    A `MoEMesh` knows them. For a group made otherwise, the first call finds them out and makes the
    process groups: all ranks of the default group must then call it, in the same order, with their
    own group.

    Raises:
        ValueError: on every rank, when the groups do not partition the ranks into groups of one
            size.
    """
    if group in _replica_groups:
        return _replica_groups[group]
    world = resolve_group(None, "sync_gradients")
    assert world is not None
    own = [group_size(group), group_rank(group), min(group_ranks(group))]
    rows = share(own, world, device, operation="sync_gradients")
    members_of: dict[int, list[tuple[int, int]]] = {}
    for rank, (_, part, leader) in enumerate(rows):
        members_of.setdefault(leader, []).append((part, rank))
    size = group_size(group)
    members = [sorted(members_of[leader]) for leader in sorted(members_of)]
    partition = all(row[0] == size for row in rows) and all(
        [part for part, _ in row] == list(range(size)) for row in members
    )
    if not partition:
        found = ", ".join(f"{row[0]} on rank {rank}" for rank, row in enumerate(rows))
        raise ValueError(
            "sync_gradients: expected the expert-parallel groups to split the ranks into groups of "
            f"one size, got groups of {found}"
        )
    grid = [[rank for _, rank in row] for row in members]
    columns = [list(column) for column in zip(*grid, strict=True)] if len(grid) > 1 else []
    declare_replicas(group, collectives.subgroups(columns), grid)
    return _replica_groups[group]


def grid_of(group: ProcessGroup) -> list[list[int]]:
    """Global ranks, a row for each group that divides parameters as this one; empty if not known.

    They are known of groups of a `MoEMesh`, and of others once `replica_group` has found them.
    """
    return _grids.get(group, [])
