"""Layout of an FSDP module's parameters in its messages: compressed and dense parts.

Shape suffixes: P ranks of the group, S elements of a rank's shard, Q elements of its packed part,
which is compressed (each parameter padded to whole blocks), D elements of its dense part, which is
sent uncompressed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moe_ext._checks import check_callable, check_kind
from moe_ext.compression.collectives.padding import PartialBlocks
from moe_ext.distributed.fsdp_state import ManagedParameter, managed_parameters
from moe_ext.distributed.placement import logical_names as spread_names
from moe_ext.nn.routers.base import Router

KeepDense = Callable[[str, nn.Module, nn.Parameter], bool]


def keep_small_dense(name: str, owner: nn.Module, param: nn.Parameter) -> bool:
    """Return True for norms, biases and routers, which are not compressed by default.

    Args:
        name (str): name of the parameter in the model.
        owner (nn.Module): the module that holds the parameter.
        param (nn.Parameter): the parameter, sharded or not.

    Returns:
        bool: True for parameters of one dimension, parameters whose name ends in "bias" (of stacked
        experts), and parameters of a router.
    """
    return param.dim() <= 1 or name.endswith("bias") or isinstance(owner, Router)


@dataclass(frozen=True)
class Segment:
    """One parameter in the shard of a rank.

    Attributes:
        name: name of the parameter in the model; "" if the segment is a whole message.
        start: offset of the segment in the shard.
        numel: elements of the segment in the shard, padding included.
        packed_start: offset of the segment in the packed or the dense part.
        compressed: True if the segment is in the packed part, False if in the dense part.
        source: the parameter; None if the segment is a whole message.
    """

    name: str
    start: int
    numel: int
    packed_start: int
    compressed: bool
    source: ManagedParameter | None


class ShardLayout:
    """Splits shards into a packed and a dense part, and joins the parts again."""

    def __init__(self, segments: Sequence[Segment], block: int) -> None:
        """Store the segments, which must be in the order of the message."""
        self.segments = tuple(segments)
        self.block = block
        self.shard_numel = sum(segment.numel for segment in segments)
        self.packed_numel = sum(self._aligned(s.numel) for s in segments if s.compressed)
        self.dense_numel = sum(s.numel for s in segments if not s.compressed)
        self._is_whole = self.packed_numel == self.shard_numel and len(self.segments) == 1
        self._partial: dict[tuple[object, ...], PartialBlocks] = {}

    def _aligned(self, numel: int) -> int:
        return -(-numel // self.block) * self.block

    @property
    def compressed(self) -> Iterator[Segment]:
        """The segments that are compressed."""
        return (segment for segment in self.segments if segment.compressed)

    def pack(self, flat: Tensor, num_shards: int) -> tuple[Tensor, Tensor]:
        """Copy the two parts out of consecutive shards.

        Args:
            flat (Tensor[P * S]): contiguous.
            num_shards (int): P.

        Returns:
            Packed part ``[P, Q]``, read-only (a view if it is all of ``flat``), and dense part
            ``[P, D + 1]``. The last element of each dense row is 0, room for the sender's status.
        """
        flat_PS = flat.view(num_shards, self.shard_numel)
        dense_PD = flat.new_zeros((num_shards, self.dense_numel + 1))
        if self._is_whole:
            return flat_PS, dense_PD
        packed_PQ = flat.new_zeros((num_shards, self.packed_numel))
        self._copy(flat_PS, packed_PQ, dense_PD, back=False)
        return packed_PQ, dense_PD

    def unpack_(self, flat: Tensor, packed_PQ: Tensor, dense_PD: Tensor) -> None:
        """Write the two parts, in the shapes that `pack` returns, back into shards."""
        self._copy(flat.view(packed_PQ.shape[0], self.shard_numel), packed_PQ, dense_PD, back=True)

    def _copy(self, flat_PS: Tensor, packed_PQ: Tensor, dense_PD: Tensor, *, back: bool) -> None:
        in_flat, in_parts = [], []
        for segment in self.segments:
            if segment.numel:
                part = packed_PQ if segment.compressed else dense_PD
                in_flat.append(flat_PS.narrow(1, segment.start, segment.numel))
                in_parts.append(part.narrow(1, segment.packed_start, segment.numel))
        if in_flat:
            to, of = (in_flat, in_parts) if back else (in_parts, in_flat)
            torch._foreach_copy_(to, of)

    def partial_blocks(
        self, first_shard: int, num_shards: int, device: torch.device
    ) -> PartialBlocks:
        """Find the blocks of the packed parts ``[P, Q]`` of some shards that hold padding.

        Args:
            first_shard (int): number of the first shard.
            num_shards (int): P.
            device (torch.device): device of the result.
        """
        key = (first_shard, num_shards, device)
        if key not in self._partial:
            is_padding_PQ = torch.ones(num_shards, self.packed_numel, dtype=torch.bool)
            for segment in self.compressed:
                numel = segment.numel if segment.source is None else segment.source.shape.numel()
                for row in range(num_shards):
                    # FSDP pads the last shards of a parameter, and packing pads every shard.
                    left = numel - (first_shard + row) * segment.numel
                    stop = segment.packed_start + min(max(left, 0), segment.numel)
                    is_padding_PQ[row, segment.packed_start : stop] = False
            self._partial[key] = PartialBlocks.of(is_padding_PQ.to(device), self.block)
        return self._partial[key]


@dataclass(kw_only=True, eq=False)
class LayoutFinder:
    """Finds the layouts of one FSDP module's messages.

    Names of the parameters of ``module`` are those in ``model``, or in the module if there is none.
    """

    op: str
    block: int
    module: FSDPModule | None
    name: str
    model: nn.Module | None
    keep_dense: KeepDense
    min_numel: int

    def __post_init__(self) -> None:
        check_kind(self.op, "module", self.module, nn.Module)
        check_kind(self.op, "model", self.model, nn.Module)
        check_kind(self.op, "name", self.name, str, required=True)
        check_callable(self.op, "keep_dense", self.keep_dense)
        self._warned = False
        self._names: dict[nn.Module, str] = {}
        self._root: nn.Module | None = None
        if self.module is not None:
            root = self.module if self.model is None else self.model
            assert isinstance(root, nn.Module)
            self._root = root
            self._names = {owner: prefix for prefix, owner in root.named_modules()}
        self._found: dict[tuple[object, ...], ShardLayout | None] = {}

    @property
    def options(self) -> dict[str, object]:
        """Options that must be equal on all ranks."""
        rule = self.keep_dense
        name = getattr(rule, "__qualname__", type(rule).__qualname__)
        return {"keep_dense": name, "min_numel": self.min_numel}

    def parameters(self) -> list[tuple[str, ManagedParameter]]:
        """Return names and parameters, in the order of the messages."""
        if self.module is None:
            return []
        entries = managed_parameters(self.module)
        return [(f"{self._names.get(e.owner, '')}.{e.name}".lstrip("."), e) for e in entries]

    def logical_names(self) -> dict[str, str]:
        """Map local names of experts that are a module each to their names in the whole model."""
        return {} if self._root is None else spread_names(self._root)

    def find(
        self,
        shard_numel: int,
        *,
        trainable_only: bool,
        frozen_only: bool = False,
    ) -> ShardLayout | None:
        """Find the layout of a message.

        Args:
            shard_numel (int): S, elements of a rank's shard in the message.
            trainable_only (bool): the message holds gradients, so it has no frozen parameters.
            frozen_only (bool): compress frozen parameters alone.

        Returns:
            ShardLayout | None: None if the message does not have the length of its parameters, for
            instance because one took no part in the backward pass. A warning says so once.
        """
        if self.module is None:
            # Parameters are not known, so the whole message is one compressed segment.
            whole = Segment("", 0, shard_numel, 0, True, None)
            return ShardLayout([whole] if shard_numel else [], self.block)
        entries = self.parameters()
        mask = tuple(entry.param.requires_grad for _, entry in entries)
        key = (mask, shard_numel, trainable_only, frozen_only)
        if key not in self._found:
            kept = [
                e for e, train in zip(entries, mask, strict=True) if train or not trainable_only
            ]
            layout = self.build(kept, frozen_only=frozen_only)
            self._found[key] = layout if layout.shard_numel == shard_numel else None
        if self._found[key] is None and not self._warned:
            self._warned = True
            why = "had no gradient" if trainable_only else "are not what its messages hold"
            warnings.warn(
                f"{self.op}: parameters of module {self.name!r} {why}, its messages are not "
                "compressed then; set_reduce_scatter_unused_params(True) gives every parameter a "
                "gradient (torch 2.13 and later)",
                stacklevel=3,
            )
        return self._found[key]

    def build(
        self, entries: list[tuple[str, ManagedParameter]], *, frozen_only: bool = False
    ) -> ShardLayout:
        """Build the layout of a message that holds the given parameters."""
        segments: list[Segment] = []
        start, ends = 0, {True: 0, False: 0}
        for name, entry in entries:
            numel = entry.shard_numel
            compressed = entry.param.numel() >= self.min_numel and not self.keep_dense(
                name, entry.owner, entry.param
            )
            compressed &= not (frozen_only and entry.param.requires_grad)
            segments.append(Segment(name, start, numel, ends[compressed], compressed, entry))
            start += numel
            ends[compressed] += -(-numel // self.block) * self.block if compressed else numel
        return ShardLayout(segments, self.block)
