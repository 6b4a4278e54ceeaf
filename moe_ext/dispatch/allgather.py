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
    """A hop whose tokens go to all ranks, their indices and weights with them."""

    def start_out(
        self, rows: Tensor, route: Route, name: str, *, format: str | None = None
    ) -> Callable[[], Tensor]:
        """The tokens that came with their indices; all that comes later goes to its rank alone."""
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
        # Padding is no token.
        count_P1 = torch.tensor(of_ranks, device=x_TD.device)[:, None]
        is_token_N = (torch.arange(most, device=x_TD.device) < count_P1).view(-1)
        here_N = (self._from_first_here(idx_NK) >= 0).any(1) & is_token_N
        here_U = torch.nonzero_static(here_N, size=sum(arriving)).view(-1)
        return [tokens[here_U]], [[column[here_U] for column in (idx_NK, *others)]]


class AllGatherDispatcher(DedupDispatcher):
    """Experts spread over a group; every token goes to every rank, which takes what it needs.

    Tokens, indices and weights travel in one all-gather, so that a layer takes three messages:
    counts, tokens, results. It sends `P - 1` rows a token whatever its experts are, which is little
    for few tokens (decoding) and small P. The way back is that of `DedupDispatcher`, whose bits it
    has: `combine="exact"` brings back the result of every slot, `combine="reduced"` one sum for
    each rank that has experts of a token (a reduce-scatter without the zeros).

    All tokens of all ranks lie on each, so it is none for a `RowBudget`.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group.
        combine: "exact" or "reduced".
        drop_policy: which slots of an expert beyond its capacity go, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`.

    Raises:
        ValueError: as for `DedupDispatcher`; or tokens are to travel "lossless", whose messages
            have lengths of their own.
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
