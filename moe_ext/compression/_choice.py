"""The cost models of a state: one for each group of ranks that reduce together."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from moe_ext.compression._layout import Layout
from moe_ext.compression._protocols import ChoosesCodecs
from moe_ext.compression.cost_model import CostModel
from moe_ext.distributed.groups import group_ranks


class Choosers:
    """Makes a cost model for a group at its first bucket, which its ranks reach together.

    Ranks of different groups come to their groups in the order of the layers, which is one for all:
    no two wait for each other in two groups.

    Args:
        given: the one for the ranks of the state; where these lie on nodes, its link is taken as
            that between nodes.
    """

    def __init__(self, given: ChoosesCodecs | None) -> None:
        self.common = given
        self.used = given is not None
        # Ranks of a node that `common` looks upon as one.
        self._node_size = 1
        self._others: dict[ProcessGroup, ChoosesCodecs] = {}

    def of(
        self, layout: Layout, common: ProcessGroup | None, device: torch.device
    ) -> ChoosesCodecs:
        """The cost model of the ranks that reduce a bucket.

        With nodes it measures what is between them; all ranks agree on what these have found.

        Args:
            layout: of the bucket.
            common: the ranks of the state.
            device: of the bucket.
        """
        self.used = True
        group, agreed_over = layout.exchange_group, layout.group if layout.levels else None
        if layout.group is None or layout.group is common:
            given = self.common
            is_new = layout.node_size != self._node_size and isinstance(given, CostModel)
            if given is None or is_new:
                link = given.link if isinstance(given, CostModel) else None
                given = CostModel(group, device=device, link=link, agreed_over=agreed_over)
                self.common, self._node_size = given, layout.node_size
            return given
        if layout.group not in self._others:
            made = CostModel(group, device=device, agreed_over=agreed_over)
            self._others[layout.group] = made
        return self._others[layout.group]

    def explain(self) -> str:
        """The tables, those of some of the ranks under a line that names them."""
        where = f"between nodes of {self._node_size} ranks:\n" if self._node_size > 1 else ""
        tables = [] if self.common is None else [where + self.common.explain()]
        for group, model in self._others.items():
            ranks = ", ".join(map(str, group_ranks(group)))
            tables.append(f"ranks {ranks}, which hold the same experts:\n{model.explain()}")
        return "\n\n".join(tables)
