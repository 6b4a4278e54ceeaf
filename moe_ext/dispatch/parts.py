"""Parts of a batch: the rows that travel together, how they are cut, and what is kept of them.

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
        rows: rows that a rank runs through its experts at once, alignment padding included. In an
            expert-parallel layer it is also the most that a rank sends or receives at once.
        overflow: "rounds" runs the rows beyond the budget in further rounds, with the exact result;
            "drop" leaves them out and counts them in `num_dropped`.
        static: across ranks, every rank sends `rows / P` rows to each of the P ranks, padding
            included, so that sizes follow from no count: nothing waits for the device before the
            rows travel. "rounds" then reads one number behind the queued work of the first round,
            "drop" nothing, and a CUDA graph can hold it. It is for `dispatcher="alltoall"` (or
            "symm_mem"). On one rank it changes nothing: sizes never follow from counts there.

    Raises:
        ValueError: a value is out of its range.
    """

    rows: int
    _: KW_ONLY
    overflow: str = "rounds"
    static: bool = False

    def __post_init__(self) -> None:
        """Refuse what is not allowed."""
        check_numbers("RowBudget", RowBudget.__annotations__, vars(self))
        check_rule("RowBudget", "rows", self.rows, "at least 1", self.rows >= 1)
        check_choice("RowBudget", "overflow", self.overflow, BUDGET_OVERFLOWS)


class Choice(NamedTuple):
    """Experts of the tokens, within the capacity.

    Attributes:
        topk_idx: `[T, K]`, -1 for none.
        topk_weights: `[T, K]`.
        capacity: rows that an expert takes from this rank, None for all.
        num_dropped: slots that found no room, 0-d; None without a capacity of the layer.
        filled: whether the host knows that no slot is -1.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    capacity: int | None = None
    num_dropped: Tensor | None = None
    filled: bool = False


@dataclass(frozen=True)
class Cut:
    """The way in which the rows of a batch are cut into parts, the same on every rank.

    Attributes:
        num_parts: runs of the tokens, of which one travels while the experts work on another.
        budget: limit on the rows of a part; None for none.
        num_shared: experts whose counts all ranks tell each other, for a caller who places rows by
            them; None for none.
    """

    num_parts: int = 1
    budget: RowBudget | None = None
    num_shared: int | None = None

    @property
    def is_static(self) -> bool:
        """Sizes follow from no count."""
        return self.budget is not None and self.budget.static


WHOLE = Cut()


@dataclass(frozen=True)
class RowCounts:
    """Rows that travel at once.

    Attributes:
        sent: rows that this rank sends to each rank of the group.
        received: rows that it receives from each.
        received_PL: rows that it receives from each rank for each of its experts.
        expert_capacity: rows that a local expert gets at most, from all ranks; None without limit.
        has_backward: whether rows of some rank get a gradient: all ranks then take part.
        padded: whether the rows from each rank end with rows of no expert.
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
        """The part of a rank in the rows `[P, E]` of every rank for every expert."""
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
        """The local expert of every received row `[R]`, -1 for none."""
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
    """Rows of every rank for every expert, which all ranks know.

    Attributes:
        tables: this rank's slots, grouped by expert.
        counts_PE: int64, on the host.
        has_backward: see `ExchangedCounts`.
    """

    tables: ops.Permutation
    counts_PE: Tensor
    has_backward: bool


class PlacedRows(NamedTuple):
    """Rows of a rank, each at a rank that has room for it.

    Attributes:
        slot_idx: `[T, K]` slots in the place of experts, -1 for none. Slot `rank * S + s` is expert
            s of a rank, and a moved one from L on.
        counts: rows that travel.
        moves: experts that travel, with the numbers that each rank gives, `receive`; None for none.
    """

    slot_idx: Tensor
    counts: RowCounts
    moves: Any

    def offsets(self, slot_offsets: Tensor) -> Tensor:
        """Offsets of the experts that are here, of those of all slots: the others have no rows.

        Args:
            slot_offsets: `[S + 1]`.
        """
        held = slot_offsets.shape[0] // 2 + (0 if self.moves is None else sum(self.moves.receive))
        return slot_offsets[: held + 1]


@dataclass(frozen=True)
class Round:
    """A part that is sent by `TokenDispatcher.send`, and once more in the backward pass.

    Attributes:
        whole: tables of all rows of the rank.
        slot_of_row: `[R]` slots of this round's rows, ordered by expert; -1 for a padding row.
        expert_offsets: `[E + 1]` of the experts in these rows, where nothing travels.
        counts: how the rows travel; None where nothing travels.
    """

    whole: ops.Permutation
    slot_of_row: Tensor
    expert_offsets: Tensor
    counts: RowCounts | None = None

    def take(self, x_TD: Tensor) -> Tensor:
        """The rows `[R, D]` of this round, copied from their tokens; differentiable."""
        return torch.ops.moe_ext._gather_tokens(x_TD, self.slot_of_row, self.whole.top_k)

    def return_sums(self, grad_RD: Tensor, tables: ops.Permutation) -> Tensor:
        """The gradient `[T, D]` of the tokens of the rows that `take` gave, summed in its dtype."""
        return ops.unpermute_tokens(grad_RD, tables)

    @property
    def tables(self) -> ops.Permutation:
        """Tables of these rows alone; made when asked for, since they are as long as all slots."""
        slots, num_slots = self.slot_of_row, self.whole.row_of_slot.shape[0]
        # Padding rows (-1) write to the last entry, which is cut off.
        row_of_slot = self.whole.row_of_slot.new_full((num_slots + 1,), -1)
        row_of_slot[slots] = torch.arange(slots.shape[0], device=slots.device)
        return replace(
            self.whole,
            slot_of_row=slots,
            row_of_slot=row_of_slot[:-1],
            expert_offsets=self.expert_offsets,
        )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of rows are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowWeights:
    """Weights of the rows that `dispatch` brought, for experts that multiply by them.

    Neither a tuple nor a dataclass: FSDP2 would cast the tensors in these.

    Attributes:
        slot_weights: a weight a slot, in the graph, in the dtype of sums.
        slot_of_row: `[R]` slots, -1 for a padding row.
    """

    def __init__(self, slot_weights: Tensor, slot_of_row: Tensor) -> None:
        self.slot_weights = slot_weights
        self.slot_of_row = slot_of_row


@dataclass(frozen=True)
class DispatchMetadata:
    """Tables that `combine` undoes `dispatch` by.

    Attributes:
        permutation: of this rank's tokens, over all E experts.
        topk_weights: `[T, K]`, in the graph; None where the experts have multiplied by them.
        sent: rows sent to each rank of the group, None when nothing was sent.
        received: rows received from each rank.
        received_permutation: groups the received rows by local expert.
        expert_capacity: rows that a local expert gets at most, from all ranks; None without limit.
        weights_R1: weights of the received rows, where they have come already.
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


# Brings the rows of a part to their experts, with something to do while they are underway, if they
# travel: rows `[R, D]` grouped by local expert, offsets `[L + 1]`, and what `combine` takes.
Part = Callable[[Callable[[], None] | None], tuple[Tensor, Tensor, Any]]


@dataclass(frozen=True)
class BatchPlan:
    """Parts of a batch, of which all ranks have as many.

    Attributes:
        parts: those that run once, to be called in this order by all ranks; a caller may take them
            out, and with them their rows.
        num_dropped: slots of this rank that were left out, 0-d int64.
        later: gives the rounds behind the parts; their backward pass runs them once more.
        placed: where rows were placed; None where each is at the rank of its expert.
        filled: whether every row of the parts has an expert.
    """

    parts: list[Part]
    num_dropped: Tensor
    later: Callable[[], list[Round]] = list
    placed: PlacedRows | None = None
    filled: bool = False


def cut_rows(tables: ops.Permutation, max_rows: int) -> list[Round]:
    """Rounds of at most `max_rows` consecutive rows, at least one, where nothing travels."""
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
    """Rounds of rows that travel.

    Args:
        tables: of all rows of this rank.
        counts: of all these rows.
        shares: of `schedule`, rows from each rank to each other in every round.
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
        # Rows from a rank come ordered by expert: this round has those between two marks.
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
    """A round in which every rank sends each other `share` rows, padding behind its own.

    Its sizes depend on no count, so that the host need not know one.

    Args:
        tables: of all rows of this rank.
        own_PL: rows that it has for each expert of each rank.
        received_PL: rows that each rank has for each of its experts.
        share: rows from a rank to another.
        number: of the round: it has the `share` rows behind those of the rounds before.
        has_backward: see `RowCounts`.
    """
    num_ranks = own_PL.shape[0]
    begin, end = number * share, (number + 1) * share
    count_P1 = own_PL.sum(1, keepdim=True)
    first_P1 = count_P1.cumsum(0) - count_P1
    place_S = torch.arange(begin, end, device=own_PL.device)
    row_PS = (first_P1 + place_S).clamp(max=max(tables.slot_of_row.shape[0] - 1, 0))
    # Without slots there is nothing to take, and nothing is counted.
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
    """The slots of P runs of rows, one behind the other."""
    total = int(count_P.sum())
    shift_P = begin_P - (count_P.cumsum(0) - count_P)
    rows = shift_P.repeat_interleave(count_P, output_size=total)
    rows = rows + torch.arange(total, device=rows.device)
    return tables.slot_of_row[rows.to(tables.slot_of_row.device)]


def keep_first(tables: ops.Permutation, topk_idx_TK: Tensor, allowed_P: Tensor) -> Tensor:
    """The choices with every slot taken out beyond the first `allowed` of its destination.

    Slots are counted in the order of the tokens, for each of P equal runs of experts apart.
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
    """The tables of what was kept, with all slots that were left out counted."""
    routed = before.num_tokens_per_expert.sum() - kept.num_tokens_per_expert.sum()
    return replace(kept, num_dropped=before.num_dropped + routed)


def fair_share(counts: Tensor, limit: int, *, dim: int) -> Tensor:
    """Cut counts so that those along `dim` sum to at most `limit`: the large ones to one level."""
    lines = counts.movedim(dim, -1)
    ordered = lines.sort(-1).values
    size = lines.shape[-1]
    # With the i smallest kept whole, the others share the rest of the limit.
    kept = ordered.cumsum(-1) - ordered
    levels = (limit - kept) // torch.arange(size, 0, -1, device=counts.device)
    level = levels.clamp(min=0).minimum(ordered).amax(-1, keepdim=True)
    cut = lines.minimum(level)
    over = lines > cut
    # The rest below a whole level goes to the first lines that want more, one each.
    spare = (limit - cut.sum(-1, keepdim=True)).clamp(min=0)
    cut = cut + (over & (over.cumsum(-1) <= spare)).long()
    return cut.movedim(-1, dim)


def schedule(pairs_PP: Tensor, limit: int) -> list[Tensor]:
    """Spread the rows of every pair of ranks over rounds.

    Args:
        pairs_PP: rows from each rank (first dimension) to each other.
        limit: rows that a rank sends, and that it receives, in one round, at most.

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
