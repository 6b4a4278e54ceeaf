"""Collectives over a process group that count their traffic and name the ranks that failed.

All packages send their collectives through this module. A group of None stands for this process
alone: nothing is sent, and the input is the result.

Shapes: P ranks of the group.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import c10d, debugging, streams
from moe_ext.comm.agreement import gather_into, neighbours
from moe_ext.comm.failures import name_failed_ranks, naming_failed_ranks
from moe_ext.comm.groups import group_size, small_message_device
from moe_ext.comm.pending import Pending, start_gather_into
from moe_ext.comm.reports import SHARED_ALL_TO_ALL, Collective, Underway
from moe_ext.comm.shared_memory import NOBODY, known
from moe_ext.comm.traffic import record_traffic

T = TypeVar("T")

# Rows of fewer bytes, such as router weights, are exchanged in one call even over a network.
_LEAST_BYTES = 256
# For groups that span several networks: the second group, over which rows go to lower ranks.
_ways_down: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
# Results of `host_group`, by default group.
_host_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
# Name of a reduction to the operation of c10d and the function of two tensors.
_REDUCE_OPS: dict[str, tuple[Any, Any]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
}
# Below this size every rank reduces the whole tensor. Reducing a part on each rank would need a
# second message, which takes longer.
_SHARED_BYTES = 2**16
# Larger tensors are reduced in pieces of this size, which stay in the caches.
_PIECE_BYTES = 2**22


def all_reduce_bytes(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends in a bandwidth-optimal all-reduce."""
    return 2 * (num_ranks - 1) * num_bytes // num_ranks


def _note(kind: str, x: Tensor, group: ProcessGroup | None, operation: str, num_bytes: int) -> None:
    """Count the bytes of a call, and with MOE_EXT_DEBUG compare the call over the ranks."""
    if debugging.enabled():
        debugging.compare(kind, x, group, operation)
    record_traffic(kind, num_bytes)


def start_all_reduce_(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    operation: str,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Pending[Tensor]:
    """Begin to sum a contiguous tensor over the ranks, in place.

    Args:
        x: of the same shape and dtype on every rank; overwritten with the sums.
        group: the P ranks.
        operation: name for error messages.
        finish: computes the result from the sums, when the caller waits for it.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    made = finish or (lambda sums: sums)
    size = group_size(group)
    _note("all_reduce", x, group, operation, all_reduce_bytes(x.nbytes, size))
    if size == 1 or x.numel() == 0:
        return Pending.done(made(x))
    with naming_failed_ranks(group, operation):
        work = dist.all_reduce(x, group=group, async_op=True)
    return Pending(work.get_future(), lambda _: made(x), group, operation)


def all_reduce_(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    operation: str,
    op: str = "sum",
    counted: bool = True,
) -> Tensor:
    """Reduce a contiguous tensor over the ranks, in place, and give it back.

    Args:
        x: of the same shape and dtype on every rank.
        group: the P ranks.
        operation: name for error messages.
        op: "sum", "max" or "min".
        counted: False for messages of fixed size by which ranks compare their arguments.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    size = group_size(group)
    if counted:
        _note("all_reduce", x, group, operation, all_reduce_bytes(x.nbytes, size))
    if group is None or size == 1 or x.numel() == 0:
        return x
    if neighbours(group, x.device, operation).are_all:
        _reduce_in_memory_(x.detach().view(-1), group, op, operation)
        return x
    with naming_failed_ranks(group, operation):
        work = dist.all_reduce(x, _REDUCE_OPS[op][0], group=group, async_op=True)
        Underway(work, Collective("all_reduce", group, x)).wait()
    return x


def _reduce_in_memory_(x_N: Tensor, group: ProcessGroup, op: str, operation: str) -> None:
    """Reduce over ranks that share memory. Every rank adds in the order of ranks."""
    size, combine = group_size(group), _REDUCE_OPS[op][1]

    def reduce(rows: Tensor, out: Tensor) -> Tensor:
        first, *others = rows
        for row in others:
            first = combine(first, row, out=out)
        return out

    for piece in x_N.split(_PIECE_BYTES // x_N.element_size()):
        length = piece.numel() // size
        whole = piece
        if piece.nbytes >= _SHARED_BYTES:
            # Each rank reduces one of `size` equal parts, then all gather the reduced parts.
            parts, whole = piece[: size * length], piece[size * length :]
            rows = all_to_all(parts.view(size, length), group, operation=operation, counted=False)
            gather_into(parts, reduce(rows, rows.new_empty(length)), group, operation)
        if whole.numel():
            rows = whole.new_empty(size, whole.numel())
            reduce(gather_into(rows, whole, group, operation), whole)


def start_all_gather(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    operation: str,
    out: Tensor | None = None,
    counted: bool = True,
) -> Pending[Tensor]:
    """Begin to gather a tensor of every rank.

    Args:
        x: `[n, ...]`, of the same shape and dtype on every rank.
        group: the P ranks.
        operation: name for error messages.
        out: contiguous tensor for the result; None allocates one.
        counted: see `all_reduce_`.

    Returns:
        `[P * n, ...]`, in group order.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    size = group_size(group)
    if size == 1:
        return Pending.done(x if out is None else out.copy_(x))
    sent = x.contiguous()
    if counted:
        _note("all_gather", x, group, operation, (size - 1) * sent.nbytes)
    found = sent.new_empty((size * sent.shape[0], *sent.shape[1:])) if out is None else out
    if sent.numel() == 0:
        return Pending.done(found)
    assert group is not None
    return start_gather_into(found, sent, group, operation)


def all_gather(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    operation: str,
    counted: bool = True,
) -> Tensor:
    """Gather a tensor of every rank; see `start_all_gather`."""
    size = group_size(group)
    if group is None or size == 1:
        return x
    if counted:
        _note("all_gather", x, group, operation, (size - 1) * x.nbytes)
    found = x.new_empty((size * x.shape[0], *x.shape[1:]))
    return gather_into(found, x.contiguous(), group, operation) if x.numel() else found


def reduce_scale(op: Any, num_ranks: int, operation: str) -> float:
    """Return the factor by which a reduction of c10d multiplies the sum over ranks.

    Raises:
        ValueError: op is none of SUM, AVG and PREMUL_SUM.
    """
    # `ReduceOp` accepts its enumeration `RedOpType` as an instance. Only `__getstate__` gives the
    # factor of PREMUL_SUM.
    kind, factor = (op, None) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    if kind == dist.ReduceOp.AVG:
        return 1.0 / num_ranks
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.PREMUL_SUM and isinstance(factor, float):
        return factor
    raise ValueError(
        f"{operation}: expected op to be SUM, AVG or PREMUL_SUM of a number, got {kind}"
    )


def start_reduce_scatter(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    operation: str,
    op: Any = dist.ReduceOp.SUM,
    out: Tensor | None = None,
) -> Pending[Tensor]:
    """Begin to sum over the ranks; each rank gets its part of the sums.

    Args:
        x: `[P * n, ...]`, of the same shape and dtype on every rank.
        group: the P ranks.
        operation: name for error messages.
        op: SUM, AVG or PREMUL_SUM of c10d, which FSDP2 uses.
        out: contiguous tensor for the result; None allocates one.

    Returns:
        `[n, ...]`, the part of this rank.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    size = group_size(group)
    # Gloo has no PREMUL_SUM: the sum is multiplied by the factor when it has arrived.
    is_known = x.is_cuda or op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    scale = 1.0 if is_known else reduce_scale(op, size, operation)
    if size == 1 and out is None:
        return Pending.done(x)
    sent = x.contiguous()
    found = sent.new_empty((sent.shape[0] // size, *sent.shape[1:])) if out is None else out
    _note("reduce_scatter", x, group, operation, (size - 1) * found.nbytes)
    if sent.numel() == 0:
        return Pending.done(found)
    with naming_failed_ranks(group, operation):
        work = getattr(dist, c10d.REDUCE_SCATTER)(
            found, sent, op=op if is_known else dist.ReduceOp.SUM, group=group, async_op=True
        )
    # `Collective` holds a reference to the sent tensor, which must outlive the call.
    works = [Underway(work, Collective("reduce_scatter", group, sent))]
    return Pending.of_works(
        works, lambda: found if scale == 1.0 else found.mul_(scale), group, operation
    )


def reduce_scatter(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    operation: str,
    op: Any = dist.ReduceOp.SUM,
    out: Tensor | None = None,
) -> Tensor:
    """Sum over the ranks; each rank gets its part. See `start_reduce_scatter`."""
    return start_reduce_scatter(x, group, operation=operation, op=op, out=out).wait()


def all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    operation: str,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    counted: bool = True,
) -> Tensor:
    """Exchange rows with every rank of a group.

    Args:
        x: `[N, ...]`; the first `send[0]` rows are for rank 0 of the group, and so on.
        group: the P ranks.
        operation: name for error messages.
        send: number of rows for each of the P ranks, in sum N; None for equal parts.
        receive: number of rows from each of the P ranks; None for equal parts.
        counted: see `all_reduce_`.

    Returns:
        `[sum(receive), ...]`, in group order.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    if group is None or (size := dist.get_world_size(group)) == 1:
        return x
    x = x.contiguous()
    if debugging.enabled():
        debugging.compare("all_to_all", x, group, operation, send, receive)
    num_rows = x.shape[0] if receive is None else sum(receive)
    out = x.new_empty((num_rows, *x.shape[1:]))
    if counted:
        own = x.shape[0] // size if send is None else send[dist.get_rank(group)]
        row_bytes = x[:1].nbytes
        record_traffic("all_to_all", (x.shape[0] - own) * row_bytes)
    try:
        near = known.get(group) if x.is_cpu else NOBODY
        near = near or neighbours(group, x.device, operation)
        _post(out, x, group, send, receive, near.memory if near.are_all else None).wait()
    except RuntimeError as error:
        name_failed_ranks(group, operation, error)
        raise
    return out


def _way_down(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """Return a second group of the same ranks, which all of them make at their first such message.

    Over one Gloo connection the request for data queues behind the data being sent. A rank that
    comes late therefore receives nothing until it has sent everything. Over two connections both
    directions of the network are used at once.
    """
    if group not in _ways_down:
        _ways_down[group] = c10d.twin_group(group, device)
    return _ways_down[group]


def post_rows(
    out: Tensor,
    x: Tensor,
    group: ProcessGroup,
    send: Sequence[int],
    receive: Sequence[int],
    exchange: Callable[..., None] | None,
) -> list[Underway] | streams.Beside:
    """Begin to exchange rows. On CUDA the exchange runs on the side stream of tokens.

    Args:
        out: `[sum(receive), ...]`, filled once the returned works have been waited for.
        x: as in `all_to_all`, or messages `[bytes]`.
        group: the P ranks.
        send: number of rows for each of the P ranks.
        receive: number of rows from each of the P ranks.
        exchange: function with the arguments of `all_to_all_single`, which is the default.
    """
    if exchange is not None or streams.has_streams(x.device):
        function = exchange or dist.all_to_all_single
        call = functools.partial(function, out, x, list(receive), list(send), group=group)
        return streams.run_beside(call, x, out, purpose="tokens")
    near = known.get(group) or neighbours(group, x.device, "dispatch")
    short = x.dim() > 1 and x.shape[1:].numel() * x.element_size() < _LEAST_BYTES
    if near.are_all or short or not near.over_network:
        return [_post(out, x, group, send, receive, near.memory if near.are_all else None)]
    size, first, end = len(send), near.first, near.end
    # Without shared memory, this rank's rows for itself go with those for higher ranks.
    shares = near.memory is not None
    up = slice(end if shares else first, size), slice(0, first if shares else end)
    down = slice(0, first), slice(end, size)
    works = [
        _post(*_cut(out, x, send, receive, *up, group), None),
        _post(*_cut(out, x, send, receive, *down, _way_down(group, x.device)), None),
    ]
    if shares:
        here = slice(first, end)
        works.append(_post(*_cut(out, x, send, receive, here, here, group), near.memory))
    return works


def _cut(
    out: Tensor,
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    to: slice,
    source: slice,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor, ProcessGroup, list[int], list[int]]:
    """Restrict an exchange to the rows for ranks `to` and from ranks `source`."""

    def part(rows: Tensor, sizes: Sequence[int], ranks: slice) -> tuple[Tensor, list[int]]:
        begin = sum(sizes[: ranks.start])
        kept = [0] * len(sizes)
        kept[ranks] = sizes[ranks]
        return rows[begin : begin + sum(kept)], kept

    (into, due), (rows, sizes) = part(out, receive, source), part(x, send, to)
    return into, rows, group, sizes, due


def _post(
    out: Tensor,
    x: Tensor,
    group: ProcessGroup,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
    memory: Any,
) -> Underway:
    """Begin to exchange rows through shared memory, or over c10d if `memory` is None."""
    if memory is not None:
        post = functools.partial(memory.all_to_all, out, x, receive or (), send or ())
        return Underway(post, Collective(SHARED_ALL_TO_ALL, group, x, send, receive))
    sizes, due = (None if each is None else list(each) for each in (send, receive))
    work = dist.all_to_all_single(out, x, due, sizes, group=group, async_op=True)
    return Underway(work, Collective("all_to_all", group, x, sizes, due))


def broadcast_(x: Tensor, group: ProcessGroup | None, source: int, *, operation: str) -> Tensor:
    """Overwrite a contiguous tensor with that of rank `source` of the group.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    if debugging.enabled():
        debugging.compare("broadcast", x, group, operation)
    if group_size(group) > 1 and x.numel():
        with naming_failed_ranks(group, operation):
            dist.broadcast(x, group=group, group_src=source)
    return x


def gather_objects(value: T, group: ProcessGroup | None, *, operation: str) -> list[T]:
    """Gather a pickled object of every rank, in group order. Slow: not for use in a step.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    if group is None:
        return [value]
    found: list[Any] = [None] * group_size(group)
    with naming_failed_ranks(group, operation):
        dist.all_gather_object(found, value, group=group)
    return found


def barrier(group: ProcessGroup, *, operation: str) -> None:
    """Wait until every rank of the group is here.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    with naming_failed_ranks(group, operation):
        dist.barrier(group)


def subgroups(ranks_of: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """Make a group of each list of global ranks. Every rank of the job makes the same call.

    Returns:
        The last of these groups that this rank belongs to, or None.
    """
    own: ProcessGroup | None = None
    for ranks in ranks_of:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    return own


def host_group() -> ProcessGroup:
    """Return a Gloo group of all ranks, made once, for threads that send while the model trains.

    The first call is collective: every rank of the job makes it.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _host_groups:
        timeout = c10d.group_timeout(world, small_message_device(world))
        _host_groups[world] = dist.new_group(timeout=timeout, backend="gloo")
    return _host_groups[world]
