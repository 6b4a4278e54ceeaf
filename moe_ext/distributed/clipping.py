"""The norm of all gradients, experts and shards on other ranks included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from moe_ext.distributed import _c10d, comm
from moe_ext.distributed.agreement import check_equal_over_ranks
from moe_ext.distributed.dtensor import (
    local_part,
    num_shards,
    sharding_groups,
    without_partials,
)
from moe_ext.distributed.gradients import is_synced, mark_synced, was_synced
from moe_ext.distributed.groups import group_size, resolve_group
from moe_ext.distributed.placement import known_shard, sharded_parameters

if TYPE_CHECKING:
    from moe_ext.distributed.mesh import MoEMesh

# Parameters of a pipeline's stages to its ranks, which all take a step or none; and those of which
# another of these ranks holds a copy that counts in the norm.
_pipelines, _copies = WeakIdKeyDictionary(), WeakIdKeyDictionary()


def note_stage(
    parameters: Iterable[Tensor], group: ProcessGroup, copies: Iterable[Tensor] = ()
) -> None:
    """Note parameters of a stage: a `GradScaler` skips a step on all ranks of the group, or none.

    Args:
        parameters: of this rank's stages.
        group: the ranks of the pipeline.
        copies: those of them that another rank holds, too, and counts in the norm.
    """
    _pipelines.update(dict.fromkeys(parameters, group))
    _copies.update(dict.fromkeys(copies, True))


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    mesh: MoEMesh | None = None,
) -> Tensor:
    """Scale the gradients of a whole model, in place, to a norm of at most `max_norm`.

    The norm is that of all parameters, each expert and each shard counted once wherever it lives:
    the value that one process with the same gradients would compute, and the same bits on every
    rank. Call it on all ranks, after `sync_gradients` where that is needed. DTensors, such as those
    of FSDP2, may lie on several meshes, beside plain parameters.

    Args:
        model: the module, or a DistributedDataParallel around it.
        max_norm: positive.
        norm_type: 2.0, or `math.inf` for the largest magnitude.
        error_if_nonfinite: raise instead of scaling by a norm that is NaN or infinite. It costs a
            device-to-host synchronisation.
        mesh: of a job with pipeline stages, of which each has other parameters; None if all ranks
            have the same model.

    Returns:
        The norm before scaling, 0-d float32 (float64 if every gradient is).

    Raises:
        ValueError: on every rank, gradients unchanged: max_norm or norm_type is not allowed, or an
            argument differs between ranks.
        RuntimeError: on every rank, gradients unchanged: the norm is not finite and
            `error_if_nonfinite` is set, or expert gradients were not synchronised.
        RankFailureError: a rank died or did not answer.
    """
    options = {
        "max_norm": float(max_norm),
        "norm_type": float(norm_type),
        "error_if_nonfinite": bool(error_if_nonfinite),
    }
    with torch.no_grad():
        gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    total = _total_norm(model, norm_type, mesh, options)
    # After the comparison: all ranks refuse the same value, and none waits for another.
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: expected max_norm to be positive, got {max_norm}")
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"clip_grad_norm_: expected norm_type to be 2.0 or inf, got {norm_type}")
    _clip_(gradients, total, max_norm, error_if_nonfinite)
    return _as_gradients(total, gradients)


@torch.no_grad()
def _clip_(
    gradients: list[Tensor], norm: Tensor, max_norm: float, error_if_nonfinite: bool
) -> None:
    """Scale gradients, whose norm over all ranks is `norm`, to one of at most `max_norm`."""
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"clip_grad_norm_: expected the norm of the gradients to be finite, got {norm.item()}"
        )
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        synced = is_synced(gradient)
        gradient.mul_(coefficient.to(gradient.device))
        if synced:
            mark_synced(gradient)


def _as_gradients(norm: Tensor, gradients: list[Tensor]) -> Tensor:
    """A norm in float64 if all gradients are, else in float32."""
    all_double = bool(gradients) and all(g.dtype == torch.float64 for g in gradients)
    return norm if all_double else norm.to(torch.float32)


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of the magnitudes to the power of `norm_type`, or the largest one, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in filter(torch.Tensor.numel, gradients):
        acc_dtype = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=acc_dtype).to(total)
        is_max = norm_type == math.inf
        total = torch.maximum(total, norm) if is_max else total + norm**norm_type
    return total


@torch.no_grad()
def _total_norm(
    model: nn.Module, norm_type: float, mesh: MoEMesh | None, options: Mapping[str, float]
) -> Tensor:
    """Norm over all ranks, which compare `options`; 0-d float64, the same bits on every rank."""
    world = resolve_group(None, "clip_grad_norm_")
    stage_size = group_size(world if mesh is None else mesh.stage_group)
    # A rank of each stage.
    leaders = [0] if mesh is None else [ranks[0] for ranks in mesh.rank_groups("stage")]
    synced_apart = {p for p, place in sharded_parameters(model).values() if not place.is_managed(p)}
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    whole, parts, unsynced = [], torch.zeros((), dtype=torch.float64, device=device), False
    for parameter in parameters:
        if parameter.grad is None or parameter in _copies:
            continue
        unsynced |= parameter in synced_apart and not was_synced(parameter.grad)
        gradient = without_partials(parameter.grad)
        num_parts = num_shards(gradient)
        if num_parts == 1:
            whole.append(local_part(gradient))
            continue
        part = _power_sum([local_part(gradient)], norm_type, device)
        if norm_type == math.inf:
            parts = torch.maximum(parts, part)
        else:
            # Every part is held by stage/parts ranks; each adds its share.
            parts = parts + part * num_parts / stage_size
    total = _power_sum(whole, norm_type, device)
    if world is not None and group_size(world) > 1:
        options = {**options, "number of ranks of a stage of mesh": stage_size}
        told = total.new_tensor([float(unsynced), *map(float, options.values())])
        local = torch.cat([torch.stack([total, parts]), told])
        rows = comm.all_gather(local[None], world, operation="clip_grad_norm_", counted=False)
        # NOTE: device-to-host sync: clipping by a norm of unsynchronised gradients, or by another
        # one than on other ranks, must not pass.
        any_unsynced, *compared = rows[:, 2:].T.tolist()
        for (name, value), values in zip(options.items(), compared, strict=True):
            check_equal_over_ranks(name, [*map(type(value), values)], world, "clip_grad_norm_")
        if any(any_unsynced):
            raise RuntimeError(
                "clip_grad_norm_: expected sync_gradients to have run since the backward pass, "
                "got expert gradients that were never synchronised"
            )
        if norm_type == math.inf:
            total = torch.maximum(rows[leaders, 0].max(), rows[:, 1].max())
        else:
            total = rows[leaders, 0].sum() + rows[:, 1].sum()
    return total if norm_type == math.inf else total.sqrt()


def _clip_over_ranks(clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.nn.utils.clip_grad_norm_` that counts the shards of other ranks, too.

    Frameworks call that one. A norm of this rank's experts alone differs between ranks, and scales
    what they hold copies of by different factors.
    """

    def clip_over_ranks(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        placements = [known_shard(parameter) for parameter in found]
        if not any(placements):
            # An exhausted generator still warns as an empty one.
            return clip(found or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"clip_grad_norm_: expected norm_type to be positive, got {norm_type}")
        total = torch.zeros((), dtype=torch.float64, device=found[0].device)
        divided: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
        for parameter in found:
            divided.setdefault(tuple(sharding_groups(parameter)), []).append(parameter)
        # In the order of the parameters, which is that of every rank. A rank without a gradient
        # takes part, too.
        for groups, held in divided.items():
            own = [local_part(p.grad) for p in held if p.grad is not None]
            part = _power_sum(own, norm_type, total.device)
            for group in groups:
                rows = comm.all_gather(
                    part[None], group, operation="clip_grad_norm_", counted=False
                )
                part = rows.max() if norm_type == math.inf else rows.sum()
            total = torch.maximum(total, part) if norm_type == math.inf else total + part
        gradients = [local_part(p.grad) for p in found if p.grad is not None]
        root = total if norm_type == math.inf else total ** (1 / norm_type)
        norm = _as_gradients(root, gradients)
        _clip_(gradients, norm, max_norm, error_if_nonfinite)
        return norm

    return clip_over_ranks


def _overflow_over_ranks(unscale: Callable[..., Any]) -> Callable[..., Any]:
    """A `GradScaler` that skips a step on every rank if gradients of some shard or stage overflow.

    Otherwise the ranks would go on with different weights of what they hold copies of.
    """

    def unscale_over_ranks(scaler: Any, optimizer: Any, *args: Any) -> Any:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        over = dict.fromkeys(group for p in held for group in sharding_groups(p))
        # torch refuses DTensors beside other tensors: it takes the parts of this rank.
        own = optimizer if not over else _parts_of(held)
        found = unscale(scaler, own, *args)
        # Stages last: each of their ranks then knows of the ranks of its stage.
        over |= dict.fromkeys(_pipelines[p] for p in held if p in _pipelines)
        for group in over:
            for overflow in found.values():
                comm.all_reduce_(overflow, group, operation="GradScaler", op="max", counted=False)
        return found

    return unscale_over_ranks


def _parts_of(parameters: list[Tensor]) -> Any:
    """Gradients of this rank's parts, as of an optimizer."""
    parts = [local_part(parameter.detach()) for parameter in parameters]
    for part, parameter in zip(parts, parameters, strict=True):
        part.grad = None if parameter.grad is None else local_part(parameter.grad)
    return SimpleNamespace(param_groups=[{"params": parts}])


_c10d.around_clip_grad_norm_(_clip_over_ranks)
_c10d.around_unscale(_overflow_over_ranks)
