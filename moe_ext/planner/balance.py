"""Exact balance of uneven loads: the experts that move, and whether that pays.

Shapes: S steps, E experts, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.comm.link import Link
from moe_ext.nn.balance.moved import moving_pays

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
    """Experts that `MoELayer(rebalance="exact")` moves.

    Args:
        counts_SE: shares of the rows.
        num_ranks: P.
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
