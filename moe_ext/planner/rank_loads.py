"""Loads of the ranks that experts lie over: as the job gives them, or balanced if that pays.

Shapes: S steps, E experts, P ranks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.comm.link import Link
from moe_ext.nn.balance.moved import moving_pays
from moe_ext.planner.axes import Columns, by_values
from moe_ext.planner.sizes import CostPart, Sizes

# Rows that shares are multiplied by, because `plan_balance` takes whole numbers of rows.
_ROWS = 2**24


class Loads(NamedTuple):
    """Loads of a job's steps on the busiest rank, and the cost of moving experts.

    Attributes:
        pace: time of the experts' products over that of even loads, averaged over steps.
        rows: rows of the busiest rank over the mean of ranks, averaged over steps.
        moved: seconds in which experts are sent in a pass, averaged over steps.
        peak_rows: the ratio of `rows` in the worst step.
        peak_moved: experts that come to one rank in the worst step.
    """

    pace: float
    rows: float
    moved: float
    peak_rows: float
    peak_moved: float


def _num_moved(counts_E: Tensor, num_ranks: int) -> tuple[int, int]:
    """Count the experts that `Dispatch(rebalance="exact")` moves, by the experts' shares of rows.

    Returns:
        The largest number of experts that leave or reach a rank, and that reach a rank.
    """
    local = len(counts_E) // num_ranks
    counts_E = (counts_E * _ROWS).round().long()
    moved_PL = ops.plan_balance(counts_E, num_ranks).slot_expert[:, local:]
    here = int((moved_PL >= 0).sum(1).max())
    away = int(torch.bincount(moved_PL[moved_PL >= 0] // local, minlength=1).max())
    return max(here, away), here


class RankLoads(CostPart):
    """Loads of the ranks that experts lie over, by the load of the job."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._known = functools.cache(self._of_ranks)

    def _of_ranks(self, ep: int, tokens: int) -> Loads:
        """Compute the loads over `ep` ranks, of experts that are balanced if `tokens` is not 0.

        Time is that of the busiest rank. If ranks share cores, rates are those of all ranks at
        work. The busiest rank is then quicker by `sharing` while other ranks wait, but not quicker
        than the work of all ranks together. Experts move only in steps in which `Rebalance` would
        move them.

        Args:
            ep: number of ranks.
            tokens: tokens of a rank in a micro-batch, for balanced experts; 0 without balance.
        """
        sizes, m = self.sizes, self.model
        over_S, kept_SE = self.job.imbalances(m.num_experts, ep), self.job.kept(m.num_experts)
        sharing = max(sizes.measured("sharing"), 1.0)
        pace_S = torch.maximum(over_S / sharing, kept_SE.sum(1))
        if not tokens:
            return Loads(float(pace_S.mean()), float(over_S.mean()), 0.0, float(over_S.max()), 0.0)
        latency, bandwidth = (float(each) for each in sizes.link(torch.tensor([ep])))
        paces, overs, taken, arrived = [], [], [], []
        for counts_E, pace, over in zip(kept_SE, pace_S.tolist(), over_S.tolist(), strict=True):
            most, came = _num_moved(counts_E, ep)
            saved, moving = moving_pays(
                rows_saved=max(pace - 1.0, 0.0) * (tokens * m.top_k),
                expert_bytes=float(m.expert_parameters * self.job.itemsize),
                num_moved=most,
                row_flops=2.0 * m.expert_parameters,
                flops=sizes.rate(),
                link=Link(latency, bandwidth, bandwidth),
            )
            pays = most > 0 and saved >= moving
            paces.append(1.0 if pays else pace)
            overs.append(1.0 if pays else over)
            taken.append(moving / 2 if pays else 0.0)
            arrived.append(came if pays else 0)
        left_S = torch.tensor(overs, dtype=torch.float64)
        return Loads(
            sum(paces) / len(paces),
            float(left_S.mean()),
            sum(taken) / len(taken),
            float(left_S.max()),
            float(max(arrived)),
        )

    def moves(self, c: Columns) -> Tensor:
        """Return True for candidates in which experts move in any step."""
        return self.of(c, "moved") > 0

    def of(self, c: Columns, name: str) -> Tensor:
        """Return one of the numbers of `Loads` for each candidate."""
        ep, balance = c["ep"], c["balance"]
        if not self.model.num_experts or not len(ep):
            return torch.full(ep.shape, float(name not in ("moved", "peak_moved")))
        if not bool(balance.any()):
            return by_values([ep], lambda n: [getattr(self._known(n, 0), name)])[:, 0]
        balanced = torch.where((balance > 0) & (ep > 1), self.sizes.tokens(c), 0.0)
        tokens, place = balanced.long().unique(return_inverse=True)
        each = tokens.tolist()
        return by_values([ep, place], lambda n, i: [getattr(self._known(n, each[i]), name)])[:, 0]
