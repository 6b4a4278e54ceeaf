"""Former home of what `moe_ext.distributed.placement` holds."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from moe_ext.distributed.placement import replica_group, sharded_parameters

__all__ = ["replica_group", "sharded_experts"]


def sharded_experts(model: nn.Module) -> dict[str, tuple[nn.Parameter, ProcessGroup]]:
    """Name to (parameter, group) of `sharded_parameters`."""
    return {
        name: (parameter, placement.group)  # type: ignore[misc]
        for name, (parameter, placement) in sharded_parameters(model).items()
    }
