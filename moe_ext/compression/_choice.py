"""The cost models of a state: one for each group of ranks that reduce together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from moe_ext.compression.cost_model import CostModel
from moe_ext.distributed.groups import group_ranks


class ChoosesCodecs(Protocol):
    """What the state wants of a cost model (see `CostModel`)."""

    def choose(self, numel: int, codecs: Sequence[Any], *, bucket: Any, current: Any = None) -> Any:
        """One of the codecs, the same on every rank."""

    def observe(self, bucket: Any, codec: Any, seconds: float) -> None:
        """Takes in what a reduction took here."""

    def settle(self, agreed: Sequence[float] | None = None) -> None:
        """Takes in the same of the slowest rank."""

    def explain(self) -> str:
        """A table."""


class Choosers:
    """Makes a cost model for a group at its first bucket, which its ranks reach together.

    Ranks of different groups come to their groups in the order of the layers, which is one for all:
    no two wait for each other in two groups.

    Args:
        given: the one for the ranks of the state.
    """

    def __init__(self, given: ChoosesCodecs | None) -> None:
        self.common = given
        self.used = given is not None
        self._others: dict[ProcessGroup, ChoosesCodecs] = {}

    def of(
        self, group: ProcessGroup | None, device: torch.device, common: ProcessGroup | None
    ) -> ChoosesCodecs:
        """The cost model of a group.

        Args:
            group: the ranks that reduce a bucket.
            device: of the bucket.
            common: the ranks of the state.
        """
        self.used = True
        if group is None or group is common:
            if self.common is None:
                self.common = CostModel(group, device=device)
            return self.common
        if group not in self._others:
            self._others[group] = CostModel(group, device=device)
        return self._others[group]

    def explain(self) -> str:
        """The tables, those of some of the ranks under a line that names them."""
        tables = [] if self.common is None else [self.common.explain()]
        for group, model in self._others.items():
            ranks = ", ".join(map(str, group_ranks(group)))
            tables.append(f"ranks {ranks}, which hold the same experts:\n{model.explain()}")
        return "\n\n".join(tables)
