"""Parts of a batch: rows that travel together, how a batch is cut, and the tables of each part.

Shapes: T tokens, D model, E experts, K top-k, N = T*K rows, R rows of a part, P ranks, L = E/P
    local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._checks import check_choice, check_numbers, check_rule

BUDGET_OVERFLOWS = ("rounds", "drop")


@dataclass(frozen=True)
class RowBudget:
    """Limit on the rows that a rank holds at once, however the router spreads the tokens.

    Attributes:
        rows: largest number of rows that a rank runs through its experts at once, including
            alignment padding. In an expert-parallel layer a rank also sends and receives at most
            this many rows at once.
        overflow: "rounds" runs the rows beyond the budget in further rounds, and the result is
            exact. "drop" leaves them out, and counts them in `num_dropped`.
        static: every rank sends `rows / P` rows to each of the P ranks, including padding. Sizes do
            not depend on counts, so the host does not wait for the device before the rows travel.
            "rounds" reads one number after the work of the first round was queued. "drop" reads
            none, and can be captured in a CUDA graph. Needs `dispatcher="alltoall"` or "symm_mem".
            On one rank sizes never depend on counts, and this option has no effect.

    Raises:
        ValueError: a value is out of its range.
    """

    rows: int
    _: KW_ONLY
    overflow: str = "rounds"
    static: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for values that are not allowed."""
        check_numbers("RowBudget", RowBudget.__annotations__, vars(self))
        check_rule("RowBudget", "rows", self.rows, "at least 1", self.rows >= 1)
        check_choice("RowBudget", "overflow", self.overflow, BUDGET_OVERFLOWS)


class Choice(NamedTuple):
    """Experts of the tokens, after the layer has applied its capacity.

    Attributes:
        topk_idx: experts, `[T, K]`, -1 for none.
        topk_weights: weights, `[T, K]`.
        capacity: largest number of rows that an expert takes from this rank, None for all.
        num_dropped: number of slots beyond the layer's capacity, 0-d; None without a capacity.
        filled: True if it is known on the host that no slot is -1.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    capacity: int | None = None
    num_dropped: Tensor | None = None
    filled: bool = False


@dataclass(frozen=True)
class Cut:
    """Rule by which a batch is cut into parts, equal on every rank.

    Attributes:
        num_parts: number of parts. One part travels while the experts work on another.
        budget: limit on the rows of a part; None for no limit.
        num_shared: number of experts whose counts every rank sends to all ranks, so that the caller
            can assign rows to places; None to exchange counts only for the rows to be sent.
    """

    num_parts: int = 1
    budget: RowBudget | None = None
    num_shared: int | None = None

    @property
    def is_static(self) -> bool:
        """True if sizes do not depend on counts."""
        return self.budget is not None and self.budget.static


WHOLE = Cut()


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows of one exchange.

    Attributes:
        sent: number of rows that this rank sends to each rank of the group.
        received: number of rows that it receives from each rank.
        received_PL: number of rows from each rank for each local expert.
        expert_capacity: largest number of rows of a local expert from all ranks; None for no limit.
        has_backward: True if rows of any rank need a gradient. All ranks then take part in the
            exchange of gradients.
        padded: True if the rows from each rank end with padding rows, which have no expert.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    received_PL: Tensor
    expert_capacity: int | None = None
    has_backward: bool = False
    padded: bool = False

    @classmethod
    def of_all(
        cls, rows_PE: Tensor, rank: int, *, has_backward: bool, device: torch.device
    ) -> RowCounts:
        """Return the counts of one rank from the rows `[P, E]` of every rank for every expert."""
        num_ranks = rows_PE.shape[0]
        rows_PPL = rows_PE.view(num_ranks, num_ranks, -1)
        between_PP, received_PL = rows_PPL.sum(2), rows_PPL[:, rank]
        return cls(
            tuple(between_PP[rank].tolist()),
            tuple(between_PP[:, rank].tolist()),
            received_PL.to(device, non_blocking=True),
            has_backward=has_backward,
        )

    def expert_of_row(self) -> Tensor:
        """Return the local expert of every received row, `[R]`, -1 for padding rows."""
        num_ranks, num_experts = self.received_PL.shape
        if not self.padded:
            expert_PL = torch.arange(num_experts, device=self.received_PL.device)
            return expert_PL.repeat(num_ranks).repeat_interleave(
                self.received_PL.reshape(-1), output_size=sum(self.received)
            )
        places = torch.arange(self.received[0], device=self.received_PL.device)
        ends_PL = self.received_PL.cumsum(1)
        expert_R = torch.searchsorted(ends_PL, places.repeat(num_ranks, 1), right=True).reshape(-1)
        return expert_R.masked_fill(expert_R == num_experts, -1)


@dataclass(frozen=True)
class SharedCounts:
    """Numbers of rows of every rank for every expert, known to all ranks.

    Attributes:
        tables: slots of this rank, grouped by expert.
        counts_PE: numbers of rows, int64, on the host.
        has_backward: see `ExchangedCounts`.
    """

    tables: ops.Permutation
    counts_PE: Tensor
    has_backward: bool


class PlacedRows(NamedTuple):
    """Assignment of this rank's rows to expert slots on all ranks, under rebalance.

    Attributes:
        slot_idx: `[T, K]`, expert slots instead of experts, -1 for none. Slot `rank * S + s` is
            slot s of a rank. Slots from L on hold experts that have moved there.
        counts: numbers of rows that travel.
        moves: experts whose weights travel, with their number from each rank in `receive`; None if
            none do.
    """

    slot_idx: Tensor
    counts: RowCounts
    moves: Any

    def offsets(self, slot_offsets: Tensor) -> Tensor:
        """Return the offsets of the slots that hold an expert; the other slots have no rows.

        Args:
            slot_offsets: offsets of all slots of this rank, `[S + 1]`.
        """
        held = slot_offsets.shape[0] // 2 + (0 if self.moves is None else sum(self.moves.receive))
        return slot_offsets[: held + 1]


@dataclass(frozen=True)
class Round:
    """A part that `TokenDispatcher.send` sends in the forward pass, and again in the backward pass.

    Attributes:
        whole: permutation of all rows of this rank.
        slot_of_row: `[R]`, slots of this round's rows, ordered by expert; -1 for a padding row.
        expert_offsets: `[E + 1]`, offsets of the experts in these rows, if nothing travels.
        counts: numbers of rows that travel; None if nothing travels.
    """

    whole: ops.Permutation
    slot_of_row: Tensor
    expert_offsets: Tensor
    counts: RowCounts | None = None

    def take(self, x_TD: Tensor) -> Tensor:
        """Copy the rows `[R, D]` of this round from their tokens. Differentiable."""
        return torch.ops.moe_ext._gather_tokens(x_TD, self.slot_of_row, self.whole.top_k)

    def return_sums(self, grad_RD: Tensor, tables: ops.Permutation) -> Tensor:
        """Sum gradients of the rows from `take` into gradients `[T, D]` of the tokens."""
        return ops.unpermute_tokens(grad_RD, tables)

    @property
    def tables(self) -> ops.Permutation:
        """Permutation of this round's rows, computed on demand: it is as long as all slots."""
        slots, num_slots = self.slot_of_row, self.whole.row_of_slot.shape[0]
        # Index -1 of a padding row addresses the extra last entry, which is cut off.
        row_of_slot = self.whole.row_of_slot.new_full((num_slots + 1,), -1)
        row_of_slot[slots] = torch.arange(slots.shape[0], device=slots.device)
        return replace(
            self.whole,
            slot_of_row=slots,
            row_of_slot=row_of_slot[:-1],
            expert_offsets=self.expert_offsets,
        )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of a dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowWeights:
    """Weights of the rows from `dispatch`, for experts that multiply by them.

    This is neither a tuple nor a dataclass, because FSDP2 casts the tensors in those.

    Attributes:
        slot_weights: weight of each slot, in the graph, in the dtype of sums.
        slot_of_row: `[R]`, slots of the rows, -1 for a padding row.
    """

    def __init__(self, slot_weights: Tensor, slot_of_row: Tensor) -> None:
        self.slot_weights = slot_weights
        self.slot_of_row = slot_of_row


@dataclass(frozen=True)
class DispatchMetadata:
    """Tables from `dispatch` with which `combine` brings results back.

    Attributes:
        permutation: permutation of this rank's tokens over all E experts.
        topk_weights: `[T, K]`, in the graph; None if the experts have multiplied by the weights.
        sent: number of rows sent to each rank of the group, None if nothing was sent.
        received: number of rows received from each rank.
        received_permutation: permutation that groups the received rows by local expert.
        expert_capacity: largest number of rows of a local expert from all ranks; None for no limit.
        weights_R1: weights of the received rows, if they travelled with the rows.
    """

    permutation: ops.Permutation
    topk_weights: Tensor | None
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None
    received_permutation: ops.Permutation | None = None
    expert_capacity: int | None = None
    weights_R1: Tensor | None = None

    @property
    def num_dropped(self) -> Tensor:
        """Slots of this rank dropped for lack of capacity, 0-d int64."""
        return self.permutation.num_dropped


# Function that brings the rows of a part to their experts. Its argument is called while the rows
# are underway. It returns rows `[R, D]` grouped by local expert, offsets `[L + 1]`, and the
# metadata for `combine`.
Part = Callable[[Callable[[], None] | None], tuple[Tensor, Tensor, Any]]


@dataclass(frozen=True)
class BatchPlan:
    """Parts of a batch. All ranks have the same number of parts.

    Attributes:
        parts: parts that all ranks call in this order. A caller may remove parts from the list, so
            that their rows are freed.
        num_dropped: number of slots of this rank that were left out, 0-d int64.
        later: function that returns the rounds after the parts. Rounds run again in the backward
            pass.
        placed: assignment of rows to slots; None if each row goes to the rank of its expert.
        filled: True if every row of the parts has an expert.
    """

    parts: list[Part]
    num_dropped: Tensor
    later: Callable[[], list[Round]] = list
    placed: PlacedRows | None = None
    filled: bool = False


def cut_rows(tables: ops.Permutation, max_rows: int) -> list[Round]:
    """Cut rows that do not travel into rounds of at most `max_rows` rows, at least one round."""
    num_rows = tables.slot_of_row.shape[0]
    rounds = []
    for start in range(0, max(num_rows, 1), max_rows):
        slots = tables.slot_of_row[start : start + max_rows]
        offsets = (tables.expert_offsets - start).clamp(0, slots.shape[0])
        rounds.append(Round(tables, slots, offsets))
    return rounds


def cut_exchange(
    tables: ops.Permutation, counts: RowCounts, shares: Iterable[Tensor], rank: int
) -> list[Round]:
    """Cut rows that travel into rounds.

    Args:
        tables: permutation of all rows of this rank.
        counts: numbers of all these rows.
        shares: result of `schedule`: rows from each rank to each rank, for every round.
        rank: this rank in its group.
    """
    device = tables.slot_of_row.device
    own_P = torch.tensor(counts.sent, device="cpu")
    first_P = own_P.cumsum(0) - own_P
    ends_PL = counts.received_PL.cumsum(1)
    sent_P, received_P = torch.zeros_like(first_P), torch.zeros_like(first_P)
    rounds = []
    for share_PP in shares:
        send_P, receive_P = share_PP[rank], share_PP[:, rank]
        # Rows from a rank are ordered by expert. This round has those from `begin` to `end`.
        begin_P1 = received_P[:, None].to(device)
        end_P1 = begin_P1 + receive_P[:, None].to(device)
        reached_PL = torch.minimum(torch.maximum(ends_PL, begin_P1), end_P1)
        part = RowCounts(
            tuple(send_P.tolist()),
            tuple(receive_P.tolist()),
            torch.diff(reached_PL, dim=1, prepend=begin_P1),
            has_backward=counts.has_backward,
        )
        slots = _slots_of_runs(tables, first_P + sent_P, send_P)
        rounds.append(Round(tables, slots, tables.expert_offsets, part))
        sent_P, received_P = sent_P + send_P, received_P + receive_P
    return rounds


def cut_evenly(
    tables: ops.Permutation,
    own_PL: Tensor,
    received_PL: Tensor,
    share: int,
    number: int,
    *,
    has_backward: bool,
) -> Round:
    """Make a round in which every rank sends `share` rows to each rank, padded at the end.

    The sizes do not depend on counts, which the host therefore need not know.

    Args:
        tables: permutation of all rows of this rank.
        own_PL: number of this rank's rows for each expert of each rank.
        received_PL: number of rows of each rank for each expert of this rank.
        share: number of rows from a rank to another.
        number: number of the round, which begins after `number * share` rows.
        has_backward: see `RowCounts`.
    """
    num_ranks = own_PL.shape[0]
    begin, end = number * share, (number + 1) * share
    count_P1 = own_PL.sum(1, keepdim=True)
    first_P1 = count_P1.cumsum(0) - count_P1
    place_S = torch.arange(begin, end, device=own_PL.device)
    row_PS = (first_P1 + place_S).clamp(max=max(tables.slot_of_row.shape[0] - 1, 0))
    # A rank without tokens has an empty `slot_of_row`, which cannot be indexed. Its rows are all
    # masked below, so any tensor serves.
    all_slots = tables.slot_of_row if tables.slot_of_row.shape[0] else place_S
    slots_PS = all_slots[row_PS].masked_fill(place_S >= count_P1, -1)
    reached_PL = received_PL.cumsum(1).clamp(begin, end)
    counts = RowCounts(
        (share,) * num_ranks,
        (share,) * num_ranks,
        torch.diff(reached_PL, dim=1, prepend=reached_PL.new_full((num_ranks, 1), begin)),
        has_backward=has_backward,
        padded=True,
    )
    return Round(tables, slots_PS.reshape(-1), tables.expert_offsets, counts)


def _slots_of_runs(tables: ops.Permutation, begin_P: Tensor, count_P: Tensor) -> Tensor:
    """Return the slots of P runs of rows, concatenated."""
    total = int(count_P.sum())
    shift_P = begin_P - (count_P.cumsum(0) - count_P)
    rows = shift_P.repeat_interleave(count_P, output_size=total)
    rows = rows + torch.arange(total, device=rows.device)
    return tables.slot_of_row[rows.to(tables.slot_of_row.device)]


def keep_first(tables: ops.Permutation, topk_idx_TK: Tensor, allowed_P: Tensor) -> Tensor:
    """Return the choices with at most `allowed` slots for each destination; others become -1.

    The P destinations are equal runs of experts. The first slots in the order of tokens are kept.
    """
    num_experts = tables.expert_offsets.shape[0] - 1
    routed = tables.row_of_slot >= 0
    target = topk_idx_TK.reshape(-1) // (num_experts // allowed_P.shape[0])
    target = target.where(routed, -1)
    none = topk_idx_TK.new_empty((target.shape[0], 0), dtype=torch.float32)
    _, by_target = ops.permute_tokens(none, target[:, None], allowed_P.shape[0])
    target = target.clamp(min=0)
    place = by_target.row_of_slot - by_target.expert_offsets[target]
    keep = routed & (place < allowed_P[target])
    return topk_idx_TK.where(keep.view_as(topk_idx_TK), -1)


def count_dropped(before: ops.Permutation, kept: ops.Permutation) -> ops.Permutation:
    """Return the permutation of the kept slots, whose `num_dropped` counts all other slots."""
    routed = before.num_tokens_per_expert.sum() - kept.num_tokens_per_expert.sum()
    return replace(kept, num_dropped=before.num_dropped + routed)


def fair_share(counts: Tensor, limit: int, *, dim: int) -> Tensor:
    """Reduce counts so that they sum to at most `limit` along `dim`, large ones to one level."""
    lines = counts.movedim(dim, -1)
    ordered = lines.sort(-1).values
    size = lines.shape[-1]
    # If the i smallest counts are kept, the other counts share the rest of the limit equally.
    kept = ordered.cumsum(-1) - ordered
    levels = (limit - kept) // torch.arange(size, 0, -1, device=counts.device)
    level = levels.clamp(min=0).minimum(ordered).amax(-1, keepdim=True)
    cut = lines.minimum(level)
    over = lines > cut
    # The remainder of the division goes to the first counts that were reduced, one row each.
    spare = (limit - cut.sum(-1, keepdim=True)).clamp(min=0)
    cut = cut + (over & (over.cumsum(-1) <= spare)).long()
    return cut.movedim(-1, dim)


def schedule(pairs_PP: Tensor, limit: int) -> list[Tensor]:
    """Spread the rows of every pair of ranks over rounds.

    Args:
        pairs_PP: number of rows from each rank (first dimension) to each rank.
        limit: largest number of rows that a rank sends, and that it receives, in a round.

    Returns:
        `[P, P]` for each round, at least one; they sum to `pairs_PP`.
    """
    num_ranks = pairs_PP.shape[0]
    left_PP, source = pairs_PP.clone(), torch.arange(num_ranks, device=pairs_PP.device)
    shares: list[Tensor] = []
    while not shares or bool(left_PP.any()):
        share_PP = torch.zeros_like(left_PP)
        to_send = source.new_full((num_ranks,), limit)
        to_receive = to_send.clone()
        for shift in range(num_ranks):
            target = (source + shift) % num_ranks
            take = left_PP[source, target].minimum(to_send).minimum(to_receive[target])
            share_PP[source, target] = take
            to_send -= take
            to_receive[target] -= take
        left_PP -= share_PP
        shares.append(share_PP)
    return shares
