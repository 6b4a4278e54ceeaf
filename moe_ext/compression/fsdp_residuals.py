"""Residuals by parameter name: for checkpoints, and for another number of ranks.

Shape suffixes: as `fsdp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_ext.compression._fsdp_internals import ManagedParameter
from moe_ext.compression.fsdp import reduce_scatter
from moe_ext.compression.fsdp_feedback import Residual, segments_of
from moe_ext.compression.fsdp_layout import LayoutFinder, ShardLayout
from moe_ext.distributed.collectives import sum_over_ranks_
from moe_ext.distributed.groups import group_ranks

_OP = "FSDPCompression"


@dataclass
class NamedResiduals:
    """The residual of one message as tensors by parameter name.

    Attributes:
        finder: gives the layout.
        residual: what is read and written.
        shards: ranks that the message is scattered over; None where it is a shard itself.
        copies: ranks that owe for the same elements besides; None where there are none.
    """

    finder: LayoutFinder
    residual: Residual
    shards: ProcessGroup | None
    copies: ProcessGroup | None

    @property
    def _num_shards(self) -> int:
        return 1 if self.shards is None else self.shards.size()

    def _layout(self) -> ShardLayout:
        entries = self.finder.parameters()
        numel = sum(entry.shard_numel for _, entry in entries if entry.param.requires_grad)
        layout = self.finder.find(numel, trainable_only=True)
        assert layout is not None
        return layout

    def local(self) -> dict[str, Tensor]:
        """Name to this rank's residual ``[P, elements of a shard]``, a copy."""
        kept, layout = self.residual.kept, self.residual.layout
        if kept is None or layout is None:
            return {}
        return {name: part.clone() for name, part in segments_of(layout, kept).items()}

    def mean(self) -> dict[str, Tensor]:
        """Name to the mean over all ranks, a DTensor like the parameter (collective)."""
        kept, layout = self.residual.kept, self.residual.layout
        if kept is None or layout is None:
            return {}
        packed_Q = kept.view(-1).clone()
        if self.shards is not None:
            packed_Q = kept.new_empty(layout.packed_numel)
            reduce_scatter(packed_Q, kept.view(-1), self.shards, dist.ReduceOp.SUM, False)
            packed_Q /= self.shards.size()
        if self.copies is not None:
            sum_over_ranks_(packed_Q, self.copies, operation=_OP)
            packed_Q /= self.copies.size()
        found: dict[str, Tensor] = {}
        for segment in layout.compressed:
            assert segment.source is not None
            like = segment.source.sharded
            local = packed_Q[segment.packed_start :][: like.to_local().numel()]
            found[segment.name] = DTensor.from_local(
                local.view(like.to_local().shape).clone(),
                like.device_mesh,
                like.placements,
                shape=like.shape,
                stride=like.stride(),
                run_check=False,
            )
        return found

    def packed(self, saved: Mapping[str, Tensor], *, own: bool) -> Tensor | None:
        """``[P, Q]`` of what `local` (``own``) or `mean` returned; ValueError where it misfits."""
        if not saved:
            return None
        layout = self._layout()
        sources = {s.name: s for s in layout.compressed}
        if set(saved) != set(sources):
            raise ValueError(
                f"{_OP}: expected residuals of parameters {sorted(sources)}, got {sorted(saved)}"
            )
        ranks = self._num_shards
        first = next(iter(sources.values())).source
        assert first is not None
        # Not that of the shard, which may be offloaded.
        packed_PQ = torch.zeros(
            (ranks, layout.packed_numel), device=first.sharded.device_mesh.device_type
        )
        row = 0 if self.shards is None else group_ranks(self.shards).index(dist.get_rank())
        for name, segment in sources.items():
            assert segment.source is not None
            place = packed_PQ.narrow(1, segment.packed_start, segment.numel)
            if own:
                _check_shape(name, saved[name], torch.Size((ranks, segment.numel)))
                place.copy_(saved[name])
                continue
            local = _shard_like(name, saved[name], segment.source)
            # Of the sum over ranks each owes its own shard, hence as many times the mean.
            place[row, : local.numel()] = local.reshape(-1) * ranks
        return packed_PQ

    def put(self, packed_PQ: Tensor | None) -> None:
        """Take what `packed` has made."""
        self.residual.kept = packed_PQ
        self.residual.layout = None if packed_PQ is None else self._layout()


def _check_shape(name: str, found: Tensor, shape: torch.Size) -> None:
    if found.shape != shape:
        raise ValueError(
            f"{_OP}: expected the residual of {name} to be of shape {tuple(shape)}, got "
            f"{tuple(found.shape)}"
        )


def _shard_like(name: str, saved: Tensor, source: ManagedParameter) -> Tensor:
    like = source.sharded
    _check_shape(name, saved, like.shape)
    if isinstance(saved, DTensor):
        if saved.device_mesh == like.device_mesh and saved.placements == like.placements:
            return saved.to_local()
        saved = saved.full_tensor()
    whole = saved.to(like.to_local().device, torch.float32)
    return distribute_tensor(
        whole, like.device_mesh, like.placements, src_data_rank=None
    ).to_local()
