"""DTensors of parameters that are divided over ranks.

`torch.distributed.tensor` takes a second to import. Only functions that make DTensors import it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.groups import global_rank, small_message_device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement

# Group to type of device to the mesh on which parameters of the group are DTensors.
_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[str, DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()


# Attribute of a mesh that `declare_mesh` was called for: weak reference to its group. Equality of
# meshes does not serve, since a user may make an equal mesh.
_GROUP = "_moe_ext_group"

# None: state dicts hold DTensors. Otherwise state dicts hold whole tensors, on ranks with True, or
# empty tensors, on ranks with False.
_keeps_wholes: ContextVar[bool | None] = ContextVar("_keeps_wholes", default=None)


@contextlib.contextmanager
def keeping_wholes(keep: bool | None) -> Iterator[None]:
    """Context that sets the result of `keeps_wholes`."""
    token = _keeps_wholes.set(keep)
    try:
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # `state_dict()` detaches parameters, which torch cannot do with a DTensor in
                # inference mode.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield
    finally:
        _keeps_wholes.reset(token)


# Context inside `whole_state_dicts` in which state dicts hold DTensors again.
state_dicts_of_parts = functools.partial(keeping_wholes, None)


def keeps_wholes() -> bool | None:
    """Return True if state dicts of this rank hold whole tensors; None if they hold DTensors."""
    return _keeps_wholes.get()


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return True for a DTensor. Cheap: if the module of DTensor is not loaded, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def warn_of_mixed_groups(caller: str, optimizer: Optimizer) -> None:
    """Warn if a parameter group on a GPU mixes DTensors with plain tensors.

    torch then updates the group in a loop over tensors, instead of with its foreach kernels. On the
    CPU the loop is the default for every group.
    """
    for group in optimizer.param_groups:
        on_gpu = [p for p in group["params"] if p.device.type != "cpu"]
        if len({is_dtensor(p) for p in on_gpu}) > 1:
            warnings.warn(
                f"{caller}: expected groups of {type(optimizer).__name__} to hold experts over "
                "ranks or other parameters, got both in one, which torch steps through tensor by "
                "tensor; moe_ext.distributed.expert_param_groups(model) has a group for each",
                stacklevel=3,
            )
            return


def is_fsdp(module: nn.Module) -> bool:
    """Return True for a module that FSDP2 has wrapped."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def declare_mesh(group: ProcessGroup, mesh: DeviceMesh) -> None:
    """Set the mesh on which the parameters that a group divides are DTensors; once for a group.

    Args:
        group: group of a `Placement`.
        mesh: mesh of the group's ranks, of one dimension, or of two with etp.
    """
    # `pickle` and `copy` look for these methods on the object before its class. Pickling is refused
    # because the file would hold this rank's part only, and every rank would read it.
    mesh.__reduce_ex__ = functools.partial(_refuse_file, mesh)  # type: ignore[method-assign]
    mesh.__deepcopy__ = lambda _memo: mesh  # type: ignore[attr-defined]
    setattr(mesh, _GROUP, weakref.ref(group))
    _meshes.setdefault(group, {})[mesh.device_type] = mesh


def _refuse_file(mesh: DeviceMesh, *_protocol: object) -> NoReturn:
    raise TypeError(
        "torch.save: expected whole tensors, got this rank's part of one that ranks "
        f"{mesh.mesh.flatten().tolist()} hold between them; save by "
        "moe_ext.distributed.checkpoint.save or torch.distributed.checkpoint.save on all ranks, or "
        "what moe_ext.distributed.full_state_dict returns on one; run tools that save by "
        "themselves (Accelerate) inside `with moe_ext.distributed.whole_state_dicts(optimizer):`, "
        "and mix moe_ext.integrations.huggingface.SavesExperts into a Trainer of transformers"
    )


def is_part(parameter: Tensor) -> bool:
    """Return True for a parameter that a `Placement` divides, rather than FSDP2 or another tool."""
    return is_dtensor(parameter) and hasattr(parameter.device_mesh, _GROUP)


def group_of_mesh(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return the group for which a mesh was declared, or None."""
    group: Callable[[], ProcessGroup | None] = getattr(mesh, _GROUP, lambda: None)
    return group()


def mesh_of(group: ProcessGroup, device: torch.device, names: tuple[str, ...]) -> DeviceMesh:
    """Return the declared mesh of a group, or declare a mesh of one dimension."""
    # A mesh needs a real type of device. For meta tensors it is that of the group's messages.
    kind = small_message_device(group).type if device.type == "meta" else device.type
    meshes = _meshes.setdefault(group, {})
    if kind not in meshes:
        found = next(iter(meshes.values()), None)
        if found is None:
            found = DeviceMesh.from_group(group, kind, mesh_dim_names=names)
        else:  # the declared mesh is for another type of device
            groups = [found.get_group(axis) for axis in range(found.ndim)]
            found = DeviceMesh.from_group(groups, kind, found.mesh, mesh_dim_names=names)
        declare_mesh(group, found)
    return meshes[kind]


def shard_of(dim: int, pieces: int) -> Placement:
    """Return the placement that shards each of `pieces` equal pieces of a dimension by itself.

    For example, the rows of a weight may hold all gates followed by all ups. Then pieces is 2.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """Return the DTensor whose part on this rank is `local`. Shares its memory; sends nothing."""
    strides = torch.empty(shape, device="meta").stride()
    return _from_local(local.contiguous(), mesh, placements, shape, strides)


def _from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    strides: tuple[int, ...],
) -> DTensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def refusing_files(whole: Tensor, *, has_pieces: bool) -> Tensor:
    """Make a DTensor of a state dict raise an error when a tool writes its local memory to a file.

    With `has_pieces`, for a result of `unflattened`, gathering it raises an error as well.
    """
    if is_dtensor(whole):
        if has_pieces:
            whole.redistribute = _refuse_gathering  # type: ignore[method-assign]
        # safetensors and Accelerate read the memory of a tensor that they write. They call
        # `storage()` after `untyped_storage()` has failed.
        mesh = whole.device_mesh
        whole.storage = functools.partial(_refuse_file, mesh)  # type: ignore[method-assign]
    return whole


def unflattened(whole: DTensor, dim: int, pieces: int, *, stacked: bool) -> DTensor:
    """Return the tensor with its dimension `dim` split into [pieces, ...], for `state_dict()`.

    `torch.distributed.checkpoint` cannot write a dimension whose pieces are sharded one by one.

    Args:
        whole: DTensor that is sharded along `dim` on the last dimension of its mesh.
        dim: dimension to split.
        pieces: number of pieces.
        stacked: each piece is the part of one rank. If False, each piece is sharded over the ranks.
    """
    from torch.distributed.tensor import Shard

    sizes = list(whole.shape)
    sizes[dim : dim + 1] = [pieces, sizes[dim] // pieces]
    along: list[Placement] = []
    for place in whole.placements[:-1]:
        at = getattr(place, "dim", -1)
        along.append(Shard(at + (at > dim or (stacked and at == dim))) if at >= 0 else place)
    along.append(Shard(dim + (not stacked)))
    local = whole.to_local().unflatten(dim, (1 if stacked else pieces, -1))
    return dtensor_of(local, whole.device_mesh, along, torch.Size(sizes))


def _refuse_gathering(*_placements: object, **_options: object) -> DTensor:
    raise ValueError(
        "state_dict: expected tensors of experts to stay in parts, since what ranks hold has a "
        "dimension more than the whole, got a call that gathers them (full_tensor, or "
        "get_model_state_dict(full_state_dict=True)); take moe_ext.distributed.full_state_dict"
    )


def gathered(whole: DTensor) -> Tensor:
    """Return the whole tensor, in the form of `unflattened`; a collective."""
    from torch.distributed.tensor import Replicate

    *others, last = whole.placements
    dim, pieces = getattr(last, "dim", -1), getattr(last, "split_factor", 1)
    if pieces > 1 and all(getattr(place, "dim", -1) != dim for place in others):
        # torch 2.11 cannot gather a dimension whose pieces are sharded one by one.
        apart = unflattened(whole, dim, pieces, stacked=False)
        return gathered(apart).flatten(dim, dim + 1)
    along = [Replicate()] * whole.device_mesh.ndim
    return type(whole).redistribute(whole, placements=along).to_local()


def flattened(whole: Tensor, dim: int, like: Tensor) -> Tensor:
    """Undo `unflattened`, for a DTensor or a plain tensor."""
    if not is_dtensor(whole) or not is_dtensor(like):
        return whole.flatten(dim, dim + 1)
    if whole.device_mesh != like.device_mesh:
        return gathered(whole).flatten(dim, dim + 1)
    local = own_part(whole).to_local().flatten(dim, dim + 1)
    return dtensor_of(local, like.device_mesh, like.placements, like.shape)


def own_part(value: DTensor) -> DTensor:
    """Return a DTensor if it holds this rank's part. ValueError if another rank has pickled it."""
    mesh = value.device_mesh
    here = (mesh.mesh == global_rank()).nonzero()
    if here.numel() and tuple(here[0].tolist()) != tuple(mesh.get_coordinate() or ()):
        raise ValueError(
            "load_state_dict: expected whole tensors or this rank's parts, got the part of another "
            f"rank, of shape {tuple(value.to_local().shape)} of {tuple(value.shape)}; save by "
            "moe_ext.distributed.checkpoint.save or torch.distributed.checkpoint.save"
        )
    return value


def divided_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Distribute a tensor that every rank holds in full, with the placements of `like`.

    Returns the tensor unchanged if `like` is plain. A dimension whose length differs from that of
    `like` is not sharded.
    """
    if not is_dtensor(like):
        return tensor
    from torch.distributed.tensor import Replicate, distribute_tensor

    lengths = dict(enumerate(tensor.shape))
    placements = [
        p if lengths.get(getattr(p, "dim", -1)) == like.shape[getattr(p, "dim", 0)] else Replicate()
        for p in like.placements
    ]
    # The tensor is detached, because `distribute_tensor` refuses tensors with an autograd history.
    return distribute_tensor(tensor.detach(), like.device_mesh, placements, src_data_rank=None)


def map_gathered(
    function: Callable[[Tensor], Tensor], local: Tensor, *, like: Tensor, num_dims: int
) -> Tensor:
    """Apply a function that needs the last dimensions of its argument whole.

    Args:
        function: function of a tensor, which returns a tensor of the same shape.
        local: this rank's part of the argument.
        like: tensor with the placements of the argument. If it is plain, nothing is sent.
        num_dims: number of last dimensions over which shards are gathered first.

    Returns:
        This rank's part of the result.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    if not is_dtensor(like):
        return function(local)
    from torch.distributed.tensor import Replicate

    mesh, first = like.device_mesh, like.dim() - num_dims
    gathered = [Replicate() if getattr(p, "dim", -1) >= first else p for p in like.placements]
    if gathered == list(like.placements):
        return function(local)
    cut = [group for dim in range(first, like.dim()) for group in sharding_groups(like, [dim])]
    parts = dtensor_of(local, mesh, like.placements, like.shape)
    with naming_failed_ranks(cut[0] if cut else None, "optimizer step"):
        whole = parts.redistribute(placements=gathered).to_local()
    # Sharding a replicated result is local and sends nothing.
    result = dtensor_of(function(whole), mesh, gathered, like.shape)
    return result.redistribute(placements=like.placements).to_local()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares memory with the tensor."""
    if not is_dtensor(tensor):
        return tensor
    # Without a graph the local tensor is read directly, which saves the four calls of `to_local()`.
    return tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor


def _whole_gradient(parameter: DTensor, grad: Tensor) -> DTensor:
    """Return the gradient of a DTensor as a DTensor, from the gradient of this rank's part."""
    return _with_layout(grad, parameter._local_tensor.stride(), parameter._spec)


def _with_layout(grad: Tensor, strides: tuple[int, ...], spec: DTensorSpec) -> DTensor:
    """Return a gradient DTensor with this spec, whose local tensor has these strides."""
    if grad.stride() != strides:
        # Autograd would copy the gradient to the strides of the parameter when it sets `.grad`.
        laid = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device)
        grad = laid.copy_(grad)
    if torch.is_grad_enabled():  # the backward pass runs with create_graph=True
        return _from_local(grad, spec.mesh, spec.placements, spec.shape, spec.stride)
    from torch.distributed.tensor import DTensor

    # `DTensor.__new__` is called directly. The constructor is the same behind a switch that
    # disables torch.compile.
    return DTensor.__new__(DTensor, grad, spec, requires_grad=False)


def _own_gradient(parameter: DTensor) -> tuple[Tensor, Tensor] | None:
    """Return this rank's parts of `.grad` and parameter; None if their placements differ."""
    grad = parameter.grad
    if not is_dtensor(grad) or grad._spec != parameter._spec:
        return None
    return grad._local_tensor, parameter._local_tensor


class _PartInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        # The layout is saved in the forward pass, because `Module.to` may replace the part before
        # the backward pass.
        local: Tensor = parameter._local_tensor
        ctx.layout = local.stride(), parameter._spec
        ctx.set_materialize_grads(False)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> DTensor | None:
        return None if grad is None else _with_layout(grad, *ctx.layout)


def part_in_graph(parameter: DTensor, runtime: Any = None) -> Tensor:
    """Return this rank's part in the graph, as `to_local()` but with one autograd node less.

    Args:
        parameter: DTensor that requires gradients.
        runtime: `moe_ext._runtime`. For a leaf, its autograd node adds weight gradients directly to
            this rank's part of an existing `.grad`. The engine runs the node after all nodes that
            were recorded later.
    """
    if runtime is not None and parameter.is_leaf:
        local = parameter._local_tensor
        return runtime.part_in_graph(local, parameter, _whole_gradient, _own_gradient)
    # The C++ `apply` of the base class is called directly. This skips the checks for torch.func of
    # `Function.apply`; transforms of torch.func refuse DTensors in any case.
    return super(torch.autograd.Function, _PartInGraph).apply(parameter)


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Redistribute a DTensor to the mesh and placements of `like`, which reduces partial sums.

    Returns a plain tensor unchanged.
    """
    if not is_dtensor(tensor) or not is_dtensor(like):
        return tensor
    # The method of the class is called, because `refusing_files` may have replaced that of the
    # object.
    return type(tensor).redistribute(tensor, like.device_mesh, like.placements)


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor with the layout of `like` and the part `local`; `local` if like is plain."""
    if not is_dtensor(like):
        return local
    return _from_local(local, like.device_mesh, like.placements, like.shape, like.stride())


def num_shards(tensor: Tensor) -> int:
    """Return the number of shards of a DTensor over its mesh; 1 for a plain tensor."""
    if not is_dtensor(tensor):
        return 1
    axes = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(i) for i, place in axes if not place.is_replicate())


def without_partials(tensor: Tensor) -> Tensor:
    """Return the full tensor for a DTensor with partial sums; any other tensor unchanged."""
    if is_dtensor(tensor) and any(place.is_partial() for place in tensor.placements):
        return tensor.full_tensor()
    return tensor


def sharding_groups(parameter: Tensor, dims: Collection[int] | None = None) -> list[ProcessGroup]:
    """Return the groups over which a DTensor is sharded, for all or some of its dimensions.

    A sum over the whole tensor has to be reduced over these groups.
    """
    if not is_dtensor(parameter):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        # `_StridedShard`, which FSDP over tensor parallelism makes, has a dim but is no `Shard`.
        if not placement.is_replicate()
        and mesh.size(axis) > 1
        and (dims is None or getattr(placement, "dim", None) in dims)
    ]
