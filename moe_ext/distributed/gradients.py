"""Gradients of the mean loss over all ranks, for dense and expert parameters alike.

The backward pass of an expert-parallel layer leaves an expert's gradient as that of the mean over
its expert-parallel group (see `AllToAllDispatcher`). So every parameter needs one thing only: the
mean over the ranks that hold a copy of it, all ranks for a dense parameter and those of the same
ep_rank for an expert. A mean of equal values changes nothing, which is why gradients that were
synchronised may be accumulated into and synchronised again.
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

_BUCKET_BYTES = 25 * 2**20
# Integers of as many bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Set on a gradient tensor: its version when it was last synchronised. A new tensor or one that
# was written to since does not match.
_SYNCED = "_moe_ext_synced_version"
# Set on a parameter whose values may differ between ranks for some steps.
_APART = "_moe_ext_apart"

# Models whose dense parameters were found equal on all ranks.
_compared: WeakSet[nn.Module] = WeakSet()


def sync_gradients(model: nn.Module, *, mesh: MoEMesh | None = None) -> None:
    """Make every gradient that of the mean over all ranks of the local losses.

    Call it on all ranks, after the last backward pass of a step and before clipping and the
    optimizer. Without torch.distributed, or with one rank, it does nothing. A plain module gets all
    of its gradients reduced. Gradients that DistributedDataParallel or FSDP2 has reduced in the
    backward pass are left as they are, those of experts too. Gradients of shards of tensor
    parallelism, DTensors on a mesh of one dimension, become means over the ranks that hold the same
    ones.

    The first call for a model also compares the values of the dense parameters: a mean of gradients
    keeps replicas equal, it does not make them so.

    A gradient that is None on some ranks counts as zero there, and one that is None on every rank
    stays None. Everything that can be checked is checked before the first gradient changes. If a
    rank dies in the middle, the gradients of the buckets already reduced (25 MiB each) keep the
    mean, all others are as before.

    Args:
        model: the module, the same on every rank; with pipeline parallelism the same on every rank
            of a stage, and all modules of that in one.
        mesh: of a job with pipeline stages: means are over the ranks of this rank's stage; None for
            all ranks.

    Raises:
        ValueError: on every rank: the parameters differ between ranks, by name, shape, dtype or (at
            the first call, the dense ones) by value; a DistributedDataParallel reduces expert
            parameters; a gradient is sparse; or a DTensor lies over a part of the ranks in several
            dimensions.
        RuntimeError: on every rank, when no gradient changed since the last call, of a model
            without DistributedDataParallel.
        RankFailureError: a rank died or did not answer; the message names it.

    Determinism: as the backend's all-reduce; every rank gets the same bits. One device-to-host
    synchronisation for the checks and one for the None gradients of each group.
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
    """Note parameters that ranks train apart and average later, as local steps do."""
    for parameter in parameters:
        setattr(parameter, _APART, True)


def may_differ(parameter: nn.Parameter) -> bool:
    """True for parameters that `let_differ` was given."""
    return hasattr(parameter, _APART)


def was_synced(gradient: Tensor) -> bool:
    """True if `sync_gradients` handled this gradient tensor at some time."""
    return hasattr(gradient, _SYNCED)


def is_synced(gradient: Tensor) -> bool:
    """True if nothing wrote to this gradient tensor since `sync_gradients` handled it."""
    return getattr(gradient, _SYNCED, None) == gradient._version


def mark_synced(gradient: Tensor) -> None:
    """Note that the values now in this gradient tensor are synchronised."""
    setattr(gradient, _SYNCED, gradient._version)


def _find_problem(
    model: nn.Module, sharded: dict[str, tuple[nn.Parameter, Placement]], world: ProcessGroup
) -> str | None:
    """Problem of this rank's model, or None."""
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
    """The reason why gradients of these parameters cannot be means over ranks, or None."""
    for name, (_, placement) in sharded.items():
        if placement.grad_reduction != "mean":
            return (
                "expected tensor-parallel modules to be made with grad_reduction='mean', since "
                f"that is what other gradients become, got {placement.grad_reduction!r} for {name}"
            )
    return None


def reduced_by_ddp(model: nn.Module) -> set[int]:
    """Ids of the parameters that a DistributedDataParallel in the model reduces."""
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
    """DTensors on a mesh of some ranks, which hold the same shards on others."""
    placed = placements(model)

    def is_shard(tensor: Tensor) -> bool:
        mesh = tensor.device_mesh if is_dtensor(tensor) else None
        return mesh is not None and mesh.ndim == 1 and mesh.size() < world.size()

    named = model.named_parameters()
    return [(n, p) for n, p in named if p.requires_grad and n not in placed and is_shard(p)]


def fingerprint(parameters: Sequence[tuple[str, Tensor]]) -> int:
    """A number from the bits of all values, equal for equal parameters."""
    hashes = []
    for _, parameter in parameters:
        if parameter.numel():
            flat = parameter.detach().reshape(-1)
            if flat.is_complex():
                flat = torch.view_as_real(flat).reshape(-1)
            bits = flat.view(_BITS[min(flat.element_size(), 8)])
            # hash_tensor is an exclusive or: an even number of equal values gives 0, whatever they
            # are. Sums of integers have the same bits in any order.
            hashes += [torch.hash_tensor(flat).view(torch.int64), bits.sum(dtype=torch.int64)]
    # NOTE: device-to-host sync, once for a model.
    text = repr(torch.stack(hashes).tolist()) if hashes else ""
    return zlib.crc32(text.encode())


def _check_on_all_ranks(
    handled: list[tuple[str, nn.Parameter]],
    values: int | None,
    world: ProcessGroup,
    agreement: Agreement,
) -> bool:
    """True if some rank has a new gradient or no rank has any; all ranks raise, or none does.

    `values` is the fingerprint of the dense parameters, None where it was compared before.
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
    """Make gradients the mean over a group, bucket by bucket, and mark them as synchronised.

    One that is None on some ranks counts as zero there. A group of None is this rank alone.
    """
    if group is not None and parameters:
        present = torch.tensor(
            [parameter.grad is not None for parameter in parameters],
            dtype=torch.int32,
            device=parameters[0].device,
        )
        collectives.all_reduce_(present, group, operation="sync_gradients", op="max", counted=False)
        # NOTE: device-to-host sync: which gradients exist decides what is sent.
        flags = present.tolist()
        pairs = zip(parameters, flags, strict=True)
        for bucket in gradient_buckets([parameter for parameter, flag in pairs if flag]):
            _average_bucket(bucket, group)
    for parameter in parameters:
        if parameter.grad is not None:
            mark_synced(parameter.grad)


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of the gradient, which may be None on this rank."""
    found: torch.dtype | None = parameter.grad_dtype
    return found or parameter.dtype


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of this rank's part in a row, zeros for None."""
    if parameter.grad is None:
        part, dtype = local_part(parameter.detach()), gradient_dtype(parameter)
        return torch.zeros_like(part, dtype=dtype).reshape(-1)
    return local_part(placed_as(parameter.grad, parameter)).reshape(-1)


def put_gradients(bucket: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Give parameters, this rank's parts of which lie side by side in `flat`, their gradients."""
    parts = [local_part(parameter.detach()) for parameter in bucket]
    pieces = flat.split([part.numel() for part in parts])
    for parameter, part, piece in zip(bucket, parts, pieces, strict=True):
        if parameter.grad is None:
            parameter.grad = with_local(parameter, piece.view_as(part).clone())
        else:
            local_part(parameter.grad).copy_(piece.view_as(part))


def gradient_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split into runs of one dtype and device of about `_BUCKET_BYTES`; the same on every rank."""
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
        # Before the sum, so that the sum of many float16 gradients does not overflow.
        flat.div_(group_size(group))
        collectives.all_reduce_(flat, group, operation="sync_gradients")
        put_gradients(bucket, flat)
