"""FSDP2 for models with expert-parallel layers.

`fully_shard` shards what it finds on each rank, and takes it for the same on all ranks of its mesh.
So experts want a mesh of the ranks that hold the same ones, and everything else one of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import nn

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

# Share of a parameter's elements, in messages.
_MOST_PADDING = 0.01


def fully_shard(module: nn.Module, mesh: MoEMesh, **options: Any) -> FSDPModule:
    """Shard a module by FSDP2, its experts between the ranks that hold the same ones.

    As `torch.distributed.fsdp.fully_shard`: call it for the blocks of a model, then for the model.
    For each it is the same as::

        fully_shard(block.moe.experts, mesh=mesh.replica_mesh, **options)
        fully_shard(block, mesh=mesh.world_mesh, **options)

    Layers that `parallelize_module` has divided over `mesh.data_mesh["tp"]` are sharded once more,
    each over the ranks that hold the same shards.

    Gradients become those of the mean over all ranks of the local losses: no `sync_gradients` is
    needed. Where the ranks that share them do not divide the experts, these are sharded along the
    next dimension that they divide, since FSDP2 would pad the first: six experts over four ranks as
    eight, in every message.

    Args:
        module: holds layers with `ep_group=mesh.ep_group`, or none.
        mesh: of the job.
        options: of torch's function, such as `mp_policy` and `reshard_after_forward`; used for
            experts and for the rest.

    Returns:
        The module.

    Raises:
        ValueError: torch.distributed is not initialised, or experts lie over another group; nothing
            is sharded.

    Reference: Liang et al., TorchTitan, 2024 (arXiv 2410.06511), where experts are sharded so.
    """
    # Not at the top: FSDP takes a second to import.
    from torch.distributed import fsdp

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
            # torch 2.11 refuses lists of modules, with a forward pass of their own or without.
            for expert in wrapped:
                fsdp.fully_shard(expert, **of_experts)
    divided = [] if mesh.tp_size == 1 else list(_outermost(module, _tensor_parallel(module, mesh)))
    for wrapped in divided:
        assert mesh.data_mesh is not None
        fsdp.fully_shard(wrapped, mesh=flat_mesh(mesh.data_mesh["data", "cp"]), **options)
    if module in experts or module in divided:
        return cast("FSDPModule", module)
    # On one rank all experts are held by all, and are wrapped with the rest.
    dim = _dim_to_shard(mesh.world_mesh.size(), held)
    rest = {"mesh": mesh.world_mesh, "shard_placement_fn": dim, **options}
    return fsdp.fully_shard(module, **rest)


def _tensor_parallel(module: nn.Module, mesh: MoEMesh) -> set[int]:
    """Ids of the parameters that torch's tensor parallelism has divided, and FSDP2 has not."""
    assert mesh.tp_group is not None
    ranks = list(group_ranks(mesh.tp_group))
    return {
        id(parameter)
        for parameter in module.parameters()
        if is_dtensor(parameter) and parameter.device_mesh.mesh.tolist() == ranks
    }


def _outermost(module: nn.Module, shards: set[int]) -> Iterator[nn.Module]:
    """Modules with a forward pass that hold nothing but shards, and are not sharded yet."""
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
    """For experts, by the ids of their parameters, the first dimension unless it pads too much."""
    from torch.distributed.tensor import Shard

    def dim_of(parameter: nn.Parameter) -> Shard | None:
        num_experts = local_part(parameter).shape[0] if parameter.dim() else 0
        padded = -num_experts % num_ranks
        if id(parameter) not in experts or padded <= _MOST_PADDING * num_experts:
            return None
        # FSDP2 pads the first dimension alone, and refuses others that the ranks do not divide.
        even = [d for d, size in enumerate(parameter.shape) if d and size % num_ranks == 0]
        return Shard(even[0]) if even else None

    return dim_of
