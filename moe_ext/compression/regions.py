"""Which rank adds up which part of a gradient, so that all have as much to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_ext.compression.reduction import Reduction


class SplitRegions:
    """Bounds of the regions that `sparse_all_reduce(algorithm="split")` gives to the ranks.

    One object serves one tensor over all steps. The regions of a step hold as many of the pairs
    that were sent in the last one each. They follow from what every rank has received, so that they
    are equal on all ranks without a message.

    Args:
        numel (int): elements of the tensor.
        world_size (int): ranks.

    Attributes:
        bounds (tuple[int, ...]): region p is ``[bounds[p], bounds[p + 1])``.
        step (int): how often they were used.
        loads (tuple[int, ...]): pairs that all ranks had for each region in the last step.
        pending (Reduction): one with ``async_op=True`` that uses them.
    """

    def __init__(self, numel: int, world_size: int) -> None:
        self.numel = numel
        self.bounds = tuple(numel * p // world_size for p in range(world_size + 1))
        self.step = 0
        self.loads: tuple[int, ...] = ()
        self.pending: Reduction | None = None

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.bounds) - 1

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs to know of the last ones, in plain numbers."""
        return {"bounds": list(self.bounds), "step": self.step, "loads": list(self.loads)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, for as many elements and ranks."""
        self.bounds, self.loads = tuple(state["bounds"]), tuple(state["loads"])
        self.step = state["step"]

    def settle(self) -> None:
        """Wait for a reduction underway: the next one takes its regions from it, on every rank."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()

    def update(self, loads_P: Tensor, kept_idx_PK: Tensor) -> None:
        """Move the bounds to where the pairs of the last step were.

        Args:
            loads_P (Tensor[P]): pairs that all ranks had for each region.
            kept_idx_PK (Tensor[P, K]): ascending indices of each region that were kept: how the
                pairs are spread inside it.
        """
        # NOTE: device-to-host sync.
        loads = [max(int(load), 0) for load in loads_P.tolist()]
        size, total = self.world_size, sum(loads)
        self.loads, self.step = tuple(loads), self.step + 1
        if total == 0 or kept_idx_PK.shape[1] == 0:
            return
        bounds, region, before = [0], 0, 0
        for part in range(1, size):
            while region < size - 1 and (before + loads[region]) * size < part * total:
                before += loads[region]
                region += 1
            share = (part * total - before * size) / max(loads[region] * size, 1)
            column = min(int(share * kept_idx_PK.shape[1]), kept_idx_PK.shape[1] - 1)
            found = int(kept_idx_PK[region, column])
            # Every region keeps an element at least.
            bounds.append(min(max(found, bounds[-1] + 1), self.numel - (size - part)))
        self.bounds = (*bounds, self.numel)
