"""FSDP2 for models with expert-parallel layers.

`fully_shard` shards what it finds on each rank, and takes it for the same on all ranks of its mesh.
So experts want a mesh of the ranks that hold the same ones, and everything else one of all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe_ext.distributed.agreement import agree
from moe_ext.distributed.groups import global_rank, group_ranks
from moe_ext.distributed.placement import Placement, note_shard, placements, replica_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_RECIPE = (
    "With mesh = moe_ext.distributed.MoEMesh(...), wrap experts with fully_shard(layer.experts, "
    "mesh=mesh.replica_mesh) first, then the rest with fully_shard(..., mesh=mesh.world_mesh)"
)
# Modules with experts, and the number of wrapped modules in the process when they were checked.
_checked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def check_wrapping(experts: nn.Module) -> None:
    """Refuse meshes of `fully_shard` that mix experts, or that let copies drift apart.

    Called before every forward pass of a module with experts: what was wrapped over which ranks is
    known only then. It looks when something was wrapped since the last time.

    Raises:
        ValueError: on every rank, before the first step.
    """
    # Not at the top: FSDP takes a second to import.
    from moe_ext.distributed import fsdp_state

    count = fsdp_state.num_wrapped()
    if count == 0 or _checked.get(experts) == count:
        return
    for root in fsdp_state.wrapped_roots():
        if _checked.get(root) != count and any(module is experts for module in root.modules()):
            _check_meshes(placements(root), fsdp_state.wrapped_parameters(root))
            _checked[root] = count
    _checked[experts] = count


def _check_meshes(
    places: dict[str, Placement], wrapped: Iterable[tuple[str, DTensor, bool]]
) -> None:
    """Refuse a parameter whose gradient is not averaged over exactly the ranks that hold it.

    Args:
        places: of the model, by name.
        wrapped: name of a parameter, its shards, and whether a hook averages its gradient over more
            ranks than those of their mesh.
    """
    ep_groups = {place.group for place in places.values() if place.num_parts > 1}
    unknown = {}
    for name, parameter, is_hooked in wrapped:
        mesh, place = parameter.device_mesh, places.get(name)
        ranks = mesh.mesh.flatten().tolist()
        if place is None or place.num_parts == 1:
            for group in ep_groups:
                wanted = set() if group is None or is_hooked else set(group_ranks(group))
                if not wanted <= set(ranks):
                    raise ValueError(
                        f"fully_shard: expected the mesh of {name} to have all ranks of the expert-"
                        f"parallel group {sorted(wanted)}, since their gradients differ, got ranks "
                        f"{ranks}. {_RECIPE}"
                    )
            continue
        assert place.group is not None
        note_shard(parameter, place)
        holders = replica_ranks(place)
        if holders is None:
            unknown[place.group, mesh] = place
            fits = set(ranks).isdisjoint(set(group_ranks(place.group)) - {global_rank()})
        else:
            fits = set(ranks) == set(holders) or (is_hooked and set(ranks) <= set(holders))
        if not fits:
            only = "" if holders is None else f", {holders}"
            raise ValueError(
                f"fully_shard: expected the mesh of {name} to have the ranks that hold the same "
                f"experts as this one{only}, got ranks {ranks}: their shards would be taken for "
                f"those of the same experts. {_RECIPE}"
            )
    for (_, mesh), place in unknown.items():
        for axis in range(mesh.ndim):
            facts = {"the experts that the ranks of a mesh hold": place.held}
            device = torch.device(mesh.device_type)
            agree("fully_shard", facts, None, mesh.get_group(axis), device)
