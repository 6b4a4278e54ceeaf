"""DTensors of parameters that are divided over ranks.

`torch.distributed.tensor` takes a second to import, so it is imported by who makes a DTensor.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[str, DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()


class _MeshOfParts(DeviceMesh):
    """Mesh whose DTensors no rank pickles: its file would hold its own part and be read by all."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _MeshOfParts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "torch.save: expected whole tensors, got this rank's part of one that ranks "
            f"{self.mesh.flatten().tolist()} hold between them; save by "
            "moe_ext.distributed.checkpoint.save or torch.distributed.checkpoint.save on all "
            "ranks, or what moe_ext.distributed.full_state_dict returns on one"
        )


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor; there is none before someone has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def dtensor_of(local: Tensor, group: ProcessGroup, dim: int) -> DTensor:
    """The whole of which the ranks of a group hold equal parts along a dimension.

    It shares memory with `local`. Nothing is sent.
    """
    from torch.distributed.tensor import DTensor, Shard

    meshes = _meshes.setdefault(group, {})
    kind = local.device.type
    if kind not in meshes:
        # A tensor on the meta device has no memory that a mesh of that kind could tell of.
        mesh = DeviceMesh.from_group(group, "cpu" if kind == "meta" else kind)
        mesh.__class__ = _MeshOfParts
        meshes[kind] = mesh
    shape = list(local.shape)
    shape[dim] *= group.size()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(),
        meshes[kind],
        [Shard(dim)],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def is_shard_of(value: DTensor, group: ProcessGroup, dim: int) -> bool:
    """Whether a DTensor lies over a group as `dtensor_of` makes it."""
    from torch.distributed.tensor import Shard

    mesh = value.device_mesh
    if mesh.ndim != 1 or tuple(value.placements) != (Shard(dim),):
        return False
    return mesh.mesh.tolist() == torch.distributed.get_process_group_ranks(group)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard, which shares memory with the tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


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
