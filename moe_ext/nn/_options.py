"""Checks of the options of a layer, and what is made of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed import ProcessGroup

from moe_ext.distributed.dispatch import (
    AllToAllDispatcher,
    LocalDispatcher,
    TokenDispatcher,
    WrappedDispatcher,
)
from moe_ext.distributed.groups import group_size
from moe_ext.nn._replay import can_replay
from moe_ext.nn.balance import Balance
from moe_ext.nn.capacity import Capacity, RowBudget
from moe_ext.nn.losses import LOSS_MODES
from moe_ext.nn.routers import Router

if TYPE_CHECKING:
    from moe_ext.nn.moe_layer import MoELayer


def capacity_of(factor: float | None, capacity: Capacity | None) -> Capacity | None:
    """The capacity that is meant, None for no limit."""
    if factor is None:
        return capacity
    if capacity is not None:
        raise ValueError(
            "MoELayer: expected capacity_factor or capacity to be None, got "
            f"capacity_factor={factor} and {capacity}"
        )
    if not 0 < factor < math.inf:
        raise ValueError(f"MoELayer: expected capacity_factor to be positive or None, got {factor}")
    return Capacity(factor)


def check_options(layer: MoELayer, shared_ffn_dim: int, shared_expert_gate: bool) -> None:
    """Refuse values that are not allowed, and those that do not go together."""
    for name in ("balance_loss_coef", "z_loss_coef"):
        if not (0 <= getattr(layer, name) < math.inf):
            raise ValueError(
                f"MoELayer: expected {name} to be at least 0, got {getattr(layer, name)}"
            )
    options = {"capacity": Capacity, "row_budget": RowBudget, "balance": Balance}
    for name, kind in options.items():
        value = getattr(layer, name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"MoELayer: expected {name} to be a {kind.__name__}, got {value!r}")
    if layer.loss_mode not in LOSS_MODES:
        raise ValueError(
            f"MoELayer: expected loss_mode to be one of {LOSS_MODES}, got {layer.loss_mode!r}"
        )
    if shared_ffn_dim < 0:
        raise ValueError(
            f"MoELayer: expected shared_ffn_dim to be at least 0, got {shared_ffn_dim}"
        )
    if shared_expert_gate and not shared_ffn_dim:
        raise ValueError(
            "MoELayer: expected shared_ffn_dim to be positive with shared_expert_gate=True, got 0"
        )
    if layer.row_budget is not None and layer.capacity is not None and layer.capacity.pad:
        raise ValueError(
            f"MoELayer: expected capacity.pad to be False with a row_budget, got {layer.capacity}"
        )


def check_experts(layer: MoELayer, experts: nn.Module, ep_group: ProcessGroup | None) -> None:
    """What a layer asks of an experts module that it did not make."""
    if group_size(ep_group) > 1 and getattr(experts, "ep_group", None) is not ep_group:
        raise ValueError(
            "MoELayer: expected experts to carry the layer's group as attribute ep_group, "
            f"got {getattr(experts, 'ep_group', None)}"
        )
    held = getattr(experts, "num_experts", layer.num_experts)
    if held != layer.num_experts:
        raise ValueError(
            f"MoELayer: expected experts to have num_experts={layer.num_experts}, got {held}"
        )


def check_router(layer: MoELayer, router: nn.Module) -> None:
    """What the options ask of a router module."""
    capacity = layer.capacity
    if isinstance(router, Router):
        if router.num_experts != layer.num_experts:
            raise ValueError(
                f"MoELayer: expected router to have num_experts={layer.num_experts}, got "
                f"{router.num_experts}"
            )
        if capacity is not None and router.sets_capacity:
            raise ValueError(
                "MoELayer: expected capacity to be None with a router that sets the rows of each "
                f"expert itself, got {capacity}"
            )
        if capacity is not None and capacity.overflow == "reroute" and not can_replay(router):
            raise ValueError(
                "MoELayer: expected router to weigh a choice that is not its own (with_choice) for "
                f"capacity.overflow='reroute', got {type(router).__name__}"
            )
        return
    for name, option in (("drop", "random"), ("overflow", "reroute")):
        if capacity is not None and getattr(capacity, name) == option:
            raise ValueError(
                f"MoELayer: expected router to be a moe_ext.nn.Router for capacity.{name}="
                f"{option!r}, got {type(router).__name__}"
            )


def make_dispatcher(
    dispatcher: str | TokenDispatcher,
    num_experts: int,
    ep_group: ProcessGroup | None,
) -> TokenDispatcher:
    """The dispatcher that a name stands for."""
    if isinstance(dispatcher, TokenDispatcher):
        return dispatcher
    if not isinstance(dispatcher, str) and hasattr(dispatcher, "dispatch"):
        return WrappedDispatcher(dispatcher)
    if dispatcher == "auto":
        dispatcher = "alltoall" if group_size(ep_group) > 1 else "local"
    if dispatcher == "local":
        if group_size(ep_group) > 1:
            raise ValueError(
                "MoELayer: expected dispatcher to be 'auto' or 'alltoall' for an ep_group of "
                f"{group_size(ep_group)} ranks, got 'local'"
            )
        return LocalDispatcher(num_experts)
    if dispatcher == "alltoall":
        if ep_group is None:
            raise ValueError(
                "MoELayer: expected ep_group to be a process group for dispatcher='alltoall', "
                "got None"
            )
        return AllToAllDispatcher(num_experts, ep_group)
    raise ValueError(
        "MoELayer: expected dispatcher to be 'auto', 'local', 'alltoall' or a TokenDispatcher, got "
        f"{dispatcher!r}"
    )
