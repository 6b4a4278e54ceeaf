"""Which parameters belong to experts, and which ranks hold copies of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from moe_ext.distributed.collectives import share
from moe_ext.distributed.groups import group_rank, group_ranks, group_size

# Ranks with the same experts, by expert-parallel group; None where this rank has no such peer.
_replica_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup | None]
_replica_groups = weakref.WeakKeyDictionary()


def expert_parameters(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, ProcessGroup | None, int]]:
    """Yield the parameters of all experts of a model.

    Those are the parameters of every module with an attribute `ep_group`, a process group or None.

    Args:
        model: any module.

    Yields:
        Name in the model, parameter (this rank's experts), expert-parallel group (None when all
        experts are on this rank), number of experts over all ranks.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        group = getattr(module, "ep_group", False)
        if group is not None and not isinstance(group, ProcessGroup):
            continue
        for name, parameter in module.named_parameters(prefix):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter, group, int(getattr(module, "num_experts", 0))


def sharded_experts(model: nn.Module) -> dict[str, tuple[nn.Parameter, ProcessGroup]]:
    """Name to (parameter, group) of what other ranks of a group do not hold.

    Those are experts, and the layers that a `SequenceParallelMLP` splits.
    """
    found = {
        name: (parameter, group)
        for name, parameter, group, _ in expert_parameters(model)
        if group is not None and group_size(group) > 1
    }
    for prefix, module in tensor_parallel_modules(model):
        parameters = dict(module.named_parameters())
        for name in module.tp_sharded:  # type: ignore[union-attr]
            full_name = f"{prefix}.{name}" if prefix else name
            found[full_name] = (parameters[name], module.tp_group)  # type: ignore[assignment]
    return found


def tensor_parallel_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for modules with a `tp_group` of more than one rank.

    Their attribute `tp_sharded` names the parameters of which each rank holds another part, and
    `grad_reduction` says whether gradients are those of the "sum" or the "mean" over that group.
    """
    for name, module in model.named_modules():
        group = getattr(module, "tp_group", None)
        known = hasattr(module, "tp_sharded") and hasattr(module, "grad_reduction")
        if known and isinstance(group, ProcessGroup) and group_size(group) > 1:
            yield name, module


def expert_param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: the dense part and the experts apart.

    Args:
        model: any module.

    Returns:
        `[{"params": [...], "name": "dense"}, {"params": [...], "name": "experts"}]`, without frozen
        parameters and without a group that would be empty.
    """
    experts = {id(parameter) for _, parameter, _, _ in expert_parameters(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in experts], "name": "dense"},
        {"params": [p for p in trained if id(p) in experts], "name": "experts"},
    ]
    return [group for group in groups if group["params"]]


def replica_group(ep_group: ProcessGroup, device: torch.device) -> ProcessGroup | None:
    """Ranks that hold the same experts as this one; None when there is no other.

    All ranks of the default group must call it, in the same order, with their own expert-parallel
    group. The first call for a group creates the process groups, later ones only look them up.

    Raises:
        ValueError: on every rank, when the expert-parallel groups do not partition the ranks into
            groups of one size.
    """
    if ep_group in _replica_groups:
        return _replica_groups[ep_group]
    world = dist.group.WORLD
    assert world is not None
    own = [group_size(ep_group), group_rank(ep_group), min(group_ranks(ep_group))]
    rows = share(own, world, device, operation="sync_gradients")
    ranks_of: dict[int, list[int]] = {}
    members_of: dict[int, list[int]] = {}
    for rank, (_, ep_rank, leader) in enumerate(rows):
        ranks_of.setdefault(ep_rank, []).append(rank)
        members_of.setdefault(leader, []).append(ep_rank)
    size = group_size(ep_group)
    partition = all(row[0] == size for row in rows) and all(
        sorted(members) == list(range(size)) for members in members_of.values()
    )
    if not partition:
        found = ", ".join(f"{row[0]} on rank {rank}" for rank, row in enumerate(rows))
        raise ValueError(
            "sync_gradients: expected the expert-parallel groups to split the ranks into groups of "
            f"one size, got groups of {found}"
        )
    mine: ProcessGroup | None = None
    if len(ranks_of[0]) > 1:
        for ep_rank in sorted(ranks_of):
            group = dist.new_group(ranks_of[ep_rank])
            if ep_rank == group_rank(ep_group):
                mine = group
    _replica_groups[ep_group] = mine
    return mine
