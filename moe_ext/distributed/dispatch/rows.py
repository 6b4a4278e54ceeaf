"""Differentiable exchange of rows between the ranks of a group.

Shapes: N rows sent, R rows received, D model, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext.distributed import streams
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_rank
from moe_ext.distributed.traffic import is_counted, record_traffic


def _exchange(
    x: Tensor,
    group: ProcessGroup,
    send: Sequence[int],
    receive: Sequence[int],
    operation: str,
    counted: bool,
) -> Tensor:
    """One all-to-all along dimension 0, on the side stream, for the caller to join."""
    if counted and is_counted():
        others = x.shape[0] - send[group_rank(group)]
        record_traffic("all_to_all", others * x.shape[1:].numel() * x.element_size())
    x = x.contiguous()
    out = x.new_empty((sum(receive), *x.shape[1:]))

    def collective() -> None:
        dist.all_to_all_single(out, x, list(receive), list(send), group=group)

    with naming_failed_ranks(group, operation):
        streams.run_beside(collective, x, out)
    return out


@dataclass
class _RowsUnderway:
    """One exchange of rows and its backward, each of them started in one place, awaited in another.

    The node of autograd that waits in the forward pass starts the exchange of the backward pass,
    and the other way round: what ran beside the one has its backward beside the other. Since a
    node's gradient must have the shape of its output, the exchanged one goes by `grad_ND`.
    """

    group: ProcessGroup
    send: Sequence[int]
    receive: Sequence[int]
    grad_scale: float
    operation: str
    counted: bool
    grad_ND: Tensor | None = None


class _Start(torch.autograd.Function):
    """Sends rows; its backward awaits their gradient."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: _RowsUnderway) -> Tensor:
        ctx.rows = rows
        return _exchange(x_ND, rows.group, rows.send, rows.receive, rows.operation, rows.counted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        grad_ND, ctx.rows.grad_ND = ctx.rows.grad_ND, None
        streams.join(grad_ND.device)
        if ctx.rows.grad_scale != 1.0:
            grad_ND.mul_(ctx.rows.grad_scale)
        return grad_ND, None


class _Finish(torch.autograd.Function):
    """Awaits rows; its backward sends their gradient by the reversed splits."""

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, rows: _RowsUnderway) -> Tensor:
        ctx.rows = rows
        streams.join(out_RD.device)
        return out_RD.view_as(out_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        rows, operation = ctx.rows, f"{ctx.rows.operation} backward"
        rows.grad_ND = _exchange(
            grad_RD, rows.group, rows.receive, rows.send, operation, rows.counted
        )
        return grad_RD, None


def all_to_all_rows(
    x_ND: Tensor,
    group: ProcessGroup,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    grad_scale: float = 1.0,
    operation: str = "all_to_all_rows",
    meanwhile: Callable[[], None] | None = None,
    counted: bool = False,
) -> Tensor:
    """Exchange rows with every rank of a group; differentiable.

    On CUDA the rows travel on a stream of their own.

    Args:
        x_ND: rows, the first `send[0]` for rank 0 of the group, then `send[1]` for rank 1, and so
            on.
        group: process group of P ranks.
        send: P row counts that sum to N.
        receive: P row counts, what each rank sends here.
        grad_scale: factor on the gradient, applied once in the backward pass.
        operation: name for error messages.
        meanwhile: called once the rows are underway; on CUDA its kernels run beside the exchange,
            and their backward beside that of the gradients.
        counted: count what is sent, forward and backward; for callers that do not do so themselves.

    Returns:
        `[R, D]`, ordered by source rank. Ranks with no row take part like any other.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it. Forward and backward.
    """
    rows = _RowsUnderway(group, send, receive, grad_scale, operation, counted)
    out_RD = _Start.apply(x_ND, rows)
    if meanwhile is not None:
        meanwhile()
    finished_RD: Tensor = _Finish.apply(out_RD, rows)
    return finished_RD
