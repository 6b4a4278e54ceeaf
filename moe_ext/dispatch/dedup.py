"""Dispatchers that send a token once to each rank, or node, that holds any of its experts.

Shapes: T tokens, D model, E experts, K top-k, P ranks of a hop, L = E/P experts behind each rank,
    U rows of tokens that travel, S slots with an expert, on the sending or the receiving side.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_choice
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.c10d import local_group, small_message_device
from moe_ext.comm.groups import check_group, group_rank, group_ranks, group_size
from moe_ext.dispatch.alltoall import AllToAllDispatcher
from moe_ext.dispatch.base import CAPABILITIES, take_part
from moe_ext.dispatch.parts import (
    WHOLE,
    BatchPlan,
    Choice,
    Cut,
    DispatchMetadata,
    Part,
    Round,
    RowBudget,
    RowCounts,
    RowWeights,
    sum_dtype,
)
from moe_ext.dispatch.token_exchange import Hop, Journey, Route, return_weights
from moe_ext.dispatch.wire import Wire
from moe_ext.ops.grouped_gemm import row_alignment

COMBINES = ("exact", "reduced")
# Process groups across nodes and inside this rank's node, by group and number of ranks per node.
# All layers share them, so that a job makes two groups in all, not two for each layer.
_HopGroups = weakref.WeakKeyDictionary[ProcessGroup, dict[int, tuple[ProcessGroup, ProcessGroup]]]
_hop_groups: _HopGroups = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class DedupMetadata(DispatchMetadata):
    """Metadata of a `DedupDispatcher`.

    Attributes:
        journey: the `Journey` of the rows.
        weights_UK: weights of the tokens that arrived, with their graph; None if neither experts
            nor this rank's sums use them.
    """

    journey: Any = None
    weights_UK: Tensor | None = None


@dataclass(frozen=True)
class _TokenRound(Round):
    """Round of slots of this rank, in which a token travels once to each rank.

    Attributes:
        topk_idx_TK: experts of all slots.
        dtype: dtype of the rows that travel. `take` returns tokens in the dtype of sums, so that
            their gradients have that dtype.
    """

    topk_idx_TK: Tensor = torch.empty(0)
    dtype: torch.dtype = torch.float32

    def take(self, x_TD: Tensor) -> Tensor:
        """Return all tokens. The routes pick those that have slots in this round."""
        return x_TD.to(sum_dtype(self.dtype))

    def return_sums(self, grad_RD: Tensor, tables: ops.Permutation) -> Tensor:
        """See `Round`. The gradients that came back are sums for each token already."""
        return grad_RD

    def choice(self) -> Tensor:
        """Return the experts of the slots in this round, `[T, K]`, -1 for other slots."""
        here_N = torch.zeros_like(self.topk_idx_TK, dtype=torch.bool).view(-1)
        here_N[self.slot_of_row] = True
        return self.topk_idx_TK.where(here_N.view_as(self.topk_idx_TK), -1)


class _Trip:
    """Exchange of the rows of one journey, and of their gradients in the backward pass.

    One autograd node starts the exchange, and another waits for it. In the backward pass the roles
    are swapped: work that overlaps with the rows has its backward pass overlap with the gradients.
    An empty tensor connects the two nodes.
    """

    def __init__(self, journey: Journey, *, weighted: bool) -> None:
        self.journey, self.weighted = journey, weighted
        self.waits: list[Callable[[], Tensor]] = []

    def finish(self) -> Tensor:
        """Wait for the exchange, and return the rows that arrived."""
        return self.waits.pop()()


class _StartSend(torch.autograd.Function):
    """Starts to send tokens to the ranks of their experts."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, trip: _Trip, dtype: torch.dtype) -> Tensor:
        ctx.trip, ctx.dtype = trip, x_TD.dtype
        journey, rows = trip.journey, x_TD.to(dtype)
        format = journey.wire.dispatch
        trip.waits.append(journey.start_out(rows, "dispatch", format))
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, empty: Tensor) -> tuple[Tensor, None, None]:
        grad, slots = ctx.trip.finish().to(ctx.dtype), ctx.trip.journey.routes[0].slots
        return grad if ctx.trip.weighted else ops.unpermute_tokens(grad, slots), None, None


class _FinishSend(torch.autograd.Function):
    """Waits for the rows of experts. Their gradients return by slot, or as sums by token."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, trip: _Trip) -> Tensor:
        ctx.trip, expand = trip, trip.journey.expand
        return torch.ops.moe_ext._gather_tokens(trip.finish(), expand.slot_of_row, expand.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None]:
        trip: _Trip = ctx.trip
        journey, name = trip.journey, "dispatch backward"
        format = journey.wire.backward_combine
        if trip.weighted:
            grad_UD = ops.unpermute_tokens(grad_rows, journey.expand)
            wait = journey.start_sums(grad_UD, name, format)
        else:
            wait = journey.start_slots(grad_rows, name, format, backward=True)
        trip.waits.append(wait)
        return grad_rows.new_empty(0), None


class _StartCombine(torch.autograd.Function):
    """Starts to send results of slots back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip, journey = trip, trip.journey
        format = journey.wire.combine
        wait = journey.start_slots(rows, "combine", format, backward=False)
        trip.waits.append(wait)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, empty: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.journey.spread(ctx.trip.finish(), weighted=ctx.trip.weighted), None


class _FinishCombine(torch.autograd.Function):
    """Waits for results, and sums them. The gradient of a sum travels once to each rank."""

    @staticmethod
    def forward(
        ctx: Any,
        empty: Tensor,
        weights_TK: Tensor | None,
        trip: _Trip,
        slots: ops.Permutation,
        dtype: torch.dtype,
    ) -> Tensor:
        slots_SD = trip.finish().to(dtype)
        if weights_TK is not None:
            ctx.save_for_backward(slots_SD, weights_TK)
        ctx.slots, ctx.trip, ctx.dtype = slots, trip, empty.dtype
        return ops.unpermute_tokens(slots_SD, slots, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        trip: _Trip = ctx.trip
        journey, empty, grad_weights = trip.journey, None, None
        if ctx.needs_input_grad[0]:
            # If sums have a wider dtype than rows, their gradient was widened from that of the
            # rows, so that this cast loses nothing.
            format, rows = journey.wire.backward_dispatch, grad_TD.to(ctx.dtype)
            wait = journey.start_out(rows, "combine backward", format)
            trip.waits.append(wait)
            empty = rows.new_empty(0)
        if ctx.needs_input_grad[1]:
            slots_SD, weights_TK = ctx.saved_tensors
            _, grad_weights = torch.ops.moe_ext._unpermute_tokens_backward(
                grad_TD,
                slots_SD,
                ctx.slots.slot_of_row,
                ctx.slots.row_of_slot,
                weights_TK.to(sum_dtype(slots_SD.dtype)),
            )
            grad_weights = grad_weights.to(weights_TK.dtype)
        return empty, grad_weights, None, None, None


class _BringWeights(torch.autograd.Function):
    """Returns the weights that arrived with indices of experts, and sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, journeys: Sequence[Journey]) -> tuple[Tensor, ...]:
        ctx.journeys = journeys
        found = []
        for journey in journeys:
            weights_UK = journey.routes[-1].weights_UK
            assert weights_UK is not None
            found.append(weights_UK.detach())
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(return_weights(ctx.journeys, grads)), None


class DedupDispatcher(AllToAllDispatcher):
    """Sends a token once to each rank that holds any of its experts.

    For even routing with K of E experts per token on P ranks, the rows per token that leave a rank
    fall from `K * (P - 1) / P` to `(P - 1) * (1 - C(E - E/P, K) / C(E, K))`. The indices of the
    experts travel too, two bytes for each of the K.

    - `combine="exact"`: the result of every slot comes back. Results and gradients are summed in
      the order of slots, with the bits of `AllToAllDispatcher`. Two of the four exchanges of a step
      are smaller: those of tokens, and of the gradients of their results.
    - `combine="reduced"`: each rank sums the weighted results of its experts in float32, and sends
      one row per token. Gradients do the same. All four exchanges are smaller. Each rank adds one
      rounding to a result, compared to a single process.

    Weights travel with the indices, and their gradients in a separate message.

    With a `RowBudget` a token goes to a rank once for each round in which it has slots there.
    "exact" then has the bits of `AllToAllDispatcher` with the same budget.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group.
        combine: "exact" or "reduced".
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`.

    Raises:
        ValueError: combine is unknown, or the size of the group does not divide E.

    Reference: DeepEP and nccl.ep send a token once to each rank, too.
    """

    serves = frozenset(CAPABILITIES) - {"row_budget.static"}

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        *,
        combine: str = "exact",
        drop_policy: str = "position",
        average: bool = True,
        wire: Wire | str | None = None,
    ) -> None:
        super().__init__(num_experts, group, drop_policy=drop_policy, average=average, wire=wire)
        check_choice(self.operation, "combine", combine, COMBINES)
        self.combine_by = self._calls.facts["combine"] = combine
        self._hops = self._make_hops(num_experts, group)
        for hop in self._hops:
            hop._calls.facts = {**self._calls.facts, "num_experts": num_experts}

    def _make_hops(self, num_experts: int, group: ProcessGroup) -> tuple[Hop, ...]:
        return (Hop(self.operation, num_experts, group, self.combine_by, self.average, self.wire),)

    def tell_apart(self, layers: Sequence[str], layer: int) -> None:
        """See `TokenDispatcher`."""
        super().tell_apart(layers, layer)
        for hop in self._hops:
            hop.tell_apart(layers, layer)

    def declare(self, options: Mapping[str, object]) -> None:
        """See `TokenDispatcher`."""
        super().declare(options)
        for hop in self._hops:
            hop.declare(options)

    def routing(self, x: Tensor, cut: Cut = WHOLE) -> AbstractContextManager[object]:
        """See `TokenDispatcher`."""
        if cut.num_shared is not None:
            return super().routing(x, cut)
        return self._telling_from(0, x, cut)

    def _telling_from(self, first: int, x: Tensor, cut: Cut = WHOLE) -> contextlib.ExitStack:
        """Return a context that sends an error to the ranks of the hops from `first` on."""
        stack = contextlib.ExitStack()
        for hop in reversed(self._hops[first:]):
            stack.enter_context(hop.routing(x, Cut(cut.num_parts)))
        return stack

    def _plan_parts(
        self,
        x_TD: Tensor,
        choice: Choice,
        num_parts: int = 1,
        weighed: bool = False,
        counts: RowCounts | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> BatchPlan:
        """See `TokenDispatcher`. Numbers of tokens are exchanged, since `counts` has none of them.

        Rows travel in `dtype`, which may differ from that of the tokens.
        """
        dtype = x_TD.dtype if dtype is None else dtype
        journeys, arrived, all_slots = self._journeys(x_TD, choice, dtype, num_parts, weighed)
        tokens, weights = [x_TD], [choice.topk_weights]
        if num_parts > 1:
            tokens, weights = ([*t.tensor_split(num_parts)] for t in (x_TD, choice.topk_weights))
        slots = [journey.routes[0].slots for journey in journeys]
        if all_slots is not None:
            slots = [_with_dropped(slots[0], all_slots)]
        parts: list[Part] = [
            functools.partial(self._send_part, *part, dtype)
            for part in zip(tokens, weights, journeys, arrived, slots, strict=True)
        ]
        dropped = [tables.num_dropped for tables in slots]
        return BatchPlan(parts, dropped[0] if num_parts == 1 else torch.stack(dropped).sum())

    def _journeys(
        self, x_TD: Tensor, choice: Choice, dtype: torch.dtype, num_parts: int, weighed: bool
    ) -> tuple[list[Journey], Sequence[Tensor | None], ops.Permutation | None]:
        """Plan the way of each part's tokens over all hops.

        Returns:
            The journeys of the parts; the weights of the tokens that arrive in each part, None if
            they are not used; tables of all slots, if a capacity may drop some.
        """
        topk_idx_TK, topk_weights_TK, capacity, _, _ = choice
        in_graph = x_TD.requires_grad or topk_weights_TK.requires_grad
        tables: ops.Permutation | None = None
        idx_TK, limit = topk_idx_TK, capacity
        routes: list[list[Route]] = [[] for _ in range(num_parts)]
        origin: list[Tensor] | None = None
        tokens_TD = x_TD.detach().to(dtype)
        weights_TK = topk_weights_TK.to(sum_dtype(dtype))
        beside = list(weights_TK.detach().tensor_split(num_parts))
        for i, hop in enumerate(self._hops):
            with self._telling_from(i + 1, tokens_TD, Cut(num_parts)):
                if i == 0:
                    with hop.routing(x_TD, Cut(num_parts)):
                        if capacity is not None:
                            _, tables = self._group_by_expert(
                                tokens_TD[:, :0], topk_idx_TK, topk_weights_TK, capacity
                            )
                            kept_TK = (tables.row_of_slot >= 0).view_as(topk_idx_TK)
                            idx_TK = topk_idx_TK.where(kept_TK, -1)
                        idx = list(idx_TK.tensor_split(num_parts))
                found = hop.find_routes(tokens_TD, idx, beside, origin, limit, in_graph=in_graph)
            for part, route in zip(routes, found, strict=True):
                part.append(route)
            idx, origin = [one.idx_UK for one in found], [one.origin_U for one in found]
            beside = [one.weights_UK for one in found if one.weights_UK is not None]
            limit, in_graph = found[0].expert_capacity, found[0].has_backward
            # The next hop needs only the dtype and the width of the tokens.
            tokens_TD = tokens_TD.new_empty(1).expand(0, x_TD.shape[1])
        journeys = [self._journey(tuple(part), tokens_TD) for part in routes]
        weights: Sequence[Tensor | None] = [None] * num_parts
        if weighed or self.combine_by == "reduced":
            if in_graph:
                weights_TK = take_part(weights_TK)
            weights = _BringWeights.apply(weights_TK, journeys)
        return journeys, weights, tables

    def _send_part(
        self,
        x_TD: Tensor,
        topk_weights_TK: Tensor,
        journey: Journey,
        weights_UK: Tensor | None,
        tables: ops.Permutation,
        dtype: torch.dtype,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Send the tokens of a part."""
        first, last = journey.routes[0], journey.routes[-1]
        trip = _Trip(journey, weighted=self.combine_by == "reduced")
        x_TD = take_part(x_TD) if last.has_backward else x_TD
        empty = _StartSend.apply(x_TD, trip, dtype)
        if meanwhile is not None:
            meanwhile()
        rows = _FinishSend.apply(empty, trip)
        metadata = DedupMetadata(
            tables,
            topk_weights_TK,
            first.sent,
            first.received,
            journey.by_slot,
            last.expert_capacity,
            journey=journey,
            weights_UK=weights_UK,
        )
        return rows, journey.expand.expert_offsets, metadata

    def _plan_rounds(self, x_TD: Tensor, choice: Choice, budget: RowBudget) -> list[Round]:
        """See `TokenDispatcher`. A round has the same slots as with `AllToAllDispatcher`."""
        return [
            _TokenRound(**vars(one), topk_idx_TK=choice.topk_idx, dtype=x_TD.dtype)
            for one in super()._plan_rounds(x_TD, choice, budget)
        ]

    def send(
        self,
        rows_ND: Tensor,
        part: Round,
        topk_weights_TK: Tensor,
        weighed: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """See `TokenDispatcher`."""
        assert isinstance(part, _TokenRound)
        choice = Choice(part.choice(), topk_weights_TK)
        plan = self._plan_parts(rows_ND, choice, weighed=weighed, dtype=part.dtype)
        rows, offsets, metadata = plan.parts.pop()(meanwhile)
        tables = _with_dropped(metadata.permutation, part.whole)
        return rows, offsets, replace(metadata, permutation=tables)

    def _group_and_count(
        self, x_TD: Tensor, choice: Choice, num_parts: int = 1, *, with_rows: bool = True
    ) -> tuple[list[tuple[Tensor, ops.Permutation]], list[RowCounts]]:
        # The hops exchange messages first, because a rank that fails reports the error in them.
        topk_idx_TK, topk_weights_TK, capacity, _, _ = choice
        in_graph = x_TD.requires_grad or topk_weights_TK.requires_grad
        limit, none_TD = capacity, x_TD.detach()[:, :0]
        for i, hop in enumerate(self._hops):
            with self._telling_from(i + 1, x_TD):
                if i == 0:
                    with hop.routing(x_TD):
                        _, tables = self._group_by_expert(
                            none_TD, topk_idx_TK, topk_weights_TK, capacity
                        )
                _, _, told = hop.count(x_TD[:0], [topk_idx_TK[:0]], limit, in_graph=in_graph)
            in_graph, limit = told.has_backward, told.expert_capacity
        sent_PL = tables.expert_offsets.diff().view(self.num_ranks, self.num_local_experts)
        counts = RowCounts(
            tuple(sent_PL.sum(1).tolist()),
            (),
            torch.zeros_like(sent_PL),
            limit,
            in_graph,
        )
        return [(none_TD, tables)], [counts]

    def _journey(self, routes: tuple[Route, ...], arrived_UD: Tensor) -> Journey:
        """Make the tables that group the arrived rows by expert, and that bring results back."""
        last = routes[-1]
        top_k = last.idx_UK.shape[1]
        num_slots = sum(last.slots_received)
        here_S = _positions(last.idx_UK, num_slots)
        align = row_alignment(arrived_UD, num_slots, self.num_local_experts)
        none = arrived_UD.new_empty((num_slots, 0))
        # Rows of an expert are in the order of their first rank, as without hops. The products for
        # weight gradients sum in this order, so their bits do not depend on the hops.
        by_origin = last.origin_U[here_S // top_k].argsort(stable=True)
        expert_S = last.idx_UK.view(-1)[here_S[by_origin]]
        _, tables = ops.permute_tokens(none, expert_S[:, None], self.num_local_experts, align=align)
        row, row_of_slot = tables.slot_of_row, torch.empty_like(tables.row_of_slot)
        row_of_slot[by_origin] = tables.row_of_slot
        # Padding rows have index -1, and keep it as their slot.
        slot = by_origin[row.clamp(min=0)].where(row >= 0, -1) if num_slots else row
        by_slot = replace(tables, slot_of_row=slot, row_of_slot=row_of_slot)
        row_of_place = row_of_slot.new_full((last.idx_UK.numel(),), -1)
        row_of_place[here_S] = row_of_slot
        place = here_S[slot.clamp(min=0)].where(slot >= 0, -1) if num_slots else slot
        expand = replace(tables, slot_of_row=place, row_of_slot=row_of_place, top_k=top_k)
        places = []
        for before, route in zip(routes, routes[1:], strict=False):
            inside_S = _positions(before.idx_UK, sum(before.slots_received))
            number = route.slots.row_of_slot.new_empty(before.idx_UK.numel())
            number[inside_S] = torch.arange(inside_S.shape[0], device=number.device)
            places.append(
                replace(
                    route.slots,
                    slot_of_row=number[route.slots.slot_of_row],
                    row_of_slot=route.slots.row_of_slot[inside_S],
                    top_k=1,
                )
            )
        return Journey(self._hops, routes, expand, by_slot, tuple(places))

    def row_weights(self, rows: Tensor, metadata: DispatchMetadata) -> RowWeights | None:
        """See `TokenDispatcher`."""
        assert isinstance(metadata, DedupMetadata)
        weights_UK = metadata.weights_UK
        if weights_UK is None:
            return None
        return RowWeights(weights_UK, metadata.journey.expand.slot_of_row)

    def combine(
        self,
        rows: Tensor,
        metadata: DispatchMetadata,
        *,
        meanwhile: Callable[[], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `TokenDispatcher`."""
        assert isinstance(metadata, DedupMetadata)
        journey: Journey = metadata.journey
        dtype = rows.dtype if dtype is None else dtype
        if self.combine_by == "exact":
            weights_TK, slots = metadata.topk_weights, metadata.permutation
            trip = _Trip(journey, weighted=weights_TK is not None)
            empty = _StartCombine.apply(rows, trip)
            if meanwhile is not None:
                meanwhile()
            return _FinishCombine.apply(empty, weights_TK, trip, slots, dtype)
        weights_UK = None if metadata.topk_weights is None else metadata.weights_UK
        y_UD = ops.unpermute_tokens(rows, journey.expand, weights_UK)
        return journey.return_sums(y_UD, "combine", journey.wire.back, meanwhile).to(dtype)


class HierarchicalDispatcher(DedupDispatcher):
    """Sends a token once to each node that holds any of its experts, then on to the ranks there.

    Between nodes, a token goes to the rank that has the place of the sender in the other node. From
    there it goes on inside the node, as with `DedupDispatcher`. For N nodes and even routing,
    `(N - 1) * (1 - C(E - E/N, K) / C(E, K))` rows per token travel between nodes. This takes one
    more message and one more wait of the host than `DedupDispatcher`.

    All ranks of the group construct it together.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group; each `node_size` consecutive ranks of it are on one node.
        node_size: number of ranks per node; None takes LOCAL_WORLD_SIZE, which torchrun sets.
        combine: see `DedupDispatcher`. "reduced" sums inside each node, then over nodes.
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`. Rows that go to the experts are rounded once for both hops, and
            rows that come back at each hop.

    Raises:
        ValueError: node_size is not known, or does not divide the size of the group; or see
            `DedupDispatcher`.
    """

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        *,
        node_size: int | None = None,
        combine: str = "exact",
        drop_policy: str = "position",
        average: bool = True,
        wire: Wire | str | None = None,
    ) -> None:
        known = os.environ.get("LOCAL_WORLD_SIZE", 0) if node_size is None else node_size
        check_group(group, "HierarchicalDispatcher", name="group")
        # Ranks compare node_size here, before they make groups by it.
        with Agreement("HierarchicalDispatcher", group) as agreement:
            self.node_size = int(known)
            if self.node_size < 1 or group_size(group) % self.node_size:
                raise ValueError(
                    "HierarchicalDispatcher: expected node_size, or else LOCAL_WORLD_SIZE, to "
                    f"divide the size of the group, {group_size(group)}, got {known}"
                )
            agreement.compare({"node_size (or else LOCAL_WORLD_SIZE)": self.node_size})
        super().__init__(
            num_experts,
            group,
            combine=combine,
            drop_policy=drop_policy,
            average=average,
            wire=wire,
        )

    def _make_hops(self, num_experts: int, group: ProcessGroup) -> tuple[Hop, ...]:
        size, num_nodes = self.node_size, self.num_ranks // self.node_size
        if size == 1 or num_nodes == 1:
            return super()._make_hops(num_experts, group)
        known = _hop_groups.setdefault(group, {})
        if size not in known:
            ranks, (node, place) = group_ranks(group), divmod(group_rank(group), size)
            device = small_message_device(group)
            between = local_group(ranks[place::size], group, device)
            inside = local_group(ranks[node * size : (node + 1) * size], group, device)
            known[size] = between, inside
        between, inside = known[size]
        options = (self.combine_by, self.average, self.wire)
        return (
            Hop(self.operation, num_experts, between, *options),
            Hop(self.operation, num_experts // num_nodes, inside, *options),
        )


def _positions(idx_UK: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` entries that are an expert, not -1, in order."""
    return torch.nonzero_static(idx_UK.view(-1) >= 0, size=count).view(-1)


def _with_dropped(slots: ops.Permutation, before: ops.Permutation) -> ops.Permutation:
    """Return the tables of the kept slots, with the number of dropped slots of `before`."""
    return replace(slots, num_dropped=before.num_dropped)
