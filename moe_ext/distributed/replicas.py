"""Finds replicas, the ranks that hold the same parts of parameters, and etp shards of experts.

A `MoEMesh` declares the replicas of its groups. For other groups the ranks find them together.
"""

from __future__ import annotations

import weakref

import torch
from torch.distributed import ProcessGroup

from moe_ext.comm import collectives
from moe_ext.comm.agreement import share
from moe_ext.comm.groups import group_rank, group_ranks, group_size, resolve_group

# Group to the ranks of other such groups with the same place in it; None if there are no others.
_replica_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup | None]
_replica_groups = weakref.WeakKeyDictionary()
# Group with etp to the ranks of it with shards of the same experts.
_expert_shards: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
# Group to the ranks of all groups that partition the job in the same way, one row for each.
_grids: weakref.WeakKeyDictionary[ProcessGroup, list[list[int]]] = weakref.WeakKeyDictionary()


def declare_replicas(
    group: ProcessGroup, replicas: ProcessGroup | None, grid: list[list[int]]
) -> None:
    """Note which ranks hold the same parts of parameters that are divided over `group`.

    Args:
        group: group of this rank.
        replicas: ranks with the same part as this rank; None if there are no others.
        grid: global ranks, one row for each group of the partition, in order of parts.
    """
    _replica_groups[group], _grids[group] = replicas, grid


def declare_expert_shards(group: ProcessGroup, shards: ProcessGroup) -> None:
    """Note that neighbouring ranks of a group hold etp shards of the same experts.

    Args:
        group: ranks that share a set of experts.
        shards: ranks of the group with shards of the same experts.
    """
    _expert_shards[group] = shards


def group_of_shards(group: ProcessGroup) -> ProcessGroup:
    """Return the argument `shards` of `declare_expert_shards` for a group."""
    return _expert_shards[group]


def shards_of_experts(group: ProcessGroup | None) -> int:
    """Return etp, the number of ranks over which each expert is divided; 1 without etp."""
    return 1 if group is None or group not in _expert_shards else _expert_shards[group].size()


def replica_group(group: ProcessGroup, device: torch.device) -> ProcessGroup | None:
    """Return the ranks that hold the same part as this rank, of parameters over `group`, or None.

    A `MoEMesh` has declared it for its groups. For any other group the first call finds the ranks
    and makes process groups. All ranks of the default group must make this first call, in the same
    order, each with its own group.

    Raises:
        ValueError: on every rank, if the groups do not partition the ranks into groups of equal
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
    """Return the global ranks of all groups of the partition, one row for each; empty if unknown.

    The partition is known for groups of a `MoEMesh`, and for others after `replica_group`.
    """
    return _grids.get(group, [])
