"""Division of the ranks of a job into groups, for attention and for experts over the same ranks."""

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
# Dimensions of a DeviceMesh that hold other batches, or other copies, by the names in use.
_DATA_NAMES = {"dp", "data", "dp_replicate", "dp_shard", "fsdp", "edp", "efsdp"}
# Thing that the ranks of a group share, by axis.
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

    The ranks fall into `pp` stages. Ranks of a stage are laid out twice: for attention as data x cp
    x tp, and for experts as edp x ep x etp; neither costs ranks of the other. The last axis changes
    fastest, as in Megatron and torchtitan: a rank is `((pp_rank * data + data_rank) * cp + cp_rank)
    * tp + tp_rank`, and also `((pp_rank * edp + edp_rank) * ep + ep_rank) * etp + etp_rank`.

    The ranks of one ep group share one set of experts, those of one edp group hold the same ones.
    The ranks of one cp group hold shards of the same sequences, those of one tp group shards of the
    same layers. The number of ranks and the other sizes say what data and edp are, and dp is either
    of them. With cp beside ep, `dp * cp * ep` ranks of a stage, the rank there is
    `(dp_rank * cp + cp_rank) * ep + ep_rank`: the ranks of an ep group hold the same shard of
    different sequences.

    Construct it on all ranks, after `torch.distributed.init_process_group`; a job of one process
    needs no process group. Each rank makes its own groups and no others.

    Args:
        dp: copies of the experts (edp), or different batches (data); or with cp beside ep, what
            these leave.
        ep: sets of whole experts that an expert-parallel group divides into, on etp ranks each.
        tp: ranks of each tensor-parallel group.
        cp: ranks of each context-parallel group.
        pp: pipeline stages.
        etp: ranks that share each expert, by shards of its ffn dimension.
        order: axes, that which changes fastest first, as Megatron takes them; tp is also the place
            of etp, and dp that of edp.

    Attributes:
        dp_size: dp.
        ep_size: ep.
        tp_size: tp.
        cp_size: cp.
        pp_size: pp.
        etp_size: etp.
        edp_size: ranks with the same experts.
        data_size: that many different batches make a step.
        dp_rank: this rank's index along dp.
        ep_rank: which experts this rank holds.
        tp_rank: rank in the tensor-parallel group.
        cp_rank: rank in the context-parallel group.
        pp_rank: stage of this rank.
        etp_rank: which shard of the experts this rank holds.
        edp_rank: which copy of the experts this rank holds.
        data_rank: which of the batches this rank works on.
        ep_group: ep * etp ranks that share one set of experts; None without torch.distributed.
        etp_group: those of them that share each expert; None with etp = 1.
        cp_group: context-parallel process group; None with cp = 1.
        tp_group: tensor-parallel process group; None with tp = 1.
        pp_group: ranks of one pipeline, in order of stages; None with pp = 1.
        stage_group: all ranks of this rank's stage; None without torch.distributed.
        device_mesh: DeviceMesh with dimensions "edp" and "ep", with etp "edp", "ep" and "etp",
            or with cp beside ep "dp", "cp" and "ep", of this stage; None without torch.distributed.
        data_mesh: DeviceMesh with dimensions "data" and "cp", with tp "data", "cp" and "tp", over
            the same ranks; None with cp beside ep, without either, or without torch.distributed.
        world_mesh: DeviceMesh of one dimension, "fsdp", with all ranks of this stage; None without
            torch.distributed.
        replica_mesh: DeviceMesh of one dimension with the ranks that hold the experts of this one,
            itself included; None without torch.distributed.

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
        # A group of fake ranks has nobody to ask.
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
        """The mesh of a job that has a DeviceMesh already, such as torchtitan's; its groups serve.

        Args:
            mesh: over all ranks, with dimensions among "pp", "cp", "tp", "ep" and names of data
                parallelism: "dp", "data", "dp_replicate", "dp_shard", "fsdp". Ranks along "ep" hold
                other data.
            experts: the same ranks as they share experts, with dimensions "pp", "ep", and "edp",
                "efsdp" or another name of data parallelism; None if `mesh` says that, too.

        Returns:
            The `MoEMesh`; what has no dimension has size 1.

        Raises:
            ValueError: a dimension has another name, or the two do not fit together.
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
        """Take ranks [pp, data, cp, tp] and [pp, edp, ep, etp]."""
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

        # In one order on all ranks: groups of one axis do not overlap, so nobody waits in a ring.
        self.stage_group, self.ep_group = group("stage"), group("ep")
        replicas = group("edp")
        self.cp_group = group("cp") if self.cp_size > 1 else None
        self.tp_group = group("tp") if self.tp_size > 1 else None
        self.pp_group = group("pp") if self.pp_size > 1 else None
        # Tools tell meshes apart by their names.
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
            declare_expert_shards(self.ep_group, parts, self.etp_group)
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
        """Take the dimensions that experts lie on, and the one that holds their copies."""
        assert self.ep_group is not None
        self.replica_mesh = mesh["edp"]
        declare_mesh(self.ep_group, mesh["ep", "etp"] if self.etp_size > 1 else mesh["ep"])

    def rank_groups(self, axis: str) -> list[list[int]]:
        """Global ranks of all groups of one axis.

        Args:
            axis: "stage" all ranks of a stage, "pp" those of a pipeline, "data", "cp", "tp", "ep"
                (with etp), "etp", "edp", or "dense", those with the same shards of layers.

        Returns:
            The groups in order of their first rank, the ranks of each in its order.
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
        """Who shares what, in lines to print.

        Args:
            rank: one rank, with which others it shares each; None lists all groups.
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
    """Ranks in four dimensions, for an order whose first axis changes fastest."""
    names = order.split("-")[::-1]
    # The default device may be meta, on which models are built.
    ranks = torch.arange(math.prod(sizes.values()), device="cpu")
    ranks = ranks.view([sizes[name] for name in names])
    (left,) = set(names) - set(axes)
    return ranks.permute([names.index(name) for name in (*axes, left)]).squeeze(-1)


def _coordinates(grid: Tensor, rank: int) -> list[int]:
    """Coordinates of a rank in a grid."""
    return (grid == rank).nonzero()[0].tolist()


def _ranges(ranks: list[int]) -> str:
    """Ranks in a line, runs of equal steps as first-last:step."""
    steps = {after - before for before, after in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) < 4 or len(steps) > 1:
        return ",".join(map(str, ranks))
    (step,) = steps
    return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f":{step}")


def _check_sizes(sizes: dict[str, int], order: str, ranks: int) -> bool:
    """True for cp beside ep; TypeError or ValueError for sizes that fit no arrangement."""
    for name, size in sizes.items():
        # A quotient of numbers of ranks is a float.
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
