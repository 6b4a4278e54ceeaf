"""Base of the token dispatchers.

Shapes: T tokens, D model, E experts, K top-k, N = T*K rows, R received rows, P ranks, L = E/P local
    experts.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_choice, check_rule, check_sizes
from moe_ext.comm import at_exit
from moe_ext.comm.agreement import Agreement, check_equal_over_ranks, share
from moe_ext.comm.failures import is_told
from moe_ext.comm.groups import (
    GroupHandle,
    check_group,
    group_rank,
    group_size,
    shares_communicator,
)
from moe_ext.comm.reports import telling
from moe_ext.dispatch.counts import DTYPES, CallComparison
from moe_ext.dispatch.parts import (
    WHOLE,
    BatchPlan,
    Choice,
    Cut,
    DispatchMetadata,
    Part,
    PlacedRows,
    Round,
    RowBudget,
    RowCounts,
    RowWeights,
    SharedCounts,
    count_dropped,
    cut_exchange,
    cut_rows,
    fair_share,
    keep_first,
    schedule,
    sum_dtype,
)
from moe_ext.dispatch.static_sizes import static_rounds, telling_in_agreement
from moe_ext.dispatch.wire import Formats, Wire
from moe_ext.ops.grouped_gemm import row_alignment

# Features of a layer that need support by its dispatcher.
CAPABILITIES = (
    "an ep_group of several ranks",
    "overlap",
    "row_budget",
    "row_budget.static",
    "rebalance",
    "combine='reduced'",
    "wire",
    "wire.dispatch='lossless'",
)
_SILENT = contextlib.nullcontext()


@functools.cache
def _warn_of_shared_communicator() -> None:
    """Warn, once in a process."""
    warnings.warn(
        "moe_ext: ep_group is the default process group: over NCCL, tokens wait for reductions of "
        "gradients in its queue, and do not travel beside them; give experts a group of their own, "
        "as MoEMesh does",
        stacklevel=3,
    )


class TokenDispatcher:
    """Brings every row to the rank of its expert, and back; base class of the transports.

    A transport is a subclass that defines how messages travel, by `exchange_counts` and
    `exchange_rows`. Everything that a layer calls is built on these two: `plan` makes the parts of
    a batch, and `combine` sums the results. A dispatcher has no parameters, and no state that
    outlives a step. A subclass may instead define `dispatch` and `combine`; a batch is then always
    one part.

    Rank r of P holds experts [r*E/P, (r+1)*E/P). The numbers of rows may be uneven or zero, but
    every rank always sends the same messages. The gradient of the expert outputs is divided by P,
    and the gradient that returns to the tokens is multiplied by P. The gradient of an expert's
    parameter is therefore that of the mean of the local losses over the group, and gradients of
    everything before the experts are unchanged.

    Args:
        num_experts: E, a multiple of P.
        group: process group of P ranks; None keeps all rows on this rank, and nothing travels.
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
        average: if False, both factors are left out. The gradient of an expert's parameter is then
            that of the sum of the losses over the group.
        wire: formats in which rows travel, for transports whose `exchange_rows` takes `formats`: a
            `Wire`; or "int8", "fp8" or "mx" for rows that go to experts; or "lossless" for all
            rows. A lossy format codes all rows, even those that stay on this rank. The result then
            does not depend on the rank of an expert, and has the same bits for any number of ranks
            above 1. In a group of one rank nothing is sent or coded. Rows that a lossless format
            does not make shorter are sent unchanged.

    Raises:
        ValueError: P does not divide E, or wire is not one of these formats.
    """

    # Default for subclasses that define everything themselves and do not call `__init__`.
    _group = GroupHandle(None)
    # True if a graph of `torch.compile` can contain the dispatcher. With several ranks it cannot,
    # because split sizes are known only after an exchange.
    in_graph = True
    wire = Wire()
    operation = "dispatch"
    # Entries of CAPABILITIES that the class supports, and the reason why a layer uses the class.
    serves = frozenset(CAPABILITIES) - {"combine='reduced'"}
    reason = "named by the caller"
    # Optional functions: `choose` replaces the dispatcher at the first forward pass, and
    # `routed_experts` runs the experts without materialising rows.
    choose: Callable[..., Any] | None = None
    routed_experts: Callable[..., tuple[Tensor, Tensor] | None] | None = None

    def __init_subclass__(cls) -> None:
        if cls.dispatch is not TokenDispatcher.dispatch:
            cls.serves = frozenset({"an ep_group of several ranks"})
        if (cls.dispatch, cls.combine) != (TokenDispatcher.dispatch, TokenDispatcher.combine):
            cls.routed_experts = None

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
        check_sizes(name, num_experts=num_experts)
        self.num_ranks = group_size(group)
        if self.num_ranks > 1:
            # An error that ends the process before its first message is then reported at exit.
            at_exit.wait_at_exit()
        if shares_communicator(group):
            _warn_of_shared_communicator()
        rule = f"a multiple of the group size {self.num_ranks}"
        check_rule(name, "num_experts", num_experts, rule, num_experts % self.num_ranks == 0)
        self.num_experts = num_experts
        self.num_local_experts = self.num_counts = num_experts // self.num_ranks
        self.drop_policy = drop_policy
        self.average = average
        wire = Wire.of(name, wire)
        self.wire = wire if self.num_ranks > 1 else Wire()
        # Extra arguments of `exchange_rows`. Without a wire there are none, so that a transport
        # need not accept `formats`.
        self._formats_out, self._formats_back = [
            {} if formats == (None, None) else {"formats": formats}
            for formats in (self.wire.out, self.wire.back)
        ]
        self.in_graph = group is None
        self.grad_scale = float(self.num_ranks) if average else 1.0
        facts = {"num_experts": num_experts, "drop_policy": drop_policy, "average": average}
        self._calls = CallComparison(facts)
        self._result_dtypes: dict[torch.dtype, torch.dtype] = {}

    def tell_apart(self, layers: Sequence[str], layer: int) -> None:
        """Compare in every exchange which layer runs, for models that may skip a layer on a rank.

        If ranks run different layers, all of them raise an error. Otherwise rows would go to
        experts of another layer.

        Args:
            layers: names of the layers that share the group, the same on every rank. All have the
                same number of experts.
            layer: index of this layer.
        """
        self._calls.tell_apart(layers, layer)

    def declare(self, options: Mapping[str, object]) -> None:
        """Compare a checksum of the layer's options in every exchange.

        If an option later changes on some ranks only, all ranks raise an error that names it.

        Args:
            options: name to value of options that must be equal on every rank.
        """
        self._calls.declare(options)

    @property
    def group(self) -> Any:
        """The process group, or None if all experts are on this rank."""
        return self._group.group

    # Messages, which a transport defines.

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
        """Send rows to every rank. Differentiable: gradients travel the same way back.

        Args:
            rows_ND: the first `send[0]` rows are for rank 0 of the group, the next `send[1]` for
                rank 1, and so on.
            send: number of rows for each of the P ranks, in sum N.
            receive: number of rows from each of the P ranks.
            grad_scale: factor on the gradient.
            operation: name for error messages.
            meanwhile: function to call once, if possible while the rows are underway.
            formats: formats of the rows and of their gradients. Passed only with a wire.

        Returns:
            `[R, D]`, ordered by source rank.

        Raises:
            RankFailureError: a rank died or did not answer, in the forward or the backward pass.
        """
        raise NotImplementedError(f"{type(self).__name__} has no exchange_rows")

    # Methods that a layer calls.

    def routing(self, x: Tensor, cut: Cut = WHOLE) -> AbstractContextManager[object]:
        """Context for the code before `plan`, such as checks of x and the router.

        If the code inside raises on one rank, the other ranks do not wait for it. Their `plan`
        raises the same error, with the number of that rank.

        Args:
            x: input of the layer, `[..., D]`.
            cut: the cut that will be passed to `plan`.
        """
        own = type(self).exchange_counts is not TokenDispatcher.exchange_counts
        if self._group.group is None or not own:
            return _SILENT
        if cut.budget is not None and cut.budget.static:
            return telling_in_agreement(self, x.device)
        return _Telling(self, x, cut)

    @property
    def name(self) -> str:
        """Name of the class, for messages."""
        return type(self).__name__

    def plan(
        self,
        x_TD: Tensor,
        choice: Choice,
        cut: Cut = WHOLE,
        *,
        weighed: bool = False,
        place: Callable[[SharedCounts], PlacedRows] | None = None,
    ) -> BatchPlan:
        """Cut a batch into parts that travel to their experts, and exchange the counts of rows.

        NOTE: device-to-host sync, unless sizes are static or nothing travels.

        Args:
            x_TD: tokens of this rank. T may differ between ranks, and may be 0.
            choice: experts of the tokens.
            cut: how to cut the batch, equal on every rank.
            weighed: True if `row_weights` will be called, so that weights travel with the rows.
            place: function that assigns rows to places, from the counts of all ranks.

        Raises:
            TypeError: x_TD has a dtype that is not exchanged.
            ValueError: on every rank, if num_experts, top_k, model_dim or the dtype differ between
                ranks, or whether there is a capacity, or whether gradients are recorded.
            RankFailureError: a rank died or did not answer.
        """
        if type(self).dispatch is not TokenDispatcher.dispatch:
            idx, weights, capacity, _, _ = choice
            found = [self.dispatch(x_TD, idx, weights, capacity=capacity)]
            return BatchPlan([lambda _: found.pop()], found[0][2].num_dropped)
        if place is not None:
            assert cut.num_shared is not None
            with _Telling(self, x_TD, cut):
                self._check_dtype(x_TD)
                none_TD = x_TD.detach()[:, :0]
                _, tables = ops.permute_tokens(none_TD, choice.topk_idx, cut.num_shared)
            own_PE = tables.num_tokens_per_expert.expand(self.num_ranks, -1)
            in_graph = x_TD.requires_grad or choice.topk_weights.requires_grad
            top_k, limit = choice.topk_idx.shape[1], choice.capacity
            told = self._calls.exchange(self, x_TD, own_PE, top_k, limit, in_graph)
            counts_PE = torch.tensor(told.received, device="cpu").T
            with self.computing(x_TD):
                placed = place(SharedCounts(tables, counts_PE, told.has_backward))
            choice = choice._replace(topk_idx=placed.slot_idx)
            return replace(self._plan_parts(x_TD, choice, 1, weighed, placed.counts), placed=placed)
        budget = cut.budget
        if budget is None:
            return self._plan_parts(x_TD, choice, cut.num_parts, weighed)
        if budget.static and self.group is not None:
            first, later = static_rounds(self, x_TD, choice, budget)
        else:
            rounds = self._plan_rounds(x_TD, choice, budget)
            if len(rounds) > 1:
                return BatchPlan([], rounds[0].whole.num_dropped, lambda: rounds)
            (first,), later = rounds, list
        weights_TK = choice.topk_weights
        part = functools.partial(self.send, first.take(x_TD), first, weights_TK, weighed)
        return BatchPlan([part], first.whole.num_dropped, later)

    def computing(self, x: Tensor) -> AbstractContextManager[object]:
        """Context for the code between `plan` and the end of `combine`, such as the experts.

        If the code inside raises on one rank, the other ranks do not wait for its rows. They raise
        the same error, with the number of that rank. The same holds for its backward pass.

        Args:
            x: input of the layer.
        """
        group = self._group.group
        return _SILENT if group is None else telling(group, x.device, self.operation)

    def agree_on_results(self, rows: Tensor, results: Tensor) -> None:
        """Compare the dtype of the experts' results over the ranks, once for each dtype of rows."""
        if self.group is None:
            return
        known = self._result_dtypes.get(rows.dtype)
        if known is None:
            facts = {"the dtype of the experts' results": results.dtype}
            Agreement(self.operation, self.group, rows.device).compare(facts)
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
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Bring every row of a batch to its expert, as a single part.

        Args:
            x_TD: as in `plan`.
            topk_idx_TK: experts of every token; -1 for none.
            topk_weights_TK: weights of the experts.
            capacity: largest number of rows that an expert takes from this rank, None for all.
            meanwhile: function to call while the rows are underway. Its backward pass runs during
                the exchange of the rows' gradients.

        Returns:
            rows `[R, D]` grouped by local expert, expert offsets `[L + 1]`, metadata.

        Raises:
            As `plan`.
        """
        choice = Choice(topk_idx_TK, topk_weights_TK, capacity)
        return self._plan_parts(x_TD, choice).parts.pop()(meanwhile)

    def row_weights(self, rows: Tensor, metadata: DispatchMetadata) -> RowWeights | None:
        """Return the weights of rows, for experts that multiply by them in their second product.

        The results must then be combined with `replace(metadata, topk_weights=None)`.

        Args:
            rows: rows that a part of a plan with `weighed` returned.
            metadata: metadata that it returned.

        Returns:
            The weights. None if weights did not travel, or if a subclass defines `dispatch` or
            `combine`; then `combine` multiplies by the weights.
        """
        own = TokenDispatcher.dispatch, TokenDispatcher.combine
        if (type(self).dispatch, type(self).combine) != own or metadata.topk_weights is None:
            return None
        if metadata.sent is None:
            weights_TK = metadata.topk_weights.to(sum_dtype(rows.dtype))
            return RowWeights(weights_TK, metadata.permutation.slot_of_row)
        assert metadata.received_permutation is not None
        if metadata.weights_R1 is None:
            return None
        return RowWeights(metadata.weights_R1, metadata.received_permutation.slot_of_row)

    def combine(
        self,
        rows: Tensor,
        metadata: DispatchMetadata,
        *,
        meanwhile: Callable[[], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the weighted sum of every token's rows, `[T, D]`, on the rank of the token.

        Args:
            rows: expert outputs, `[R, D]`.
            metadata: metadata that `dispatch` returned.
            meanwhile: function to call while the rows travel, for work that does not need them. On
                CUDA its kernels and their backward pass run during the exchange.
            dtype: dtype of the sums, None for that of the rows.
        """
        rows_ND = self.bring_back(rows, metadata, meanwhile=meanwhile)
        return self.weighted_sum(rows_ND if dtype is None else rows_ND.to(dtype), metadata)

    def weighted_sum(self, rows_ND: Tensor, metadata: DispatchMetadata) -> Tensor:
        """Return the weighted sum of every token's rows, `[T, D]`; second half of `combine`.

        Args:
            rows_ND: rows that `bring_back` returned.
            metadata: metadata that `dispatch` returned.
        """
        permutation = metadata.permutation
        # The permutation has T*K rows. Rows without an expert come last, and were not sent.
        if metadata.sent is not None:
            sent_N = permutation.slot_of_row[: rows_ND.shape[0]]
            permutation = replace(permutation, slot_of_row=sent_N)
        return ops.unpermute_tokens(rows_ND, permutation, metadata.topk_weights)

    def bring_back(
        self,
        rows: Tensor,
        metadata: DispatchMetadata,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Bring expert outputs to the ranks of their tokens, without weights. Differentiable.

        Args:
            rows: expert outputs, in the order of the rows from `dispatch`.
            metadata: metadata that `dispatch` returned.
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
            **self._formats_back,
        )

    # Implementation of the methods above by the two messages.

    def _plan_parts(
        self,
        x_TD: Tensor,
        choice: Choice,
        num_parts: int = 1,
        weighed: bool = False,
        counts: RowCounts | None = None,
    ) -> BatchPlan:
        """Cut the tokens into equal runs, the parts. One message carries the counts of all parts.

        Args:
            x_TD: as in `plan`.
            choice: as in `plan`.
            num_parts: number of parts.
            weighed: as in `plan`.
            counts: counts of the single part, if the ranks know them already.
        """
        idx_TK, weights_TK, capacity, _, filled = choice
        if self._group.group is None:
            rows, tables = self._group_by_expert(x_TD, idx_TK, weights_TK, capacity)
            metadata = DispatchMetadata(tables, weights_TK, expert_capacity=capacity)
            offsets = tables.expert_offsets
            return BatchPlan(
                [lambda _: (rows, offsets, metadata)], tables.num_dropped, filled=filled
            )
        if counts is None:
            grouped, told = self._group_and_count(x_TD, choice, num_parts)
        else:
            with self.computing(x_TD):
                grouped = [self._group_by_expert(x_TD, idx_TK, weights_TK, capacity)]
            told = [counts]
        weights = [weights_TK] if num_parts == 1 else [*weights_TK.tensor_split(num_parts)]
        parts: list[Part] = []
        dropped = []
        for (rows_ND, tables), part_TK, one in zip(grouped, weights, told, strict=True):
            rows_ND = rows_ND[: sum(one.sent)]
            parts.append(functools.partial(self._send, rows_ND, tables, part_TK, one, weighed))
            dropped.append(tables.num_dropped)
        num_dropped = dropped[0] if num_parts == 1 else torch.stack(dropped).sum()
        return BatchPlan(parts, num_dropped, filled=filled or capacity is None)

    def _plan_rounds(self, x_TD: Tensor, choice: Choice, budget: RowBudget) -> list[Round]:
        """Cut the rows into rounds within a budget. There is at least one round."""
        idx_TK, weights_TK, capacity, _, _ = choice
        max_rows, drop = budget.rows, budget.overflow == "drop"
        if self.group is None:
            # The rows have no columns, because only the tables of the permutation are needed.
            none_TD = x_TD.detach()[:, :0]
            _, tables = self._group_by_expert(none_TD, idx_TK, weights_TK, capacity)
            if drop and tables.slot_of_row.shape[0] > max_rows:
                allowed = tables.expert_offsets.new_full((1,), max_rows)
                kept_idx = keep_first(tables, idx_TK, allowed)
                _, kept = ops.permute_tokens(none_TD, kept_idx, self.num_experts)
                return cut_rows(count_dropped(tables, kept), max_rows)[:1]
            return cut_rows(tables, max_rows)
        ((_, tables),), (counts,) = self._group_and_count(x_TD, choice, with_rows=False)
        align = row_alignment(x_TD, max_rows, self.num_local_experts)
        limit = max_rows - self.num_local_experts * (align - 1)
        # Number of rows from each rank (first dimension) to each rank, known to every rank.
        values = [max_rows, *counts.sent]
        table = share(values, self.group, x_TD.device, operation="RowBudget")
        check_equal_over_ranks("rows", [row[0] for row in table], self.group, "RowBudget")
        pairs_PP = torch.tensor([row[1:] for row in table], dtype=torch.int64, device="cpu")
        rank = group_rank(self.group)
        if drop:
            allowed_PP = fair_share(fair_share(pairs_PP, limit, dim=1), limit, dim=0)
            if bool((allowed_PP < pairs_PP).any()):
                kept_idx = keep_first(tables, idx_TK, allowed_PP[rank].to(x_TD.device))
                choice = Choice(kept_idx, weights_TK)
                ((_, kept),), (counts,) = self._group_and_count(x_TD, choice, with_rows=False)
                tables, pairs_PP = count_dropped(tables, kept), allowed_PP
        return cut_exchange(tables, counts, schedule(pairs_PP, limit), rank)

    def send(
        self,
        rows_ND: Tensor,
        part: Round,
        topk_weights_TK: Tensor,
        weighed: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Bring the rows of a round to their experts. Differentiable.

        Args:
            rows_ND: rows in the order of `part.slot_of_row`.
            part: the round.
            topk_weights_TK: weights of all slots.
            weighed: as in `plan`.
            meanwhile: as in `dispatch`.

        Returns:
            As `dispatch`.
        """
        tables = part.tables
        if part.counts is None:
            return rows_ND, tables.expert_offsets, DispatchMetadata(tables, topk_weights_TK)
        return self._send(rows_ND, tables, topk_weights_TK, part.counts, weighed, meanwhile)

    def _send(
        self,
        rows_ND: Tensor,
        tables: ops.Permutation,
        topk_weights_TK: Tensor,
        counts: RowCounts,
        weighed: bool,
        meanwhile: Callable[[], None] | None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Send the rows of a part, and at the same time their weights in another message."""
        if counts.has_backward and not rows_ND.requires_grad:
            rows_ND = take_part(rows_ND)
        arrived: list[Tensor] = []
        splits = counts.sent, counts.received
        exchange = functools.partial(self.exchange_rows, grad_scale=self.grad_scale)

        def send_rows() -> None:
            name = f"{self.operation} dispatch"
            options: dict[str, Any] = {"meanwhile": meanwhile, **self._formats_out}
            arrived.append(exchange(rows_ND, *splits, operation=name, **options))

        weights_R1 = None
        if not weighed:
            send_rows()
        else:
            weights_TK = topk_weights_TK.to(sum_dtype(rows_ND.dtype))
            # `unpermute_tokens` serves as a gather: its backward pass returns the gradient of a row
            # to the slot of the row.
            sent_N = tables.slot_of_row[: rows_ND.shape[0]]
            column_N1 = torch.ops.moe_ext.unpermute_tokens(
                weights_TK.reshape(-1, 1), tables.row_of_slot, sent_N, 1
            )
            if counts.has_backward:
                column_N1.requires_grad_()
            name = f"{self.operation} weights"
            weights_R1 = exchange(column_N1, *splits, operation=name, meanwhile=send_rows)
        rows_RD = arrived.pop()
        # Received rows are ordered by (rank, expert), and become ordered by (expert, rank).
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
        """Return the rows of this rank's tokens grouped by expert, and the permutation."""
        align = 1
        if self._group.group is None:
            # Only rows that stay are padded here. Rows that travel are padded on arrival.
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
        self, x_TD: Tensor, choice: Choice, num_parts: int = 1, *, with_rows: bool = True
    ) -> tuple[list[tuple[Tensor, ops.Permutation]], list[RowCounts]]:
        """Group the rows of each part by expert, and exchange the counts of all parts.

        Without `with_rows` the rows have no columns.
        """
        idx_TK, weights_TK, capacity, _, _ = choice
        size = self.num_ranks, self.num_local_experts
        grouped, own = list[tuple[Tensor, ops.Permutation]](), list[Tensor]()
        with _Telling(self, x_TD, Cut(num_parts)):
            self._check_dtype(x_TD)
            parts: list[Any] = [(x_TD if with_rows else x_TD.detach()[:, :0], idx_TK, weights_TK)]
            if num_parts > 1:
                split = (t.tensor_split(num_parts) for t in parts[0])
                parts = [*zip(*split, strict=True)]
            for tokens, idx, weights in parts:
                grouped.append(self._group_by_expert(tokens, idx, weights, capacity))
                own.append(grouped[-1][1].expert_offsets.diff().view(size))
        own_PM = own[0] if num_parts == 1 else torch.cat(own, 1)
        in_graph, top_k = x_TD.requires_grad or weights_TK.requires_grad, idx_TK.shape[1]
        told = self._calls.exchange(self, x_TD, own_PM, top_k, capacity, in_graph, num_parts)
        received = told.received_PM.view(size[0], num_parts, -1).unbind(1)
        counts = list[RowCounts]()
        for sizes in zip(told.sent, told.received, received, strict=True):
            counts.append(RowCounts(*sizes, told.expert_capacity, told.has_backward))
        return grouped, counts

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


@dataclass(frozen=True)
class _Telling(AbstractContextManager[object]):
    """Context that sends an error of the code inside to the other ranks, instead of counts."""

    dispatcher: TokenDispatcher
    x: Tensor
    cut: Cut

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or is_told(error):
            return
        dispatcher, cut = self.dispatcher, self.cut
        nothing_PL = torch.zeros(
            dispatcher.num_ranks,
            cut.num_shared or dispatcher.num_counts * cut.num_parts,
            dtype=torch.int64,
            device=self.x.device,
        )
        # The exchange raises as well, since ranks have no counts. The original error is kept.
        with contextlib.suppress(ValueError, TypeError, RuntimeError):
            dispatcher._calls.exchange(dispatcher, self.x, nothing_PL, problem=error)


def take_part(rows: Tensor) -> Tensor:
    """Return rows that require a gradient.

    If the rows of another rank have gradients, this rank has to take part in their exchange.
    """
    if rows.requires_grad:
        return rows
    # A tensor that was made in inference mode cannot enter a graph, so it is copied.
    return (rows.clone() if rows.is_inference() else rows.detach()).requires_grad_()
