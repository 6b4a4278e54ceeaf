"""Differentiable exchange of rows between the ranks of a group.

Shapes: N rows sent, R rows received, D model, P ranks of the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext.comm import collectives, debugging, streams
from moe_ext.comm.c10d import backward_number
from moe_ext.comm.failures import in_layer, name_failed_ranks, running
from moe_ext.comm.groups import group_rank
from moe_ext.comm.reports import Underway, exchanged_rows
from moe_ext.comm.traffic import open_counts, record_traffic
from moe_ext.dispatch.wire import (
    LOSSLESS,
    Formats,
    decode,
    decode_messages,
    encode,
    encode_messages,
    join_messages,
)


@dataclass
class _RowsUnderway:
    """An exchange of rows and that of their gradients, each started and awaited in two nodes.

    The autograd node that waits for the rows in the forward pass starts the exchange of gradients
    in the backward pass, and the other way round. Work between the two nodes therefore runs during
    the exchange in both passes. The rows pass between the nodes in `underway`, and an empty tensor
    connects the nodes in the graph. The rows themselves cannot connect them, because coded rows are
    bytes, and a gradient must have the shape of its output.

    On CUDA the exchange runs on a side stream.
    """

    group: ProcessGroup
    send: Sequence[int]
    receive: Sequence[int]
    grad_scale: float
    operation: str
    formats: Formats
    exchange: Callable[..., None] | None = None
    counted: bool = True
    underway: Tensor | None = None
    works: list[Underway] | streams.Beside | None = None
    layer: weakref.ref[nn.Module] | None = field(default_factory=running.get)
    lengths: list[int] = field(default_factory=list)  # bytes of each arriving message

    def start(self, rows: Tensor, backward: bool) -> None:
        """Begin to send rows, or with `backward` their gradients in the other direction."""
        send, receive = (self.receive, self.send) if backward else (self.send, self.receive)
        if self.formats[backward] is not None:
            rows = encode(rows, self.formats[backward])
        sent = rows.contiguous()
        if self.formats[backward] == LOSSLESS:
            messages, own_P = encode_messages(sent, send, group_rank(self.group))
            told_P = collectives.all_to_all(
                own_P, self.group, operation=self.operation, counted=False
            )
            # NOTE: device-to-host sync, since the lengths are the splits of the next message.
            lengths, receive = torch.stack([own_P, told_P]).tolist()
            sent, send = join_messages(sent, send, messages, lengths), lengths
            self.lengths = receive
        if self.counted and open_counts:
            others = sent.shape[0] - send[group_rank(self.group)]
            record_traffic("all_to_all", others * sent.shape[1:].numel() * sent.element_size())
        self.underway = out = sent.new_empty((sum(receive), *sent.shape[1:]))
        if backward_number() != -1:
            exchanged_rows(sent)
        try:
            if debugging.enabled():
                debugging.compare("all_to_all", sent, self.group, self.operation, send, receive)
            self.works = collectives.post_rows(out, sent, self.group, send, receive, self.exchange)
        except RuntimeError as error:
            self._name_failed_ranks(error, backward)
            raise

    def finish(self, like: Tensor, dim: int, backward: bool) -> Tensor:
        """Wait for the rows, and return them decoded, in the dtype of `like`."""
        assert self.underway is not None
        arrived, works = self.underway, self.works
        self.underway = self.works = None
        if isinstance(works, streams.Beside):
            works.join()
        elif works is not None:
            try:
                for i, work in enumerate(works):
                    # An exchange passes the turn once, even if it consists of several messages.
                    work.wait(passes_turn=i == 0)
            except RuntimeError as error:
                self._name_failed_ranks(error, backward)
                raise
        if self.formats[backward] is None:
            return arrived
        if self.formats[backward] == LOSSLESS:
            counts = self.send if backward else self.receive
            out = like.new_empty(sum(counts), dim)
            return decode_messages(arrived, self.lengths, out, counts, self.operation)
        return decode(arrived, self.formats[backward], dim, like.dtype)

    def start_back(self, grad_RD: Tensor) -> None:
        """Begin to send gradients. The thread of autograd has no layer set, so it is set here."""
        with in_layer(self.layer):
            self.start(grad_RD, backward=True)

    def finish_back(self, like: Tensor, dim: int) -> Tensor:
        """Wait for the gradients, and return them multiplied by the factor."""
        with in_layer(self.layer):
            grad_ND = self.finish(like, dim, backward=True)
        return grad_ND if self.grad_scale == 1.0 else grad_ND.mul_(self.grad_scale)

    def _name_failed_ranks(self, error: RuntimeError, backward: bool) -> None:
        name_failed_ranks(self.group, self.operation + " backward" * backward, error)


class _Exchange(torch.autograd.Function):
    """Exchanges rows when no other work runs at the same time."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: _RowsUnderway) -> Tensor:
        ctx.rows, ctx.dim = rows, x_ND.shape[1:].numel()
        rows.start(x_ND, backward=False)
        return rows.finish(x_ND, ctx.dim, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        ctx.rows.start_back(grad_RD)
        return ctx.rows.finish_back(grad_RD, ctx.dim), None


class _Start(torch.autograd.Function):
    """Starts to send rows. The backward pass waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: _RowsUnderway) -> Tensor:
        ctx.rows, ctx.dim = rows, x_ND.shape[1:].numel()
        rows.start(x_ND, backward=False)
        return x_ND.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, empty: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.finish_back(empty, ctx.dim), None


class _Finish(torch.autograd.Function):
    """Waits for rows. The backward pass starts to send their gradients, with reversed splits."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, rows: _RowsUnderway, dim: int) -> Tensor:
        ctx.rows = rows
        return rows.finish(empty, dim, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        ctx.rows.start_back(grad_RD)
        return grad_RD.new_empty(0), None, None


def all_to_all_rows(
    x_ND: Tensor,
    group: ProcessGroup,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    grad_scale: float = 1.0,
    operation: str = "all_to_all_rows",
    meanwhile: Callable[[], None] | None = None,
    formats: Formats = (None, None),
    exchange: Callable[..., None] | None = None,
    counted: bool = True,
) -> Tensor:
    """Exchange rows with every rank of a group. Differentiable.

    On CUDA the rows travel on a side stream. Elsewhere only `meanwhile` runs during the exchange.

    Args:
        x_ND: rows; the first `send[0]` are for rank 0 of the group, the next `send[1]` for rank 1,
            and so on.
        group: process group of P ranks.
        send: number of rows for each of the P ranks, in sum N.
        receive: number of rows from each of the P ranks.
        grad_scale: factor on the gradient, applied once in the backward pass.
        operation: name for error messages.
        meanwhile: function to call while the rows are underway. Its backward pass runs during the
            exchange of the gradients.
        formats: formats of the rows and of their gradients, see `Wire`.
        exchange: function with the arguments of `all_to_all_single`, which is the default.
        counted: count the traffic of both passes; False if `exchange` counts it.

    Returns:
        `[R, D]`, ordered by source rank. Ranks without rows take part like all others.

    Raises:
        RankFailureError: a rank died or did not answer, in either pass; the message names it.
    """
    rows = _RowsUnderway(group, send, receive, grad_scale, operation, formats, exchange, counted)
    if meanwhile is None:
        return _Exchange.apply(x_ND, rows)
    empty = _Start.apply(x_ND, rows)
    meanwhile()
    return _Finish.apply(empty, rows, x_ND.shape[1:].numel())


def start_rows(
    rows: Tensor,
    group: ProcessGroup,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    format: str | None,
    operation: str,
) -> Callable[[], Tensor]:
    """Begin an exchange of rows outside of autograd.

    Args:
        rows: as in `all_to_all_rows`.
        group: as in `all_to_all_rows`.
        send: as in `all_to_all_rows`.
        receive: as in `all_to_all_rows`.
        format: format of the rows.
        operation: name for error messages.

    Returns:
        Function that waits for the rows and returns them.
    """
    underway = _RowsUnderway(group, send, receive, 1.0, operation, (format, None))
    underway.start(rows, backward=False)
    like, dim = rows.new_empty(0), rows.shape[1:].numel()

    def finish() -> Tensor:
        with in_layer(underway.layer):
            return underway.finish(like, dim, backward=False)

    return finish


def join_parts(parts: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Tensor:
    """Join the rows of several parts into one message: first all rows for rank 0, and so on.

    Args:
        parts: rows of each part, ordered by rank.
        counts: number of rows for each rank, of each part.
    """
    if len(parts) == 1:
        return parts[0]
    by_part = [part.split(list(count)) for part, count in zip(parts, counts, strict=True)]
    return torch.cat([rows for by_rank in zip(*by_part, strict=True) for rows in by_rank])


def split_parts(rows: Tensor, counts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Undo `join_parts` with the same counts."""
    if len(counts) == 1:
        return [rows]
    pieces = rows.split([count for by_rank in zip(*counts, strict=True) for count in by_rank])
    return [torch.cat(pieces[i :: len(counts)]) for i in range(len(counts))]


def total(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the number of rows for each rank, summed over all parts."""
    return tuple(map(sum, zip(*counts, strict=True)))
