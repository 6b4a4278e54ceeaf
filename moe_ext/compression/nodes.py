"""Reduction in two levels: dense among the ranks of a node, by a codec between nodes.

Each rank of a node owns a shard of the node's sum, and reduces it with the ranks that own the same
shard in the other nodes.

Shape suffixes: N elements of a part, L ranks of a node, M nodes, S elements of a shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._checks import check_rule
from moe_ext.comm import c10d
from moe_ext.comm.groups import global_rank, group_rank, group_ranks, group_size
from moe_ext.compression.codecs import Codec
from moe_ext.compression.collectives.hierarchical import share_in_node, sum_in_node
from moe_ext.compression.collectives.quantized import shard_numel
from moe_ext.compression.feedback import Packing, add_at

_OPERATION = "CompressionState"


@dataclass(frozen=True, eq=False)
class Levels:
    """Groups for the two levels of a group that has L > 1 ranks on each node.

    Attributes:
        local_group: the ranks of this node.
        node_group: the ranks with the same local rank in every node; None if there is one node.
    """

    local_group: ProcessGroup
    node_group: ProcessGroup | None

    @property
    def node_size(self) -> int:
        """Number of ranks of a node, L."""
        return group_size(self.local_group)

    def shard_of(self, flat_N: Tensor, numel: int) -> Tensor:
        """Return this rank's shard of the sum over the node, as float32 or wider."""
        return sum_in_node(flat_N, numel, self.local_group, _OPERATION)

    def share(self, target_N: Tensor, shard_S: Tensor) -> None:
        """Gather the shards of the ranks of this node into `target_N`."""
        share_in_node(target_N, shard_S.to(target_N.dtype), self.local_group, _OPERATION)


class NodeShard(Packing):
    """Packing of this rank's shard of parameters that the ranks of a node divide among them.

    A residual by name has the shape of the whole parameter, with zeros outside of the shard. The
    sum over ranks is therefore the same with nodes and without.

    Args:
        levels: groups of the ranks that own the other shards.
        exact: rows may be left out, so no row is divided if there are enough rows for all ranks.
        shapes: shapes of the parameters.
    """

    def __init__(self, levels: Levels, exact: bool, shapes: Sequence[torch.Size]) -> None:
        place = group_rank(levels.local_group)
        self._levels, self._whole = levels, Packing(shapes)
        row = _row(shapes[0], levels) if exact else 0
        # A shard has at least one element, because collectives send no message for an empty one.
        numel = max(1, shard_numel(self._whole.numel, levels.node_size, row or 1))
        bounds = itertools.accumulate(self._whole.sizes, initial=-place * numel)
        clipped = [min(max(bound, 0), numel) for bound in bounds]
        self._spans = list(itertools.pairwise(clipped))
        # The last piece is padding.
        pieces = [stop - start for start, stop in itertools.pairwise([*clipped, numel])]
        rows = [torch.Size([numel // row, row])] if row else None
        super().__init__(rows or [torch.Size([piece]) for piece in pieces if piece])
        self.window, self.place = (place * numel, numel), place

    def spans(self) -> list[tuple[int, int]]:
        """See `Packing`; spans of parameters that are in other shards are empty."""
        return self._spans

    def by_parameter(self, flat_N: Tensor) -> list[Tensor]:
        """See `Packing`."""
        whole = flat_N.new_zeros(self._whole.numel)
        add_at(whole, flat_N, self.start)
        return self._whole.pieces(whole)

    def packed(self, whole: Tensor) -> Tensor:
        """See `Packing`. Elements of other shards are sent to the ranks that own these.

        All ranks of the node call this together.
        """
        return self._levels.shard_of(whole, self.numel)


def _row(shape: torch.Size, levels: Levels) -> int:
    """Return the elements that a shard is a multiple of: a row, or less if ranks outnumber rows."""
    rows = shape[0] if len(shape) else 1
    if rows >= levels.node_size:
        return shape.numel() // rows
    return shard_numel(shape.numel(), levels.node_size, 1)


class Nodes:
    """Finds the ranks of a group that share a node.

    Args:
        size: ranks of a node, neighbours in the group of the state; None for one level.

    Raises:
        ValueError: size is not positive.
    """

    def __init__(self, size: int | None) -> None:
        check_rule(_OPERATION, "node_size", size, "at least 1", size is None or size >= 1)
        self.size = None if size is None else int(size)
        self._levels: dict[ProcessGroup, Levels | None] = {}

    def problem(
        self,
        common: ProcessGroup | None,
        codecs: Sequence[Codec | None],
        candidates: Sequence[Codec],
    ) -> str | None:
        """Check the number of ranks and the codecs; a codec of None stands for any candidate."""
        size, num_ranks = self.size, group_size(common)
        if size is None or num_ranks == 1:
            return None
        if num_ranks % size:
            return f"expected node_size to divide the number of ranks, got {size} for {num_ranks}"
        if size == 1:
            return None
        for codec in (*codecs, *(candidates if None in codecs else ())):
            if codec is not None and not codec.shardable:
                return (
                    "expected codecs that any shard of a parameter can be sent as with node_size, "
                    f"got {codec}"
                )
        return None

    def levels(
        self, group: ProcessGroup | None, common: ProcessGroup | None, device: torch.device
    ) -> Levels | None:
        """Return the two levels of a group; None if no two of its ranks share a node.

        All ranks of the group call this together. If nodes have different numbers of the group's
        ranks, the result is None as well, and the group is reduced in one level.

        Args:
            group: the ranks that reduce a bucket.
            common: the ranks of the state.
            device: device of the bucket.
        """
        if self.size is None or group is None or common is None:
            return None
        if group not in self._levels:
            self._levels[group] = self._made(group, common, device, self.size)
        return self._levels[group]

    def _made(
        self, group: ProcessGroup, common: ProcessGroup, device: torch.device, size: int
    ) -> Levels | None:
        place_of = {rank: place for place, rank in enumerate(group_ranks(common))}
        nodes: dict[int, list[int]] = {}
        for rank in group_ranks(group):
            if rank not in place_of:
                return None
            nodes.setdefault(place_of[rank] // size, []).append(rank)
        counts = {len(ranks) for ranks in nodes.values()}
        if counts == {1} or len(counts) > 1:
            return None
        me = global_rank()
        local = next(ranks for ranks in nodes.values() if me in ranks)
        place = local.index(me)
        beside = [ranks[place] for ranks in nodes.values()]
        local_group = c10d.local_group(local, group, device)
        node_group = c10d.local_group(beside, group, device) if len(beside) > 1 else None
        return Levels(local_group, node_group)
