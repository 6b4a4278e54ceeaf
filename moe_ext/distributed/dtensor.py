"""DTensors of parameters that are divided over ranks.

`torch.distributed.tensor` takes a second to import, so it is imported by who makes a DTensor.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import global_rank, group_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[str | DeviceMesh, DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()


# Whether state dicts hold whole tensors in the place of DTensors, and this rank keeps them.
_keeps_wholes: ContextVar[bool | None] = ContextVar("_keeps_wholes", default=None)


class _MeshOfParts(DeviceMesh):
    """Mesh whose DTensors no rank pickles: its file would hold its own part and be read by all."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _MeshOfParts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "torch.save: expected whole tensors, got this rank's part of one that ranks "
            f"{self.mesh.flatten().tolist()} hold between them; save by "
            "moe_ext.distributed.checkpoint.save or torch.distributed.checkpoint.save on all "
            "ranks, or what moe_ext.distributed.full_state_dict returns on one; run tools that "
            "save by themselves (Accelerate) inside `with "
            "moe_ext.distributed.whole_state_dicts():`, and mix "
            "moe_ext.integrations.huggingface.SavesExperts into a Trainer of transformers"
        )


@contextlib.contextmanager
def whole_state_dicts(keep: bool | None = None) -> Iterator[None]:
    """Have `state_dict()` of models and optimizers hold whole tensors, for tools that save these.

    Inside, it is a collective: all ranks call it, as Accelerate does, and one of them writes what
    it got. Experts, columns of layers, and what optimizers hold of them come as plain tensors on
    the CPU, as one process has them; `load_state_dict` of a job of any number of ranks takes them,
    with or without this. What FSDP2 shards beside them stays a DTensor.

    Args:
        keep: whether this rank gets the tensors, and not empty ones in their place; None is true of
            rank 0 alone.
    """
    token = _keeps_wholes.set(global_rank() == 0 if keep is None else keep)
    try:
        yield
    finally:
        _keeps_wholes.reset(token)


@contextlib.contextmanager
def state_dicts_of_parts() -> Iterator[None]:
    """Undo `whole_state_dicts` inside."""
    token = _keeps_wholes.set(None)
    try:
        yield
    finally:
        _keeps_wholes.reset(token)


def keeps_wholes() -> bool | None:
    """Whether this rank gets whole tensors in state dicts; None outside `whole_state_dicts`."""
    return _keeps_wholes.get()


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor; there is none before someone has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def dtensor_of(
    local: Tensor, group: ProcessGroup, dim: int, table: Sequence[object] = ()
) -> DTensor:
    """The whole of which the ranks of a group hold equal parts along a dimension.

    It shares memory with `local`. Nothing is sent.

    Args:
        local: the part of this rank; a DTensor if others share that part with it.
        group: ranks that hold the parts.
        dim: which parts are equal slices of.
        table: for a DTensor, the meshes of all parts, as nested lists of ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    inner = local.placements if is_dtensor(local) else ()
    shape = torch.Size(n * (group.size() if i == dim else 1) for i, n in enumerate(local.shape))
    mesh = _mesh_of_parts(local, group, table)
    whole = DTensor.from_local(
        local_part(local).contiguous(),
        mesh,
        [Shard(dim), *inner],
        run_check=False,
        shape=shape,
        stride=contiguous_stride(shape),
    )
    # safetensors and Accelerate ask for the memory of what they write; this is their second try.
    whole.storage = mesh.__reduce__  # type: ignore[method-assign]
    return whole


def dtensor_of_shards(
    local: Tensor, group: ProcessGroup, groups: tuple[ProcessGroup, ProcessGroup], cut: int
) -> DTensor:
    """The whole of which the ranks of a group hold equal parts along dimensions 0 and `cut`.

    Args:
        local: the part of this rank.
        group: ranks that hold the parts, those along `cut` next to each other.
        groups: this rank's along dimension 0, and along `cut`.
        cut: a dimension.
    """
    from torch.distributed.tensor import DTensor, Shard

    mesh = _mesh_of_shards(local, group, groups)
    sizes = {0: groups[0].size(), cut: groups[1].size()}
    shape = torch.Size(n * sizes.get(i, 1) for i, n in enumerate(local.shape))
    whole = DTensor.from_local(
        local.contiguous(),
        mesh,
        [Shard(0), Shard(cut)],
        run_check=False,
        shape=shape,
        stride=contiguous_stride(shape),
    )
    whole.storage = mesh.__reduce__  # type: ignore[method-assign]
    return whole


def local_of_shards(
    whole: DTensor, group: ProcessGroup, groups: tuple[ProcessGroup, ProcessGroup], cut: int
) -> Tensor | None:
    """The tensor that `dtensor_of_shards` was given; None for a DTensor of another mesh."""
    from torch.distributed.tensor import Shard

    mesh = _mesh_of_shards(whole, group, groups)
    if whole.device_mesh is not mesh or tuple(whole.placements) != (Shard(0), Shard(cut)):
        return None
    return whole.to_local()


def _mesh_of_shards(
    local: Tensor, group: ProcessGroup, groups: tuple[ProcessGroup, ProcessGroup]
) -> DeviceMesh:
    kind = "cpu" if local.device.type == "meta" else local.device.type
    meshes, key = _meshes.setdefault(group, {}), f"{kind} with shards"
    if key not in meshes:
        ranks = torch.tensor(group_ranks(group)).view(-1, groups[1].size())
        names = ("parts", "shards")
        meshes[key] = DeviceMesh.from_group(list(groups), kind, mesh=ranks, mesh_dim_names=names)
        meshes[key].__class__ = _MeshOfParts
    return meshes[key]


def _mesh_of_parts(local: Tensor, group: ProcessGroup, table: Sequence[object]) -> DeviceMesh:
    inner = local.device_mesh if is_dtensor(local) else None
    # A tensor on the meta device has no memory that a mesh of that kind could tell of.
    kind = "cpu" if local.device.type == "meta" else local.device.type
    meshes, key = _meshes.setdefault(group, {}), kind if inner is None else inner
    if key not in meshes:
        if inner is None:
            mesh = DeviceMesh.from_group(group, kind)
        else:
            mesh = DeviceMesh.from_group(
                [group, *(inner.get_group(axis) for axis in range(inner.ndim))],
                inner.device_type,
                mesh=torch.tensor(table),
                mesh_dim_names=("parts", *(f"shards_{axis}" for axis in range(inner.ndim))),
            )
        mesh.__class__ = _MeshOfParts
        meshes[key] = mesh
    return meshes[key]


def local_of(
    whole: DTensor, like: Tensor, group: ProcessGroup, dim: int, table: Sequence[object] = ()
) -> Tensor | None:
    """The tensor that `dtensor_of` was given; None for a DTensor of another mesh or placement."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = _mesh_of_parts(like, group, table).mesh.tolist()
    if whole.device_mesh.mesh.tolist() != mesh or whole.placements[0] != Shard(dim):
        return None
    if not is_dtensor(like):
        return whole.to_local()
    shape = torch.Size(n // (group.size() if i == dim else 1) for i, n in enumerate(whole.shape))
    return DTensor.from_local(
        whole.to_local(),
        like.device_mesh,
        whole.placements[1:],
        run_check=False,
        shape=shape,
        stride=contiguous_stride(shape),
    )


def divided_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank holds, divided as another one is; itself if that is not divided.

    A dimension that is of another length there stays whole.
    """
    if not is_dtensor(like):
        return tensor
    from torch.distributed.tensor import Replicate, distribute_tensor

    lengths = dict(enumerate(tensor.shape))
    placements = [
        p if lengths.get(getattr(p, "dim", -1)) == like.shape[getattr(p, "dim", 0)] else Replicate()
        for p in like.placements
    ]
    return distribute_tensor(tensor, like.device_mesh, placements, src_data_rank=None)


def map_gathered(
    function: Callable[[Tensor], Tensor], local: Tensor, *, like: Tensor, num_dims: int
) -> Tensor:
    """This rank's part of a function of tensors whose last dimensions it needs whole.

    Args:
        function: of a tensor, to one of its shape.
        local: this rank's part of the argument.
        like: a tensor that is placed as the argument; a plain one needs no message.
        num_dims: the last dimensions, over which parts are gathered where they are divided.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    if not is_dtensor(like):
        return function(local)
    from torch.distributed.tensor import DTensor, Replicate

    mesh, first = like.device_mesh, like.dim() - num_dims
    gathered = [Replicate() if getattr(p, "dim", -1) >= first else p for p in like.placements]
    if gathered == list(like.placements):
        return function(local)

    def placed(part: Tensor, placements: Sequence[Placement]) -> DTensor:
        shape, stride = like.shape, contiguous_stride(like.shape)
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    cut = [group for dim in range(first, like.dim()) for group in sharding_groups(like, [dim])]
    with naming_failed_ranks(cut[0] if cut else None, "optimizer step"):
        whole = placed(local, like.placements).redistribute(placements=gathered).to_local()
    # Cutting sends nothing.
    return placed(function(whole), gathered).redistribute(placements=like.placements).to_local()


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard, which shares memory with the tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A DTensor with the placements of another one on its mesh; sums that are due are made."""
    assert is_dtensor(tensor) and is_dtensor(like)
    return tensor.redistribute(like.device_mesh, like.placements)


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A DTensor as another one, of other shards."""
    from torch.distributed.tensor import DTensor

    assert is_dtensor(like)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def num_shards(tensor: Tensor) -> int:
    """Parts that the ranks of a DTensor's mesh hold between them; 1 for a plain tensor."""
    if not is_dtensor(tensor):
        return 1
    axes = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(i) for i, place in axes if not place.is_replicate())


def without_partials(tensor: Tensor) -> Tensor:
    """The whole tensor instead of sums that are still to be made, if it is a DTensor of such."""
    if is_dtensor(tensor) and any(place.is_partial() for place in tensor.placements):
        return tensor.full_tensor()
    return tensor


def sharding_groups(parameter: Tensor, dims: Collection[int] | None = None) -> list[ProcessGroup]:
    """Groups over which parts of a DTensor are summed, of all or some of its sharded dimensions."""
    if not is_dtensor(parameter):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        # A strided shard (FSDP over tensor parallelism) has a dim too, and is no Shard by type.
        if not placement.is_replicate()
        and mesh.size(axis) > 1
        and (dims is None or getattr(placement, "dim", None) in dims)
    ]
