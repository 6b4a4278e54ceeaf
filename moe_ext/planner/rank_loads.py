"""Loads of the ranks that experts lie over: as the job has them, and balanced where that pays.

Shapes: S steps, E experts, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.comm.link import Link
from moe_ext.nn.balance.moved import moving_pays
from moe_ext.planner.axes import Columns, present
from moe_ext.planner.sizes import CostPart, Sizes

# Rows of a pass, for whole numbers of them.
_ROWS = 2**24


class Moves(NamedTuple):
    """Experts that travel in a pass of each step.

    Attributes:
        most_S: that leave or reach one rank, the most of all ranks.
        came_S: that reach one rank, the most of all.
    """

    most_S: Tensor
    came_S: Tensor


class Loads(NamedTuple):
    """Rows of the busiest rank over the mean, and what balance adds, of the steps of a job.

    Attributes:
        pace: time of the experts' rows over that of even loads, the mean of the steps.
        rows: rows of the busiest rank over the mean, the mean of the steps.
        moved: seconds in which experts travel in a pass, the mean of the steps.
        peak_rows: rows in the worst step.
        peak_moved: experts that come to one rank in the worst step.
    """

    pace: float
    rows: float
    moved: float
    peak_rows: float
    peak_moved: float


def moves_of(counts_SE: Tensor, num_ranks: int) -> Moves:
    """Experts that `Dispatch(rebalance="exact")` moves.

    Args:
        counts_SE: shares of the rows.
        num_ranks: P, the ranks of the group.
    """
    local = counts_SE.shape[1] // num_ranks
    most, came = [], []
    for counts_E in (counts_SE * _ROWS).round().long():
        moved_PL = ops.plan_balance(counts_E, num_ranks).slot_expert[:, local:]
        here = int((moved_PL >= 0).sum(1).max())
        away = int(torch.bincount(moved_PL[moved_PL >= 0] // local, minlength=1).max())
        most.append(float(max(here, away)))
        came.append(float(here))
    return Moves(*(torch.tensor(found, dtype=torch.float64) for found in (most, came)))


def balanced(
    over_S: Tensor,
    pace_S: Tensor,
    moves: Moves,
    *,
    rows: float,
    row_flops: float,
    flops: float,
    expert_bytes: float,
    link: Link,
) -> Loads:
    """Loads of a layer that moves experts in the steps in which that pays, as `Rebalance` does.

    Args:
        over_S: rows of the busiest rank over the mean, without balance.
        pace_S: the same in time.
        moves: in each step.
        rows: of a rank, the mean.
        row_flops: operations of a row's products in the forward pass.
        flops: operations a second.
        expert_bytes: of an expert's weights.
        link: of the ranks.
    """
    seconds, even, taken = [], [], []
    for pace, most in zip(pace_S.tolist(), moves.most_S.tolist(), strict=True):
        saved, moving = moving_pays(
            rows_saved=max(pace - 1.0, 0.0) * rows,
            expert_bytes=expert_bytes,
            num_moved=most,
            row_flops=row_flops,
            flops=flops,
            link=link,
        )
        pays = most > 0 and saved >= moving
        even.append(pays)
        taken.append(moving / 2 if pays else 0.0)
        seconds.append(1.0 if pays else pace)
    is_even = torch.tensor(even)
    left_S = torch.where(is_even, 1.0, over_S)
    came_S = torch.where(is_even, moves.came_S, 0.0)
    return Loads(
        sum(seconds) / len(seconds),
        float(left_S.mean()),
        sum(taken) / len(taken),
        float(left_S.max()),
        float(came_S.max()),
    )


class RankLoads(CostPart):
    """Loads of the ranks that experts lie over, by the load of the job."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._known: dict[tuple[int, int], Loads] = {}

    def _of_ranks(self, ep: int, tokens: int) -> Loads:
        """Loads over `ep` ranks; of balanced experts for a number of a rank's tokens, 0 for others.

        Time is that of the busiest rank. Where ranks share processors, rates are those of all at
        work; the busiest one is quicker by that share while others wait, and at least the work of
        all has to be done.
        """
        sizes = self.sizes
        found = self._known.get((ep, tokens))
        if found is not None:
            return found
        m, over_S = self.model, self.job.imbalances(self.model.num_experts, ep)
        kept_SE = self.job.kept(m.num_experts)
        sharing = max(sizes.measured("sharing"), 1.0)
        pace_S = torch.maximum(over_S / sharing, kept_SE.sum(1))
        if not tokens:
            found = Loads(float(pace_S.mean()), float(over_S.mean()), 0.0, float(over_S.max()), 0.0)
        else:
            latency, bandwidth = sizes.link(torch.tensor([ep]))
            found = balanced(
                *(over_S, pace_S, moves_of(kept_SE, ep)),
                rows=float(tokens * m.top_k),
                row_flops=2.0 * m.expert_parameters,
                flops=sizes.rate(),
                expert_bytes=float(m.expert_parameters * self.job.itemsize),
                link=Link(float(latency), float(bandwidth), float(bandwidth)),
            )
        self._known[ep, tokens] = found
        return found

    def moves(self, c: Columns) -> Tensor:
        """True for candidates in which experts ever move."""
        return self.of(c, "moved") > 0

    def of(self, c: Columns, name: str) -> Tensor:
        """One of the numbers of `Loads`, of each candidate."""
        ep, balance = c["ep"], c.get("balance")
        if not self.model.num_experts or not len(ep):
            return torch.full(ep.shape, float(name not in ("moved", "peak_moved")))
        if balance is None or not bool(balance.any()):
            table = torch.zeros(int(ep.max()) + 1, dtype=torch.float64)
            for size in present(ep):
                table[size] = getattr(self._of_ranks(size, 0), name)
            return table[ep]
        tokens = torch.where((balance > 0) & (ep > 1), self.sizes.tokens(c), 0.0).long()
        most = int(ep.max()) + 1
        keys, place = (tokens * most + ep).unique(return_inverse=True)
        each = [getattr(self._of_ranks(key % most, key // most), name) for key in keys.tolist()]
        return torch.tensor(each, dtype=torch.float64)[place]
