"""States of all ranks of a run, for a rank of another one.

Ranks that hold other experts have a group of ranks of their own: those with the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_ext.distributed.groups import group_ranks
from moe_ext.optim._compressed_mean import Ranks


def members_of(ranks: Ranks, common: ProcessGroup | None) -> list[int]:
    """Places among the ranks of an optimizer of those that share a parameter group."""
    if common is None:
        return [0]
    places = {rank: place for place, rank in enumerate(group_ranks(common))}
    shared = group_ranks(ranks) if isinstance(ranks, ProcessGroup) else (dist.get_rank(),)
    return [places[rank] for rank in shared if rank in places]


def _members_then(state: dict[str, Any], index: int, num_ranks: int) -> Sequence[int]:
    """Ranks that shared a parameter group when a state was saved."""
    known = state["compression"].get("members")
    return range(num_ranks) if known is None or index >= len(known) else known[index]


def check_order(op: str, states: Sequence[dict[str, Any]]) -> None:
    """ValueError unless the states are those of all ranks, each once, in order."""
    for place, state in enumerate(states):
        group_of = {
            number: index
            for index, group in enumerate(state["param_groups"])
            for number in group["params"]
        }
        for server in state["compression"]["servers"]:
            members = _members_then(state, group_of[server["parameters"][0]], len(states))
            rank = members[server["rank"]] if server["world_size"] == len(members) else None
            if rank != place:
                raise ValueError(
                    f"{op}: expected state {place} of {len(states)} to be that of rank {place} of "
                    f"{len(states)}, got rank {server['rank']} of {server['world_size']}"
                )


def _part(members: Sequence[int], num_ranks: int) -> tuple[int, int] | None:
    """(which, of how many) divisions of the ranks into groups like this one; None if unclear.

    Groups are neighbours, or ranks at equal distances.
    """
    size, first = len(members), members[0]
    if num_ranks % size:
        return None
    parts = num_ranks // size
    if list(members) == list(range(first, num_ranks, parts)):
        return first, parts
    if list(members) == list(range(first, first + size)) and first % size == 0:
        return first // size, parts
    return None


def holders(
    op: str, states: Sequence[dict[str, Any]], members: Sequence[Sequence[int]], num_ranks: int
) -> list[list[int]]:
    """Old ranks that held the parameters of each parameter group of this rank.

    Args:
        op: for messages.
        states: of the old ranks, in their order.
        members: of this rank's parameter groups, as `members_of`.
        num_ranks: of the new run.

    Raises:
        ValueError: experts were divided over another number of ranks, or in a way that does not
            tell which ones a rank held.
    """
    found = []
    for index, mine in enumerate(members):
        own, held = _part(mine, num_ranks), []
        for rank, state in enumerate(states):
            theirs = _members_then(state, index, len(states))
            part = _part(theirs, len(states))
            if own is None or part is None or own[1] != part[1]:
                raise ValueError(
                    f"{op}: expected parameter group {index} to be divided over as many ranks as "
                    "before, in groups of neighbours or at equal distances, got ranks "
                    f"{list(mine)} of {num_ranks}, and before {list(theirs)} of {len(states)}; "
                    "call flush before experts are divided otherwise"
                )
            if part[0] == own[0]:
                held.append(rank)
        found.append(held)
    return found


def shared_state(
    states: Sequence[dict[str, Any]], held_by: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The state without errors: each parameter group's from a rank that held it."""
    groups = states[0]["param_groups"]
    rows = {
        number: states[held[0]]["state"][number]
        for group, held in zip(groups, held_by, strict=True)
        for number in group["params"]
        if number in states[held[0]]["state"]
    }
    return {**states[0], "state": rows}
