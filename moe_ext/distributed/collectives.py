"""Collectives of moe_ext: differentiable exchange of rows, and agreement on small messages.

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
from moe_ext.distributed.failures import (
    naming_failed_ranks,
    process_identity,
    remember_processes,
)
from moe_ext.distributed.groups import group_ranks, group_size
from moe_ext.distributed.traffic import record_traffic


def _exchange(
    x: Tensor,
    group: ProcessGroup,
    send: Sequence[int],
    receive: Sequence[int],
    operation: str,
    *,
    beside: bool = False,
) -> Tensor:
    """One all-to-all along dimension 0; `beside`: on the side stream, for the caller to join."""
    x = x.contiguous()
    out = x.new_empty((sum(receive), *x.shape[1:]))

    def collective() -> None:
        dist.all_to_all_single(out, x, list(receive), list(send), group=group)

    with naming_failed_ranks(group, operation):
        if beside:
            streams.run_beside(collective, x, out)
        else:
            collective()
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
    grad_ND: Tensor | None = None


class _Start(torch.autograd.Function):
    """Sends rows; its backward awaits their gradient."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: _RowsUnderway) -> Tensor:
        ctx.rows = rows
        return _exchange(x_ND, rows.group, rows.send, rows.receive, rows.operation, beside=True)

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
            grad_RD, rows.group, rows.receive, rows.send, operation, beside=True
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

    Returns:
        `[R, D]`, ordered by source rank. Ranks with no row take part like any other.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it. Forward and backward.
    """
    rows = _RowsUnderway(group, send, receive, grad_scale, operation)
    out_RD = _Start.apply(x_ND, rows)
    if meanwhile is not None:
        meanwhile()
    finished_RD: Tensor = _Finish.apply(out_RD, rows)
    return finished_RD


def all_to_all_counts(message: Tensor, group: ProcessGroup, *, operation: str) -> Tensor:
    """Send row p of an int64 `[P, M]` message to rank p; returns `[P, M]`, row p from rank p."""
    ones = [1] * message.shape[0]
    return _exchange(message, group, ones, ones, operation)


def sum_over_ranks_(x: Tensor, group: ProcessGroup | None, *, operation: str) -> Tensor:
    """Add up a contiguous tensor over the ranks of a group, in place, and count what is sent.

    Nothing is sent where there is one rank (group None) or no element.
    """
    size = group_size(group)
    if size > 1 and x.numel():
        record_traffic("all_reduce", 2 * (size - 1) * x.nbytes // size)
        with naming_failed_ranks(group, operation):
            dist.all_reduce(x, group=group)
    return x


def share(
    values: Sequence[int], group: ProcessGroup, device: torch.device, *, operation: str
) -> list[list[int]]:
    """Gather a fixed number of integers from every rank, in group order.

    It also learns which process runs which rank, for messages about later failures.

    NOTE: device-to-host sync, since the callers branch on the result.
    """
    local = torch.tensor([[*process_identity(), *values]], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(local) for _ in range(group_size(group))]
    with naming_failed_ranks(group, operation):
        dist.all_gather(gathered, local, group=group)
    rows: list[list[int]] = torch.cat(gathered).tolist()
    remember_processes(group_ranks(group), [(row[0], row[1]) for row in rows])
    return [row[2:] for row in rows]


def agree(
    facts: dict[str, int], group: ProcessGroup, device: torch.device, *, operation: str
) -> None:
    """Check that every rank of the group holds the same facts; one all-gather of fixed size.

    Raises:
        ValueError: on every rank, naming the first fact that differs with the value of each rank.
    """
    rows = share(list(facts.values()), group, device, operation=operation)
    for name, column in zip(facts, zip(*rows, strict=True), strict=True):
        check_equal_over_ranks(name, column, group, operation)


def check_equal_over_ranks(
    name: str, values: Sequence[object], group: ProcessGroup, operation: str
) -> None:
    """ValueError naming every rank's value unless all are equal; `values` in group order."""
    if any(value != values[0] for value in values):
        found = ", ".join(
            f"{v} on rank {r}" for r, v in zip(group_ranks(group), values, strict=True)
        )
        raise ValueError(f"{operation}: expected {name} to be equal on every rank, got {found}")
