"""Dispatcher that sends rows by all-to-all.

Shapes: N rows sent, R received rows, D model, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import collectives
from moe_ext.dispatch.base import TokenDispatcher
from moe_ext.dispatch.rows import all_to_all_rows
from moe_ext.dispatch.wire import Formats, Wire


class AllToAllDispatcher(TokenDispatcher):
    """Exchanges by all-to-all: rows to experts and back, counts, and weights of the rows.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group.
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`.

    Raises:
        ValueError: the size of the group does not divide E.
    """

    # Function with the arguments of `all_to_all_single` that sends rows; None for that function.
    _exchange: Callable[..., None] | None = None

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        *,
        drop_policy: str = "position",
        average: bool = True,
        wire: Wire | str | None = None,
    ) -> None:
        super().__init__(num_experts, group, drop_policy=drop_policy, average=average, wire=wire)

    def exchange_counts(self, message_PM: Tensor, *, operation: str) -> Tensor:
        """See `TokenDispatcher`."""
        group = self._group.group
        return collectives.all_to_all(message_PM, group, operation=operation, counted=False)

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
        """See `TokenDispatcher`."""
        return all_to_all_rows(
            rows_ND,
            self._group.group,
            send,
            receive,
            grad_scale=grad_scale,
            operation=operation,
            meanwhile=meanwhile,
            formats=formats,
            exchange=self._exchange,
        )
