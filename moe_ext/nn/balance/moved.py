"""Exact balance over ranks: weights of experts travel to ranks that have room for their rows.

Shapes: T tokens, K top-k, E experts, P ranks, L = E / P local experts, S = 2 L slots of a rank,
    M moved experts of this rank.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_choice, check_numbers, check_rule, check_sizes
from moe_ext.comm.agreement import share
from moe_ext.comm.groups import GroupHandle, group_rank, group_size, small_message_device
from moe_ext.comm.link import Link, link_of, max_over_ranks, quickest, seconds_of
from moe_ext.dispatch import PlacedRows, RowCounts, SharedCounts
from moe_ext.dispatch.rows import all_to_all_rows

MODES = ("exact", "periodic")
_OPERATION = "MoELayer.rebalance"
# Number of rows of the matrix product with which the rate of the processor is measured.
_REHEARSAL_ROWS = 256
# Least seconds for which all ranks compute together in a measurement: longer than the time slices
# of ranks that share a core.
_REHEARSAL_SECONDS = 0.02


@dataclass(frozen=True)
class Rebalance:
    """When experts move, and the rates from which the saved time is computed.

    Attributes:
        mode: "exact" makes a plan for the rows of each pass. "periodic" makes a plan in
            `update_placement`, for the loads since the last plan; later passes split their rows in
            the proportions of that plan.
        break_even: experts move in a pass if the saved time is at least this multiple of the time
            that moving them takes; 0 always moves them.
        every: number of calls of `update_placement` from one plan to the next, for "periodic".
        hysteresis: for "periodic": a new plan replaces the plan in use if its heaviest rank is
            lighter by more than this fraction.
        link: link of the group; None measures it in the first pass. The link may differ between
            ranks, because all of them use that of the first rank.
        flops: floating point operations per second of a rank's products while all ranks compute;
            None measures it. As `link`, the value of the first rank counts.
        flops_alone: the same rate while the other ranks wait, larger if ranks share cores. None
            takes `flops` if that is given, otherwise measures. As `link`, the value of the first
            rank counts.
    """

    # Options that may differ between ranks, since `Rebalancer` uses those of the first rank.
    FREE_TO_DIFFER: ClassVar[tuple[str, ...]] = ("link", "flops", "flops_alone")

    mode: str = "exact"
    break_even: float = 1.0
    every: int = 100
    hysteresis: float = 0.1
    link: Link | None = None
    flops: float | None = None
    flops_alone: float | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("Rebalance", "mode", self.mode, MODES)
        check_numbers("Rebalance", Rebalance.__annotations__, vars(self))
        for name in ("break_even", "hysteresis"):
            value = getattr(self, name)
            check_rule("Rebalance", name, value, "at least 0", 0 <= value < math.inf)
        for name in ("flops", "flops_alone"):
            value = getattr(self, name)
            check_rule("Rebalance", name, value, "above 0", value is None or value > 0)
        check_sizes("Rebalance", every=self.every)
        if self.flops_alone is not None and not self.flops_alone >= (self.flops or math.inf):
            raise ValueError(
                "Rebalance: expected flops_alone to be at least flops, which must be given with "
                f"it, got {self.flops_alone} and {self.flops}"
            )


def moving_pays(
    *,
    rows_saved: float,
    expert_bytes: float,
    num_moved: float,
    row_flops: float,
    flops: float,
    link: Link,
    backward: bool = True,
) -> tuple[float, float]:
    """Return the seconds that balance saves in a pass, and the seconds that moving experts takes.

    Balance saves `rows_saved * row_flops / flops`, three times that with a backward pass. Moving
    takes `latency + num_moved * expert_bytes / bandwidth`, twice that with a backward pass. Moving
    pays if `rows_saved` per moved expert is above `expert_bytes flops / (1.5 bandwidth row_flops)`.

    Args:
        rows_saved: rows of the heaviest rank beyond its share.
        expert_bytes: bytes of an expert's weights.
        num_moved: largest number of experts that leave or reach one rank.
        row_flops: operations of a row's products in the forward pass.
        flops: operations per second.
        link: link of the group.
        backward: whether gradients are recorded.
    """
    saved = (3 if backward else 1) * rows_saved * row_flops / flops
    each_way = link.latency + num_moved * expert_bytes / link.exchange_bandwidth
    return saved, (2 if backward else 1) * each_way


def _slots(slot_S: Tensor, rows_S: Tensor, place_R: Tensor, num_places: int) -> Tensor:
    """Return the slot of each place, `[num_places]`, -1 for none; without host synchronisation.

    Args:
        slot_S: slots in the order of their experts, on the host.
        rows_S: number of rows that each slot takes, on the host.
        place_R: places of the rows in the flattened choice, in the order of their experts.
        num_places: number of places of the choice, T K.
    """
    slot_S, rows_S = (x.to(place_R.device, non_blocking=True) for x in (slot_S, rows_S))
    slot_R = slot_S.repeat_interleave(rows_S, output_size=len(place_R))
    return place_R.new_full((num_places,), -1).index_copy_(0, place_R, slot_R)


class ExpertMoves:
    """Experts that travel in one pass.

    Args:
        group: the P ranks.
        sent: `[N]` int64 local experts of this rank, in the order of the ranks that they go to.
        send: number of experts that go to each rank.
        receive: number of experts that come from each rank.
    """

    def __init__(
        self, group: ProcessGroup, sent: Tensor, send: list[int], receive: list[int]
    ) -> None:
        self.group, self.sent, self.send, self.receive = group, sent, send, receive

    def extend(self, weight: Tensor) -> Tensor:
        """Append the experts that arrive to `weight [L, ...]`: `[L + M, ...]`. Differentiable.

        The backward pass sends the gradients of moved experts to their home rank, which adds them
        in the order of ranks.
        """
        sent = self.sent.to(weight.device, non_blocking=True)
        flat = weight.flatten(1).index_select(0, sent)
        came = all_to_all_rows(flat, self.group, self.send, self.receive, operation=_OPERATION)
        return torch.cat([weight, came.view(-1, *weight.shape[1:])])


class StackedExperts(Protocol):
    """Experts that are divided over ranks, with stacked parameters such as `down_proj`."""

    num_experts: int
    down_proj: nn.Parameter

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The group over which the experts are divided."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the experts of this rank."""


class Rebalancer:
    """Makes and applies the plans of one layer.

    Args:
        options: when experts move.
        experts: experts of the layer.
    """

    def __init__(self, options: Rebalance, experts: StackedExperts) -> None:
        self.options = options
        self._group = GroupHandle(experts.ep_group)
        self.num_ranks = group_size(experts.ep_group)
        self.num_experts = experts.num_experts
        # Number of experts that came to this rank in the last pass, and bytes that left the rank.
        self.num_moved = self.moved_bytes = 0
        stacked = list(experts.parameters())
        self.expert_bytes = sum(p.element_size() * math.prod(p.shape[1:]) for p in stacked)
        # Each number of a matrix costs a row one multiplication and one addition.
        self.row_flops = 2 * sum(math.prod(p.shape[1:]) for p in stacked if p.dim() == 3)
        self._sizes = tuple(experts.down_proj.shape[1:])
        self.rates: tuple[Link, float, float] | None = None
        # For "periodic": loads since the last plan was made, the plan in use, calls of `update`.
        self.loads_E = torch.zeros(self.num_experts, dtype=torch.int64, device="cpu")
        self.plan: ops.BalancePlan | None = None
        self.calls = 0

    def metrics(self, device: torch.device) -> dict[str, Tensor]:
        """Return metrics of the last pass, under the names of `MoELayer.metrics`."""
        found = {"num_moved_experts": self.num_moved, "moved_bytes": self.moved_bytes}
        return {name: torch.full((), value, device=device) for name, value in found.items()}

    def place(
        self, x_TD: Tensor, topk_idx: Tensor, told: SharedCounts, *, counts: bool
    ) -> PlacedRows:
        """Assign a slot to each row by the counts of all ranks, which call this together.

        Args:
            x_TD: the tokens.
            topk_idx: chosen experts, -1 for none.
            told: the counts of all ranks.
            counts: add the counts of this pass to the loads of "periodic".
        """
        if counts and self.options.mode == "periodic":
            self.loads_E += told.counts_PE.sum(0)
        rank, local = group_rank(self._group.group), self.num_experts // self.num_ranks
        counts_PE, plan = told.counts_PE, self.plan
        if self.options.mode == "exact":
            plan = ops.plan_balance(counts_PE.sum(0), self.num_ranks)
        rows_PS = None if plan is None else ops.split_rows(counts_PE, plan)
        moves = None
        if plan is None or rows_PS is None or not self._pays(counts_PE, rows_PS, plan, x_TD):
            self.num_moved = self.moved_bytes = 0
            at_home = counts_PE.reshape(self.num_ranks, -1, local)
            rows_PS = nn.functional.pad(at_home, (0, local)).flatten(1)
            slot_idx = torch.where(topk_idx < 0, -1, topk_idx + topk_idx // local * local)
        else:
            moves = self._moves(plan, rank)
            order_S = plan.slot_expert.flatten().argsort(stable=True)
            num_rows = int(rows_PS[rank].sum())
            rows_S, place_R = rows_PS[rank][order_S], told.tables.slot_of_row[:num_rows]
            slot_idx = _slots(order_S, rows_S, place_R, topk_idx.numel()).view_as(topk_idx)
        has_backward = told.has_backward
        rows = RowCounts.of_all(rows_PS, rank, has_backward=has_backward, device=topk_idx.device)
        return PlacedRows(slot_idx, rows, moves)

    def _moves(self, plan: ops.BalancePlan, rank: int) -> ExpertMoves:
        local = self.num_experts // self.num_ranks
        to_PL = plan.slot_expert[:, local:]
        mine_PL = to_PL // local == rank
        send = mine_PL.sum(1).tolist()
        came = to_PL[rank][to_PL[rank] >= 0]
        receive = torch.bincount(came // local, minlength=self.num_ranks).tolist()
        self.num_moved, self.moved_bytes = len(came), sum(send) * self.expert_bytes
        return ExpertMoves(self._group.group, to_PL[mine_PL] % local, send, receive)

    def _pays(
        self, counts_PE: Tensor, rows_PS: Tensor, plan: ops.BalancePlan, x_TD: Tensor
    ) -> bool:
        local = self.num_experts // self.num_ranks
        moved_PL = plan.slot_expert[:, local:]
        if not bool((moved_PL >= 0).any()):
            return False
        if self.options.break_even == 0:
            return True
        if self.rates is None:
            self.rates = self._measured(x_TD)
        link, flops, alone = self.rates
        home_P = counts_PE.sum(0).view(self.num_ranks, -1).sum(1)
        # Rows at the rate `flops` that take as long as those of the heaviest rank. If ranks share
        # cores, it computes at the rate `alone` once the lighter ranks are done.
        home_rows = max(float(home_P.max()) * flops / alone, float(home_P.sum()) / self.num_ranks)
        balanced_rows = float(rows_PS.sum(0).view(self.num_ranks, -1).sum(1).max())
        leave_P = torch.bincount(moved_PL[moved_PL >= 0] // local, minlength=self.num_ranks)
        most = max(int(leave_P.max()), int((moved_PL >= 0).sum(1).max()))
        saved, taken = moving_pays(
            rows_saved=max(home_rows - balanced_rows, 0.0),
            expert_bytes=self.expert_bytes,
            num_moved=most,
            row_flops=self.row_flops,
            flops=flops,
            link=link,
            backward=torch.is_grad_enabled(),
        )
        return saved >= self.options.break_even * taken

    def _measured(self, x_TD: Tensor) -> tuple[Link, float, float]:
        """Return the link, and a rank's rates while all ranks compute and while one rank does.

        All ranks get equal values: options that are given are those of the first rank.
        """
        group = self._group.group
        link, flops, alone = self._given(group)
        if link is None:
            link = link_of(group, x_TD.device)
        if flops is not None:
            return link, flops, alone or flops
        weight = x_TD.new_zeros(self._sizes)
        rows = x_TD.new_zeros(_REHEARSAL_ROWS, self._sizes[1])
        product = functools.partial(torch.mm, rows, weight.T)

        def seconds(repeats: int) -> float:
            return seconds_of(lambda: [product() for _ in range(repeats)], x_TD.device) / repeats

        # For `flops_alone`, rank 0 computes while the other ranks wait for its message.
        first = group_rank(group) == 0
        found = quickest(lambda _: product(), rows, 4, warm_ups=1) if first else 0.0
        (one,) = max_over_ranks([found], group, x_TD.device)
        together = seconds(max(1, math.ceil(_REHEARSAL_SECONDS / max(one, 1e-9))))
        slowest, shared = max_over_ranks([together, together if first else 0.0], group, x_TD.device)
        flops = 2 * _REHEARSAL_ROWS * math.prod(self._sizes) / max(slowest, 1e-9)
        return link, flops, flops * max(1.0, shared / max(one, 1e-9))

    def _given(self, group: ProcessGroup) -> tuple[Link | None, float | None, float | None]:
        """Return `link`, `flops` and `flops_alone` of the first rank on every rank."""
        options, link = self.options, self.options.link
        rates = (0.0, 0.0, 0.0)
        if link is not None:
            rates = (link.latency, link.exchange_bandwidth, link.reduce_bandwidth)
        numbers = (*rates, options.flops or 0.0, options.flops_alone or 0.0)
        words = struct.unpack("<5q", struct.pack("<5d", *numbers))
        device = small_message_device(group)
        first = share(words, group, device, operation=_OPERATION)[0]
        *of_link, flops, alone = struct.unpack("<5d", struct.pack("<5q", *first))
        # Zeros stand for None: the bandwidth of a link is positive.
        return Link(*of_link) if of_link[1] else None, flops or None, alone or None

    def update(self) -> None:
        """Count a call of `update_placement`, and make a new plan if it is due."""
        self.calls += 1
        if self.options.mode != "periodic" or self.calls % self.options.every:
            return
        loads_E, self.loads_E = self.loads_E, torch.zeros_like(self.loads_E)
        plan = ops.plan_balance(loads_E, self.num_ranks)
        counts_PE = loads_E.new_zeros(self.num_ranks, self.num_experts)
        counts_PE[0] = loads_E
        if self.plan is None:
            used_P = loads_E.view(self.num_ranks, -1).sum(1)
        else:
            used_P = ops.split_rows(counts_PE, self.plan).sum(0).view(self.num_ranks, -1).sum(1)
        if plan.slot_rows.sum(1).max() < (1 - self.options.hysteresis) * used_P.max():
            self.plan = plan
