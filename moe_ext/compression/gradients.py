"""Compressed reduction of gradients for hand-written loops, and a flush of residuals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_kind
from moe_ext.comm.agreement import Agreement, share
from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import group_size
from moe_ext.compression.reducer import BucketInStep, Reducer
from moe_ext.compression.state import CompressionState
from moe_ext.distributed.clipping import clip_grad_norm_
from moe_ext.distributed.dtensor import is_dtensor, local_part, with_local
from moe_ext.distributed.gradients import (
    flat_gradient,
    gradient_buckets,
    gradient_dtype,
    is_synced,
    mark_synced,
    put_gradients,
    reduced_by_ddp,
)
from moe_ext.distributed.placement import Placement, replicated_groups, sharded_parameters
from moe_ext.distributed.replicas import replica_group

_OPERATION = "compress_gradients"
# A group (None is this process alone), and the parameters of which its ranks hold copies.
_Copies = tuple[ProcessGroup | None, list[nn.Parameter]]
# Kinds of gradient that a rank may have for a parameter.
_NOTHING, _DENSE, _SPARSE = 0, 1, 2


def compress_gradients(model: nn.Module, state: CompressionState) -> bool:
    """Replace every gradient by the mean over all ranks, compressed by the codecs of the state.

    The compressed form of `sync_gradients`. Call it on all ranks, after the last backward pass of a
    step and before clipping and the optimizer. Experts of an expert-parallel model are reduced over
    the ranks that hold the same experts. A `DistributedDataParallel` with `compress_hook` calls
    this itself for the experts, as the second half of the step, at the end of the backward pass.
    Another call then does nothing.

    A gradient that is None on some ranks counts as zero there. A gradient that is None on every
    rank stays None. Unlike with `sync_gradients`, gradients must not be accumulated into reduced
    gradients, because the reduced part would enter the residuals again.

    Args:
        model: the module that the state was made for, the same on every rank.
        state: see `CompressionState`.

    Returns:
        True if all gradients were finite on every rank; False only with nonfinite="propagate". With
        "propagate", uncompressed gradients of a model without residuals are not searched: NaN in
        them reaches the sum, as in torch.

    Raises:
        ValueError: on every rank: a gradient is NaN or infinite (unless the state propagates it);
            the ranks have different codecs or parameters; a parameter is a DTensor without being an
            expert over ranks, or is not of the state's model; a DistributedDataParallel reduces
            experts. Gradients are zero if they were not finite, and residuals are unchanged.
        RuntimeError: on every rank: no gradient has changed since the last call, for a model
            without DistributedDataParallel.
        RankFailureError: a rank died or did not answer; residuals are unchanged.
    """
    check_kind(_OPERATION, "model", model, nn.Module, required=True)
    check_kind(_OPERATION, "state", state, CompressionState, required=True)
    if state.is_hooked and not state.was_finite:
        # DDP has found NaN in its half of the gradients, so the optimizer will skip the step.
        return False
    experts = sharded_parameters(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if not _check(model, state, experts, device):
        return state.was_finite
    step = state.begin_step(_OPERATION)
    if state.options.local_clip_norm is not None:
        step.whole_norm = _local_norm(model)
    with torch.no_grad():
        try:
            placed = _begin(step, _copies(model, state, experts, device), device)
            try:
                finite = step.finish()
            finally:
                for bucket, running in placed:
                    _put_back(bucket, running.flat_N)
        except Exception:
            if state.is_hooked:
                state.undo()
            raise
    if not finite and state.is_hooked:
        state.undo()
    clip_norm = state.options.clip_norm
    if finite and clip_norm is not None and experts:
        clip_grad_norm_(model, clip_norm * state.options.loss_scale)
    return finite


def _begin(
    step: Reducer, found: Sequence[_Copies], device: torch.device
) -> list[tuple[list[nn.Parameter], BucketInStep]]:
    placed: list[tuple[list[nn.Parameter], BucketInStep]] = []
    for group, parameters in found[1:]:
        step.expect(parameters, group)
    try:
        for group, parameters in found:
            for bucket, flat_N in _filled_buckets(parameters, group, device):
                placed.append((bucket, step.add(bucket, flat_N, group)))
    except Exception as error:
        # Reductions that have begun still write to residuals, so `abandon` waits for them.
        step.abandon(error)
        raise
    return placed


def _check(
    model: nn.Module,
    state: CompressionState,
    experts: dict[str, tuple[nn.Parameter, Placement]],
    device: torch.device,
) -> bool:
    """Check everything that can be checked beforehand. Either every rank raises or none does.

    Returns:
        True if there is something to reduce.
    """
    problem = None
    for name, parameter in model.named_parameters():
        place = experts[name][1] if name in experts else None
        if is_dtensor(parameter) and (place is None or place.is_managed(parameter)):
            problem = f"expected parameters to be plain tensors, got a DTensor for {name}"
    reduced = reduced_by_ddp(model)
    if state.is_hooked and not reduced:
        problem = (
            "expected model to be the DistributedDataParallel that reduces with this state, got "
            f"{type(model).__name__}; a loop without it wants a state of its own"
        )
    for name, (parameter, _) in experts.items():
        if id(parameter) in reduced:
            problem = (
                "expected DistributedDataParallel to leave the expert parameters alone, but it "
                f"reduces {name}; spread experts over ranks and call moe_ext.parallelize(model) "
                "before the model is wrapped"
            )
    trained = [p for p in model.parameters() if p.requires_grad]
    _, strange = state.parameters.names_of(trained)
    count = sum(1 for _ in model.parameters())
    facts = {"the number of parameters": count, **state.options.facts()}
    gradients = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in reduced]
    fresh = [int(not all(is_synced(g) for g in gradients)), int(bool(gradients))]
    agreement = Agreement(_OPERATION, state.group, device)
    rows = agreement.compare(facts, values=fresh, problem=problem or strange)
    is_fresh = any(row[0] for row in rows) or not any(row[1] for row in rows)
    if not is_fresh and not reduced:
        raise RuntimeError(
            f"{_OPERATION}: expected new gradients since the last call, but none changed on "
            "any rank; call it once after the last backward pass of a step"
        )
    return is_fresh


def _copies(
    model: nn.Module,
    state: CompressionState,
    experts: dict[str, tuple[nn.Parameter, Placement]],
    device: torch.device,
) -> list[_Copies]:
    """Return the dense parameters that DDP does not reduce, and the experts by their groups."""
    elsewhere = reduced_by_ddp(model) | {id(parameter) for parameter, _ in experts.values()}
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in elsewhere]
    trained = [(p, placement) for p, placement in experts.values() if p.requires_grad]
    return [(state.group, dense), *replicated_groups(trained, device)]


def _filled_buckets(
    parameters: list[nn.Parameter], group: ProcessGroup | None, device: torch.device
) -> list[tuple[list[nn.Parameter], Tensor]]:
    """Make buckets of parameters with a gradient on at least one rank; zeros if not on this one."""
    kinds = _agreed_kinds(parameters, group, device)
    pairs = list(zip(parameters, kinds, strict=True))
    found = [
        (bucket, torch.cat([flat_gradient(p) for p in bucket]))
        for bucket in gradient_buckets([p for p, kind in pairs if kind == _DENSE])
    ]
    for parameter, kind in pairs:
        if kind == _SPARSE:
            found.append(([parameter], _sparse_gradient(parameter)))
    return found


def _agreed_kinds(
    parameters: list[nn.Parameter], group: ProcessGroup | None, device: torch.device
) -> list[int]:
    """Agree on the kind of each parameter's gradient, over the ranks that have one."""
    kinds = [_kind(parameter) for parameter in parameters]
    if group is None or not kinds or group_size(group) == 1:
        return kinds
    rows = share(kinds, group, device, operation=_OPERATION)
    agreed = []
    for parameter, column in zip(parameters, zip(*rows, strict=True), strict=True):
        present = {kind for kind in column if kind != _NOTHING}
        if len(present) > 1:
            raise ValueError(
                f"{_OPERATION}: expected the gradient of a parameter to be sparse on every "
                f"rank or on none, got both for one of shape {tuple(parameter.shape)}"
            )
        agreed.append(present.pop() if present else _NOTHING)
    return agreed


def _kind(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return _NOTHING
    return _SPARSE if parameter.grad.layout == torch.sparse_coo else _DENSE


def _sparse_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is not None:
        return parameter.grad
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]), dtype=gradient_dtype(parameter))
    return torch.sparse_coo_tensor(indices, values, tuple(parameter.shape), is_coalesced=True)


def _put_back(bucket: Sequence[nn.Parameter], flat_N: Tensor) -> None:
    if flat_N.layout == torch.sparse_coo:
        bucket[0].grad = flat_N
        mark_synced(flat_N)
        return
    put_gradients(bucket, flat_N)
    for parameter in bucket:
        assert parameter.grad is not None
        mark_synced(parameter.grad)


def _local_norm(model: nn.Module) -> float:
    """Return the norm of all gradients of this rank."""
    total = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = local_part(parameter.grad)
            values = grad.coalesce().values() if grad.is_sparse else grad
            total += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    return math.sqrt(total)


def flush(model: nn.Module, state: CompressionState) -> bool:
    """Add all residuals to the gradients by one dense all-reduce, and clear them.

    Call it on all ranks, between the reduction of a step and the step of the optimizer, in the step
    after which the model is saved. The checkpoint then needs no state and fits any number of ranks.
    With a `GradScaler`, call it before `unscale_`. A frozen parameter gets no gradient and keeps
    its residual.

    Args:
        model: the module that the state was made for.
        state: state of this rank; every rank passes its own.

    Returns:
        True if residuals were flushed. False, with nonfinite="propagate", after a step that was not
        finite, because the optimizer will skip that step. Flush after the next step instead.

    Raises:
        ValueError: on every rank: the ranks have residuals of different parameters.
        RankFailureError: a rank died or did not answer; gradients and residuals are unchanged.
    """
    if state.options.nonfinite == "propagate" and not state.was_finite:
        return False
    state.regroup()
    owed = state.owed_now()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    facts = {"the parameters that are owed for": ", ".join(owed)}
    Agreement("flush", state.group, device).compare(facts)
    experts = {id(p): placement.group for p, placement in sharded_parameters(model).values()}
    by_group: dict[ProcessGroup | None, list[str]] = {}
    for name in owed:
        ep_group = experts.get(id(state.parameters.by_name[name]))
        group = state.group if ep_group is None else replica_group(ep_group, device)
        by_group.setdefault(group, []).append(name)
    with torch.no_grad():
        totals: dict[str, Tensor] = {}
        for group, names in by_group.items():
            flat_N = torch.cat([owed[name].reshape(-1).to(device) for name in names])
            all_reduce_(flat_N, group, operation="flush")
            if state.options.average:
                flat_N.div_(group_size(group))
            pieces = flat_N.split([owed[name].numel() for name in names])
            totals.update(zip(names, pieces, strict=True))
        for name, total in totals.items():
            _add_to_gradient(state.parameters.by_name[name], total)
    state.memory.clear("residual", set(owed))
    return True


def _add_to_gradient(parameter: nn.Parameter, flat: Tensor) -> None:
    total = flat.view_as(local_part(parameter)).to(gradient_dtype(parameter))
    if parameter.grad is None:
        parameter.grad = with_local(parameter, total.clone())
        return
    synced = is_synced(parameter.grad)
    local_part(parameter.grad).add_(total)
    if synced:
        mark_synced(parameter.grad)
