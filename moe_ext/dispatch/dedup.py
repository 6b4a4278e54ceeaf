"""Dispatchers that send a token once to each rank, or node, that holds any of its experts.

Shapes: T tokens, D model, E experts, K top-k, P ranks of a hop, L = E/P experts behind each of
    them, U rows of tokens that travel, S slots whose expert is behind another rank or this one.
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
# Groups between this rank's node and others, and inside it: by group and ranks of a node.
# All layers share them, so that they meet there and a job does not make two groups for each.
_HopGroups = weakref.WeakKeyDictionary[ProcessGroup, dict[int, tuple[ProcessGroup, ProcessGroup]]]
_hop_groups: _HopGroups = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class DedupMetadata(DispatchMetadata):
    """Metadata of a `DedupDispatcher`.

    Attributes:
        journey: the way of the rows.
        weights_UK: the weights of the tokens that arrived, in the graph for "reduced"; None for
            "exact".
    """

    journey: Any = None
    weights_UK: Tensor | None = None


@dataclass(frozen=True)
class _TokenRound(Round):
    """Some of a rank's slots, whose tokens travel once to a rank.

    Attributes:
        topk_idx_TK: experts of all slots.
        dtype: of the rows that travel; `take` gives tokens in that of sums, for their gradients.
    """

    topk_idx_TK: Tensor = torch.empty(0)
    dtype: torch.dtype = torch.float32

    def take(self, x_TD: Tensor) -> Tensor:
        """All tokens; `dispatch` takes those that have slots here."""
        return x_TD.to(sum_dtype(self.dtype))

    def return_sums(self, grad_RD: Tensor, tables: ops.Permutation) -> Tensor:
        """See `Round`: the sums were taken where the rows came back."""
        return grad_RD

    def choice(self) -> Tensor:
        """`[T, K]`, the experts of the slots that are here, -1 for the others."""
        here_N = torch.zeros_like(self.topk_idx_TK, dtype=torch.bool).view(-1)
        here_N[self.slot_of_row] = True
        return self.topk_idx_TK.where(here_N.view_as(self.topk_idx_TK), -1)


class _Trip:
    """Rows of one journey on their way, and later their gradients.

    The function of autograd that waits in the forward pass starts the exchange of the backward
    pass, and the other way round: what ran beside the one has its backward beside the other. An
    empty tensor joins the two.
    """

    def __init__(self, journey: Journey, *, weighted: bool) -> None:
        self.journey, self.weighted = journey, weighted
        self.waits: list[Callable[[], Tensor]] = []

    def finish(self) -> Tensor:
        """Tokens that arrived."""
        return self.waits.pop()()


class _StartSend(torch.autograd.Function):
    """Tokens on their way to the ranks of their experts."""

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
    """The rows of experts; their gradients go back by slot, or as sums for each token."""

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
    """Results of slots on their way back."""

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
    """Weighted sums of rows that are back; the gradient of a sum travels once to a rank."""

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
            # Sums that are wider than rows are of rounded gradients: nothing is lost.
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
    """Weights of parts, which came with the indices of their experts; the gradients travel back."""

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
    """Experts spread over a group; a token goes once to each rank that holds any of its experts.

    With K experts of E a token, each on one of P ranks, the rows that leave a rank fall from
    `K * (P - 1) / P` a token to `(P - 1) * (1 - C(E - E/P, K) / C(E, K))` for even routing. Beside
    them travel the indices of the experts, two bytes for each of the K.

    - `combine="exact"`: the result of every slot comes back, and they are added up in the order of
      slots, forward and backward: the bits are those of `AllToAllDispatcher`. Two of the four
      exchanges of a step are smaller: of tokens, and of the gradients of their results.
    - `combine="reduced"`: each rank adds up the weighted results of its experts, in float32, and
      sends one row a token; so do the gradients. All four exchanges are smaller, and a result is
      rounded once a rank more than on one process.

    Weights travel with the indices, their gradients in a message of their own.

    With a `RowBudget` a token goes once for each round that has slots of it for the rank; "exact"
    then has the bits of `AllToAllDispatcher` with that budget.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group.
        combine: "exact" or "reduced".
        drop_policy: which slots of an expert beyond its capacity go, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`.

    Raises:
        ValueError: combine is neither, or the size of the group does not divide E.

    Reference: the dispatch of DeepEP and of nccl.ep sends a token once a rank in this way.
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
        """Context that tells the ranks of these hops of a failure, the first hop's first."""
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
        """See `TokenDispatcher`; numbers of tokens follow from no counts, and are exchanged.

        Rows travel in a dtype that need not be that of the tokens.
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
            The journeys of the parts; the weights of the tokens that arrive, None where they are
            not in a graph; tables of all slots, where some may be dropped.
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
            # Tokens of the next hop, for their dtype alone.
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
        """Send the tokens of a plan."""
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
        """See `TokenDispatcher`; the slots of a round are those that `AllToAllDispatcher` sends."""
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
        # A rank that fails tells the others in the messages of the hops: they come first.
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
        """The tables by which the arrived rows are grouped by expert, and go back."""
        last = routes[-1]
        top_k = last.idx_UK.shape[1]
        num_slots = sum(last.slots_received)
        here_S = _positions(last.idx_UK, num_slots)
        align = row_alignment(arrived_UD, num_slots, self.num_local_experts)
        none = arrived_UD.new_empty((num_slots, 0))
        # Rows of an expert are in the order of the ranks that they come from, as without hops:
        # the products for weight gradients add them up in this order.
        by_origin = last.origin_U[here_S // top_k].argsort(stable=True)
        expert_S = last.idx_UK.view(-1)[here_S[by_origin]]
        _, tables = ops.permute_tokens(none, expert_S[:, None], self.num_local_experts, align=align)
        row, row_of_slot = tables.slot_of_row, torch.empty_like(tables.row_of_slot)
        row_of_slot[by_origin] = tables.row_of_slot
        # Padding rows (-1) have no slot.
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
    """Experts spread over a group of several nodes; a token goes once to each node, then to ranks.

    A token travels between nodes once for each node that holds any of its experts, to the rank of
    the sender's place there. Inside the node it goes on as with `DedupDispatcher`: between nodes go
    `(N - 1) * (1 - C(E - E/N, K) / C(E, K))` rows a token for N nodes and even routing. It takes
    one more message and one more wait of the host than that.

    All ranks of the group make it together.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group; each `node_size` consecutive ranks of it are on one node.
        node_size: ranks of a node; None is LOCAL_WORLD_SIZE, as torchrun sets it.
        combine: as for `DedupDispatcher`; "reduced" adds up inside the node, then over nodes.
        drop_policy: which slots of an expert beyond its capacity go, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`; what goes to the experts is rounded once for both hops, what
            comes back at each.

    Raises:
        ValueError: node_size is not known or does not divide the size of the group, or as for
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
        # Before groups are made of it.
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
    """Places of the `count` entries that name an expert, in their order."""
    return torch.nonzero_static(idx_UK.view(-1) >= 0, size=count).view(-1)


def _with_dropped(slots: ops.Permutation, before: ops.Permutation) -> ops.Permutation:
    """The tables of the slots that were kept, with the number that `before` says were dropped."""
    return replace(slots, num_dropped=before.num_dropped)
