"""How the ranks of a job split into data-parallel and expert-parallel groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_ext.distributed.groups import world_size


class MoEMesh:
    """Ranks as a grid of `dp x ep`; ep is innermost: rank = dp_rank * ep + ep_rank.

    The ranks of one ep group share one set of experts; ranks with the same ep_rank hold the same
    experts. Every rank sees its own data: dp and ep together are the data parallelism of the dense
    part. Construct it on all ranks, after `torch.distributed.init_process_group`; a job of one
    process needs no process group.

    Args:
        dp: number of expert-parallel groups.
        ep: ranks of each expert-parallel group.
        tp: tensor parallelism, 1 in this version.
        cp: context parallelism, 1 in this version.
        pp: pipeline parallelism, 1 in this version.
        etp: tensor parallelism of the experts, 1 in this version.

    Attributes:
        dp_size: dp.
        ep_size: ep.
        dp_rank: index of this rank's expert-parallel group.
        ep_rank: rank in the expert-parallel group.
        ep_group: expert-parallel process group; None without torch.distributed.
        device_mesh: 2-D DeviceMesh with dimensions "dp" and "ep"; None without torch.distributed.

    Raises:
        ValueError: a size is below 1 or not supported, or dp * ep is not the number of ranks.
    """

    def __init__(
        self, *, dp: int = 1, ep: int = 1, tp: int = 1, cp: int = 1, pp: int = 1, etp: int = 1
    ) -> None:
        for name, size in (("dp", dp), ("ep", ep)):
            if size < 1:
                raise ValueError(f"MoEMesh: expected {name} to be at least 1, got {size}")
        for name, size in (("tp", tp), ("cp", cp), ("pp", pp), ("etp", etp)):
            if size != 1:
                raise ValueError(f"MoEMesh: expected {name} to be 1 in this version, got {size}")
        ranks = world_size()
        if dp * ep != ranks:
            raise ValueError(
                f"MoEMesh: expected dp * ep to be the number of ranks, {ranks}, got {dp} * {ep}"
            )
        self.dp_size = dp
        self.ep_size = ep
        self.ep_group: ProcessGroup | None = None
        self.device_mesh: DeviceMesh | None = None
        rank = 0
        if dist.is_available() and dist.is_initialized():
            rank = dist.get_rank()
            on_cuda = torch.cuda.is_available() and dist.get_backend() == "nccl"
            device_type = "cuda" if on_cuda else "cpu"
            self.device_mesh = init_device_mesh(device_type, (dp, ep), mesh_dim_names=("dp", "ep"))
            self.ep_group = self.device_mesh.get_group("ep")
        self.dp_rank, self.ep_rank = divmod(rank, ep)

    def __repr__(self) -> str:
        return (
            f"MoEMesh(dp={self.dp_size}, ep={self.ep_size}, dp_rank={self.dp_rank}, "
            f"ep_rank={self.ep_rank})"
        )
