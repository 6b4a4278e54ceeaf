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
# Modules of this process that `fully_shard`, or another function like it, has wrapped.
_wrapped = _composable_state._module_state_mapping
# Modules with experts, and the number of wrapped modules in the process when they were checked.
_checked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter that one FSDP module gathers and reduces.

    Attributes:
        owner: the module that holds it, and its name there.
        param: the sharded parameter.
        shard_numel: elements of a rank's shard in the messages, padding included.
        shape: of what the ranks of the messages hold between them: a part, of experts over ranks.
        dim: the dimension that the messages divide.
    """

    owner: nn.Module
    name: str
    param: nn.Parameter
    shard_numel: int
    shape: torch.Size
    dim: int

    @property
    def sharded(self) -> DTensor:
        """The parameter, as what it is."""
        return cast(DTensor, self.param.data)


def _param_groups(module: Any) -> list[Any]:
    """Parameter groups of a module that `fully_shard` has wrapped; an empty list for others."""
    state: Any = _composable_state._get_module_state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def managed_parameters(module: FSDPModule) -> list[ManagedParameter]:
    """Parameters of one FSDP module, in the order of its messages."""
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
    """Names and modules that send messages; one for modules that were wrapped together."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = id(module._get_fsdp_state())
            if state not in seen and _param_groups(module):
                seen.add(state)
                yield name, module


def shard_group(module: FSDPModule) -> ProcessGroup:
    """The ranks that a module's parameters are sharded over."""
    return _param_groups(module)[0].mesh_info.shard_process_group


def replicate_group(module: FSDPModule) -> ProcessGroup | None:
    """The ranks that hold the same shard, where FSDP itself reduces between them."""
    info = _param_groups(module)[0].mesh_info
    return getattr(info, "replicate_process_group", None)


def resharded_over(module: FSDPModule) -> int:
    """Ranks that share the parameters after the forward pass; 1 where each rank keeps them all."""
    info = _param_groups(module)[0].post_forward_mesh_info
    return 1 if info is None else int(info.shard_mesh_size)


def holds_wrapped(model: nn.Module) -> bool:
    """True if a model holds modules that `fully_shard` has wrapped."""
    return len(_wrapped) > 0 and any(_param_groups(module) for module in model.modules())


def reduces_gradients(root: nn.Module) -> bool:
    """True if the backward pass that runs reduces the gradients of a model's wrapped modules."""
    groups = (group for module in root.modules() for group in _param_groups(module))
    return all(group.reduce_grads for group in groups)


def messages_of(module: FSDPModule) -> dict[str, Any]:
    """The objects that send a module's messages, by kind."""
    group = _param_groups(module)[0]
    return {
        "all-gather": getattr(group, "_all_gather_comm", None),
        "reduce-scatter": getattr(group, "_reduce_scatter_comm", None),
        "all-reduce": getattr(group, "_all_reduce_hook", None),
    }


def wrapped_roots() -> list[nn.Module]:
    """The outermost wrapped modules, of those that have begun a forward pass."""
    modules = list(_wrapped)
    states = [_composable_state._get_module_state(module) for module in modules]
    return [m for m, s in zip(modules, states, strict=True) if getattr(s, "_is_root", False)]


def wrapped_parameters(root: nn.Module) -> Iterator[tuple[str, DTensor, Any]]:
    """Every parameter that wrapped modules manage: its name, its shards, and FSDP2's group of it.

    Gathered now or not.
    """
    path_of = {module: f"{path}." if path else "" for path, module in root.named_modules()}
    for module in path_of:
        for group in _param_groups(module):
            for entry in group.fsdp_params:
                name = path_of[entry._module_info.module] + entry._module_info.param_name
                yield name, entry.sharded_param, group


# The parameters of a model that ranks hold between them, and the function of the name of any of its
# parameters: sets of ranks, each of which its mesh has to hold, since gradients are averaged over
# them.
Divided = tuple[Collection[str], Callable[[str], list[set[int]]]]


def check_wrapping(experts: nn.Module, divided_of: Callable[[nn.Module], Divided]) -> None:
    """Refuse meshes of `fully_shard` that mix experts, or that let copies drift apart.

    And divisors of gradients that make those of experts other multiples of a mean than the rest.

    Called before every forward pass of a module with experts: what was wrapped over which ranks is
    known only then. It looks when something was wrapped since the last time.

    Args:
        experts: the module with experts.
        divided_of: tells of a model.

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
    """Refuse a parameter whose gradient is not averaged over all ranks that have one."""
    # Gradients as multiples of the mean over the mesh.
    scale_of = dict[str, float]()
    for name, shards, group in wrapped_parameters(root):
        size, ranks = group.mesh_info.mesh.size(), shards.device_mesh.mesh.flatten().tolist()
        scale_of[name] = size / (group.gradient_divide_factor or size)
        # A hook reduces over more ranks than those of the mesh.
        is_hooked = getattr(group, "_all_reduce_hook", None) is not None
        for needed in () if is_hooked else needed_by(name):
            if not needed <= set(ranks):
                raise ValueError(
                    f"fully_shard: expected the mesh of {name} to have the ranks {sorted(needed)}, "
                    f"over which its gradients are averaged, got ranks {ranks}. {_RECIPE}"
                )
    scales = {scale: name for name, scale in scale_of.items() if name not in divided}
    for name in divided:
        # Gradients of parameters that no wrapped module manages become means.
        scale = scale_of.get(name, 1.0)
        if scales and not any(math.isclose(scale, other) for other in scales):
            other, rest = scales.popitem()
            raise ValueError(
                "fully_shard: expected set_gradient_divide_factor to make gradients of experts the "
                f"multiple of a mean that the others are, got {scale:g} times it for {name} and "
                f"{other:g} times for {rest}; the layer has divided by its number of ranks already"
            )
