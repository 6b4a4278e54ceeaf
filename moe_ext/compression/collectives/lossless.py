"""Collectives whose payloads keep every bit, by coded exponents (see `ops.encode_exponents`).

The length of a payload depends on the data. Ranks therefore first exchange the lengths of their
longest payloads, in messages of 8 bytes, and pad to the longest of all. The host waits for that
length alone.

Shape suffixes: N elements, P ranks, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext.comm import workers
from moe_ext.comm.coded_rows import Payloads
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.comm.pending import Pending
from moe_ext.comm.workers import Messages
from moe_ext.compression.collectives.arguments import check_call, tensor_problem

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check(
    op: str,
    whole: tuple[Tensor, str],
    part: tuple[Tensor, str] | None,
    ranks: ProcessGroup | None,
    average: bool,
    validate: bool,
) -> None:
    x, name = whole
    size = group_size(ranks)
    problem = tensor_problem(x, name, DTYPES)
    if problem is None and part is not None:
        y, part_name = part
        fits = y.numel() * size == x.numel() and y.dtype == x.dtype and y.device == x.device
        if not (fits and y.is_contiguous()):
            problem = (
                f"expected {part_name} to be contiguous {x.dtype} of 1/{size} of the "
                f"{x.numel()} elements of {name}, got {y.dtype} of shape {tuple(y.shape)}"
            )
    check_call(op, x, ranks, problem, {"average": average}, validate=validate)


def lossless_all_reduce_(
    x: Tensor,
    *,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Take the mean over ranks, in place, with messages that are compressed without loss.

    Each rank receives one shard of all ranks' tensors, sums it in float32 in the order of the
    ranks, rounds once to the dtype, and sends the sum. With two ranks the result equals
    `torch.distributed`'s mean (scaled before the sum, as DDP does) bit for bit. With more ranks
    rounding may differ, only because the backend sums in another order.

    Args:
        x (Tensor): float32, bfloat16 or float16, contiguous, of any shape; changed in place.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first.
        async_op (bool): return a `Reduction` at once. Nothing may touch x before its end.

    Returns:
        Tensor: x, with the same bits on all ranks; or a `Reduction` of it.

    Raises:
        ValueError: an argument has the wrong dtype, device or shape, or differs between ranks; the
            message names them. With ``validate`` every rank raises it.
        RankFailureError: a rank died or did not answer; x is unchanged.
        RuntimeError: this rank received a damaged payload; x may have changed.

    Deterministic: the same bits on every rank and in every run, on CUDA as on the CPU. On CUDA the
    host waits for the length of each of the two messages during the call. When the result is asked
    for, the host also waits for a mark of damage.
    """
    name = "lossless_all_reduce_"
    ranks = resolve_group(group, name)
    _check(name, (x, "x"), None, ranks, average, validate)
    pending = start_all_reduce(x, ranks, average, operation=name, async_op=async_op)
    return pending if async_op else pending.wait()


def lossless_all_gather(
    output: Tensor,
    input: Tensor,
    *,
    group: ProcessGroup | None = None,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Gather the tensors of all ranks, bit for bit, in fewer bytes.

    Args:
        output (Tensor): as x of `lossless_all_reduce_`, N elements; filled.
        input (Tensor): of the dtype and device of ``output``, contiguous, N / P elements.
        group: as `lossless_all_reduce_`.
        validate (bool): as `lossless_all_reduce_`.
        async_op (bool): as `lossless_all_reduce_`.

    Returns:
        Tensor: output; or a `Reduction` of it.

    Raises:
        ValueError: as `lossless_all_reduce_`.
        RankFailureError: a rank died or did not answer; output is unchanged.
    """
    name = "lossless_all_gather"
    ranks = resolve_group(group, name)
    _check(name, (output, "output"), (input, "input"), ranks, False, validate)
    pending = start_all_gather(output, input, ranks, operation=name, async_op=async_op)
    return pending if async_op else pending.wait()


def lossless_reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Return this rank's shard of the mean over ranks, as `lossless_all_reduce_` computes it.

    Args:
        output (Tensor): of the dtype and device of ``input``, contiguous, N / P elements; filled.
        input (Tensor): as x of `lossless_all_reduce_`, N elements; not changed.
        group: as `lossless_all_reduce_`.
        average (bool): divide by P.
        validate (bool): as `lossless_all_reduce_`.
        async_op (bool): as `lossless_all_reduce_`.

    Returns:
        Tensor: output; or a `Reduction` of it.

    Raises:
        ValueError: as `lossless_all_reduce_`.
        RankFailureError: a rank died or did not answer; output is unchanged.
    """
    name = "lossless_reduce_scatter"
    ranks = resolve_group(group, name)
    _check(name, (input, "input"), (output, "output"), ranks, average, validate)
    factor = 1 / group_size(ranks) if average else 1.0
    args = (output.detach().view(-1), input.detach().view(-1), factor)
    pending = _start(_reduce_scatter, args, ranks, name, output, async_op)
    return pending if async_op else pending.wait()


def start_all_reduce(
    x: Tensor, group: ProcessGroup | None, average: bool, *, operation: str, async_op: bool = True
) -> Pending[Tensor]:
    """Start `lossless_all_reduce_` without its checks."""
    factor = 1 / group_size(group) if average else 1.0
    return _start(_all_reduce, (x.detach().view(-1), factor), group, operation, x, async_op)


def start_all_gather(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup | None,
    *,
    operation: str,
    async_op: bool = True,
) -> Pending[Tensor]:
    """Start `lossless_all_gather` without its checks."""
    args = (output.detach().view(-1), input.detach().view(-1))
    return _start(_all_gather, args, group, operation, output, async_op)


class _Payloads(Payloads):
    """Payloads of one collective, padded before they are sent."""

    def padded(self, rows_PB: Tensor, num_bytes_P: Tensor, messages: Messages) -> Tensor:
        """Pad or cut each row to the length of the longest payload of any rank."""
        most = messages.gather(as_bytes(num_bytes_P.max()))
        # NOTE: device-to-host sync of the length of the next message.
        longest = int(most.view(-1).view(torch.int64).max())
        # Rows may be narrower than `longest`, because shards of the last ranks hold fewer elements.
        return nn.functional.pad(rows_PB, (0, longest - rows_PB.shape[1])).reshape(-1)


def _start(
    twin: Callable[..., list[Tensor]],
    args: tuple[Tensor | float, ...],
    group: ProcessGroup | None,
    operation: str,
    result: Tensor,
    async_op: bool,
) -> Pending[Tensor]:
    payloads = _Payloads()

    def finish(_: list[Tensor]) -> Tensor:
        payloads.check(operation)
        return result

    return workers.start(
        twin, (*args, payloads), group, operation, finish=finish, async_op=async_op
    )


def _sum_of_shard(
    x_N: Tensor, factor: float, payloads: _Payloads, messages: Messages
) -> tuple[Tensor, list[Tensor]]:
    """Return the sum over ranks of this rank's shard, and the shards of x as views."""
    count = -(-x_N.numel() // messages.size)
    shards = [x_N[rank * count : (rank + 1) * count] for rank in range(messages.size)]
    own = shards[messages.rank]
    coded = ops.encode_exponent_rows(x_N, messages.size, left_out=messages.rank)
    found_PB = messages.exchange(payloads.padded(*coded, messages))
    sum_n = torch.zeros(own.numel(), device=x_N.device, dtype=torch.float32)
    theirs = torch.empty_like(own)
    for rank, row in enumerate(found_PB):
        if rank != messages.rank:
            payloads.read(theirs, row)
        sum_n.add_(own if rank == messages.rank else theirs, alpha=factor)
    return sum_n.to(x_N.dtype), shards


def _gather(own: Tensor, shards: list[Tensor], payloads: _Payloads, messages: Messages) -> None:
    """Fill all shards: this rank's with a copy of `own`, the others with what their owners send."""
    rows_PB = messages.gather(payloads.padded(*ops.encode_exponent_rows(own, 1), messages))
    for rank, (shard, row) in enumerate(zip(shards, rows_PB, strict=True)):
        if rank == messages.rank:
            shard.copy_(own)
        else:
            payloads.read(shard, row)
    payloads.tell()


def _all_reduce(
    x_N: Tensor, factor: float, payloads: _Payloads, messages: Messages
) -> list[Tensor]:
    if messages.size > 1 and x_N.numel():
        own, shards = _sum_of_shard(x_N, factor, payloads, messages)
        _gather(own, shards, payloads, messages)
    return [x_N]


def _reduce_scatter(
    out: Tensor, x_N: Tensor, factor: float, payloads: _Payloads, messages: Messages
) -> list[Tensor]:
    if messages.size > 1 and x_N.numel():
        out.copy_(_sum_of_shard(x_N, factor, payloads, messages)[0])
        payloads.tell()
    else:
        out.copy_(x_N)
    return [out]


def _all_gather(
    out_N: Tensor, own: Tensor, payloads: _Payloads, messages: Messages
) -> list[Tensor]:
    if messages.size > 1 and own.numel():
        _gather(own, list(out_N.view(messages.size, -1)), payloads, messages)
    else:
        out_N.copy_(own)
    return [out_N]
