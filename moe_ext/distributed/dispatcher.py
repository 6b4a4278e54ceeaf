"""Token dispatchers: bring every row to the rank of its expert, and back.

Shapes: T tokens, D model, E experts, K top-k, N = T*K rows, R received rows, P ranks, L = E/P local
    experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.distributed.agreement import agree, check_equal_over_ranks
from moe_ext.distributed.collectives import all_to_all_counts, all_to_all_rows
from moe_ext.distributed.failures import RankFailureError
from moe_ext.distributed.groups import GroupHandle, check_group, group_ranks, group_size
from moe_ext.ops.grouped_gemm import row_alignment

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class DispatchMetadata:
    """What `combine` needs to undo `dispatch`.

    Attributes:
        permutation: of this rank's tokens, over all E experts.
        topk_weights: `[T, K]`, in the graph.
        sent: rows sent to each rank of the group, None when nothing was sent.
        received: rows received from each rank.
        received_permutation: groups the received rows by local expert.
        expert_capacity: rows that a local expert gets at most, from all ranks; None without limit.
    """

    permutation: ops.Permutation
    topk_weights: Tensor
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None
    received_permutation: ops.Permutation | None = None
    expert_capacity: int | None = None

    @property
    def num_dropped(self) -> Tensor:
        """Slots of this rank dropped for lack of capacity, 0-d int64."""
        return self.permutation.num_dropped


@dataclass(frozen=True)
class ExchangedCounts:
    """Who sends how many rows, as `AllToAllDispatcher.exchange_counts` finds it.

    Attributes:
        sent: rows that this rank sends to each rank of the group.
        received: rows that it receives from each.
        received_PL: rows that it receives for each of its experts.
        expert_capacity: see `DispatchMetadata`.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    received_PL: Tensor
    expert_capacity: int | None


class TokenDispatcher(Protocol):
    """Brings rows to their experts and back; holds no parameters and no state of a step."""

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_weights_TK: Tensor,
        *,
        capacity: int | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Return rows grouped by local expert, their offsets `[L + 1]`, and the metadata."""
        ...

    def combine(self, rows: Tensor, metadata: DispatchMetadata) -> Tensor:
        """Return `y_TD`, the weighted sum of every token's expert outputs."""
        ...


class LocalDispatcher:
    """All experts on this rank: a permutation and its inverse.

    Args:
        num_experts: E.
        drop_policy: which slots of an expert beyond its capacity go, "position" or "score".
        align: let an expert's rows end in zero rows where that suits the products
            (`row_alignment`); False where the rows travel first.
    """

    def __init__(
        self, num_experts: int, *, drop_policy: str = "position", align: bool = True
    ) -> None:
        self.num_experts = num_experts
        self.drop_policy = drop_policy
        self.align = align

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_weights_TK: Tensor,
        *,
        capacity: int | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Group the rows of this rank's tokens by expert.

        Args:
            x_TD: tokens.
            topk_idx_TK: experts of every token, -1 = none.
            topk_weights_TK: their weights.
            capacity: rows that an expert takes from this rank, None for all.

        Returns:
            rows `[N, D]`, expert offsets `[E + 1]`, metadata.
        """
        rows_ND, permutation = ops.permute_tokens(
            x_TD,
            topk_idx_TK,
            self.num_experts,
            topk_weights=topk_weights_TK.detach() if self.drop_policy == "score" else None,
            capacity=capacity,
            drop_policy=self.drop_policy,
            align=row_alignment(x_TD, topk_idx_TK.numel(), self.num_experts) if self.align else 1,
        )
        metadata = DispatchMetadata(permutation, topk_weights_TK, expert_capacity=capacity)
        return rows_ND, permutation.expert_offsets, metadata

    def combine(self, rows: Tensor, metadata: DispatchMetadata) -> Tensor:
        """Weighted sum of every token's rows, `[T, D]`."""
        return ops.unpermute_tokens(rows, metadata.permutation, metadata.topk_weights)


class AllToAllDispatcher:
    """Experts spread over a group: two all-to-alls of rows and one of counts.

    Rank r of P holds experts [r*E/P, (r+1)*E/P). Splits may be uneven or zero; every rank runs the
    same collectives whatever it sends. The gradient that reaches the expert outputs is divided by
    P, and the one that goes back to the tokens multiplied by P: so a gradient of an expert's
    parameter is that of the mean over the group of the local losses, while gradients of everything
    before the experts are unchanged.

    Args:
        num_experts: E, a multiple of P.
        group: process group.
        drop_policy: which slots of an expert beyond its capacity go, "position" or "score".
        average: False leaves out both factors: a gradient of an expert's parameter is then that of
            the sum over the group.

    Raises:
        ValueError: P does not divide E.
    """

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        *,
        drop_policy: str = "position",
        average: bool = True,
    ) -> None:
        check_group(group, "AllToAllDispatcher")
        self._group = GroupHandle(group)
        self.num_ranks = group_size(group)
        if num_experts % self.num_ranks != 0:
            raise ValueError(
                "AllToAllDispatcher: expected num_experts to be a multiple of the group size "
                f"{self.num_ranks}, got {num_experts}"
            )
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.num_ranks
        self.drop_policy = drop_policy
        self.average = average
        self.grad_scale = float(self.num_ranks) if average else 1.0
        self._local = LocalDispatcher(num_experts, drop_policy=drop_policy, align=False)
        self._agreed = False

    @property
    def group(self) -> ProcessGroup:
        """The process group."""
        group = self._group.group
        assert group is not None
        return group

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAllDispatcher:
        return AllToAllDispatcher(
            self.num_experts, self.group, drop_policy=self.drop_policy, average=self.average
        )

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_weights_TK: Tensor,
        *,
        capacity: int | None = None,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Send every row to the rank of its expert.

        Args:
            x_TD: tokens of this rank; T may differ between ranks and may be 0.
            topk_idx_TK: experts of every token, -1 = none.
            topk_weights_TK: their weights.
            capacity: rows that an expert takes from this rank, None for all.

        Returns:
            rows `[R, D]` grouped by local expert, expert offsets `[L + 1]`, metadata.

        Raises:
            TypeError: x_TD is of a dtype that is not exchanged.
            ValueError: on every rank, when num_experts, top_k, model_dim or the dtype differ
                between ranks.
            RankFailureError: a rank died or did not answer.
        """
        rows_ND, local, counts = self.exchange_counts(
            x_TD, topk_idx_TK, topk_weights_TK, capacity=capacity
        )
        rows_RD = all_to_all_rows(
            rows_ND[: sum(counts.sent)],
            self.group,
            counts.sent,
            counts.received,
            grad_scale=self.grad_scale,
            operation="AllToAllDispatcher dispatch",
        )
        grouped, permutation = self.group_by_expert(rows_RD, counts.received_PL)
        metadata = DispatchMetadata(
            local.permutation,
            topk_weights_TK,
            counts.sent,
            counts.received,
            permutation,
            counts.expert_capacity,
        )
        return grouped, permutation.expert_offsets, metadata

    def exchange_counts(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_weights_TK: Tensor,
        *,
        capacity: int | None = None,
        with_rows: bool = True,
    ) -> tuple[Tensor, DispatchMetadata, ExchangedCounts]:
        """The first half of `dispatch`: group the rows by expert and agree on who sends what.

        Args:
            x_TD: as in `dispatch`.
            topk_idx_TK: as in `dispatch`.
            topk_weights_TK: as in `dispatch`.
            capacity: as in `dispatch`.
            with_rows: False leaves the rows without columns: only the tables are wanted.

        Returns:
            This rank's rows grouped by expert, their metadata, and the counts.
        """
        with self.reporting_failures(x_TD):
            if x_TD.dtype not in _DTYPES:
                raise TypeError(
                    f"AllToAllDispatcher: expected x_TD to be one of {_DTYPES}, got {x_TD.dtype}"
                )
            rows_ND, offsets, local = self._local.dispatch(
                x_TD if with_rows else x_TD.detach()[:, :0],
                topk_idx_TK,
                topk_weights_TK,
                capacity=capacity,
            )
        own_PL = offsets.diff().view(self.num_ranks, self.num_local_experts)
        code = _DTYPES.index(x_TD.dtype)
        header = (x_TD.shape[1], code, topk_idx_TK.shape[1], 0, capacity or 0)
        return rows_ND, local, self._exchange_counts(own_PL, header)

    def combine(
        self,
        rows: Tensor,
        metadata: DispatchMetadata,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Send expert outputs back; weighted sum of every token's rows, `[T, D]`.

        Args:
            rows: expert outputs, `[R, D]`.
            metadata: what `dispatch` returned.
            meanwhile: called while the rows travel, for kernels that do not need them. On CUDA they
                and their backward pass run beside the exchange.
        """
        assert metadata.sent is not None
        assert metadata.received is not None
        assert metadata.received_permutation is not None
        rows_RD = ops.unpermute_tokens(rows, metadata.received_permutation)
        rows_ND = all_to_all_rows(
            rows_RD,
            self.group,
            metadata.received,
            metadata.sent,
            grad_scale=1.0 / self.grad_scale,
            operation="AllToAllDispatcher combine",
            meanwhile=meanwhile,
        )
        # Masked and dropped slots sent no row; the permutation still counts T*K rows.
        num_rows = metadata.permutation.slot_of_row.numel()
        rows_ND = torch.nn.functional.pad(rows_ND, (0, 0, 0, num_rows - rows_ND.shape[0]))
        return ops.unpermute_tokens(rows_ND, metadata.permutation, metadata.topk_weights)

    @contextlib.contextmanager
    def reporting_failures(self, x: Tensor) -> Iterator[None]:
        """Tell the other ranks when the code inside fails: they raise instead of waiting.

        For what comes before `dispatch` and can fail on one rank alone: checks of x, the router.
        The others get a ValueError from their `dispatch` that names this rank.

        Args:
            x: the input that is looked at, `[..., D]`.
        """
        try:
            yield
        except Exception:
            code = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else len(_DTYPES)
            header = (x.shape[-1] if x.dim() else 0, code, 0, 1, 0)
            nothing_PL = torch.zeros(
                self.num_ranks, self.num_local_experts, dtype=torch.int64, device=x.device
            )
            # The error of this rank says more than that of the exchange.
            with contextlib.suppress(ValueError, RankFailureError):
                self._exchange_counts(nothing_PL, header)
            raise

    def _exchange_counts(
        self, own_PL: Tensor, header: tuple[int, int, int, int, int]
    ) -> ExchangedCounts:
        """Tell every rank how many rows it gets for each of its experts.

        The message carries a header (model_dim, dtype, top_k, whether the sender failed, capacity),
        since an exchange of rows of different sizes would hang or mix up bytes.
        """
        operation = "AllToAllDispatcher"
        if not self._agreed:
            # The length of the message depends on num_experts.
            facts = {"num_experts": self.num_experts}
            agree(operation, facts, None, self.group, own_PL.device)
            self._agreed = True
        head = own_PL.new_tensor(header)
        message = torch.cat([head.expand(self.num_ranks, -1), own_PL], dim=1)
        received = all_to_all_counts(message, self.group, operation=f"{operation} counts")
        heads, counts_PL = received[:, : len(header)], received[:, len(header) :]
        # NOTE: device-to-host sync, the only one of the layer: the collective takes its splits, and
        # the allocator its size, on the host; and every rank must reach the same verdict before
        # rows move.
        table = torch.cat([heads, counts_PL.sum(1, True), own_PL.sum(1, True)], 1).tolist()
        dims, codes, top_ks, failed, limits, num_received, num_sent = zip(*table, strict=True)
        check_equal_over_ranks("model_dim", dims, self.group, operation)
        names = [*map(str, _DTYPES), "another dtype"]
        dtypes = [names[code] for code in codes]
        check_equal_over_ranks("the dtype of x", dtypes, self.group, operation)
        if any(failed):
            rank = group_ranks(self.group)[failed.index(1)]
            raise ValueError(
                f"{operation}: expected every rank to route its tokens, but rank {rank} failed "
                "before that; see its own error"
            )
        check_equal_over_ranks("top_k", top_ks, self.group, operation)
        expert_capacity = sum(limits) if all(limits) else None
        return ExchangedCounts(num_sent, num_received, counts_PL, expert_capacity)

    def group_by_expert(self, rows_RD: Tensor, counts_PL: Tensor) -> tuple[Tensor, ops.Permutation]:
        """Regroup rows ordered by (rank, expert) to (expert, rank)."""
        num_rows = rows_RD.shape[0]
        expert_PL = torch.arange(self.num_local_experts, device=rows_RD.device)
        expert_R = expert_PL.repeat(self.num_ranks).repeat_interleave(
            counts_PL.reshape(-1), output_size=num_rows
        )
        align = row_alignment(rows_RD, num_rows, self.num_local_experts)
        return ops.permute_tokens(rows_RD, expert_R[:, None], self.num_local_experts, align=align)
