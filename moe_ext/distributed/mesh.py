"""Division of the ranks of a job into data-, context- and expert-parallel groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_ext.distributed._c10d import flat_mesh
from moe_ext.distributed.groups import resolve_group, world_size
from moe_ext.distributed.placement import declare_replicas


class MoEMesh:
    """Ranks as a grid of data, context and expert parallelism.

    The ranks of one ep group share one set of experts; ranks with the same ep_rank hold the same
    experts. The ranks of one cp group share their sequences: each holds a shard of them, and ring
    attention goes round the group. ep is innermost, in one of two arrangements:

    - folded, `dp * ep` ranks: rank = dp_rank * ep + ep_rank, and each `cp` consecutive ranks are a
      cp group. Attention and experts use the same ranks in turn, so both groups may be as large as
      the job; either may hold several of the other.
    - beside each other, `dp * cp * ep` ranks: rank = (dp_rank * cp + cp_rank) * ep + ep_rank. The
      ranks of an ep group hold the same shard of different sequences.

    Which one follows from the number of ranks; with cp = 1 they are the same, and every rank has
    data of its own. Construct it on all ranks, after `torch.distributed.init_process_group`; a job
    of one process needs no process group.

    Args:
        dp: what the others leave: expert-parallel groups, or with cp beside ep, pairs of the two.
        ep: ranks of each expert-parallel group.
        tp: tensor parallelism, 1 in this version.
        cp: ranks of each context-parallel group.
        pp: pipeline parallelism, 1 in this version.
        etp: tensor parallelism of the experts, 1 in this version.

    Attributes:
        dp_size: dp.
        ep_size: ep.
        cp_size: cp.
        data_size: number of cp groups: that many different batches make a step.
        dp_rank: this rank's index along dp.
        ep_rank: rank in the expert-parallel group.
        cp_rank: rank in the context-parallel group.
        data_rank: index of this rank's cp group: which of the batches it works on.
        ep_group: expert-parallel process group; None without torch.distributed.
        cp_group: context-parallel process group; None with cp = 1.
        device_mesh: DeviceMesh with dimensions "dp" and "ep", or with cp beside ep "dp", "cp" and
            "ep"; None without torch.distributed.
        world_mesh: DeviceMesh of one dimension with all ranks; None without torch.distributed.
        replica_mesh: DeviceMesh of one dimension with the ranks that hold the experts of this one,
            itself included; None without torch.distributed.
        data_mesh: DeviceMesh with dimensions "data" and "cp" over the same ranks, where cp is
            folded; None otherwise, and with cp = 1.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1 or not supported, or the number of ranks fits neither
            arrangement.
    """

    def __init__(
        self, *, dp: int = 1, ep: int = 1, tp: int = 1, cp: int = 1, pp: int = 1, etp: int = 1
    ) -> None:
        sizes = {"dp": dp, "ep": ep, "cp": cp, "tp": tp, "pp": pp, "etp": etp}
        for name, size in sizes.items():
            # A quotient of numbers of ranks is a float.
            if not isinstance(size, int):
                raise TypeError(f"MoEMesh: expected {name} to be an int, got {size!r}")
        for name, size in (("dp", dp), ("ep", ep), ("cp", cp)):
            if size < 1:
                raise ValueError(f"MoEMesh: expected {name} to be at least 1, got {size}")
        for name, size in (("tp", tp), ("pp", pp), ("etp", etp)):
            if size != 1:
                raise ValueError(f"MoEMesh: expected {name} to be 1 in this version, got {size}")
        ranks = world_size()
        folded = dp * ep == ranks and ranks % cp == 0
        if not folded and dp * cp * ep != ranks:
            product = "dp * ep" if cp == 1 else "dp * cp * ep, or dp * ep with cp a divisor,"
            got = f"{dp} * {ep}" if cp == 1 else f"dp {dp}, cp {cp}, ep {ep}"
            raise ValueError(
                f"MoEMesh: expected {product} to be the number of ranks, {ranks}, got {got}"
            )
        self.dp_size, self.ep_size, self.cp_size = dp, ep, cp
        self.data_size = ranks // cp
        self.ep_group: ProcessGroup | None = None
        self.cp_group: ProcessGroup | None = None
        self.device_mesh: DeviceMesh | None = None
        self.world_mesh: DeviceMesh | None = None
        self.replica_mesh: DeviceMesh | None = None
        self.data_mesh: DeviceMesh | None = None
        rank = 0
        if dist.is_available() and dist.is_initialized():
            rank = dist.get_rank()
            self._make_groups(folded)
        outer, self.ep_rank = divmod(rank, ep)
        if folded:
            self.dp_rank, (self.data_rank, self.cp_rank) = outer, divmod(rank, cp)
        else:
            self.dp_rank, self.cp_rank = divmod(outer, cp)
            self.data_rank = self.dp_rank * ep + self.ep_rank

    def _make_groups(self, folded: bool) -> None:
        on_cuda = torch.cuda.is_available() and dist.get_backend() == "nccl"
        device_type = "cuda" if on_cuda else "cpu"
        sizes = {"dp": self.dp_size, "ep": self.ep_size}
        if not folded:
            sizes = {"dp": self.dp_size, "cp": self.cp_size, "ep": self.ep_size}
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.device_mesh = mesh
        self.ep_group = mesh.get_group("ep")
        world = resolve_group(None, "MoEMesh")
        assert world is not None
        self.world_mesh = DeviceMesh.from_group(world, device_type)
        self.replica_mesh = mesh["dp"] if folded else flat_mesh(mesh["dp", "cp"])
        grid = mesh.mesh.view(-1, self.ep_size).tolist()
        alone = len(grid) == 1
        declare_replicas(self.ep_group, None if alone else self.replica_mesh.get_group(), grid)
        if self.cp_size == 1:
            return
        if folded:
            shape = (self.data_size, self.cp_size)
            self.data_mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "cp"))
            mesh = self.data_mesh
        self.cp_group = mesh.get_group("cp")

    def __repr__(self) -> str:
        cp = f", cp={self.cp_size}" if self.cp_size > 1 else ""
        cp_rank = f", cp_rank={self.cp_rank}" if self.cp_size > 1 else ""
        return (
            f"MoEMesh(dp={self.dp_size}, ep={self.ep_size}{cp}, dp_rank={self.dp_rank}, "
            f"ep_rank={self.ep_rank}{cp_rank})"
        )
