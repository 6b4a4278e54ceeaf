"""DTensors of parameters that are divided over ranks.

`torch.distributed.tensor` takes a second to import, so it is imported by who makes a DTensor.
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

# Group to the meshes on which it divides experts, or layers, by type of device.
_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[str, DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()


# True if state dicts hold whole tensors in the place of DTensors, and this rank keeps them.
_keeps_wholes: ContextVar[bool | None] = ContextVar("_keeps_wholes", default=None)


@contextlib.contextmanager
def keeping_wholes(keep: bool | None) -> Iterator[None]:
    """Have `keeps_wholes` say so inside."""
    token = _keeps_wholes.set(keep)
    try:
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # torch detaches no DTensor in that mode, as state_dict() does.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield
    finally:
        _keeps_wholes.reset(token)


# Undoes `whole_state_dicts` inside.
state_dicts_of_parts = functools.partial(keeping_wholes, None)


def keeps_wholes() -> bool | None:
    """True if this rank gets whole tensors in state dicts; None outside `whole_state_dicts`."""
    return _keeps_wholes.get()


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """True if a value is a DTensor; there is none before someone has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def warn_of_mixed_groups(caller: str, optimizer: Optimizer) -> None:
    """Warn if an optimizer has DTensors beside tensors in one group on a GPU.

    torch steps through such a group tensor by tensor, on the CPU through all groups by default.
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
    """True for a module whose parameters FSDP2 gathers in its forward pass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def declare_mesh(group: ProcessGroup, mesh: DeviceMesh) -> None:
    """Have experts, or layers, that a group divides lie on a mesh; once for a group.

    Args:
        group: of `Placement`.
        mesh: the group's dimension of a mesh, or its two.
    """
    # `pickle` and `copy` ask an object before its class. The file of one rank would hold its own
    # part, and be read by all.
    mesh.__reduce_ex__ = functools.partial(_refuse_file, mesh)  # type: ignore[method-assign]
    mesh.__deepcopy__ = lambda _memo: mesh  # type: ignore[attr-defined]
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


def _is_declared(mesh: DeviceMesh) -> bool:
    return "__deepcopy__" in vars(mesh)


def is_part(parameter: Tensor) -> bool:
    """True for a parameter that is divided as `Placement` says, not by FSDP2 or another tool."""
    return is_dtensor(parameter) and _is_declared(parameter.device_mesh)


def group_of_mesh(mesh: DeviceMesh) -> ProcessGroup | None:
    """The group whose parts lie on a mesh; None for a mesh that was not declared."""
    if not _is_declared(mesh):
        return None
    return next((g for g, meshes in _meshes.items() if mesh in meshes.values()), None)


def mesh_of(group: ProcessGroup, device: torch.device, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of a group; one of its own, of one dimension, if it is of no `MoEMesh`."""
    # A tensor on the meta device has no memory that a mesh of that kind could tell of.
    kind = small_message_device(group).type if device.type == "meta" else device.type
    meshes = _meshes.setdefault(group, {})
    if kind not in meshes:
        found = next(iter(meshes.values()), None)
        if found is None:
            found = DeviceMesh.from_group(group, kind, mesh_dim_names=names)
        else:  # of tensors on another device
            groups = [found.get_group(axis) for axis in range(found.ndim)]
            found = DeviceMesh.from_group(groups, kind, found.mesh, mesh_dim_names=names)
        declare_mesh(group, found)
    return meshes[kind]


def shard_of(dim: int, pieces: int) -> Placement:
    """Shards along a dimension, of `pieces` that follow each other and are divided each by itself.

    Such as the gates and the ups of a layer, one above the other.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """The DTensor of which this rank holds `local`, and shares memory with it; nothing is sent."""
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
    """The same DTensor, for a state dict: who writes its memory is told what to write instead.

    With `has_pieces` it is of `unflattened`, and who gathers it is told so, too.
    """
    if is_dtensor(whole):
        if has_pieces:
            whole.redistribute = _refuse_gathering  # type: ignore[method-assign]
        # safetensors and Accelerate ask for the memory of what they write; this is their second
        # try.
        mesh = whole.device_mesh
        whole.storage = functools.partial(_refuse_file, mesh)  # type: ignore[method-assign]
    return whole


def unflattened(whole: DTensor, dim: int, pieces: int, *, stacked: bool) -> DTensor:
    """The same tensor with a dimension of `pieces` in front of `dim`, for `state_dict()`.

    `torch.distributed.checkpoint` writes no pieces that are divided each by itself.

    Args:
        whole: divided along `dim` on the last dimension of its mesh.
        dim: of the tensor.
        pieces: their number.
        stacked: each of them is the part of one rank; else each is divided over the ranks.
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
    """The whole tensor, with the dimension of `unflattened`; a collective."""
    from torch.distributed.tensor import Replicate

    *others, last = whole.placements
    dim, pieces = getattr(last, "dim", -1), getattr(last, "split_factor", 1)
    if pieces > 1 and all(getattr(place, "dim", -1) != dim for place in others):
        # torch 2.11 gathers no pieces that are divided each by itself.
        apart = unflattened(whole, dim, pieces, stacked=False)
        return gathered(apart).flatten(dim, dim + 1)
    along = [Replicate()] * whole.device_mesh.ndim
    return type(whole).redistribute(whole, placements=along).to_local()


def flattened(whole: Tensor, dim: int, like: Tensor) -> Tensor:
    """Undo `unflattened`, of a DTensor or of a plain tensor."""
    if not is_dtensor(whole) or not is_dtensor(like):
        return whole.flatten(dim, dim + 1)
    if whole.device_mesh != like.device_mesh:
        return gathered(whole).flatten(dim, dim + 1)
    local = own_part(whole).to_local().flatten(dim, dim + 1)
    return dtensor_of(local, like.device_mesh, like.placements, like.shape)


def own_part(value: DTensor) -> DTensor:
    """ValueError for a DTensor that another rank has pickled: it holds the part of that rank."""
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
    # torch refuses the result of an operator, such as a mean of two models.
    return distribute_tensor(tensor.detach(), like.device_mesh, placements, src_data_rank=None)


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
    from torch.distributed.tensor import Replicate

    mesh, first = like.device_mesh, like.dim() - num_dims
    gathered = [Replicate() if getattr(p, "dim", -1) >= first else p for p in like.placements]
    if gathered == list(like.placements):
        return function(local)
    cut = [group for dim in range(first, like.dim()) for group in sharding_groups(like, [dim])]
    parts = dtensor_of(local, mesh, like.placements, like.shape)
    with naming_failed_ranks(cut[0] if cut else None, "optimizer step"):
        whole = parts.redistribute(placements=gathered).to_local()
    # Cutting sends nothing.
    result = dtensor_of(function(whole), mesh, gathered, like.shape)
    return result.redistribute(placements=like.placements).to_local()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard, which shares memory with the tensor."""
    if not is_dtensor(tensor):
        return tensor
    # Without a graph `to_local()` would make a view, in four calls more.
    return tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor


def _whole_gradient(parameter: DTensor, grad: Tensor) -> DTensor:
    """The gradient of a DTensor, of which a backward pass has found this rank's part."""
    return _with_layout(grad, parameter._local_tensor.stride(), parameter._spec)


def _with_layout(grad: Tensor, strides: tuple[int, ...], spec: DTensorSpec) -> DTensor:
    """A gradient of the spec, of a part with these strides."""
    if grad.stride() != strides:
        # `.grad` would be made so from it anyway.
        laid = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device)
        grad = laid.copy_(grad)
    if torch.is_grad_enabled():  # create_graph=True
        return _from_local(grad, spec.mesh, spec.placements, spec.shape, spec.stride)
    from torch.distributed.tensor import DTensor

    # The constructor is this behind a switch of torch.compile.
    return DTensor.__new__(DTensor, grad, spec, requires_grad=False)


def _own_gradient(parameter: DTensor) -> tuple[Tensor, Tensor] | None:
    """This rank's parts of `.grad` and of the parameter; None if they are divided in two ways."""
    grad = parameter.grad
    if not is_dtensor(grad) or grad._spec != parameter._spec:
        return None
    return grad._local_tensor, parameter._local_tensor


class _PartInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        # The layout as it is now: `Module.to` may give the parameter another part.
        local: Tensor = parameter._local_tensor
        ctx.layout = local.stride(), parameter._spec
        ctx.set_materialize_grads(False)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> DTensor | None:
        return None if grad is None else _with_layout(grad, *ctx.layout)


def part_in_graph(parameter: DTensor, runtime: Any = None) -> Tensor:
    """This rank's part, with gradients: `to_local()` without the second node of its backward pass.

    Args:
        parameter: requires gradients.
        runtime: `moe_ext._runtime`. Its node, of a leaf, adds products to this rank's part of a
            `.grad` that is there. The engine runs it after all nodes that were recorded later.
    """
    if runtime is not None and parameter.is_leaf:
        local = parameter._local_tensor
        return runtime.part_in_graph(local, parameter, _whole_gradient, _own_gradient)
    # Without what `Function.apply` asks of torch.func, whose transforms refuse it by themselves.
    return super(torch.autograd.Function, _PartInGraph).apply(parameter)


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A DTensor with the placements of another one on its mesh; sums that are due are made.

    A plain tensor comes back as it is.
    """
    if not is_dtensor(tensor) or not is_dtensor(like):
        return tensor
    # The object itself may refuse, see `refusing_files`.
    return type(tensor).redistribute(tensor, like.device_mesh, like.placements)


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A DTensor as another one, of other shards; `local` itself if that is a plain tensor."""
    if not is_dtensor(like):
        return local
    return _from_local(local, like.device_mesh, like.placements, like.shape, like.stride())


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
