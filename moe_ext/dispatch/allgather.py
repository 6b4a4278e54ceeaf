"""Dispatcher that sends every token to every rank, for few tokens.

Shapes: T tokens of a rank, D model, K top-k, P ranks, U tokens that have experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.comm import collectives
from moe_ext.dispatch.dedup import DedupDispatcher
from moe_ext.dispatch.token_exchange import Hop, Route, packed, unpacked
from moe_ext.dispatch.wire import LOSSLESS, ROW_WIRES, encode


class _GatherHop(Hop):
    """Hop that sends all tokens, with their indices and weights, to all ranks."""

    def start_out(
        self, rows: Tensor, route: Route, name: str, *, format: str | None = None
    ) -> Callable[[], Tensor]:
        """Return the tokens that arrived with their indices. Later rows go only where needed."""
        return (
            route.arrived.pop
            if route.arrived
            else super().start_out(rows, route, name, format=format)
        )

    def _bring_columns(
        self,
        x_TD: Tensor,
        columns: Sequence[Sequence[Tensor]],
        once: Sequence[ops.Permutation],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        tokens_received: Sequence[Sequence[int]],
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        (beside,), (of_ranks,), (arriving,) = columns, tokens_received, received
        all_columns = [encode(x_TD, self.wire.dispatch), *beside]
        message, most = packed(all_columns), max(of_ranks)
        padded = message.new_zeros(most, message.shape[1])
        padded[: x_TD.shape[0]] = message
        gathered = collectives.all_gather(
            padded, self.group, operation=f"{self.operation} dispatch"
        )
        tokens, idx_NK, *others = unpacked(gathered, all_columns)
        # Rows of a rank beyond its number of tokens are padding.
        count_P1 = torch.tensor(of_ranks, device=x_TD.device)[:, None]
        is_token_N = (torch.arange(most, device=x_TD.device) < count_P1).view(-1)
        here_N = (self._from_first_here(idx_NK) >= 0).any(1) & is_token_N
        here_U = torch.nonzero_static(here_N, size=sum(arriving)).view(-1)
        return [tokens[here_U]], [[column[here_U] for column in (idx_NK, *others)]]


class AllGatherDispatcher(DedupDispatcher):
    """Sends every token to every rank, which takes the tokens that have experts there.

    Tokens, indices and weights travel in one all-gather, so a layer takes three messages: counts,
    tokens and results. A rank always sends `P - 1` rows per token, which is cheap for few tokens
    (decoding) and small P. Results return as in `DedupDispatcher`, with the same bits.
    `combine="exact"` returns the result of every slot. `combine="reduced"` returns one sum for each
    rank that has experts of a token (a reduce-scatter without the zeros).

    Each rank holds all tokens of all ranks, so a `RowBudget` is not supported.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group.
        combine: "exact" or "reduced".
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`.

    Raises:
        ValueError: see `DedupDispatcher`; or `wire` sends tokens "lossless", as messages whose
            lengths differ between ranks.
    """

    serves = DedupDispatcher.serves - {"overlap", "row_budget", "wire.dispatch='lossless'"}

    def _make_hops(self, num_experts: int, group: ProcessGroup) -> tuple[Hop, ...]:
        if self.wire.dispatch == LOSSLESS:
            raise ValueError(
                f"{self.operation}: expected wire to send tokens in rows of one length "
                f"({ROW_WIRES}), which travel with their indices, got {LOSSLESS!r}"
            )
        return (
            _GatherHop(
                self.operation, num_experts, group, self.combine_by, self.average, self.wire
            ),
        )
