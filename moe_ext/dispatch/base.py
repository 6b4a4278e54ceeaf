"""Base of the token dispatchers.

Shapes: T tokens, D model, E experts, K top-k, N = T*K rows, R received rows, P ranks, L = E/P local
    experts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_choice, check_integer
from moe_ext.comm import at_exit
from moe_ext.comm.agreement import agree, check_equal_over_ranks, share
from moe_ext.comm.failures import is_told
from moe_ext.comm.groups import GroupHandle, check_group, group_rank, group_size
from moe_ext.comm.reports import telling
from moe_ext.dispatch.chunks import (
    Chunk,
    RowCounts,
    cut_exchange,
    cut_rows,
    fair_share,
    keep_first,
    schedule,
)
from moe_ext.dispatch.counts import DTYPES, CallComparison, ExchangedCounts, Header
from moe_ext.dispatch.rows import join_parts, split_parts, total
from moe_ext.dispatch.wire import Formats, Wire
from moe_ext.ops.grouped_gemm import row_alignment

_SILENT = contextlib.nullcontext()


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


# Sends the rows of a part, with something to do meanwhile.
Part = Callable[[Callable[[], None] | None], tuple[Tensor, Tensor, DispatchMetadata]]


class TokenDispatcher:
    """Brings every row to the rank of its expert, and back; base of the transports.

    A transport subclasses it and says how messages travel, by `exchange_counts` and
    `exchange_rows`; everything that a layer uses follows from these two: `routing`, `dispatch`,
    `combine`, and `chunks` with `send` and `combine_part`. A dispatcher holds no parameters and no
    state of a step. One with a `dispatch` of its own brings its own `combine`, and its own `chunks`
    where it is to serve a `RowBudget`.

    Rank r of P holds experts [r*E/P, (r+1)*E/P). Splits may be uneven or zero; every rank sends the
    same messages whatever is in them. The gradient that reaches the expert outputs is divided by P,
    and the one that goes back to the tokens multiplied by P: so a gradient of an expert's
    parameter is that of the mean over the group of the local losses, while gradients of everything
    before the experts are unchanged.

    Args:
        num_experts: E, a multiple of P.
        group: process group of P ranks; None keeps all rows on this rank, and nothing travels.
        drop_policy: which slots of an expert beyond its capacity go, "position" or "score".
        average: False leaves out both factors: a gradient of an expert's parameter is then that of
            the sum over the group.
        wire: formats in which rows travel, for transports whose `exchange_rows` takes `formats`: a
            `Wire`, or "int8", "fp8" or "mx" for what goes to the experts, or "lossless" for all
            rows. Where coding loses anything all rows are coded, those for this rank too: a result
            does not depend on which rank an expert is on, and has the same bits for 2 ranks and
            more. Alone a rank sends nothing, and codes nothing. Rows that coding does not make
            shorter travel as they are.

    Raises:
        ValueError: P does not divide E, or wire is no such format.
    """

    # For subclasses that do all by themselves and never call __init__.
    _group = GroupHandle(None)
    wire = Wire()
    operation = "dispatch"
    # Parts of the tokens that travel by themselves; see `cut`.
    num_parts = 1

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup | None = None,
        *,
        drop_policy: str = "position",
        average: bool = True,
        wire: Wire | str | None = None,
    ) -> None:
        self.operation = name = type(self).__name__
        check_group(group, name, name="group")
        self._group = GroupHandle(group)
        check_choice(name, "drop_policy", drop_policy, ("position", "score"))
        check_integer(name, "num_experts", num_experts)
        self.num_ranks = group_size(group)
        if self.num_ranks > 1:
            at_exit.wait_at_exit()  # which tells of an error that ends it before the first message
        if num_experts % self.num_ranks != 0:
            raise ValueError(
                f"{name}: expected num_experts to be a multiple of the group size "
                f"{self.num_ranks}, got {num_experts}"
            )
        self.num_experts = num_experts
        self.num_local_experts = self.num_counts = num_experts // self.num_ranks
        self.drop_policy = drop_policy
        self.average = average
        wire = Wire.of(name, wire)
        self.wire = wire if self.num_ranks > 1 else Wire()
        self.grad_scale = float(self.num_ranks) if average else 1.0
        facts = {"num_experts": num_experts, "drop_policy": drop_policy, "average": average}
        self._calls = CallComparison(facts)
        self._result_dtypes: dict[torch.dtype, torch.dtype] = {}

    def tell_apart(self, layers: Sequence[str], layer: int) -> None:
        """Compare with every exchange which layer runs, for models that may skip one on a rank.

        Ranks that run different layers then raise, all of them, where rows would go to experts of
        another layer.

        Args:
            layers: names of the layers that share the group, with as many experts each, the same on
                every rank.
            layer: index of this one.
        """
        self._calls.tell_apart(layers, layer)

    def declare(self, options: Mapping[str, object]) -> None:
        """Take the options of a layer, which its ranks have compared, into every exchange.

        A later change on some ranks alone then raises on all of them, with its name.

        Args:
            options: what must be equal on every rank, by name.
        """
        self._calls.declare(options)

    @property
    def group(self) -> Any:
        """The process group, None where nothing travels."""
        return self._group.group

    @property
    def in_graph(self) -> bool:
        """A graph of `torch.compile` can hold it: split sizes are known only after an exchange."""
        return self.group is None

    # The part of a transport: messages.

    def exchange_counts(self, message_PM: Tensor, *, operation: str) -> Tensor:
        """Send row p of an int64 message to rank p.

        Args:
            message_PM: `[P, M]`, M equal on every rank.
            operation: name for error messages.

        Returns:
            `[P, M]`, row p from rank p.

        Raises:
            RankFailureError: a rank died or did not answer.
        """
        raise NotImplementedError(f"{type(self).__name__} has no exchange_counts")

    def exchange_rows(
        self,
        rows_ND: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        *,
        grad_scale: float,
        operation: str,
        meanwhile: Callable[[], None] | None = None,
        formats: Formats = (None, None),
    ) -> Tensor:
        """Send rows to every rank; differentiable, the gradients travel back by the same way.

        Args:
            rows_ND: the first `send[0]` for rank 0 of the group, then `send[1]` for rank 1, and so
                on.
            send: P row counts that sum to N.
            receive: P row counts, what each rank sends here.
            grad_scale: factor on the gradient.
            operation: name for error messages.
            meanwhile: to be called once, while the rows are underway where the transport can.
            formats: in which the rows travel, and their gradients; given where there is a wire.

        Returns:
            `[R, D]`, ordered by source rank.

        Raises:
            RankFailureError: a rank died or did not answer. Forward and backward.
        """
        raise NotImplementedError(f"{type(self).__name__} has no exchange_rows")

    # The part that a layer calls.

    def routing(
        self, x: Tensor, *, num_shared: int | None = None
    ) -> AbstractContextManager[object]:
        """Context for what comes before `dispatch` and can fail on one rank alone.

        Checks of x, the router: when the code inside fails, the other ranks get the same error
        from their `dispatch`, with this rank's name, in the place of waiting for it.

        Args:
            x: the input that is looked at, `[..., D]`.
            num_shared: experts of the `share_counts` that comes before `dispatch`; None for none.
        """
        silent = self.group is None or type(self).exchange_counts is TokenDispatcher.exchange_counts
        return _SILENT if silent else self._telling_of_failure(x, num_shared)

    def share_counts(
        self, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor, num_experts: int
    ) -> SharedCounts:
        """Tell all ranks the rows of every expert, for a caller who places rows by these counts.

        It is the exchange of counts of the `dispatch` that follows, to which the caller gives the
        `RowCounts` that follow from it. Between the two comes `computing`.

        NOTE: device-to-host sync, in the place of that of `dispatch`.

        Args:
            x_TD: as in `dispatch`.
            topk_idx_TK: experts of every token before they are placed, -1 = none.
            topk_weights_TK: as in `dispatch`.
            num_experts: of these experts, equal on every rank.

        Raises:
            As `dispatch`.
        """
        with self._telling_of_failure(x_TD, num_experts):
            self._check_dtype(x_TD)
            none_TD = x_TD.detach()[:, :0]
            _, tables = ops.permute_tokens(none_TD, topk_idx_TK, num_experts)
        own_PE = tables.num_tokens_per_expert.expand(self.num_ranks, -1)
        in_graph = x_TD.requires_grad or topk_weights_TK.requires_grad
        header = self._calls.header(x_TD, topk_idx_TK.shape[1], None, in_graph, self.wire)
        told = self._tell(own_PE, header, lambda counts_PE: counts_PE)
        return SharedCounts(tables, torch.tensor(told.received).T, told.has_backward)

    def computing(self, x: Tensor) -> AbstractContextManager[object]:
        """Context for what comes after `dispatch`, up to the end of `combine`.

        Experts: when the code inside fails, the other ranks get the same error in the place of
        waiting for this rank's rows, with its name. So they do where its backward pass fails.

        Args:
            x: the input that is looked at.
        """
        group = self.group
        return _SILENT if group is None else telling(group, x.device, self.operation)

    def agree_on_results(self, rows: Tensor, results: Tensor) -> None:
        """Compare the dtype of experts' results over the ranks, once for each dtype of rows."""
        if self.group is None:
            return
        known = self._result_dtypes.get(rows.dtype)
        if known is None:
            facts = {"the dtype of the experts' results": results.dtype}
            agree(self.operation, facts, None, self.group, rows.device)
            self._result_dtypes[rows.dtype] = results.dtype
        elif results.dtype != known:
            raise ValueError(
                f"{self.operation}: expected experts to return {known} for rows of {rows.dtype} "
                f"as before, got {results.dtype}"
            )

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_weights_TK: Tensor,
        *,
        capacity: int | None = None,
        counts: RowCounts | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Bring every row to its expert.

        Args:
            x_TD: tokens of this rank; T may differ between ranks and may be 0.
            topk_idx_TK: experts of every token, -1 = none.
            topk_weights_TK: their weights.
            capacity: rows that an expert takes from this rank, None for all.
            counts: rows that travel, where all ranks know them by `share_counts`; None exchanges
                them.
            meanwhile: called while the rows are underway, if they travel: its backward pass runs
                beside the exchange of their gradients.

        Returns:
            rows `[R, D]` grouped by local expert, expert offsets `[L + 1]`, metadata.

        Raises:
            TypeError: x_TD is of a dtype that is not exchanged.
            ValueError: on every rank, when num_experts, top_k, model_dim, the dtype, whether there
                is a capacity or whether gradients are recorded differ between ranks.
            RankFailureError: a rank died or did not answer.
        """
        if self.group is None:
            rows_ND, tables = self._group_by_expert(x_TD, topk_idx_TK, topk_weights_TK, capacity)
            metadata = DispatchMetadata(tables, topk_weights_TK, expert_capacity=capacity)
            return rows_ND, tables.expert_offsets, metadata
        if counts is None:
            rows_ND, tables, counts = self._group_and_count(
                x_TD, topk_idx_TK, topk_weights_TK, capacity
            )
        else:
            with self.computing(x_TD):
                rows_ND, tables = self._group_by_expert(
                    x_TD, topk_idx_TK, topk_weights_TK, capacity
                )
        rows_ND = rows_ND[: sum(counts.sent)]
        return self._send(rows_ND, tables, topk_weights_TK, counts, "dispatch", meanwhile=meanwhile)

    @property
    def takes_meanwhile(self) -> bool:
        """Whether `dispatch` and `send` call `meanwhile` while rows travel."""
        own = TokenDispatcher.dispatch, TokenDispatcher.send
        return self.group is not None and (type(self).dispatch, type(self).send) == own

    def cut(self, num_parts: int) -> TokenDispatcher:
        """A copy of this dispatcher for `in_parts` with so many parts, equal on all ranks.

        Raises:
            ValueError: it sends whole batches alone.
        """
        if type(self).dispatch is not TokenDispatcher.dispatch:
            raise no_parts(self, num_parts)
        found = copy.copy(self)
        found.num_parts = num_parts
        found._calls = copy.copy(self._calls)
        found._calls.facts = {**self._calls.facts, "overlap": num_parts}
        return found

    def in_parts(
        self, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor, *, weighed: bool
    ) -> list[Part]:
        """`dispatch` of `num_parts` parts of the tokens, for rows that travel beside the experts.

        Counts of all parts travel in one message, and so do weights.

        Args:
            x_TD: as in `dispatch`.
            topk_idx_TK: as there.
            topk_weights_TK: as there.
            weighed: whether `row_weights` will be asked for.

        Returns:
            For each part what sends its rows, to be called by all ranks in the same order. It takes
            what to do while they are underway, or None, and returns as `dispatch` does.

        Raises:
            As `dispatch`.
        """
        num_parts, size = self.num_parts, (self.num_ranks, self.num_local_experts)
        columns = (t.tensor_split(num_parts) for t in (x_TD, topk_idx_TK, topk_weights_TK))
        parts = list(zip(*columns, strict=True))
        with self._telling_of_failure(x_TD):
            self._check_dtype(x_TD)
            grouped = [self._group_by_expert(x, idx, weights, None) for x, idx, weights in parts]
        own_PM = torch.cat([tables.expert_offsets.diff().view(size) for _, tables in grouped], 1)
        in_graph = x_TD.requires_grad or topk_weights_TK.requires_grad
        header = self._calls.header(x_TD, topk_idx_TK.shape[1], None, in_graph, self.wire)

        def by_part(counts_PM: Tensor) -> Tensor:
            return counts_PM.view(size[0], num_parts, size[1])

        told = self._tell(own_PM, header, lambda counts_PM: by_part(counts_PM).sum(2))
        received = by_part(told.received_PM).unbind(1)
        graph = told.has_backward
        counts = [
            RowCounts(*sizes, has_backward=graph)
            for sizes in zip(told.sent, told.received, received, strict=True)
        ]
        rows = [rows_ND[: sum(sent)] for (rows_ND, _), sent in zip(grouped, told.sent, strict=True)]
        arrived: list[Tensor | None] = [None] * num_parts
        if weighed:
            column_N1 = join_parts(
                [
                    _weight_of_rows(tables, part[2].to(sum_dtype(x_TD.dtype)), sum(sent))
                    for (_, tables), part, sent in zip(grouped, parts, told.sent, strict=True)
                ],
                told.sent,
            )
            arrived_R1 = self._exchange_weights(
                column_N1, total(told.sent), total(told.received), graph
            )
            arrived = [*split_parts(arrived_R1, told.received)]
        return [
            functools.partial(
                self._send, rows[i], grouped[i][1], parts[i][2], counts[i], "dispatch", arrived[i]
            )
            for i in range(num_parts)
        ]

    def row_weights(self, rows: Tensor, metadata: DispatchMetadata) -> RowWeights | None:
        """The weights of the rows, for experts that take them into their second product.

        Where they travel, that is one more exchange, of a number a row, and one of its gradient.
        The results are then combined with `replace(metadata, topk_weights=None)`.

        Args:
            rows: what `dispatch` or `send` returned, all ranks of the group.
            metadata: what it returned.

        Returns:
            None where `dispatch` or `combine` are not those of this class.
        """
        own = TokenDispatcher.dispatch, TokenDispatcher.combine
        if (type(self).dispatch, type(self).combine) != own or metadata.topk_weights is None:
            return None
        tables, weights_TK = metadata.permutation, metadata.topk_weights.to(sum_dtype(rows.dtype))
        if metadata.sent is None:
            return RowWeights(weights_TK, tables.slot_of_row)
        assert metadata.received is not None
        assert metadata.received_permutation is not None
        arrived_R1 = metadata.weights_R1
        if arrived_R1 is None:
            arrived_R1 = self._exchange_weights(
                _weight_of_rows(tables, weights_TK, sum(metadata.sent)),
                metadata.sent,
                metadata.received,
                rows.requires_grad,
            )
        return RowWeights(arrived_R1, metadata.received_permutation.slot_of_row)

    def _exchange_weights(
        self, column_N1: Tensor, sent: Sequence[int], received: Sequence[int], has_backward: bool
    ) -> Tensor:
        return self.exchange_rows(
            take_part(column_N1) if has_backward else column_N1,
            sent,
            received,
            grad_scale=self.grad_scale,
            operation=f"{self.operation} weights",
        )

    def combine(
        self,
        rows: Tensor,
        metadata: DispatchMetadata,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Weighted sum of every token's rows, `[T, D]`, on the rank of the token.

        Args:
            rows: expert outputs, `[R, D]`.
            metadata: what `dispatch` returned.
            meanwhile: called while the rows travel, for kernels that do not need them. On CUDA they
                and their backward pass run beside the exchange.
        """
        return self.weighted_sum(self.bring_back(rows, metadata, meanwhile=meanwhile), metadata)

    def weighted_sum(self, rows_ND: Tensor, metadata: DispatchMetadata) -> Tensor:
        """Weighted sum of every token's rows, `[T, D]`: the second half of `combine`.

        Args:
            rows_ND: what `bring_back` returned.
            metadata: what `dispatch` returned.
        """
        permutation = metadata.permutation
        # Masked and dropped slots sent no row: the last of the T*K that the permutation may count.
        if metadata.sent is not None:
            sent_N = permutation.slot_of_row[: rows_ND.shape[0]]
            permutation = replace(permutation, slot_of_row=sent_N)
        return ops.unpermute_tokens(rows_ND, permutation, metadata.topk_weights)

    def combine_part(self, rows: Tensor, metadata: DispatchMetadata) -> Tensor:
        """`combine` of a chunk: the sums `[T, D]` of its rows alone, in float32 or float64.

        Args:
            rows: expert outputs, `[R, D]`.
            metadata: what `send` returned.
        """
        rows_ND = self.bring_back(rows, metadata)
        return self.weighted_sum(rows_ND.to(sum_dtype(rows.dtype)), metadata)

    def chunks(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_weights_TK: Tensor,
        *,
        max_rows: int,
        capacity: int | None = None,
        drop: bool = False,
    ) -> list[Chunk]:
        """Cut the rows of a `dispatch` into chunks that go one after the other.

        `send` brings the rows of a chunk to their experts, `combine_part` their results back.

        Args:
            x_TD: as in `dispatch`; read for its shape and dtype alone.
            topk_idx_TK: as in `dispatch`.
            topk_weights_TK: as in `dispatch`.
            max_rows: rows that a rank runs, sends or receives in one chunk, at most.
            capacity: as in `dispatch`.
            drop: leave out the rows beyond one chunk.

        Returns:
            The chunks, at least one and as many on every rank of the group. The `num_dropped` of
            their tables counts all slots that were left out.

        Raises:
            TypeError: the dispatcher has a `dispatch` of its own.
            ValueError: on every rank, when max_rows differs between ranks, and as `dispatch`.
            RankFailureError: a rank died or did not answer.
        """
        if type(self).dispatch is not TokenDispatcher.dispatch:
            with self.routing(x_TD):
                raise no_chunks(self)
        if self.group is not None:
            return self._exchanged_chunks(
                x_TD, topk_idx_TK, topk_weights_TK, capacity, max_rows, drop
            )
        # Rows without columns: only the tables are wanted, and they cost no row.
        none_TD = x_TD.detach()[:, :0]
        _, tables = self._group_by_expert(none_TD, topk_idx_TK, topk_weights_TK, capacity)
        if drop and tables.slot_of_row.shape[0] > max_rows:
            allowed = tables.expert_offsets.new_full((1,), max_rows)
            kept_idx = keep_first(tables, topk_idx_TK, allowed)
            _, kept = ops.permute_tokens(none_TD, kept_idx, self.num_experts)
            return cut_rows(count_dropped(tables, kept), max_rows)[:1]
        return cut_rows(tables, max_rows)

    def send(
        self,
        rows_ND: Tensor,
        chunk: Chunk,
        topk_weights_TK: Tensor,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Bring the rows of a chunk to their experts; differentiable.

        Args:
            rows_ND: in the order of `chunk.slot_of_row`.
            chunk: one of `chunks`.
            topk_weights_TK: of all slots.
            meanwhile: as in `dispatch`.

        Returns:
            As `dispatch`.
        """
        tables = chunk.tables
        if chunk.counts is None:
            return rows_ND, tables.expert_offsets, DispatchMetadata(tables, topk_weights_TK)
        return self._send(
            rows_ND, tables, topk_weights_TK, chunk.counts, "chunk", meanwhile=meanwhile
        )

    def bring_back(
        self,
        rows: Tensor,
        metadata: DispatchMetadata,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Bring expert outputs to the ranks of their tokens, unweighted; differentiable.

        Args:
            rows: expert outputs, in the order in which `dispatch` or `send` gave the rows.
            metadata: what it returned.
            meanwhile: as in `combine`.

        Returns:
            Rows in the order of `metadata.permutation`.
        """
        if metadata.sent is None:
            if meanwhile is not None:
                meanwhile()
            return rows
        assert metadata.received is not None
        assert metadata.received_permutation is not None
        return self.exchange_rows(
            ops.unpermute_tokens(rows, metadata.received_permutation),
            metadata.received,
            metadata.sent,
            grad_scale=1.0 / self.grad_scale,
            operation=f"{self.operation} combine",
            meanwhile=meanwhile,
            **self._coded(self.wire.back),
        )

    # The above, from the two messages.

    def _coded(self, formats: Formats) -> dict[str, Any]:
        """Arguments of `exchange_rows`, which need not know of formats where there is no wire."""
        return {} if formats == (None, None) else {"formats": formats}

    def _send(
        self,
        rows_ND: Tensor,
        tables: ops.Permutation,
        topk_weights_TK: Tensor,
        counts: RowCounts,
        word: str,
        weights_R1: Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        if counts.has_backward:
            rows_ND = take_part(rows_ND)
        rows_RD = self.exchange_rows(
            rows_ND,
            counts.sent,
            counts.received,
            grad_scale=self.grad_scale,
            operation=f"{self.operation} {word}",
            meanwhile=meanwhile,
            **self._coded(self.wire.out),
        )
        # From the order (rank, expert) to (expert, rank).
        expert_R = counts.expert_of_row()
        align = row_alignment(rows_RD, rows_RD.shape[0], self.num_local_experts)
        grouped, permutation = ops.permute_tokens(
            rows_RD, expert_R[:, None], self.num_local_experts, align=align
        )
        metadata = DispatchMetadata(
            tables,
            topk_weights_TK,
            counts.sent,
            counts.received,
            permutation,
            counts.expert_capacity,
            weights_R1,
        )
        return grouped, permutation.expert_offsets, metadata

    def _group_by_expert(
        self, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor, capacity: int | None
    ) -> tuple[Tensor, ops.Permutation]:
        """The rows of this rank's tokens, grouped by expert."""
        align = 1
        if self.group is None:
            # Padding would travel with the rows: it is added on arrival.
            align = row_alignment(x_TD, topk_idx_TK.numel(), self.num_experts)
        return ops.permute_tokens(
            x_TD,
            topk_idx_TK,
            self.num_experts,
            topk_weights=topk_weights_TK.detach() if self.drop_policy == "score" else None,
            capacity=capacity,
            drop_policy=self.drop_policy,
            align=align,
        )

    def _group_and_count(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_weights_TK: Tensor,
        capacity: int | None,
        *,
        with_rows: bool = True,
    ) -> tuple[Tensor, ops.Permutation, RowCounts]:
        """Rows grouped by expert, without columns if not wanted, and who sends how many."""
        with self._telling_of_failure(x_TD):
            self._check_dtype(x_TD)
            taken_TD = x_TD if with_rows else x_TD.detach()[:, :0]
            rows_ND, tables = self._group_by_expert(
                taken_TD, topk_idx_TK, topk_weights_TK, capacity
            )
        own_PL = tables.expert_offsets.diff().view(self.num_ranks, self.num_local_experts)
        in_graph = x_TD.requires_grad or topk_weights_TK.requires_grad
        header = self._calls.header(x_TD, topk_idx_TK.shape[1], capacity, in_graph, self.wire)
        told = self._tell(own_PL, header, lambda counts_PL: counts_PL.sum(1, True))
        (received,), (sent,) = told.received, told.sent
        counts = RowCounts(
            sent, received, told.received_PM, told.expert_capacity, told.has_backward
        )
        return rows_ND, tables, counts

    @contextlib.contextmanager
    def _telling_of_failure(self, x: Tensor, num_shared: int | None = None) -> Iterator[None]:
        """Tell the other ranks when the code inside fails, in the place of the counts."""
        try:
            yield
        except Exception as error:
            if is_told(error):
                raise
            header = self._calls.header(x, 0, 0, x.requires_grad, self.wire, failed=True)
            nothing_PL = torch.zeros(
                self.num_ranks,
                num_shared or self.num_counts * self.num_parts,
                dtype=torch.int64,
                device=x.device,
            )
            # The error of this rank says more than that of the exchange.
            with contextlib.suppress(ValueError, TypeError, RuntimeError):
                self._tell(nothing_PL, header, lambda counts_PL: counts_PL, error)
            raise

    def _tell(
        self,
        own_PM: Tensor,
        header: Header,
        totals: Callable[[Tensor], Tensor],
        problem: Exception | None = None,
    ) -> ExchangedCounts:
        """Exchange counts over the group; see `CallComparison.exchange`."""
        send, group = self.exchange_counts, self.group
        return self._calls.exchange(own_PM, header, totals, send, group, self.operation, problem)

    def _check_dtype(self, x_TD: Tensor) -> None:
        if x_TD.dtype not in DTYPES:
            raise TypeError(
                f"{self.operation}: expected x_TD to be one of {DTYPES}, got {x_TD.dtype}"
            )
        if x_TD.dtype == torch.float64 and self.wire != Wire():
            raise TypeError(
                f"{self.operation}: expected x_TD to be float32, bfloat16 or float16 with "
                f"{self.wire}, which has fewer digits, got {x_TD.dtype}; leave wire out"
            )

    def _exchanged_chunks(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_weights_TK: Tensor,
        capacity: int | None,
        max_rows: int,
        drop: bool,
    ) -> list[Chunk]:
        _, tables, counts = self._group_and_count(
            x_TD, topk_idx_TK, topk_weights_TK, capacity, with_rows=False
        )
        align = row_alignment(x_TD, max_rows, self.num_local_experts)
        limit = max_rows - self.num_local_experts * (align - 1)
        # Rows from each rank (first dimension) to each other, on the host of every rank.
        values = [max_rows, *counts.sent]
        table = share(values, self.group, x_TD.device, operation="RowBudget")
        check_equal_over_ranks("rows", [row[0] for row in table], self.group, "RowBudget")
        pairs_PP = torch.tensor([row[1:] for row in table], dtype=torch.int64)
        rank = group_rank(self.group)
        if drop:
            allowed_PP = fair_share(fair_share(pairs_PP, limit, dim=1), limit, dim=0)
            if bool((allowed_PP < pairs_PP).any()):
                kept_idx = keep_first(tables, topk_idx_TK, allowed_PP[rank].to(x_TD.device))
                _, kept, counts = self._group_and_count(
                    x_TD, kept_idx, topk_weights_TK, None, with_rows=False
                )
                tables, pairs_PP = count_dropped(tables, kept), allowed_PP
        return cut_exchange(tables, counts, schedule(pairs_PP, limit), rank)


def count_dropped(before: ops.Permutation, kept: ops.Permutation) -> ops.Permutation:
    """The tables of what was kept, with all slots that were left out counted."""
    routed = before.num_tokens_per_expert.sum() - kept.num_tokens_per_expert.sum()
    return replace(kept, num_dropped=before.num_dropped + routed)


def _weight_of_rows(tables: ops.Permutation, weights_TK: Tensor, num_rows: int) -> Tensor:
    """The weight `[N, 1]` of each row that is sent; a slot gets the gradient of its row."""
    sent_N = tables.slot_of_row[:num_rows]
    column_N1: Tensor = torch.ops.moe_ext.unpermute_tokens(
        weights_TK.reshape(-1, 1), tables.row_of_slot, sent_N, 1
    )
    return column_N1


def take_part(rows: Tensor) -> Tensor:
    """Rows in a graph, for an exchange through which gradients of another rank come back."""
    return rows if rows.requires_grad else rows.detach().requires_grad_()


def no_parts(dispatcher: object, num_parts: int) -> ValueError:
    """Error of a dispatcher that sends no parts of a batch."""
    return ValueError(
        "MoELayer: expected dispatcher to be one that sends rows in parts ('alltoall', 'dedup', "
        f"'hierarchical', 'auto') with overlap={num_parts}, got {type(dispatcher).__name__}"
    )


def no_chunks(dispatcher: object) -> TypeError:
    """Error of a dispatcher that sends whole batches alone."""
    return TypeError(
        "RowBudget: expected the dispatcher to be a LocalDispatcher or another TokenDispatcher "
        f"that sends chunks, got {type(dispatcher).__name__}"
    )


class WrappedDispatcher(TokenDispatcher):
    """Gives an object that has `dispatch` and `combine` alone what a layer uses beyond these.

    Args:
        inner: the object; its `combine` takes rows and metadata.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def dispatch(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Dispatch of the wrapped object."""
        result: tuple[Tensor, Tensor, DispatchMetadata] = self.inner.dispatch(*args, **options)
        return result

    def combine(
        self,
        rows: Tensor,
        metadata: DispatchMetadata,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Combine of the wrapped object, and then `meanwhile`."""
        y_TD: Tensor = self.inner.combine(rows, metadata)
        if meanwhile is not None:
            meanwhile()
        return y_TD

    def chunks(self, *args: Any, **options: Any) -> list[Chunk]:
        """Refused: the object knows whole batches alone."""
        raise no_chunks(self.inner)
