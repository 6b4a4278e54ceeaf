"""Parameter groups by what a parameter is: matrix or vector, dense or expert."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from moe_ext.distributed.placement import Placement, placements, replica_group


def stacked_experts(model: nn.Module) -> set[str]:
    """Names of the parameters whose first dimension counts experts."""
    places = placements(model)
    return {
        name
        for name, parameter in model.named_parameters()
        if name in places and _is_stacked(parameter, places[name])
    }


def _is_stacked(parameter: nn.Parameter, placement: Placement) -> bool:
    whole = placement.axis == "ep" and placement.dim == 0
    return whole and parameter.dim() > 0 and parameter.shape[0] == len(placement.held)


def param_groups(model: nn.Module, *, process_groups: bool = False) -> list[dict[str, Any]]:
    """Groups for the optimizers of `moe_ext.optim`, with the names of the parameters.

    Biases, norms and other vectors get ``weight_decay=0`` and ``adapt=False``. Stacked experts
    (`GroupedExperts`) get ``per_expert=True``; the bias of a stacked expert is a vector.

    Args:
        model: any module; frozen parameters are left out.
        process_groups: for OneBitAdam, OneBitLamb and ZeroOneAdam: give groups of expert-parallel
            parameters the ``process_group`` of the ranks that hold the same experts, or "self".
            All ranks must call it then, since the first call makes those groups.

    Returns:
        Groups that are not empty, each with a ``name`` and with (name, parameter) pairs.
    """
    experts = {name: p for name, p in placements(model).items() if p.axis == "ep"}
    stacked = stacked_experts(model)
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        each = name in stacked
        vector = parameter.dim() - int(each) < 2
        ep_group = experts[name].group if name in experts else None
        kind = "stacked experts" if each else "experts" if name in experts else "dense"
        key = (kind, vector, id(ep_group) if process_groups else None)
        if key not in groups:
            group: dict[str, Any] = {"params": [], "name": kind + (" vectors" if vector else "")}
            if each:
                group["per_expert"] = True
            if vector:
                group |= {"weight_decay": 0.0, "adapt": False}
            if process_groups and ep_group is not None and experts[name].num_parts > 1:
                group["process_group"] = _replicas(ep_group, parameter)
            groups[key] = group
        groups[key]["params"].append((name, parameter))
    return list(groups.values())


def _replicas(ep_group: ProcessGroup, parameter: nn.Parameter) -> ProcessGroup | str:
    replicas = replica_group(ep_group, parameter.device)
    return "self" if replicas is None else replicas
