"""Clips by the norm of all gradients, including those of experts and shards on other ranks."""

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

# Parameter of a pipeline stage to the ranks of the pipeline, which skip a step together. Parameters
# that are a copy of one on another rank of the pipeline, which counts in the norm instead.
_pipelines, _copies = WeakIdKeyDictionary(), WeakIdKeyDictionary()
# Attribute of a loss that `GradScaler` has scaled.
_SCALED = "_moe_ext_scaled"


def note_stage(
    parameters: Iterable[Tensor], group: ProcessGroup, copies: Iterable[Tensor] = ()
) -> None:
    """Note parameters of a stage, for `GradScaler` and `clip_grad_norm_`.

    A `GradScaler` then skips a step on all ranks of the group or on none.

    Args:
        parameters: parameters of this rank's stages.
        group: the ranks of the pipeline.
        copies: parameters that another rank holds too, and counts in the norm.
    """
    _pipelines.update(dict.fromkeys(parameters, group))
    _copies.update(dict.fromkeys(copies, True))


def is_scaled_alike(scale: object) -> bool:
    """Return True unless a loss scale comes from a scaler whose ranks may skip different steps.

    A plain number comes from no scaler.
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

    The norm covers all parameters, and counts each expert and each shard once, on whichever rank it
    is. It is the value that one process with the same gradients would compute, with the same bits
    on every rank. Call it on all ranks, after `sync_gradients` if that is needed. DTensors, such as
    those of FSDP2, may lie on several meshes, and may be mixed with plain parameters.

    Args:
        model: the module, or a DistributedDataParallel around it; or one or more parameters, the
            same on every rank.
        max_norm: largest norm, positive.
        norm_type: exponent of the norm, positive; `math.inf` or "inf" for the largest magnitude.
        error_if_nonfinite: raise an error if the norm is NaN or infinite. This costs a
            device-to-host synchronisation.
        mesh: mesh of a job with pipeline stages, each of which has other parameters. None if all
            ranks have the same model.

    Returns:
        The norm before scaling, 0-d float32; float64 if every gradient is float64.

    Raises:
        ValueError: on every rank, with gradients unchanged, if max_norm or norm_type is not
            positive, or an argument differs between ranks.
        RuntimeError: on every rank, with gradients unchanged, if the norm is not finite and
            `error_if_nonfinite` is set, or if expert gradients were not synchronised.
        RankFailureError: a rank died or did not answer.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    options = {
        "max_norm": max_norm,
        "norm_type": norm_type,
        "error_if_nonfinite": bool(error_if_nonfinite),
    }
    if isinstance(model, nn.Module):
        sharded_parameters(model)  # notes placements on the parameters, for `known_shard`
    given = [model] if isinstance(model, Tensor) else model
    parameters = list(given.parameters() if isinstance(given, nn.Module) else given)
    with torch.no_grad():
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    total = _power_of_norm(parameters, norm_type, mesh, options)
    # These checks come after the ranks have compared the values, so that all ranks raise.
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
    """Multiply gradients in place. Gradients that are synchronised stay marked as synchronised."""
    for gradient in gradients:
        synced = is_synced(gradient)
        gradient.mul_(coefficient.to(gradient.device))
        if synced:
            mark_synced(gradient)


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of magnitudes to the power of `norm_type`, or the largest, in float64."""
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
    """Return the norm over all ranks to the power of `norm_type`; for an infinite one the norm.

    The ranks compare `options` on the way. The result is 0-d float64, with the same bits on every
    rank.
    """
    world = resolve_group(None, "clip_grad_norm_")
    stage_size = group_size(world if mesh is None else mesh.stage_group)
    # One rank of each stage, whose plain parameters count in the norm.
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
            # Each part is on `stage_size / num_parts` ranks, and each of them adds its share.
            parts = parts + part * num_parts / stage_size
    total = _power_sum(whole, norm_type, device)
    if world is not None and group_size(world) > 1:
        options = {**options, "number of ranks of a stage of mesh": stage_size}
        told = total.new_tensor([float(unsynced), *map(float, options.values())])
        local = torch.cat([torch.stack([total, parts]), told])
        rows = collectives.all_gather(
            local[None], world, operation="clip_grad_norm_", counted=False
        )
        # NOTE: device-to-host sync, to refuse unsynchronised gradients, and options that differ
        # between ranks.
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
    """`torch.amp.GradScaler` for models with experts over ranks, and for pipeline stages.

    If the gradients of an expert or of a stage overflow on one rank, all ranks skip the step.
    Otherwise copies of the other parameters would differ afterwards. torch's own scaler raises an
    error if DTensors are mixed with other tensors, and each stage of a pipeline would decide alone.
    """

    def scale(self, outputs: Any) -> Any:
        """Scale as torch's scaler does; the result can be passed to a pipeline as `loss_scale`."""
        found = super().scale(outputs)
        if isinstance(found, Tensor):
            setattr(found, _SCALED, True)
        return found

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        over = dict.fromkeys(group for p in held for group in sharding_groups(p))
        found = super()._unscale_grads_(_parts_of(held) if over else optimizer, *args)
        # The group of the pipeline comes last. An overflow within a stage is known to all ranks of
        # the stage by then.
        over |= dict.fromkeys(_pipelines[p] for p in held if p in _pipelines)
        if over and not found:  # a rank without gradients takes part in the reductions, too
            found = {held[0].device: torch.zeros((), device=held[0].device, dtype=torch.float32)}
        for group in over:
            for overflow in found.values():
                collectives.all_reduce_(
                    overflow, group, operation="GradScaler", op="max", counted=False
                )
        return found


def _parts_of(parameters: list[Tensor]) -> Any:
    """Return an object with the `param_groups` of an optimizer over this rank's local parts."""
    parts = [local_part(parameter.detach()) for parameter in parameters]
    for part, parameter in zip(parts, parameters, strict=True):
        part.grad = None if parameter.grad is None else local_part(parameter.grad)
    return SimpleNamespace(param_groups=[{"params": parts}])
