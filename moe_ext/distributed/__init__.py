"""Process groups, token dispatch and gradient synchronisation."""

import importlib
from typing import TYPE_CHECKING, Any

from moe_ext.comm.failures import RankFailureError, naming_failed_ranks
from moe_ext.comm.interleaving import run_in_turns
from moe_ext.comm.traffic import Traffic, count_traffic
from moe_ext.distributed import checkpoint
from moe_ext.distributed.clipping import GradScaler, clip_grad_norm_
from moe_ext.distributed.data_parallel import broadcast_experts, data_parallel, parallelize
from moe_ext.distributed.fsdp import fully_shard
from moe_ext.distributed.gradients import sync_gradients
from moe_ext.distributed.mesh import MoEMesh
from moe_ext.distributed.named_dimensions import layout_placements
from moe_ext.distributed.placement import (
    Placement,
    declare_placement,
    expert_param_groups,
    expert_parameters,
    placements,
)
from moe_ext.distributed.state_dict import full_state_dict, whole_state_dicts
from moe_ext.ops.sharding_rules import register_sharding_rules

if TYPE_CHECKING:
    from moe_ext.dispatch import (
        AllGatherDispatcher,
        AllToAllDispatcher,
        AutoDispatcher,
        DedupDispatcher,
        DeepEpDispatcher,
        DispatchChoice,
        DispatchMetadata,
        HierarchicalDispatcher,
        LocalDispatcher,
        NcclEpDispatcher,
        SymmetricMemoryDispatcher,
        TokenDispatcher,
        Wire,
    )
    from moe_ext.integrations.deepspeed_config import from_ds_config

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "AutoDispatcher",
    "DedupDispatcher",
    "DeepEpDispatcher",
    "DispatchChoice",
    "DispatchMetadata",
    "GradScaler",
    "HierarchicalDispatcher",
    "LocalDispatcher",
    "NcclEpDispatcher",
    "SymmetricMemoryDispatcher",
    "MoEMesh",
    "Placement",
    "RankFailureError",
    "TokenDispatcher",
    "Traffic",
    "Wire",
    "broadcast_experts",
    "checkpoint",
    "clip_grad_norm_",
    "count_traffic",
    "data_parallel",
    "declare_placement",
    "expert_param_groups",
    "expert_parameters",
    "from_ds_config",
    "full_state_dict",
    "fully_shard",
    "layout_placements",
    "naming_failed_ranks",
    "parallelize",
    "placements",
    "register_sharding_rules",
    "run_in_turns",
    "sync_gradients",
    "whole_state_dicts",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # `moe_ext.dispatch` and `moe_ext.integrations` import this package, so their names are imported
    # on first use.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "integrations.deepspeed_config" if name == "from_ds_config" else "dispatch"
    return getattr(importlib.import_module(f"moe_ext.{home}"), name)
