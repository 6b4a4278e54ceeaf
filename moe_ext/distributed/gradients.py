"""Makes gradients those of the mean loss over all ranks, for dense and expert parameters.

After the backward pass of an expert-parallel layer, an expert has the gradient of the mean loss
over its expert-parallel group, see `AllToAllDispatcher`. Every parameter then only needs the mean
over the ranks that hold a copy of it: all ranks for a dense parameter, the ranks of the same
ep_rank for an expert. The mean of equal values is that value. Synchronised gradients may therefore
be accumulated into and synchronised again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from moe_ext._checks import check_kind
from moe_ext.comm import c10d, collectives
from moe_ext.comm.agreement import Agreement, check_equal_over_ranks
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.distributed.dtensor import is_dtensor, local_part, placed_as, with_local
from moe_ext.distributed.placement import (
    Placement,
    placements,
    replicated_groups,
    sharded_parameters,
)
from moe_ext.distributed.replicas import replica_group

if TYPE_CHECKING:
    from moe_ext.distributed.mesh import MoEMesh

# Advice in errors about parameters that differ between ranks.
HOW_TO_KEEP_EQUAL = (
    "seed every rank alike, and call moe_ext.distributed.sync_gradients after each backward pass, "
    "or wrap the model in DistributedDataParallel or FSDP2"
)
_BUCKET_BYTES = 25 * 2**20
# Bytes of an element to the integer type of that size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Attribute of a gradient tensor: its version counter when it was last synchronised. A new tensor
# lacks the attribute, and a tensor that was written to since has another version.
_SYNCED = "_moe_ext_synced_version"
# Attribute of a parameter whose values may differ between ranks for some steps.
_APART = "_moe_ext_apart"

# Models whose dense parameters have been compared, and were equal on all ranks.
_compared: WeakSet[nn.Module] = WeakSet()


def sync_gradients(model: nn.Module, *, mesh: MoEMesh | None = None) -> None:
    """Make every gradient that of the mean over all ranks of the local losses.

    Call it on all ranks, after the last backward pass of a step and before clipping and the
    optimizer. Without torch.distributed, or with one rank, it does nothing. For a plain module all
    gradients are reduced. Gradients that DistributedDataParallel or FSDP2 has reduced in the
    backward pass are not changed, including those of experts. Gradients of tensor-parallel shards,
    DTensors on a mesh of one dimension, become means over the ranks that hold the same shards.

    The first call for a model also compares the values of the dense parameters, since averaging
    gradients keeps equal replicas equal, but does not make them equal.

    A gradient that is None on some ranks counts as zero there. A gradient that is None on every
    rank stays None. All checks come before the first gradient changes. If a rank dies during the
    call, gradients in buckets (25 MiB each) that were already reduced keep the mean, and all other
    gradients are unchanged.

    Args:
        model: the module, the same on every rank. With pipeline parallelism it is a module that
            holds all modules of a stage, the same on every rank of the stage.
        mesh: mesh of a job with pipeline stages: gradients are averaged over the ranks of this
            rank's stage. None averages over all ranks.

    Raises:
        ValueError: on every rank, if parameters differ between ranks by name, shape or dtype, or,
            at the first call, dense ones by value; if a DistributedDataParallel reduces expert
            parameters; if a gradient is sparse; or if a DTensor lies on a mesh of several
            dimensions over a part of the ranks.
        RuntimeError: on every rank, if no gradient has changed since the last call, for a model
            without DistributedDataParallel.
        RankFailureError: a rank died or did not answer; the message names it.

    Determinism: that of the backend's all-reduce; every rank gets the same bits. There is one
    device-to-host synchronisation for the checks, and one for each group to find None gradients.
    """
    check_kind("sync_gradients", "model", model, nn.Module, required=True)
    world = resolve_group(None, "sync_gradients") if mesh is None else mesh.stage_group
    if group_size(world) == 1:
        return
    assert world is not None
    sharded = sharded_parameters(model)
    if not any(True for _ in model.parameters()):
        raise ValueError("sync_gradients: expected model to have parameters, got none")
    device = next(model.parameters()).device
    with Agreement("sync_gradients", world, device) as agreement:
        if problem := _find_problem(model, sharded, world):
            raise ValueError(f"sync_gradients: {problem}")
        # FSDP2 has reduced these in the backward pass.
        sharded = {n: (p, place) for n, (p, place) in sharded.items() if not place.is_managed(p)}
        dense, shards = _dense_parameters(model, sharded), _tensor_parallel(model, world)
        handled = [
            *dense,
            *((name, parameter) for name, (parameter, _) in sharded.items()),
            *shards,
        ]
        values = None if model in _compared else fingerprint(dense)
        is_fresh = _check_on_all_ranks(handled, values, world, agreement)
    _compared.add(model)
    if not is_fresh:
        if reduced_by_ddp(model):
            return
        raise RuntimeError(
            "sync_gradients: expected new gradients since the last call, but none changed on any "
            "rank; call it once after the last backward pass of a step"
        )

    average_gradients(world, [parameter for _, parameter in dense])
    for replicas, parameters in replicated_groups(sharded.values(), device):
        average_gradients(replicas, parameters)
    by_group: dict[ProcessGroup, list[nn.Parameter]] = {}
    for _, parameter in shards:
        if parameter.grad is not None:
            parameter.grad = placed_as(parameter.grad, parameter)
        group: ProcessGroup = parameter.device_mesh.get_group()  # type: ignore[attr-defined]
        by_group.setdefault(group, []).append(parameter)
    for group, parameters in by_group.items():
        average_gradients(replica_group(group, device), parameters)


def let_differ(parameters: Iterable[nn.Parameter]) -> None:
    """Note parameters that ranks train separately and average later, as in local steps."""
    for parameter in parameters:
        setattr(parameter, _APART, True)


def may_differ(parameter: nn.Parameter) -> bool:
    """Return True for a parameter that was passed to `let_differ`."""
    return hasattr(parameter, _APART)


def was_synced(gradient: Tensor) -> bool:
    """Return True if this gradient tensor has ever been synchronised."""
    return hasattr(gradient, _SYNCED)


def is_synced(gradient: Tensor) -> bool:
    """Return True if this gradient tensor was synchronised, and not written to since."""
    return getattr(gradient, _SYNCED, None) == gradient._version


def mark_synced(gradient: Tensor) -> None:
    """Note that the current values of this gradient tensor are synchronised."""
    setattr(gradient, _SYNCED, gradient._version)


def _find_problem(
    model: nn.Module, sharded: dict[str, tuple[nn.Parameter, Placement]], world: ProcessGroup
) -> str | None:
    """Return the reason why this rank's model cannot be synchronised, or None."""
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            ranks, place = parameter.device_mesh.size(), sharded.get(name, (None, None))[1]
            is_known = place is not None and not place.is_managed(parameter)
            if ranks != world.size() and parameter.device_mesh.ndim > 1 and not is_known:
                return (
                    f"expected DTensor parameters to lie over all {world.size()} ranks, got {ranks}"
                    f" for {name}; see moe_ext.distributed.fully_shard"
                )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            layout = parameter.grad.layout
            return f"expected gradients to be dense, got {layout} for {name}"
    if problem := reduction_problem(sharded):
        return problem
    reduced = reduced_by_ddp(model)
    for name, (parameter, _) in sharded.items():
        if id(parameter) in reduced:
            return (
                "expected DistributedDataParallel to leave the expert parameters alone, but it "
                f"reduces {name}: ranks hold different experts under that name. Spread experts "
                "over ranks and call moe_ext.parallelize(model) before the model is wrapped"
            )
    return None


def reduction_problem(sharded: dict[str, tuple[nn.Parameter, Placement]]) -> str | None:
    """Return the reason why gradients of these parameters cannot become means, or None."""
    for name, (_, placement) in sharded.items():
        if placement.grad_reduction != "mean":
            return (
                "expected tensor-parallel modules to be made with grad_reduction='mean', since "
                f"that is what other gradients become, got {placement.grad_reduction!r} for {name}"
            )
    return None


def reduced_by_ddp(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that a DistributedDataParallel in the model reduces."""
    reduced: set[int] = set()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ignored = c10d.ddp_ignored(module)
            named = module.module.named_parameters(remove_duplicate=False)
            reduced |= {id(parameter) for name, parameter in named if name not in ignored}
    return reduced


def _dense_parameters(
    model: nn.Module, sharded: dict[str, tuple[nn.Parameter, Placement]]
) -> list[tuple[str, nn.Parameter]]:
    elsewhere = reduced_by_ddp(model) | {id(parameter) for parameter, _ in sharded.values()}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in elsewhere and not is_dtensor(parameter)
    ]


def _tensor_parallel(model: nn.Module, world: ProcessGroup) -> list[tuple[str, nn.Parameter]]:
    """Return tensor-parallel DTensors, whose mesh of one dimension covers a part of the ranks."""
    placed = placements(model)

    def is_shard(tensor: Tensor) -> bool:
        mesh = tensor.device_mesh if is_dtensor(tensor) else None
        return mesh is not None and mesh.ndim == 1 and mesh.size() < world.size()

    named = model.named_parameters()
    return [(n, p) for n, p in named if p.requires_grad and n not in placed and is_shard(p)]


def fingerprint(parameters: Sequence[tuple[str, Tensor]]) -> int:
    """Return a checksum over the bits of all values. NOTE: device-to-host sync."""
    hashes = []
    for _, parameter in parameters:
        if parameter.numel():
            flat = parameter.detach().reshape(-1)
            if flat.is_complex():
                flat = torch.view_as_real(flat).reshape(-1)
            bits = flat.view(_BITS[min(flat.element_size(), 8)])
            # `hash_tensor` is an exclusive or, in which an even number of equal values cancels. The
            # sum of the bits as integers is added; it does not depend on the order of addition.
            hashes += [torch.hash_tensor(flat).view(torch.int64), bits.sum(dtype=torch.int64)]
    # NOTE: device-to-host sync; `sync_gradients` calls this once for a model.
    text = repr(torch.stack(hashes).tolist()) if hashes else ""
    return zlib.crc32(text.encode())


def _check_on_all_ranks(
    handled: list[tuple[str, nn.Parameter]],
    values: int | None,
    world: ProcessGroup,
    agreement: Agreement,
) -> bool:
    """Compare the parameters over ranks. True if a rank has a new gradient, or no rank has any.

    Either all ranks raise or none does. `values` is the fingerprint of the dense parameters, or
    None if it was compared before.
    """
    gradients = [parameter.grad for _, parameter in handled if parameter.grad is not None]
    fresh = not all(is_synced(grad) for grad in gradients)
    signature = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in handled)
    facts = {
        "the number of parameters to reduce": len(handled),
        "the number of their elements": sum(parameter.numel() for _, parameter in handled),
        "the checksum of their names, shapes and dtypes": zlib.crc32(signature.encode()),
    }
    told = [int(fresh), int(bool(gradients)), -1 if values is None else values]
    rows = agreement.compare(facts, values=told)
    first = [row[2] for row in rows]
    if -1 not in first:
        name = "the values of the dense parameters at the first call (seed every rank alike)"
        check_equal_over_ranks(name, first, world, "sync_gradients")
    return any(row[0] for row in rows) or not any(row[1] for row in rows)


def average_gradients(group: ProcessGroup | None, parameters: list[nn.Parameter]) -> None:
    """Average gradients over a group, bucket by bucket, and mark them as synchronised.

    A gradient that is None on some ranks counts as zero there. A group of None is this rank alone.
    """
    if group is not None and parameters:
        present = torch.tensor(
            [parameter.grad is not None for parameter in parameters],
            dtype=torch.int32,
            device=parameters[0].device,
        )
        collectives.all_reduce_(present, group, operation="sync_gradients", op="max", counted=False)
        # NOTE: device-to-host sync, since the existing gradients determine what is sent.
        flags = present.tolist()
        pairs = zip(parameters, flags, strict=True)
        for bucket in gradient_buckets([parameter for parameter, flag in pairs if flag]):
            _average_bucket(bucket, group)
    for parameter in parameters:
        if parameter.grad is not None:
            mark_synced(parameter.grad)


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's gradient, also if there is no gradient on this rank."""
    found: torch.dtype | None = parameter.grad_dtype
    return found or parameter.dtype


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of this rank's part as a flat tensor; zeros if there is none."""
    if parameter.grad is None:
        part, dtype = local_part(parameter.detach()), gradient_dtype(parameter)
        return torch.zeros_like(part, dtype=dtype).reshape(-1)
    return local_part(placed_as(parameter.grad, parameter)).reshape(-1)


def put_gradients(bucket: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Set the gradients of parameters from `flat`, the concatenation of their local parts."""
    parts = [local_part(parameter.detach()) for parameter in bucket]
    pieces = flat.split([part.numel() for part in parts])
    for parameter, part, piece in zip(bucket, parts, pieces, strict=True):
        if parameter.grad is None:
            parameter.grad = with_local(parameter, piece.view_as(part).clone())
        else:
            local_part(parameter.grad).copy_(piece.view_as(part))


def gradient_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters of one dtype and device into buckets of about `_BUCKET_BYTES`.

    The buckets are the same on every rank.
    """
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[object, ...], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        key = (parameter.dtype, gradient_dtype(parameter), parameter.device)
        bucket, size = open_buckets.get(key, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(parameter)
        size += local_part(parameter.detach()).nbytes
        open_buckets[key] = ([], 0) if size >= _BUCKET_BYTES else (bucket, size)
    return buckets


def _average_bucket(bucket: list[nn.Parameter], group: ProcessGroup) -> None:
    with torch.no_grad():
        flat = torch.cat([flat_gradient(parameter) for parameter in bucket])
        # The division comes before the sum, so that a sum of float16 gradients cannot overflow.
        flat.div_(group_size(group))
        collectives.all_reduce_(flat, group, operation="sync_gradients")
        put_gradients(bucket, flat)
