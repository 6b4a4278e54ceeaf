"""Rows in rounds: how the rows of a layer are cut so that no rank holds more than it can.

Shapes: T tokens, D model, E experts, K top-k, N = T*K rows, R rows of a round, P ranks, L = E/P
    local experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.distributed.collectives import all_to_all_rows, check_equal_over_ranks, share
from moe_ext.distributed.dispatcher import (
    AllToAllDispatcher,
    ExchangedCounts,
    LocalDispatcher,
)
from moe_ext.distributed.groups import group_rank
from moe_ext.ops.grouped_gemm import row_alignment

Experts = Callable[[Tensor, Tensor], Tensor]


class Round(Protocol):
    """Some of a rank's rows, and the way of these through the experts."""

    @property
    def tables(self) -> ops.Permutation:
        """Where the rows come from."""
        ...

    def run(self, rows_RD: Tensor, experts: Experts) -> Tensor:
        """What the experts make of the rows, in the order of the rows; differentiable."""
        ...


def take_rows(x_TD: Tensor, tables: ops.Permutation) -> Tensor:
    """The rows of a round, copied from their tokens; not differentiable."""
    rows: Tensor = torch.ops.moe_ext._gather_tokens(x_TD.detach(), tables.slot_of_row, tables.top_k)
    return rows


@dataclass(frozen=True)
class LocalRound:
    """Consecutive rows, grouped by expert.

    Attributes:
        whole: tables of all rows.
        start: the first row.
        budget: number of rows, fewer at the end.
    """

    whole: ops.Permutation
    start: int
    budget: int

    @property
    def tables(self) -> ops.Permutation:
        """Of these rows; made when asked for, since each is as long as all slots."""
        slot_of_row = self.whole.slot_of_row[self.start : self.start + self.budget]
        row = self.whole.row_of_slot - self.start
        inside = (row >= 0) & (row < slot_of_row.shape[0])
        return replace(self.whole, slot_of_row=slot_of_row, row_of_slot=row.where(inside, -1))

    def run(self, rows_RD: Tensor, experts: Experts) -> Tensor:
        """See `Round`."""
        offsets = (self.whole.expert_offsets - self.start).clamp(0, rows_RD.shape[0])
        return experts(rows_RD, offsets)


@dataclass(frozen=True)
class ExchangeRound:
    """Rows that travel to the rank of their expert.

    Attributes:
        whole: tables of all rows.
        slot_of_row: slots of the rows that this rank sends, ordered by destination.
        dispatcher: whose group they travel in.
        sent: rows to each rank.
        received: rows from each rank.
        received_PL: rows from each rank for each local expert.
    """

    whole: ops.Permutation
    slot_of_row: Tensor
    dispatcher: AllToAllDispatcher
    sent: list[int]
    received: list[int]
    received_PL: Tensor

    @property
    def tables(self) -> ops.Permutation:
        """Of the rows that this rank sends; made when asked for, being as long as all slots."""
        row_of_slot = torch.full_like(self.whole.row_of_slot, -1)
        rows = torch.arange(self.slot_of_row.shape[0], device=row_of_slot.device)
        row_of_slot[self.slot_of_row] = rows
        return replace(self.whole, slot_of_row=self.slot_of_row, row_of_slot=row_of_slot)

    def run(self, rows_RD: Tensor, experts: Experts) -> Tensor:
        """See `Round`."""
        group, grad_scale = self.dispatcher.group, self.dispatcher.grad_scale
        operation = "AllToAllDispatcher round"
        arrived = all_to_all_rows(
            rows_RD, group, self.sent, self.received, grad_scale=grad_scale, operation=operation
        )
        grouped, permutation = self.dispatcher.group_by_expert(arrived, self.received_PL)
        out = ops.unpermute_tokens(experts(grouped, permutation.expert_offsets), permutation)
        return all_to_all_rows(
            out, group, self.received, self.sent, grad_scale=1.0 / grad_scale, operation=operation
        )


def plan_rounds(
    dispatcher: Any,
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    capacity: int | None,
    budget: int,
    drop: bool,
) -> tuple[list[Round], Tensor]:
    """Cut the rows of a layer into rounds.

    Args:
        dispatcher: a `LocalDispatcher` or an `AllToAllDispatcher`.
        x_TD: tokens.
        topk_idx_TK: experts of every token, -1 = none.
        topk_weights_TK: their weights.
        capacity: rows that an expert takes from this rank, None for all.
        budget: rows that a rank runs, sends or receives in one round, at most.
        drop: leave out the rows beyond one round.

    Returns:
        The rounds, at least one and as many on every rank of the group, and the number of slots
        dropped, 0-d int64.

    Raises:
        TypeError: the dispatcher is of another kind.
        ValueError: on every rank, when the budget differs between ranks.
        RankFailureError: a rank died or did not answer.
    """
    if isinstance(dispatcher, LocalDispatcher):
        return _plan_local(
            dispatcher, x_TD, topk_idx_TK, topk_weights_TK, capacity=capacity, budget=budget,
            drop=drop,
        )  # fmt: skip
    if isinstance(dispatcher, AllToAllDispatcher):
        return _plan_exchange(
            dispatcher, x_TD, topk_idx_TK, topk_weights_TK, capacity=capacity, budget=budget,
            drop=drop,
        )  # fmt: skip
    raise TypeError(
        "RowBudget: expected the dispatcher to be a LocalDispatcher or an AllToAllDispatcher, got "
        f"{type(dispatcher).__name__}"
    )


def _plan_local(
    dispatcher: LocalDispatcher,
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    capacity: int | None,
    budget: int,
    drop: bool,
) -> tuple[list[Round], Tensor]:
    # Rows without columns: only the tables are wanted, and they cost no row.
    none_TD = x_TD.detach()[:, :0]
    _, _, metadata = dispatcher.dispatch(none_TD, topk_idx_TK, topk_weights_TK, capacity=capacity)
    tables, num_dropped = metadata.permutation, metadata.num_dropped
    num_rows = tables.slot_of_row.shape[0]
    if drop and num_rows > budget:
        kept_idx = _keep_first(tables, topk_idx_TK, tables.expert_offsets.new_full((1,), budget))
        tables = _tables(none_TD, kept_idx, dispatcher.num_experts)
        num_dropped = num_dropped + _num_routed(metadata.permutation) - _num_routed(tables)
        num_rows = budget
    starts = range(0, num_rows, budget) if num_rows else range(1)
    return [LocalRound(tables, start, budget) for start in starts], num_dropped


def _tables(none_TD: Tensor, topk_idx_TK: Tensor, num_experts: int) -> ops.Permutation:
    return ops.permute_tokens(none_TD, topk_idx_TK, num_experts)[1]


def _num_routed(tables: ops.Permutation) -> Tensor:
    return tables.num_tokens_per_expert.sum()


def _keep_first(tables: ops.Permutation, topk_idx_TK: Tensor, allowed_P: Tensor) -> Tensor:
    """The choices with every slot taken out beyond the first `allowed` of its destination.

    Slots are counted in the order of the tokens, for each of P equal runs of experts apart.
    """
    num_experts = tables.expert_offsets.shape[0] - 1
    routed = tables.row_of_slot >= 0
    target = topk_idx_TK.reshape(-1) // (num_experts // allowed_P.shape[0])
    target = target.where(routed, -1)
    none = topk_idx_TK.new_empty((target.shape[0], 0), dtype=torch.float32)
    by_target = _tables(none, target[:, None], allowed_P.shape[0])
    target = target.clamp(min=0)
    place = by_target.row_of_slot - by_target.expert_offsets[target]
    keep = routed & (place < allowed_P[target])
    return topk_idx_TK.where(keep.view_as(topk_idx_TK), -1)


def _plan_exchange(
    dispatcher: AllToAllDispatcher,
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    capacity: int | None,
    budget: int,
    drop: bool,
) -> tuple[list[Round], Tensor]:
    _, local, counts = dispatcher.exchange_counts(
        x_TD, topk_idx_TK, topk_weights_TK, capacity=capacity, with_rows=False
    )
    tables, num_dropped = local.permutation, local.num_dropped
    align = row_alignment(x_TD, budget, dispatcher.num_local_experts)
    limit = budget - dispatcher.num_local_experts * (align - 1)
    pairs_PP = _share_pairs(dispatcher.group, counts, budget, x_TD.device)
    if drop:
        allowed_PP = fair_share(fair_share(pairs_PP, limit, dim=1), limit, dim=0)
        if bool((allowed_PP < pairs_PP).any()):
            own = allowed_PP[group_rank(dispatcher.group)].to(x_TD.device)
            kept_idx = _keep_first(tables, topk_idx_TK, own)
            before = _num_routed(tables)
            _, local, counts = dispatcher.exchange_counts(
                x_TD, kept_idx, topk_weights_TK, with_rows=False
            )
            tables = local.permutation
            num_dropped = num_dropped + before - _num_routed(tables)
            pairs_PP = allowed_PP
    shares = schedule(pairs_PP, limit)
    return _exchange_rounds(dispatcher, tables, counts, shares), num_dropped


def _share_pairs(
    group: ProcessGroup, counts: ExchangedCounts, budget: int, device: torch.device
) -> Tensor:
    """Rows from each rank (first dimension) to each other, on the host of every rank."""
    rows = share([budget, *counts.sent], group, device, operation="RowBudget")
    check_equal_over_ranks("rows", [row[0] for row in rows], group, "RowBudget")
    return torch.tensor([row[1:] for row in rows], dtype=torch.int64)


def fair_share(counts: Tensor, limit: int, *, dim: int) -> Tensor:
    """Cut counts so that those along `dim` sum to at most `limit`: the large ones to one level."""
    lines = counts.movedim(dim, -1)
    ordered = lines.sort(-1).values
    size = lines.shape[-1]
    # Where the i smallest are kept whole, the others share what is left of the limit.
    kept = ordered.cumsum(-1) - ordered
    levels = (limit - kept) // torch.arange(size, 0, -1)
    level = levels.clamp(min=0).minimum(ordered).amax(-1, keepdim=True)
    cut = lines.minimum(level)
    over = lines > cut
    # What a whole level leaves over goes to the first lines that want more, one each.
    spare = (limit - cut.sum(-1, keepdim=True)).clamp(min=0)
    cut = cut + (over & (over.cumsum(-1) <= spare)).long()
    return cut.movedim(-1, dim)


def schedule(pairs_PP: Tensor, limit: int) -> list[Tensor]:
    """Spread the rows of every pair of ranks over rounds.

    Args:
        pairs_PP: rows from each rank (first dimension) to each other.
        limit: rows that a rank sends, and that it receives, in one round, at most.

    Returns:
        `[P, P]` for each round, at least one round; they sum to `pairs_PP`.
    """
    num_ranks = pairs_PP.shape[0]
    left_PP, source = pairs_PP.clone(), torch.arange(num_ranks)
    rounds: list[Tensor] = []
    while not rounds or bool(left_PP.any()):
        share_PP = torch.zeros_like(left_PP)
        to_send, to_receive = (
            source.new_full((num_ranks,), limit),
            source.new_full((num_ranks,), limit),
        )
        for shift in range(num_ranks):
            target = (source + shift) % num_ranks
            take = left_PP[source, target].minimum(to_send).minimum(to_receive[target])
            share_PP[source, target] = take
            to_send -= take
            to_receive[target] -= take
        left_PP -= share_PP
        rounds.append(share_PP)
    return rounds


def _exchange_rounds(
    dispatcher: AllToAllDispatcher,
    tables: ops.Permutation,
    counts: ExchangedCounts,
    shares: list[Tensor],
) -> list[Round]:
    """What this rank sends and receives in each round."""
    me = group_rank(dispatcher.group)
    device = tables.slot_of_row.device
    first_P = torch.tensor(counts.sent).cumsum(0) - torch.tensor(counts.sent)
    ends_PL = counts.received_PL.cumsum(1)
    sent_P, received_P = torch.zeros_like(first_P), torch.zeros_like(first_P)
    rounds: list[Round] = []
    for share_PP in shares:
        send_P, receive_P = share_PP[me], share_PP[:, me]
        begin_P1 = received_P[:, None].to(device)
        end_P1 = begin_P1 + receive_P[:, None].to(device)
        reached_PL = torch.minimum(torch.maximum(ends_PL, begin_P1), end_P1)
        rounds.append(
            ExchangeRound(
                tables,
                _select(tables, first_P + sent_P, send_P),
                dispatcher,
                send_P.tolist(),
                receive_P.tolist(),
                torch.diff(reached_PL, dim=1, prepend=begin_P1),
            )
        )
        sent_P, received_P = sent_P + send_P, received_P + receive_P
    return rounds


def _select(tables: ops.Permutation, begin_P: Tensor, count_P: Tensor) -> Tensor:
    """The slots of P runs of rows, one behind the other."""
    total = int(count_P.sum())
    shift_P = begin_P - (count_P.cumsum(0) - count_P)
    rows = torch.arange(total) + shift_P.repeat_interleave(count_P, output_size=total)
    return tables.slot_of_row[rows.to(tables.slot_of_row.device)]
