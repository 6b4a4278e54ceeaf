"""FSDP2 for models with expert-parallel layers.

torch's `fully_shard` shards the parameters of each rank over a mesh, and assumes that they are the
same on all ranks of that mesh. Experts therefore need a mesh of the ranks that hold the same
experts. All other parameters need a mesh of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.comm.c10d import flat_mesh
from moe_ext.comm.groups import group_ranks
from moe_ext.distributed.dtensor import is_dtensor, local_part
from moe_ext.distributed.mesh import MoEMesh
from moe_ext.distributed.placement import (
    expert_parameters,
    sharded_parameters,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard

# Largest share of padding in a parameter's messages. Beyond it another dimension is sharded.
_MOST_PADDING = 0.01


def fully_shard(module: nn.Module, mesh: MoEMesh, **options: Any) -> FSDPModule:
    """Shard a module by FSDP2, with its experts sharded over the ranks that hold the same experts.

    Like `torch.distributed.fsdp.fully_shard`, call it for the blocks of a model and then for the
    model. Each call is equivalent to::

        fully_shard(block.moe.experts, mesh=mesh.replica_mesh, **options)
        fully_shard(block, mesh=mesh.world_mesh, **options)

    Layers that `parallelize_module` has divided over `mesh.data_mesh["tp"]` are also sharded over
    the ranks that hold the same tensor-parallel shards.

    Gradients become those of the mean over all ranks of the local losses, so `sync_gradients` is
    not needed. If the number of experts is not a multiple of the number of ranks, experts are
    sharded along the next dimension that is. FSDP2 would pad the first dimension: every message of
    six experts over four ranks would hold eight.

    Args:
        module: module whose layers with experts, if it has any, have `ep_group=mesh.ep_group`.
        mesh: mesh of the job.
        options: options of torch's function, such as `mp_policy` and `reshard_after_forward`. They
            are used for experts and for all other parameters.

    Returns:
        The module.

    Raises:
        TypeError: mesh is a DeviceMesh.
        ValueError: torch.distributed is not initialised, or experts are not divided over
            `mesh.ep_group`. Nothing has been sharded then.

    Reference: Liang et al., TorchTitan, 2024 (arXiv 2410.06511), which shards experts in this way.
    """
    # The import is local because FSDP takes a second to import.
    from torch.distributed import fsdp

    if isinstance(mesh, DeviceMesh):
        raise TypeError(
            "fully_shard: expected mesh to be a MoEMesh, got a DeviceMesh; make one for all calls "
            "by MoEMesh.from_device_mesh(mesh)"
        )
    if mesh.replica_mesh is None or mesh.world_mesh is None:
        raise ValueError(
            "fully_shard: expected mesh to be made after torch.distributed was initialised, got "
            f"{mesh}"
        )
    if mesh.etp_size > 1:
        raise ValueError(f"fully_shard: expected mesh to have etp=1, got {mesh}")
    sharded = sharded_parameters(module)
    for name, (_, place) in sharded.items():
        if place.axis != "ep" or place.group is not mesh.ep_group:
            raise ValueError(
                f"fully_shard: expected {name} to be of experts over mesh.ep_group, got "
                f"{place.axis!r} over another group"
            )
    for name, parameter, group, _ in expert_parameters(module) if mesh.ep_size > 1 else ():
        if group is None and not is_dtensor(parameter):
            raise ValueError(
                f"fully_shard: expected experts to be divided over mesh.ep_group, got {name} with "
                f"all experts on each rank, and a mesh of ep={mesh.ep_size}; call "
                "moe_ext.parallelize(model, mesh) first"
            )
    experts = list(_outermost(module, {id(parameter) for parameter, _ in sharded.values()}))
    held = {id(parameter) for _, parameter, _, _ in expert_parameters(module)}
    dim = _dim_to_shard(mesh.replica_mesh.size(), held)
    of_experts = {"mesh": mesh.replica_mesh, "shard_placement_fn": dim, **options}
    for wrapped in experts:
        try:
            fsdp.fully_shard(wrapped, **of_experts)
        except ValueError:
            if not isinstance(wrapped, nn.ModuleList):
                raise
            # torch 2.11 refuses every ModuleList, even one with a forward method.
            for expert in wrapped:
                fsdp.fully_shard(expert, **of_experts)
    divided = [] if mesh.tp_size == 1 else list(_outermost(module, _tensor_parallel(module, mesh)))
    for wrapped in divided:
        assert mesh.data_mesh is not None
        fsdp.fully_shard(wrapped, mesh=flat_mesh(mesh.data_mesh["data", "cp"]), **options)
    if module in experts or module in divided:
        return cast("FSDPModule", module)
    # With an ep_group of one rank, experts are not divided, and are sharded with the rest here.
    dim = _dim_to_shard(mesh.world_mesh.size(), held)
    rest = {"mesh": mesh.world_mesh, "shard_placement_fn": dim, **options}
    return fsdp.fully_shard(module, **rest)


def _tensor_parallel(module: nn.Module, mesh: MoEMesh) -> set[int]:
    """Return the ids of tensor-parallel parameters that FSDP2 has not sharded yet."""
    assert mesh.tp_group is not None
    ranks = list(group_ranks(mesh.tp_group))
    return {
        id(parameter)
        for parameter in module.parameters()
        if is_dtensor(parameter) and parameter.device_mesh.mesh.tolist() == ranks
    }


def _outermost(module: nn.Module, shards: set[int]) -> Iterator[nn.Module]:
    """Yield the outermost modules with a forward method all of whose parameters are in `shards`.

    Modules that FSDP2 has sharded are left out.
    """
    from torch.distributed.fsdp import FSDPModule

    own = [id(parameter) for parameter in module.parameters()]
    if isinstance(module, FSDPModule) or shards.isdisjoint(own):
        return
    if set(own) <= shards and type(module).forward is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from _outermost(child, shards)


def _dim_to_shard(num_ranks: int, experts: set[int]) -> Callable[[nn.Parameter], Shard | None]:
    """Return the function that chooses the sharded dimension of a parameter, None for the first.

    `experts` holds the ids of expert parameters. They get another dimension if sharding the first
    would need too much padding.
    """
    from torch.distributed.tensor import Shard

    def dim_of(parameter: nn.Parameter) -> Shard | None:
        num_experts = local_part(parameter).shape[0] if parameter.dim() else 0
        padded = -num_experts % num_ranks
        if id(parameter) not in experts or padded <= _MOST_PADDING * num_experts:
            return None
        # FSDP2 pads only the first dimension. It refuses any other that is not a multiple of the
        # number of ranks.
        even = [d for d, size in enumerate(parameter.shape) if d and size % num_ranks == 0]
        return Shard(even[0]) if even else None

    return dim_of
