"""Way of tokens over hops and back. A hop is an exchange between the ranks of a group.

Shapes: T tokens, D model, E experts, K top-k, P ranks of a hop, L = E/P experts behind each rank,
    U rows of tokens that travel, S slots with an expert, on the sending or the receiving side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext.comm import collectives
from moe_ext.comm.failures import in_layer, running
from moe_ext.comm.groups import group_rank
from moe_ext.dispatch.alltoall import AllToAllDispatcher
from moe_ext.dispatch.counts import ExchangedCounts
from moe_ext.dispatch.rows import join_parts, split_parts, start_rows, total
from moe_ext.dispatch.wire import LOSSLESS, Formats, Wire, decode, encode


@dataclass(frozen=True)
class Route:
    """Way of some tokens over one hop.

    Attributes:
        once: tokens grouped by rank, `[U]` rows: one for each rank that holds experts of a token.
        slots: slots grouped by rank, `[S]` rows.
        sent: number of token rows for each rank.
        received: number of token rows from each rank.
        slots_sent: number of slots with an expert behind each rank.
        slots_received: number of slots here of each rank's tokens.
        idx_UK: for every received token, its experts behind this rank; -1 for other experts.
        origin_U: for every received token, the rank that sent it in the first hop.
        weights_UK: for every received token, the weights of all its experts; None if weights do not
            travel.
        expert_capacity: largest number of rows of an expert; None for no limit.
        has_backward: whether tokens of any rank get a gradient.
        arrived: the received tokens, if they came with their indices; empty once they are used.
        handle: handle of a library that sends the rows.
        layer: the layer that runs, for error messages in the backward pass.
    """

    once: ops.Permutation
    slots: ops.Permutation
    sent: tuple[int, ...]
    received: tuple[int, ...]
    slots_sent: tuple[int, ...]
    slots_received: tuple[int, ...]
    idx_UK: Tensor
    origin_U: Tensor
    weights_UK: Tensor | None
    expert_capacity: int | None
    has_backward: bool
    arrived: list[Tensor]
    handle: Any = None
    layer: Any = field(default_factory=running.get)

    def take_once(self, x_TD: Tensor) -> Tensor:
        """Return the rows `[U, D]` that travel."""
        if x_TD.dtype == torch.uint8:
            return x_TD[self.once.slot_of_row // self.once.top_k]
        return torch.ops.moe_ext._gather_tokens(x_TD, self.once.slot_of_row, self.once.top_k)


class Hop(AllToAllDispatcher):
    """Exchange between ranks, behind each of which is an equal run of experts.

    Args:
        owner: name for error messages.
        num_experts: E, number of experts of all runs together.
        group: the P ranks.
        combine: see `DedupDispatcher`.
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`.
    """

    def __init__(
        self,
        owner: str,
        num_experts: int,
        group: ProcessGroup,
        combine: str,
        average: bool,
        wire: Wire,
    ) -> None:
        super().__init__(num_experts, group, average=average, wire=wire)
        self.operation, self.num_counts = owner, 3
        self._calls.facts["combine"] = combine

    def find_routes(
        self,
        x_TD: Tensor,
        idx: Sequence[Tensor],
        weights: Sequence[Tensor] | None,
        origin: Sequence[Tensor] | None,
        capacity: int | None,
        *,
        in_graph: bool,
    ) -> list[Route]:
        """Plan the routes of each part's rows, and send facts about the rows to the receivers.

        These are the experts `[T, K]`, the weights `[T, K]` if given, and, except in the first hop,
        the origin `[T]`. All parts share the messages.
        """
        once, slots, told = self.count(x_TD, idx, capacity, in_graph=in_graph)
        (sent, slots_sent, _), (received, slots_received, tokens_received) = (
            (found[::3], found[1::3], found[2::3]) for found in (told.sent, told.received)
        )
        # Indices take two bytes if this is enough.
        narrow = torch.int16 if self.num_experts < 2**15 else torch.int32
        columns = []
        for i, idx_TK in enumerate(idx):
            once[i] = replace(once[i], slot_of_row=once[i].slot_of_row[: sum(sent[i])])
            slots[i] = replace(slots[i], slot_of_row=slots[i].slot_of_row[: sum(slots_sent[i])])
            column = [idx_TK.to(narrow)]
            if origin is not None:
                column.append(origin[i][:, None].to(narrow))
            if weights is not None:
                column.append(weights[i])
            columns.append(column)
        arrived, found = self._bring_columns(x_TD, columns, once, sent, received, tokens_received)
        routes = []
        for i, (idx_UK, *others) in enumerate(found):
            weights_UK = None if weights is None else others.pop()
            if origin is None:
                rank_P = torch.arange(self.num_ranks, device=idx_UK.device)
                received_P = told.received_PM[:, 3 * i]
                origin_U = rank_P.repeat_interleave(received_P, output_size=sum(received[i]))
            else:
                origin_U = others[0].view(-1).to(torch.int64)
            routes.append(
                Route(
                    once[i],
                    slots[i],
                    sent[i],
                    received[i],
                    slots_sent[i],
                    slots_received[i],
                    self._from_first_here(idx_UK),
                    origin_U,
                    weights_UK,
                    told.expert_capacity,
                    told.has_backward,
                    arrived,
                )
            )
        return routes

    def count(
        self, x_TD: Tensor, idx: Sequence[Tensor], capacity: int | None, *, in_graph: bool
    ) -> tuple[list[ops.Permutation], list[ops.Permutation], ExchangedCounts]:
        """Exchange the numbers of tokens and slots; group this rank's tokens and slots by rank."""
        once, slots, own = list[ops.Permutation](), list[ops.Permutation](), list[Tensor]()
        with self.routing(x_TD):
            self._check_dtype(x_TD)
            for idx_TK in idx:
                target_TK = idx_TK.div(self.num_local_experts, rounding_mode="floor")
                # Negative indices are kept, because division would turn an invalid -2 into -1,
                # which means no rank.
                target_TK = target_TK.where(idx_TK >= 0, idx_TK)
                again_TKK = target_TK[:, :, None] == target_TK[:, None, :]
                once_TK = target_TK.masked_fill(again_TKK.tril(-1).any(-1), -1)
                # The rows have no columns, because only the tables are needed.
                none_TD = x_TD.new_empty((idx_TK.shape[0], 0))
                try:
                    for target, tables in ((once_TK, once), (target_TK, slots)):
                        tables.append(ops.permute_tokens(none_TD, target, self.num_ranks)[1])
                        own.append(tables[-1].num_tokens_per_expert)
                except RuntimeError:
                    # This call raises an error that names the index of the expert, not of a rank.
                    ops.permute_tokens(none_TD, idx_TK, self.num_experts)
                    raise
                own.append(torch.full_like(own[-1], idx_TK.shape[0]))
        top_k, own_PM = idx[0].shape[1], torch.stack(own, 1)
        told = self._calls.exchange(self, x_TD, own_PM, top_k, capacity, in_graph)
        return once, slots, told

    def start_out(
        self, rows: Tensor, route: Route, name: str, *, format: str | None = None
    ) -> Callable[[], Tensor]:
        """Begin to send the rows of a route; return a function that waits for received rows."""
        with in_layer(route.layer):
            return start_rows(
                route.take_once(rows),
                self.group,
                route.sent,
                route.received,
                format=format,
                operation=f"{self.operation} {name}",
            )

    def start_back(
        self,
        rows: Tensor,
        route: Route,
        name: str,
        format: str | None,
        *,
        slots: bool,
        backward: bool,
    ) -> Callable[[], Tensor]:
        """Begin to send results or gradients back; return a function that waits for them.

        Rows of slots arrive in the order of `route.slots`, and rows of tokens in that of
        `route.once`. Gradients are multiplied by the factor of `TokenDispatcher`.
        """
        splits = (route.slots_received, route.slots_sent) if slots else (route.received, route.sent)
        with in_layer(route.layer):
            return self._start_back(rows, *splits, name, format, backward=backward)

    def bring_sums(
        self,
        y_UD: Tensor,
        route: Route,
        name: str,
        formats: Formats,
        meanwhile: Callable[[], None] | None,
    ) -> Tensor:
        """Send results back, and sum those of each token, `[T, D]`. Differentiable."""
        back_UD = self.exchange_rows(
            y_UD,
            route.received,
            route.sent,
            grad_scale=1.0 / self.grad_scale,
            operation=f"{self.operation} {name}",
            meanwhile=meanwhile,
            formats=formats,
        )
        return ops.unpermute_tokens(back_UD, route.once)

    def return_weights(self, routes: Sequence[Route], grads: Sequence[Tensor]) -> list[Tensor]:
        """Send gradients of received weights back; return those of each part, `[T, K]`."""
        sent, received = [route.sent for route in routes], [route.received for route in routes]
        joined = join_parts(grads, received)
        name = "weights backward"
        with in_layer(routes[0].layer):
            back = self._start_back(joined, total(received), total(sent), name, None, backward=True)
        parts = zip(split_parts(back(), sent), routes, strict=True)
        # A slot is on one rank, so the other ranks add zeros to its gradient.
        return [ops.unpermute_tokens(part, route.once) for part, route in parts]

    def _start_back(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        name: str,
        format: str | None,
        *,
        backward: bool,
    ) -> Callable[[], Tensor]:
        wait = start_rows(
            rows,
            self.group,
            send,
            receive,
            format=format,
            operation=f"{self.operation} {name}",
        )
        if not backward or self.grad_scale == 1.0:
            return wait
        return lambda: wait().mul_(self.grad_scale)

    def _bring_columns(
        self,
        x_TD: Tensor,
        columns: Sequence[Sequence[Tensor]],
        once: Sequence[ops.Permutation],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        tokens_received: Sequence[Sequence[int]],
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Send columns; return the tokens that arrive with them, if any, and columns `[U, ...]`."""
        rows = []
        for column, tables in zip(columns, once, strict=True):
            token_U = tables.slot_of_row // tables.top_k
            rows.append(packed([each[token_U] for each in column]))
        # All columns travel in one message, and as bytes, because Gloo does not send int16.
        arrived = collectives.all_to_all(
            join_parts(rows, sent),
            self.group,
            send=total(sent),
            receive=total(received),
            operation=f"{self.operation} indices",
        )
        return [], [unpacked(part, columns[0]) for part in split_parts(arrived, received)]

    def _from_first_here(self, idx_UK: Tensor) -> Tensor:
        """Return the experts behind this rank, counted from its first one; -1 for others."""
        local_UK = idx_UK.to(torch.int64) - group_rank(self.group) * self.num_local_experts
        here_UK = (local_UK >= 0) & (local_UK < self.num_local_experts)
        return local_UK.where(here_UK, -1)


def packed(columns: Sequence[Tensor]) -> Tensor:
    """Join columns `[N, ...]` of any dtypes to rows of bytes."""
    widths = [column.shape[1] * column.element_size() for column in columns]
    return torch.cat(
        [
            as_bytes(column).view(len(column), width)
            for column, width in zip(columns, widths, strict=True)
        ],
        1,
    )


def unpacked(rows_NB: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split the rows of `packed` into columns of the shapes and dtypes of `like`."""
    widths = [column.shape[1] * column.element_size() for column in like]
    # The parts are copied for their alignment. A part of a single row counts as contiguous, but may
    # start at any byte.
    parts = [part.clone(memory_format=torch.contiguous_format) for part in rows_NB.split(widths, 1)]
    return [part.view(column.dtype) for part, column in zip(parts, like, strict=True)]


@dataclass(frozen=True)
class Journey:
    """Way of tokens over all hops of a dispatch, and tables that group the arrived rows by expert.

    Attributes:
        hops: the hops, in the order of the way out.
        routes: one route for each hop.
        expand: permutation that groups the slots `[U * K]` of the arrived tokens by expert.
        by_slot: the same permutation, with slots numbered among those that have an expert here.
        places: for each hop except the first, the permutation of the slots that come back over it,
            from the order of ranks to the order of slots in the hop before.
    """

    hops: tuple[Hop, ...]
    routes: tuple[Route, ...]
    expand: ops.Permutation
    by_slot: ops.Permutation
    places: tuple[ops.Permutation, ...]

    def start_out(self, x_TD: Tensor, name: str, format: str | None) -> Callable[[], Tensor]:
        """Begin to send tokens to their experts; return a function that waits for rows `[U, D]`.

        Rows are coded once for all hops, but by "lossless" for each hop. Only the first hop
        overlaps with work of the caller.
        """
        each = format if format == LOSSLESS else None
        rows, route = encode(x_TD, format), self.routes[0]
        wait = self.hops[0].start_out(rows, route, name, format=each)

        def finish() -> Tensor:
            rows = wait()
            for hop, route in zip(self.hops[1:], self.routes[1:], strict=True):
                rows = hop.start_out(rows, route, name, format=each)()
            return decode(rows, format, x_TD.shape[1], x_TD.dtype)

        return finish

    @property
    def wire(self) -> Wire:
        """Formats in which the rows travel."""
        return self.hops[0].wire

    def spread(self, grad_UD: Tensor, *, weighted: bool) -> Tensor:
        """Return the gradients of the rows of experts, given those of the sums over the rows."""
        expand, weights_UK = self.expand, self.routes[-1].weights_UK
        grad_rows: Tensor = torch.ops.moe_ext._gather_tokens(
            grad_UD, expand.slot_of_row, expand.top_k
        )
        if weighted:
            assert weights_UK is not None
            # Padding rows have slot -1, and so take the extra last weight. They are zero.
            weights = torch.cat([weights_UK.view(-1), weights_UK.new_zeros(1)])
            grad_wide = grad_rows.to(weights.dtype) * weights[expand.slot_of_row, None]
            grad_rows = grad_wide.to(grad_rows.dtype)
        scale = math.prod(hop.grad_scale for hop in self.hops)
        return grad_rows if scale == 1.0 else grad_rows.mul_(1.0 / scale)

    def return_sums(
        self, y_UD: Tensor, name: str, formats: Formats, meanwhile: Callable[[], None] | None
    ) -> Tensor:
        """Send results back, and sum those of each token at every hop, `[T, D]`. Differentiable."""
        last = self.hops[0]
        for hop, route in zip(reversed(self.hops), reversed(self.routes), strict=True):
            y_UD = hop.bring_sums(y_UD, route, name, formats, meanwhile if hop is last else None)
        return y_UD

    def start_sums(self, grad_UD: Tensor, name: str, format: str | None) -> Callable[[], Tensor]:
        """Begin to do the same for gradients, without a graph; return a function that waits."""
        between = [route.once for route in self.routes[1:]]
        wait = self._start_back(grad_UD, between, name, format, slots=False, backward=True)
        return lambda: ops.unpermute_tokens(wait(), self.routes[0].once)

    def start_slots(
        self, rows: Tensor, name: str, format: str | None, *, backward: bool
    ) -> Callable[[], Tensor]:
        """Begin to send slots back; return a function that waits for them, `[S, D]`.

        The slots are then in the order of `routes[0].slots`.
        """
        rows_SD = ops.unpermute_tokens(rows, self.by_slot)
        return self._start_back(rows_SD, self.places, name, format, slots=True, backward=backward)

    def _start_back(
        self,
        rows: Tensor,
        between: Sequence[ops.Permutation],
        name: str,
        format: str | None,
        *,
        slots: bool,
        backward: bool,
    ) -> Callable[[], Tensor]:
        """Send rows back over all hops; return a function that waits for the first hop.

        `between` brings rows of each later hop into the order of the hop before it.
        """
        way: dict[str, bool] = {"slots": slots, "backward": backward}
        for i in reversed(range(len(self.hops))):
            hop, route = self.hops[i], self.routes[i]
            wait = hop.start_back(rows, route, name, format, **way)
            if i > 0:
                rows = ops.unpermute_tokens(wait(), between[i - 1])
        return wait


def return_weights(journeys: Sequence[Journey], grads: Sequence[Tensor]) -> list[Tensor]:
    """Send gradients of weights back over all hops; return those of each part, `[T, K]`."""
    found = list(grads)
    for i in reversed(range(len(journeys[0].hops))):
        routes = [journey.routes[i] for journey in journeys]
        found = journeys[0].hops[i].return_weights(routes, found)
    return found
