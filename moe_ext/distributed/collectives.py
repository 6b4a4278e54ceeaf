"""Collectives of moe_ext: differentiable exchange of rows, and agreement on small messages.

Shapes: N rows sent, R rows received, D model, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.distributed.failures import (
    naming_failed_ranks,
    process_identity,
    remember_processes,
)
from moe_ext.distributed.groups import group_ranks, group_size


def _exchange(
    x: Tensor, group: ProcessGroup, send: Sequence[int], receive: Sequence[int], operation: str
) -> Tensor:
    """One all-to-all along dimension 0."""
    out = x.new_empty((sum(receive), *x.shape[1:]))
    with naming_failed_ranks(group, operation):
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


class _AllToAllRows(torch.autograd.Function):
    """Rows out, gradients back by the reversed splits."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        group: ProcessGroup,
        send: Sequence[int],
        receive: Sequence[int],
        grad_scale: float,
        operation: str,
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        ctx.grad_scale, ctx.operation = grad_scale, operation
        return _exchange(x_ND, group, send, receive, operation)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        operation = f"{ctx.operation} backward"
        grad_ND = _exchange(grad_RD, ctx.group, ctx.receive, ctx.send, operation)
        if ctx.grad_scale != 1.0:
            grad_ND.mul_(ctx.grad_scale)
        return grad_ND, None, None, None, None, None


def all_to_all_rows(
    x_ND: Tensor,
    group: ProcessGroup,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    grad_scale: float = 1.0,
    operation: str = "all_to_all_rows",
) -> Tensor:
    """Exchange rows with every rank of a group; differentiable.

    Args:
        x_ND: rows, the first `send[0]` for rank 0 of the group, then `send[1]` for rank 1, and so
            on.
        group: process group of P ranks.
        send: P row counts that sum to N.
        receive: P row counts, what each rank sends here.
        grad_scale: factor on the gradient, applied once in the backward pass.
        operation: name for error messages.

    Returns:
        `[R, D]`, ordered by source rank. Ranks with no row take part like any other.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it. Forward and backward.
    """
    out: Tensor = _AllToAllRows.apply(x_ND, group, send, receive, grad_scale, operation)
    return out


def all_to_all_counts(message: Tensor, group: ProcessGroup, *, operation: str) -> Tensor:
    """Send row p of an int64 `[P, M]` message to rank p; returns `[P, M]`, row p from rank p."""
    ones = [1] * message.shape[0]
    return _exchange(message, group, ones, ones, operation)


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
