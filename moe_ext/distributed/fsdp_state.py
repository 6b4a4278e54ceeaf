"""The only file that reads private attributes of torch's FSDP2."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup, _composable_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

__all__ = ["AllGather", "ReduceScatter"]

_RECIPE = (
    "Wrap with moe_ext.distributed.fully_shard(module, mesh), mesh a MoEMesh; or experts with "
    "torch's fully_shard(layer.experts, mesh=mesh.replica_mesh) first, and then the rest with "
    "mesh=mesh.world_mesh"
)
# All modules of this process that `fully_shard`, or another composable function, has wrapped.
_wrapped = _composable_state._module_state_mapping
# Module to the number of wrapped modules in the process when it was last checked.
_checked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter that one FSDP module gathers and reduces.

    Attributes:
        owner: module that holds the parameter.
        name: name of the parameter in its owner.
        param: the sharded parameter.
        shard_numel: elements of a rank's shard in messages, including padding.
        shape: shape of the unsharded parameter; for experts over ranks, of this rank's part.
        dim: dimension that is sharded.
    """

    owner: nn.Module
    name: str
    param: nn.Parameter
    shard_numel: int
    shape: torch.Size
    dim: int

    @property
    def sharded(self) -> DTensor:
        """The sharded parameter as a DTensor."""
        return cast(DTensor, self.param.data)


def _param_groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a wrapped module; an empty list for other modules."""
    state: Any = _composable_state._get_module_state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def managed_parameters(module: FSDPModule) -> list[ManagedParameter]:
    """Return the parameters of one FSDP module, in the order of its messages."""
    groups = _param_groups(module)
    if len(groups) > 1:
        raise ValueError(
            "fsdp compression: expected a module to have one mesh for all of its parameters, got "
            f"{len(groups)} groups of parameters"
        )
    return [
        ManagedParameter(
            entry._module_info.module,
            entry._module_info.param_name,
            entry.sharded_param,
            entry.padded_sharded_param_size.numel(),
            entry._orig_size,
            entry.fsdp_placement.dim,
        )
        for group in groups
        for entry in group.fsdp_params
    ]


def fsdp_modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    """Yield names and modules that send messages. Modules wrapped together appear once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = id(module._get_fsdp_state())
            if state not in seen and _param_groups(module):
                seen.add(state)
                yield name, module


def shard_group(module: FSDPModule) -> ProcessGroup:
    """Return the group over which the parameters of a module are sharded."""
    return _param_groups(module)[0].mesh_info.shard_process_group


def replicate_group(module: FSDPModule) -> ProcessGroup | None:
    """Return the group with the same shard if FSDP2 reduces over it (HSDP), otherwise None."""
    info = _param_groups(module)[0].mesh_info
    return getattr(info, "replicate_process_group", None)


def resharded_over(module: FSDPModule) -> int:
    """Return the number of ranks over which parameters are sharded after the forward pass.

    1 means that each rank keeps them whole until the backward pass.
    """
    info = _param_groups(module)[0].post_forward_mesh_info
    return 1 if info is None else int(info.shard_mesh_size)


def holds_wrapped(model: nn.Module) -> bool:
    """Return True if a model holds modules that `fully_shard` has wrapped."""
    return len(_wrapped) > 0 and any(_param_groups(module) for module in model.modules())


def reduces_gradients(root: nn.Module) -> bool:
    """Return True if the current backward pass reduces gradients of all wrapped modules."""
    groups = (group for module in root.modules() for group in _param_groups(module))
    return all(group.reduce_grads for group in groups)


def messages_of(module: FSDPModule) -> dict[str, Any]:
    """Return the objects that send the messages of a module, by kind of message."""
    group = _param_groups(module)[0]
    return {
        "all-gather": getattr(group, "_all_gather_comm", None),
        "reduce-scatter": getattr(group, "_reduce_scatter_comm", None),
        "all-reduce": getattr(group, "_all_reduce_hook", None),
    }


def wrapped_roots() -> list[nn.Module]:
    """Return the outermost wrapped modules that have begun a forward pass."""
    modules = list(_wrapped)
    states = [_composable_state._get_module_state(module) for module in modules]
    return [m for m, s in zip(modules, states, strict=True) if getattr(s, "_is_root", False)]


def wrapped_parameters(root: nn.Module) -> Iterator[tuple[str, DTensor, Any]]:
    """Yield name, sharded parameter and FSDP2's parameter group of every managed parameter.

    The sharded parameter is yielded even while the module holds the gathered one.
    """
    path_of = {module: f"{path}." if path else "" for path, module in root.named_modules()}
    for module in path_of:
        for group in _param_groups(module):
            for entry in group.fsdp_params:
                name = path_of[entry._module_info.module] + entry._module_info.param_name
                yield name, entry.sharded_param, group


# Names of the divided parameters of a model, and a function from the name of any parameter to sets
# of ranks. Its mesh must contain each of these sets, since gradients are averaged over them.
Divided = tuple[Collection[str], Callable[[str], list[set[int]]]]


def check_wrapping(experts: nn.Module, divided_of: Callable[[nn.Module], Divided]) -> None:
    """Refuse meshes of `fully_shard` that mix different experts, or that let copies drift apart.

    Also refuse gradient divisors that give experts another multiple of the mean gradient than other
    parameters.

    A module with experts calls this before every forward pass, because only then all wrapping is
    done. The check runs only if modules were wrapped since the last call.

    Args:
        experts: the module with experts.
        divided_of: function from a model to its `Divided`.

    Raises:
        ValueError: on every rank, before the first step.
    """
    count = len(_wrapped)
    if count == 0 or _checked.get(experts) == count:
        return
    for root in wrapped_roots():
        if _checked.get(root) != count and any(module is experts for module in root.modules()):
            _check_meshes(root, *divided_of(root))
            _checked[root] = count
    _checked[experts] = count


def _check_meshes(
    root: nn.Module, divided: Collection[str], needed_by: Callable[[str], list[set[int]]]
) -> None:
    """Raise ValueError if a gradient is not averaged over all ranks that compute a part of it."""
    # Name to the factor between the reduced gradient and the mean over the mesh.
    scale_of = dict[str, float]()
    for name, shards, group in wrapped_parameters(root):
        size, ranks = group.mesh_info.mesh.size(), shards.device_mesh.mesh.flatten().tolist()
        scale_of[name] = size / (group.gradient_divide_factor or size)
        # With a hook, gradients are reduced over further ranks than those of the mesh.
        is_hooked = getattr(group, "_all_reduce_hook", None) is not None
        for needed in () if is_hooked else needed_by(name):
            if not needed <= set(ranks):
                raise ValueError(
                    f"fully_shard: expected the mesh of {name} to have the ranks {sorted(needed)}, "
                    f"over which its gradients are averaged, got ranks {ranks}. {_RECIPE}"
                )
    scales = {scale: name for name, scale in scale_of.items() if name not in divided}
    for name in divided:
        # A divided parameter that FSDP2 does not manage gets the mean gradient.
        scale = scale_of.get(name, 1.0)
        if scales and not any(math.isclose(scale, other) for other in scales):
            other, rest = scales.popitem()
            raise ValueError(
                "fully_shard: expected set_gradient_divide_factor to make gradients of experts the "
                f"multiple of a mean that the others are, got {scale:g} times it for {name} and "
                f"{other:g} times for {rest}; the layer has divided by its number of ranks already"
            )
