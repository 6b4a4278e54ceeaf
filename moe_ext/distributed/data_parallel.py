"""DistributedDataParallel for the dense part of a model with expert-parallel layers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_ext.distributed import _c10d, comm
from moe_ext.distributed.groups import is_initialized
from moe_ext.distributed.placement import replica_group, sharded_parameters


def broadcast_experts(model: nn.Module) -> None:
    """Give all ranks with the same ep_rank the expert parameters of the first of them, in place.

    `GroupedExperts` draws the same experts on ranks with the same seed; this makes them the same
    where seeds differ, or after a checkpoint was read on one rank only. Call it on all ranks.

    Args:
        model: any module.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    for parameter, placement in sharded_parameters(model).values():
        assert placement.group is not None
        replicas = replica_group(placement.group, parameter.device)
        if replicas is not None:
            comm.broadcast_(parameter.data, replicas, 0, operation="broadcast_experts")


def data_parallel(model: nn.Module, **ddp_kwargs: Any) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel that leaves expert-parallel parameters alone.

    DDP averages the dense gradients during the backward pass and `sync_gradients(wrapped)` does the
    experts after it. DDP alone would average gradients of different experts.

    Args:
        model: the module; its expert parameters are made equal over their replicas.
        ddp_kwargs: passed on, but `process_group`, which is the default group here.

    Returns:
        The wrapper.

    Raises:
        ValueError: torch.distributed is not initialised, or `process_group` is given.
    """
    if not is_initialized():
        raise ValueError(
            "data_parallel: expected torch.distributed to be initialised, got no process group"
        )
    if ddp_kwargs.get("process_group") is not None:
        raise ValueError(
            "data_parallel: expected process_group to be None, since the dense part is averaged "
            f"over all ranks, got {ddp_kwargs['process_group']}"
        )
    broadcast_experts(model)
    _c10d.set_ddp_ignored(model, list(sharded_parameters(model)))
    return DistributedDataParallel(model, **ddp_kwargs)
