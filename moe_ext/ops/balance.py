"""Plans that give every rank the same number of rows.

Shape suffixes: P ranks, E experts, S = 2 E / P slots of a rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class BalancePlan(NamedTuple):
    """Experts that each rank runs, and how many rows of each; unpacks in this order.

    Attributes:
        slot_expert (Tensor[P, S]): int64 expert in each slot of each rank: first the E / P experts
            at home, then the moved ones, both ascending, then -1.
        slot_rows (Tensor[P, S]): int64 rows that a slot takes, over all source ranks.
    """

    slot_expert: Tensor
    slot_rows: Tensor


def plan_balance(num_tokens_per_expert_E: Tensor, num_ranks: int) -> BalancePlan:
    r"""Gives every rank an even share of the rows, and moves at most E / P experts to it.

    Of N rows, ranks below :math:`N \bmod P` take :math:`\lceil N / P \rceil` and the others
    :math:`\lfloor N / P \rfloor`. Expert e is at home on rank ``e // (E / P)``. The experts are
    columns of an alias table, whose capacities sum to the share of their rank. Vose's construction
    fills each column from one other expert at most. Columns of one rank are paired first, so that
    an even load moves nothing.

    Args:
        num_tokens_per_expert_E (Tensor[E]): int64 rows of each expert over all ranks, >= 0. On a
            GPU they are brought to the host, which synchronises.
        num_ranks (int): P, a divisor of E.

    Returns:
        BalancePlan: on CPU.

    Raises:
        RuntimeError: an argument has the wrong dtype, shape or value.

    Deterministic, with whole numbers alone, so that every rank makes the same plan of the same
    counts.

    Reference: Vose, A Linear Algorithm for Generating Random Numbers with a Given Distribution,
    1991.
    """
    counts = num_tokens_per_expert_E.detach().cpu()
    return BalancePlan(*torch.ops.moe_ext.plan_balance(counts, num_ranks))


@torch.library.register_fake("moe_ext::plan_balance")
def _(counts: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    shape = (num_ranks, 2 * counts.shape[0] // num_ranks)
    return counts.new_empty(shape), counts.new_empty(shape)


def split_rows(counts_PE: Tensor, plan: BalancePlan) -> Tensor:
    """Counts the rows that each rank sends to each slot of a plan.

    Rows stay on their rank as far as its slots have room for them. Other rows fill the slots of
    their expert in the order of ranks. With counts other than those of the plan, the slots of an
    expert share its rows in proportion to the planned ones, rounded by the sums so far. If none
    were planned, all rows go to the first slot.

    Args:
        counts_PE (Tensor[P, E]): int64 rows of each source rank for each expert, >= 0.
        plan (BalancePlan): of `plan_balance`, or of the caller's own: `[P, S]` with 2 E slots in
            all, and at least one slot for every expert that has rows.

    Returns:
        Tensor[P, P * S]: int64 rows of a source rank for slot `rank * S + slot`, on CPU.

    Raises:
        RuntimeError: an argument has the wrong dtype, shape or value.

    Deterministic.
    """
    return torch.ops.moe_ext.split_rows(counts_PE.detach().cpu(), *plan)


@torch.library.register_fake("moe_ext::split_rows")
def _(counts: Tensor, slot_expert: Tensor, slot_rows: Tensor) -> Tensor:
    return counts.new_empty((counts.shape[0], 2 * counts.shape[1]))
