"""Divides the ranks of a job into groups, for attention and for experts on the same ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._checks import check_rule
from moe_ext.comm import c10d
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import (
    global_rank,
    group_size,
    is_initialized,
    resolve_group,
    small_message_device,
)
from moe_ext.distributed.dtensor import declare_mesh
from moe_ext.distributed.replicas import declare_expert_shards, declare_replicas

_ORDER = "tp-cp-ep-dp-pp"
# Names that other libraries give to mesh dimensions of data parallelism: ranks along them have
# different batches, or other copies of the parameters.
_DATA_NAMES = {"dp", "data", "dp_replicate", "dp_shard", "fsdp", "edp", "efsdp"}
# Axis to the thing that the ranks of one group along it share, for `explain`.
_SHARED = {
    "stage": "a pipeline stage",
    "pp": "a pipeline",
    "tp": "the layers, by shards (tp)",
    "cp": "a sequence (cp)",
    "dense": "copies of the dense part",
    "ep": "a set of experts (ep)",
    "etp": "each expert, by shards (etp)",
    "edp": "copies of experts (edp)",
}


class MoEMesh:
    """Ranks as two grids, one for attention and one for experts.

    The ranks are divided into `pp` stages. The ranks of a stage form two grids: data x cp x tp for
    attention, and edp x ep x etp for experts. Both grids cover the same ranks. The last axis
    changes fastest, as in Megatron and torchtitan: a rank is `((pp_rank * data + data_rank) * cp +
    cp_rank) * tp + tp_rank`, and also `((pp_rank * edp + edp_rank) * ep + ep_rank) * etp +
    etp_rank`.

    Ranks of one ep group hold one set of experts between them; ranks of one edp group hold the same
    experts. Ranks of one cp group hold shards of the same sequences; ranks of one tp group hold
    shards of the same layers. The sizes data and edp follow from the number of ranks and the other
    sizes, and `dp` must equal one of them.

    A third arrangement, called cp beside ep, has `dp * cp * ep` ranks in a stage. There a rank is
    `(dp_rank * cp + cp_rank) * ep + ep_rank`, and the ranks of an ep group hold the same shard of
    different sequences.

    Construct it on all ranks, after `torch.distributed.init_process_group`. A job of one process
    needs no process group. Each rank makes only the groups that it belongs to.

    Args:
        dp: number of copies of the experts (edp), or of different batches (data). With cp beside
            ep, the number of ranks of a stage divided by `cp * ep`.
        ep: number of sets of whole experts in an expert-parallel group, each on `etp` ranks.
        tp: number of ranks of a tensor-parallel group.
        cp: number of ranks of a context-parallel group.
        pp: number of pipeline stages.
        etp: number of ranks that share each expert, by shards of its ffn dimension.
        order: order of the axes, the one that changes fastest first, as in Megatron. The place of
            tp holds for etp as well, and the place of dp for edp.

    Attributes:
        dp_size: dp.
        ep_size: ep.
        tp_size: tp.
        cp_size: cp.
        pp_size: pp.
        etp_size: etp.
        edp_size: number of ranks with the same experts.
        data_size: number of different batches in a step.
        dp_rank: index of this rank along dp.
        ep_rank: index of this rank's experts.
        tp_rank: rank in the tensor-parallel group.
        cp_rank: rank in the context-parallel group.
        pp_rank: stage of this rank.
        etp_rank: index of this rank's shard of the experts.
        edp_rank: index of this rank's copy of the experts.
        data_rank: index of this rank's batch.
        ep_group: ep * etp ranks that share one set of experts; None without torch.distributed.
        etp_group: ranks of `ep_group` that share each expert; None with etp = 1.
        cp_group: context-parallel process group; None with cp = 1.
        tp_group: tensor-parallel process group; None with tp = 1.
        pp_group: ranks of one pipeline, in order of stages; None with pp = 1.
        stage_group: all ranks of this rank's stage; None without torch.distributed.
        device_mesh: DeviceMesh with dimensions "edp" and "ep", with etp "edp", "ep" and "etp",
            or with cp beside ep "dp", "cp" and "ep", of this stage; None without torch.distributed.
        data_mesh: DeviceMesh of this stage with dimensions "data" and "cp", with tp "data", "cp"
            and "tp". None with cp beside ep, with cp = tp = 1, or without torch.distributed.
        world_mesh: DeviceMesh of one dimension, "fsdp", with all ranks of this stage; None without
            torch.distributed.
        replica_mesh: DeviceMesh of one dimension with the ranks that hold the same experts as this
            rank, including this rank; None without torch.distributed.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1 or not supported, the number of ranks fits no arrangement, or
            `order` gives attention and experts different stages.
        RuntimeError: WORLD_SIZE says that a launcher started several processes, and
            `torch.distributed.init_process_group` has not run.

    Reference: Liu et al., MoE Parallel Folding, 2025 (arXiv 2504.14960).
    """

    def __init__(
        self,
        *,
        dp: int = 1,
        ep: int = 1,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        etp: int = 1,
        order: str = _ORDER,
    ) -> None:
        sizes = {"dp": dp, "ep": ep, "cp": cp, "tp": tp, "pp": pp, "etp": etp}
        world = resolve_group(None, "MoEMesh")
        # The other ranks of a "fake" process group do not exist, so nothing can be compared.
        is_fake = world is not None and dist.get_backend(world) == "fake"
        with Agreement("MoEMesh", world, validate=not is_fake) as agreement:
            beside = _check_sizes(sizes, order, group_size(world))
            agreement.compare({"options": {**sizes, "order": order}})
        ranks = group_size(world)
        stage = ranks // pp
        if beside and dp * ep != stage:
            grid = torch.arange(ranks, device="cpu").view(pp, dp, cp, ep)
            attention = grid.transpose(2, 3).reshape(pp, dp * ep, cp, 1)
            self._lay_out(attention, grid.view(pp, dp * cp, ep, 1), dp, beside=True)
            return
        dense = {"tp": tp, "cp": cp, "ep": 1, "dp": stage // (cp * tp), "pp": pp}
        spread = {"tp": etp, "cp": 1, "ep": ep, "dp": stage // (ep * etp), "pp": pp}
        self._lay_out(
            _grid(dense, order, ("pp", "dp", "cp", "tp")),
            _grid(spread, order, ("pp", "dp", "ep", "tp")),
            dp,
        )

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> MoEMesh:
        """Make the mesh of a job that has a DeviceMesh, such as torchtitan's, and use its groups.

        Args:
            mesh: mesh of all ranks, with dimensions named "pp", "cp", "tp", "ep", or after data
                parallelism: "dp", "data", "dp_replicate", "dp_shard", "fsdp". Ranks along "ep" have
                different data.
            experts: mesh of the same ranks for experts, with dimensions "pp", "ep" and "edp",
                "efsdp" or another name of data parallelism. None if `mesh` has the dimension "ep".

        Returns:
            The `MoEMesh`. An axis without a dimension has size 1.

        Raises:
            ValueError: a dimension has another name, or the two meshes do not fit together.
        """
        own, grids = cls.__new__(cls), list[Tensor]()
        groups: dict[str, ProcessGroup] = {}
        for found, axis, shard in ((mesh, "cp", "tp"), (experts or mesh, "ep", "etp")):
            names = found.mesh_dim_names or ()
            unknown = [n for n in names if n not in {"pp", "cp", "tp", "ep", "etp", *_DATA_NAMES}]
            if unknown or not names:
                raise ValueError(
                    "MoEMesh: expected the dimensions of a DeviceMesh to be named 'pp', 'cp', 'tp',"
                    f" 'ep' or after data parallelism, {sorted(_DATA_NAMES)}, got {names}"
                )
            last = [name for name in (axis, shard) if name in names]
            dims = [*(n for n in names if n == "pp"), *(n for n in names if n not in ("pp", *last))]
            sizes = {name: found.size(names.index(name)) for name in names}
            shape = (sizes.get("pp", 1), -1, sizes.get(axis, 1), sizes.get(shard, 1))
            grid = found.mesh.permute([names.index(name) for name in (*dims, *last)])
            grid = grid.reshape(shape).to(torch.int64)
            grids.append(grid)
            own_names = [n for n in names if n not in _DATA_NAMES and "etp" not in names]
            groups.update({name: found.get_group(name) for name in own_names})
        attention, spread = grids
        own._lay_out(attention, spread, spread.shape[1], groups=groups)
        return own

    def _lay_out(
        self,
        attention: Tensor,
        experts: Tensor,
        dp: int,
        *,
        beside: bool = False,
        groups: dict[str, ProcessGroup] | None = None,
    ) -> None:
        """Set sizes, ranks and groups from grids [pp, data, cp, tp] and [pp, edp, ep, etp]."""
        stages = [grid.flatten(1).sort().values for grid in (attention, experts)]
        if attention.numel() != experts.numel() or not torch.equal(*stages):
            raise ValueError(
                "MoEMesh: expected attention and experts to have the same ranks in each stage (pp "
                f"last in order), got {stages[0].tolist()} and {stages[1].tolist()}"
            )
        self._attention, self._experts = attention, experts
        self.pp_size, self.data_size, self.cp_size, self.tp_size = attention.shape
        _, self.edp_size, self.ep_size, self.etp_size = experts.shape
        self.dp_size, rank = dp, global_rank()
        self.pp_rank, self.data_rank, self.cp_rank, self.tp_rank = _coordinates(attention, rank)
        _, self.edp_rank, self.ep_rank, self.etp_rank = _coordinates(experts, rank)
        if beside:
            self.dp_rank = self.data_rank // self.ep_size
        else:
            self.dp_rank = self.edp_rank if dp == self.edp_size else self.data_rank
        self.ep_group: ProcessGroup | None = None
        self.etp_group: ProcessGroup | None = None
        self.cp_group: ProcessGroup | None = None
        self.tp_group: ProcessGroup | None = None
        self.pp_group: ProcessGroup | None = None
        self.stage_group: ProcessGroup | None = None
        self.device_mesh: DeviceMesh | None = None
        self.world_mesh: DeviceMesh | None = None
        self.replica_mesh: DeviceMesh | None = None
        self.data_mesh: DeviceMesh | None = None
        world = resolve_group(None, "MoEMesh")
        if world is not None:
            self._make_groups(world, groups or {}, beside)

    def _make_groups(
        self, world: ProcessGroup, groups: dict[str, ProcessGroup], beside: bool
    ) -> None:
        on_cuda = torch.cuda.is_available() and dist.get_backend() == "nccl"
        device_type, device = "cuda" if on_cuda else "cpu", small_message_device(world)

        def group(axis: str) -> ProcessGroup:
            ranks = self._own(axis)
            if axis in ("stage", "edp", "dense") and len(ranks) == world.size():
                return world
            return groups[axis] if axis in groups else c10d.local_group(ranks, world, device)

        def mesh(grid: Tensor, **axes: ProcessGroup) -> DeviceMesh:
            names, shape = tuple(axes), [found.size() for found in axes.values()]
            return DeviceMesh.from_group(
                list(axes.values()), device_type, grid.reshape(shape), mesh_dim_names=names
            )

        # All ranks make their groups in the same order of axes. Groups of one axis do not overlap,
        # so ranks cannot wait for each other in a circle.
        self.stage_group, self.ep_group = group("stage"), group("ep")
        replicas = group("edp")
        self.cp_group = group("cp") if self.cp_size > 1 else None
        self.tp_group = group("tp") if self.tp_size > 1 else None
        self.pp_group = group("pp") if self.pp_size > 1 else None
        # The mesh gets a name because tools distinguish meshes by the names of their dimensions.
        self.world_mesh = DeviceMesh.from_group(
            self.stage_group, device_type, mesh_dim_names=("fsdp",)
        )
        experts, attention = self._experts[self.pp_rank], self._attention[self.pp_rank]
        alone = self.edp_size == 1
        declare_replicas(self.ep_group, None if alone else replicas, experts.flatten(1).tolist())
        if beside:
            assert self.cp_group is not None
            outer = experts.view(-1, self.cp_size, self.ep_size)[:, self.cp_rank, self.ep_rank]
            outermost = c10d.local_group(outer.tolist(), world, device)
            self.device_mesh = mesh(experts, dp=outermost, cp=self.cp_group, ep=self.ep_group)
            self._declare_experts(mesh(experts, edp=replicas, ep=self.ep_group))
            return
        if self.etp_size > 1:
            self.etp_group = group("etp")
            same = experts[self.edp_rank, :, self.etp_rank].tolist()
            parts = c10d.local_group(same, world, device)
            declare_expert_shards(self.ep_group, self.etp_group)
            self.device_mesh = mesh(experts, edp=replicas, ep=parts, etp=self.etp_group)
        else:
            self.device_mesh = mesh(experts, edp=replicas, ep=self.ep_group)
        self._declare_experts(self.device_mesh)
        if self.tp_group is not None:
            copies = group("dense")
            alone = copies.size() == 1
            grid = attention.flatten(0, 1).tolist()
            declare_replicas(self.tp_group, None if alone else copies, grid)
        if self.cp_group is None and self.tp_group is None:
            return
        axes = {"data": group("data"), "cp": self.cp_group or group("cp")}
        if self.tp_group is not None:
            axes["tp"] = self.tp_group
        self.data_mesh = mesh(attention, **axes)

    def _declare_experts(self, mesh: DeviceMesh) -> None:
        """Set `replica_mesh`, and declare the mesh on which expert parameters are DTensors."""
        assert self.ep_group is not None
        self.replica_mesh = mesh["edp"]
        declare_mesh(self.ep_group, mesh["ep", "etp"] if self.etp_size > 1 else mesh["ep"])

    def rank_groups(self, axis: str) -> list[list[int]]:
        """Return the global ranks of all groups along one axis.

        Args:
            axis: "pp", "data", "cp", "tp", "ep" (which includes etp), "etp", "edp"; or "stage" for
                all ranks of a stage, or "dense" for the ranks with the same shards of dense layers.

        Returns:
            The groups, ordered by their first rank, each with its ranks in group order.
        """
        attention, experts = self._attention, self._experts
        found = {
            "stage": attention.flatten(1).sort().values,
            "pp": attention.movedim(0, -1),
            "data": attention.movedim(1, -1),
            "cp": attention.movedim(2, -1),
            "tp": attention,
            "dense": attention.movedim(3, 1).flatten(2).sort().values,
            "ep": experts.flatten(2),
            "etp": experts,
            "edp": experts.movedim(1, -1),
        }
        if axis not in found:
            raise ValueError(f"MoEMesh: expected axis to be one of {list(found)}, got {axis!r}")
        return sorted(found[axis].flatten(0, -2).tolist())

    def _own(self, axis: str) -> list[int]:
        rank = global_rank()
        return next(group for group in self.rank_groups(axis) if rank in group)

    def explain(self, rank: int | None = None) -> str:
        """Return a text that lists the groups along each axis, for printing.

        Args:
            rank: show only the groups of this rank; None shows all groups.
        """
        sizes = [("data", self.data_size), ("cp", self.cp_size), ("tp", self.tp_size)]
        others = [("edp", self.edp_size), ("ep", self.ep_size), ("etp", self.etp_size)]
        lines = [f"{self._experts.numel()} ranks in {self.pp_size} pipeline stages"]
        for what, axes in (("attention", sizes), ("experts", others)):
            product = " x ".join(f"{name} {size}" for name, size in axes)
            lines.append(f"each stage for {what}: {product}")
        if rank is not None:
            stage, data, cp, tp = _coordinates(self._attention, rank)
            _, _, ep, etp = _coordinates(self._experts, rank)
            lines.append(f"rank {rank}: stage {stage}, batch {data}, cp_rank {cp}, tp_rank {tp}, ")
            lines[-1] += f"ep_rank {ep}, etp_rank {etp}"
        for axis, text in _SHARED.items():
            groups = self.rank_groups(axis)
            if len(groups[0]) == 1:
                continue
            shown = [group for group in groups if rank is None or rank in group]
            lines.append(f"{text}: " + " | ".join(map(_ranges, shown)))
        return "\n".join(lines)

    def __repr__(self) -> str:
        axes = ("tp", "cp", "pp", "etp")
        more = [name for name in axes if getattr(self, f"{name}_size") > 1]
        sizes = "".join(f", {name}={getattr(self, f'{name}_size')}" for name in more)
        ranks = "".join(f", {name}_rank={getattr(self, f'{name}_rank')}" for name in more)
        return (
            f"MoEMesh(dp={self.dp_size}, ep={self.ep_size}{sizes}, dp_rank={self.dp_rank}, "
            f"ep_rank={self.ep_rank}{ranks})"
        )


def _grid(sizes: dict[str, int], order: str, axes: tuple[str, ...]) -> Tensor:
    """Return the grid of ranks with dimensions `axes`. The first axis of `order` is fastest."""
    names = order.split("-")[::-1]
    # The device is explicit because a user may construct the mesh under `torch.device("meta")`.
    ranks = torch.arange(math.prod(sizes.values()), device="cpu")
    ranks = ranks.view([sizes[name] for name in names])
    (left,) = set(names) - set(axes)
    return ranks.permute([names.index(name) for name in (*axes, left)]).squeeze(-1)


def _coordinates(grid: Tensor, rank: int) -> list[int]:
    """Return the coordinates of a rank in a grid."""
    return (grid == rank).nonzero()[0].tolist()


def _ranges(ranks: list[int]) -> str:
    """Return ranks as text; four or more with equal steps become "first-last:step"."""
    steps = {after - before for before, after in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) < 4 or len(steps) > 1:
        return ",".join(map(str, ranks))
    (step,) = steps
    return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f":{step}")


def _check_sizes(sizes: dict[str, int], order: str, ranks: int) -> bool:
    """Return True for cp beside ep. TypeError or ValueError if no arrangement has these sizes."""
    for name, size in sizes.items():
        # Users who compute a size as `num_ranks / n` pass a float.
        if not isinstance(size, int):
            raise TypeError(f"MoEMesh: expected {name} to be an int, got {size!r}")
        check_rule("MoEMesh", name, size, "at least 1", size >= 1)
    dp, ep, cp, tp, pp, etp = sizes.values()
    if sorted(order.split("-")) != sorted(_ORDER.split("-")):
        raise ValueError(f"MoEMesh: expected order to name the axes of {_ORDER!r}, got {order!r}")
    stage = ranks // pp
    fits = ranks == stage * pp and stage % (cp * tp) == 0 and stage % (ep * etp) == 0
    beside = dp * cp * ep == stage and cp > 1 and tp == etp == 1
    if not beside and not (fits and dp in (stage // (cp * tp), stage // (ep * etp))):
        named = {name: size for name, size in sizes.items() if size > 1 or name in ("dp", "ep")}
        axes = [name for name in ("cp", "tp") if name in named]
        stages = "" if pp == 1 else f" of a stage (pp={pp})"
        products = ["dp * ep * etp" if etp > 1 else "dp * ep", " * ".join(["dp", *axes])]
        products += ["dp * cp * ep"] if axes == ["cp"] else []
        rule = f", and {' * '.join(axes)} a divisor of it" if axes else ""
        raise ValueError(
            f"MoEMesh: expected {' or '.join(products)} to be the number of ranks{stages}, "
            f"{ranks / pp:g}{rule}, got "
            + ", ".join(f"{name}={size}" for name, size in named.items())
            + "; torch.distributed.init_process_group() has not run" * (not is_initialized())
        )
    fits = not beside or order == _ORDER or dp * ep == stage
    check_rule("MoEMesh", "order", order, f"{_ORDER!r} with cp beside ep", fits)
    return beside
