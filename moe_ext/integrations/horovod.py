"""Horovod's calls over torch's process group.

Its scripts run with another import::

    import moe_ext.integrations.horovod as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Gradients are averaged by `sync_gradients` when the optimizer steps: after the backward pass, not
during it. A model of which ranks hold different experts calls `sync_gradients(model)` itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from moe_ext.distributed import sync_gradients
from moe_ext.distributed.comm import all_reduce_, broadcast_, gather_objects
from moe_ext.distributed.groups import (
    global_rank,
    is_initialized,
    join_processes,
    leave_processes,
    resolve_group,
    world_size,
)
from moe_ext.distributed.placement import known_shard

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Sum",
    "allreduce",
    "broadcast_parameters",
    "init",
    "join",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]

Average, Sum = "average", "sum"
# A rank begins the step of the optimizer of a number, or one of these.
_JOINED, _TENSOR = -1, -2

_optimizers: list[nn.ParameterList] = []
# Ranks that had data when ranks last compared what they begin.
_active: list[int] = []


def init() -> None:
    """Join the processes that torchrun started; a process group that is there already is kept."""
    if not is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        join_processes(backend)
    _optimizers.clear()
    _active.clear()


def shutdown() -> None:
    """Leave the process group."""
    leave_processes()


def rank() -> int:
    """This process's number."""
    return global_rank()


def size() -> int:
    """Number of processes."""
    return world_size()


def local_rank() -> int:
    """This process's number on its machine, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", global_rank()))


def _group(operation: str) -> ProcessGroup | None:
    return resolve_group(None, operation)


def _begin(kind: int, operation: str) -> list[int]:
    """Kind of step that every rank begins."""
    kinds = gather_objects(kind, _group(operation), operation=operation)
    active = [index for index, other in enumerate(kinds) if other != _JOINED]
    if active:
        _active[:] = active
    if _TENSOR in kinds and _JOINED in kinds:
        raise RuntimeError(
            "allreduce: expected no rank to have joined, got ranks "
            f"{[index for index, other in enumerate(kinds) if other == _JOINED]}, which do not "
            "know the tensor's shape; join after the last allreduce"
        )
    return kinds


def _check_op(function: str, op: str) -> None:
    if op not in (Average, Sum):
        raise ValueError(f"{function}: expected op to be Average or Sum, got {op!r}")


def allreduce(tensor: Tensor, name: str | None = None, op: str = Average) -> Tensor:
    """The mean (or sum) of a tensor over all ranks, as a new one; not differentiable.

    Raises:
        ValueError: op is neither Average nor Sum.
        RuntimeError: on every rank: one has joined.
    """
    _check_op("allreduce", op)
    _begin(_TENSOR, "allreduce")
    out = tensor.detach().clone(memory_format=torch.contiguous_format)
    if op == Average and not out.is_floating_point():
        raise ValueError(f"allreduce: expected op to be Sum for {out.dtype}, got {op!r}")
    all_reduce_(out, _group("allreduce"), operation="allreduce")
    return out.div_(size()) if op == Average else out


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Overwrite the tensors of a state dict, or of `named_parameters()`, with those of a rank.

    Raises:
        ValueError: root_rank is no rank.
    """
    if not 0 <= root_rank < size():
        raise ValueError(
            f"broadcast_parameters: expected root_rank to be in [0, {size()}), got {root_rank}"
        )
    pairs = params.items() if isinstance(params, Mapping) else params
    group = _group("broadcast_parameters")
    with torch.no_grad():
        for _, value in sorted(pairs, key=lambda pair: pair[0]):
            if isinstance(value, Tensor):
                whole = value.detach().contiguous()
                broadcast_(whole, group, root_rank, operation="broadcast_parameters")
                value.copy_(whole)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer,
    named_parameters: object = None,
    compression: object = None,
    backward_passes_per_step: int = 1,
    op: str = Average,
) -> Optimizer:
    """Have an optimizer average gradients over all ranks before each step.

    Args:
        optimizer: returned, with a method `synchronize`: call it before clipping, and the step
            will not do it again.
        named_parameters: ignored; those of the optimizer are averaged.
        compression: None alone; `moe_ext.compression` has hooks and loops that compress.
        backward_passes_per_step: ignored: gradients are sent when the optimizer steps, so any
            number of backward passes may add to them before.
        op: Average or Sum.

    Raises:
        ValueError: op or compression is none of these, or a parameter is this rank's part of one
            that lies over several.
    """
    _check_op("DistributedOptimizer", op)
    if compression is not None:
        raise ValueError(
            f"DistributedOptimizer: expected compression to be None, got {compression!r}; "
            "moe_ext.compression.compress_gradients sends less"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(known_shard(p) for p in parameters):
        raise ValueError(
            "DistributedOptimizer: expected parameters that every rank has a copy of, got experts "
            "that lie over ranks; call moe_ext.distributed.sync_gradients(model) before the step"
        )
    holder, number = nn.ParameterList(parameters), len(_optimizers)
    _optimizers.append(holder)
    synchronized = False

    def synchronize() -> None:
        nonlocal synchronized
        _begin(number, "DistributedOptimizer")
        sync_gradients(holder)
        if op == Sum:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(size())
        synchronized = True

    def before_step(*_: object) -> None:
        nonlocal synchronized
        if not synchronized:
            synchronize()
        synchronized = False

    optimizer.synchronize = synchronize  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(before_step)
    return optimizer


def join() -> int:
    """Say that this rank has no more data, and help the others until none has any.

    Meanwhile its gradients count as zero: means are still over all ranks. Its parameters stay
    behind; `broadcast_parameters(..., root_rank=join())` brings them on.

    Returns:
        The last rank to join, the highest of several.
    """
    while True:
        kinds = _begin(_JOINED, "join")
        others = [kind for kind in kinds if kind != _JOINED]
        if not others:
            return max(_active, default=size() - 1)
        holder = _optimizers[others[0]]
        for p in holder.parameters():
            p.grad = None
        sync_gradients(holder)
        for p in holder.parameters():
            p.grad = None
