"""The norm of all gradients, experts and shards on other ranks included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from moe_ext._checks import check_rule
from moe_ext.comm import collectives
from moe_ext.comm.agreement import check_equal_over_ranks
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.distributed.dtensor import (
    local_part,
    num_shards,
    sharding_groups,
    without_partials,
)
from moe_ext.distributed.gradients import is_synced, mark_synced, was_synced
from moe_ext.distributed.placement import known_shard, sharded_parameters

if TYPE_CHECKING:
    from moe_ext.distributed.mesh import MoEMesh

# Parameters of a pipeline's stages to its ranks, which all take a step or none; and those of which
# another of these ranks holds a copy that counts in the norm.
_pipelines, _copies = WeakIdKeyDictionary(), WeakIdKeyDictionary()
# Attribute of a tensor that `GradScaler` has scaled.
_SCALED = "_moe_ext_scaled"


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


def is_scaled_alike(scale: object) -> bool:
    """True for a factor of losses whose ranks skip a step together, if any does.

    A number is of no scaler.
    """
    return not isinstance(scale, Tensor) or hasattr(scale, _SCALED)


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor] | Tensor,
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
        model: the module, or a DistributedDataParallel around it; or parameters alone, or one, the
            same ones on every rank.
        max_norm: positive.
        norm_type: positive; `math.inf`, or "inf", for the largest magnitude.
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
    max_norm, norm_type = float(max_norm), float(norm_type)
    options = {
        "max_norm": max_norm,
        "norm_type": norm_type,
        "error_if_nonfinite": bool(error_if_nonfinite),
    }
    if isinstance(model, nn.Module):
        sharded_parameters(model)  # notes them
    given = [model] if isinstance(model, Tensor) else model
    parameters = list(given.parameters() if isinstance(given, nn.Module) else given)
    with torch.no_grad():
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    total = _power_of_norm(parameters, norm_type, mesh, options)
    # After the comparison: all ranks refuse the same value, and none waits for another.
    check_rule("clip_grad_norm_", "max_norm", max_norm, "positive", max_norm > 0)
    check_rule("clip_grad_norm_", "norm_type", norm_type, "positive", norm_type > 0)
    norm = total if norm_type == math.inf else total ** (1 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"clip_grad_norm_: expected the norm of the gradients to be finite, got {norm.item()}"
        )
    _scale_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    all_double = bool(gradients) and all(g.dtype == torch.float64 for g in gradients)
    return norm if all_double else norm.to(torch.float32)


@torch.no_grad()
def _scale_(gradients: list[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients, in place; those that were synchronised stay so."""
    for gradient in gradients:
        synced = is_synced(gradient)
        gradient.mul_(coefficient.to(gradient.device))
        if synced:
            mark_synced(gradient)


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
def _power_of_norm(
    parameters: list[Tensor],
    norm_type: float,
    mesh: MoEMesh | None,
    options: Mapping[str, float],
) -> Tensor:
    """Norm over all ranks, which compare `options`, to the power of `norm_type`, if it is finite.

    0-d float64, the same bits on every rank.
    """
    world = resolve_group(None, "clip_grad_norm_")
    stage_size = group_size(world if mesh is None else mesh.stage_group)
    # A rank of each stage.
    leaders = [0] if mesh is None else [ranks[0] for ranks in mesh.rank_groups("stage")]
    device = parameters[0].device if parameters else torch.device("cpu")
    whole, parts, unsynced = [], torch.zeros((), dtype=torch.float64, device=device), False
    for parameter in parameters:
        if parameter.grad is None or parameter in _copies:
            continue
        place = known_shard(parameter)
        is_apart = place is not None and not place.is_managed(parameter)
        unsynced |= is_apart and not was_synced(parameter.grad)
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
        rows = collectives.all_gather(
            local[None], world, operation="clip_grad_norm_", counted=False
        )
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
    return total


class GradScaler(torch.amp.GradScaler):
    """torch's, for models whose experts lie over ranks, and for stages of a pipeline.

    All ranks skip a step if gradients of some expert, or some stage, overflow: otherwise they would
    go on with different weights of what they hold copies of. torch's own raises over DTensors
    beside other tensors, and each stage of a pipeline would decide by itself.
    """

    def scale(self, outputs: Any) -> Any:
        """As torch's; a pipeline takes the result for `loss_scale`."""
        found = super().scale(outputs)
        if isinstance(found, Tensor):
            setattr(found, _SCALED, True)
        return found

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        over = dict.fromkeys(group for p in held for group in sharding_groups(p))
        found = super()._unscale_grads_(_parts_of(held) if over else optimizer, *args)
        # Stages last: each of their ranks then knows of the ranks of its stage.
        over |= dict.fromkeys(_pipelines[p] for p in held if p in _pipelines)
        if over and not found:  # without a gradient this rank takes part, too
            found = {held[0].device: torch.zeros((), device=held[0].device, dtype=torch.float32)}
        for group in over:
            for overflow in found.values():
                collectives.all_reduce_(
                    overflow, group, operation="GradScaler", op="max", counted=False
                )
        return found


def _parts_of(parameters: list[Tensor]) -> Any:
    """Gradients of this rank's parts, as of an optimizer."""
    parts = [local_part(parameter.detach()) for parameter in parameters]
    for part, parameter in zip(parts, parameters, strict=True):
        part.grad = None if parameter.grad is None else local_part(parameter.grad)
    return SimpleNamespace(param_groups=[{"params": parts}])
