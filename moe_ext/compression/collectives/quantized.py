"""Sharded reductions: ranks encode their tensors, the owner of a shard sums and encodes the sum.

Shapes: N elements, P ranks, M elements of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import workers
from moe_ext.comm.agreement import is_nonfinite
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.comm.pending import Pending
from moe_ext.comm.workers import Message, Messages
from moe_ext.compression.collectives.arguments import (
    check_call,
    choice_problem,
    finite_problem,
    flat_problem,
    tensor_problem,
)
from moe_ext.compression.collectives.coding import (
    FORMATS,
    LEAST_BLOCK,
    Coding,
    QuantizedCoding,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (64, 128, 256, 512, 1024)
# Elements of a piece of a shard are a multiple of this number, so that its codes and scales need
# no padding.
_GRAIN = 4096
# Least bytes of a piece, and most pieces of a shard. The latency of a smaller piece is longer than
# the encoding that can overlap with it.
_LEAST_BYTES, _MAX_PIECES = 131072, 8
# Mask that is XORed into the seed to round sums, so that the second rounding of a step draws other
# random numbers than the first.
_SECOND_SEED = 0x5851F42D4C957F2D


class States(NamedTuple):
    """Residuals and random state of a reduction; see the arguments of `quantized_all_reduce_`."""

    residual: Tensor | None = None
    server_residual: Tensor | None = None
    rng_state: Tensor | None = None
    residual_in: Tensor | None = None
    server_residual_in: Tensor | None = None

    def flat(self) -> States:
        """Return views of all tensors as vectors."""
        return States(*(None if x is None else x.view(-1) for x in self))


def shard_numel(numel: int, world_size: int, block: int | None = 256) -> int:
    """Return the elements of a shard in `quantized_all_reduce_`: whole blocks, equal on all ranks.

    Args:
        numel (int): N.
        world_size (int): P.
        block (int or None): as `quantized_all_reduce_`.

    Returns:
        int: M, with P M at least N. The last shards may lie partly or fully past the end.
    """
    block = block or LEAST_BLOCK
    return -(-numel // (world_size * block)) * block


def _option_problem(format: str, block: int | None, rng_state: Tensor | None) -> str | None:
    problem = choice_problem(format, "format", FORMATS)
    if problem is None and block not in (None, *BLOCKS):
        problem = f"expected block to be None or a power of two from 64 to 1024, got {block}"
    if problem is None and block is None and format == "sign":
        problem = "expected block to be a number for signs, whose scale is its mean, got None"
    if problem is None and rng_state is not None:
        if format == "sign":
            return "expected rng_state to be None for signs, which are not rounded, got one"
        if rng_state.dtype != torch.int64 or rng_state.shape != (4,):
            return (
                f"expected rng_state to be int64 of shape (4,), got {rng_state.dtype} of shape "
                f"{tuple(rng_state.shape)}"
            )
    return problem


def _state_problem(old: Tensor | None, new: Tensor | None, name: str, numel: int) -> str | None:
    """Check a residual that is written (`new`), and the one that is read instead (`old`)."""
    problem = flat_problem(new, name, numel)
    if problem is not None or old is None:
        return problem
    if new is None:
        return f"expected {name} to be given with {name}_in, which is only read, got None"
    if old.numel() and old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr():
        return f"expected {name}_in to be in memory of its own, got a part of {name}'s"
    return flat_problem(old, f"{name}_in", numel)


def _states_problem(states: States, numel: int, shard: int) -> str | None:
    residual, server, _, residual_in, server_in = states
    return _state_problem(residual_in, residual, "residual", numel) or _state_problem(
        server_in, server, "server_residual", shard
    )


def _shards_problem(whole: Tensor, shard: Tensor, size: int, names: tuple[str, str]) -> str | None:
    problem = tensor_problem(whole, names[0], _DTYPES) or tensor_problem(shard, names[1], _DTYPES)
    if problem is None and whole.numel() != size * shard.numel():
        return (
            f"expected {names[0]} to hold {size} times the {shard.numel()} elements of {names[1]}, "
            f"got {whole.numel()}"
        )
    return problem


def quantized_all_reduce_(
    x: Tensor,
    *,
    format: str = "int8",
    block: int | None = 256,
    residual: Tensor | None = None,
    server_residual: Tensor | None = None,
    rng_state: Tensor | None = None,
    residual_in: Tensor | None = None,
    server_residual_in: Tensor | None = None,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    r"""Take the mean over ranks, in place, with messages of quantised values.

    Every rank quantises its tensor (with ``residual``) and sends each shard to its owner. The owner
    adds the shards up in float32, quantises the sum (with ``server_residual``) and sends it to all
    ranks. On a CPU a large shard is sent in up to 8 pieces, so that encoding overlaps with sending.
    Both residuals are in units of the sum: :math:`P` times the mean, plus all residuals and server
    residuals, is conserved up to the rounding of float32.

    Args:
        x (Tensor): float32, bfloat16 or float16, contiguous, of any shape; changed in place.
        format (str): "int8", "int6", "int4", "int3", "int2", "fp8" or "sign", see
            `quantize_blockwise`.
        block (int or None): elements that share a scale, a power of two from 64 to 1024. None is
            one scale per payload, for what a rank sends of a shard, or of a piece of a shard.
            Ranks need not agree on a scale, and each is as small as its own elements allow.
        residual (Tensor[N]): float32, contiguous: quantisation error of this rank's tensor; changed
            in place.
        server_residual (Tensor[M]): float32, of `shard_numel` elements: quantisation error of the
            sum of this rank's shard; changed in place.
        rng_state (Tensor[4]): int64, as `quantize_blockwise`, for stochastic rounding. The rank
            in it must differ between ranks, otherwise their errors are correlated.
        residual_in (Tensor[N]): read instead of ``residual``, which is then only written; not
            changed. Without it, a copy of ``residual`` is made to restore it after an error.
        server_residual_in (Tensor[M]): the same for ``server_residual``.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first, and look for NaN and infinity.
            If False, the caller has agreed on layouts and checked the numbers. A block that holds
            NaN or infinity then becomes NaN on all ranks, as do the residuals.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor: x, with the same bits on all ranks; or a `Reduction` of it. A group of one rank
        sends nothing and loses nothing: x gets both residuals added, which become zero.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value, or differs between ranks; the
            message names them. With ``validate`` every rank raises it.
        RankFailureError: a rank died or did not answer; x and the residuals are unchanged.

    Deterministic: shards are added in the order of the ranks.

    Reference: Tang et al., 1-bit Adam, 2021 (arXiv 2102.02888), figure 3; Wang et al., ZeRO++, 2023
    (arXiv 2306.10209), section 3.3.
    """
    name = "quantized_all_reduce_"
    ranks = resolve_group(group, name)
    size, numel = group_size(ranks), x.numel()
    states = States(residual, server_residual, rng_state, residual_in, server_residual_in)
    problem = (
        tensor_problem(x, "x", _DTYPES)
        or _option_problem(format, block, rng_state)
        or _states_problem(states, numel, shard_numel(numel, size, block))
        or (finite_problem(x, "x") if validate else None)
    )
    facts = {
        "format": format,
        "block": block,
        "average": average,
        "having a residual": residual is not None,
        "having a server_residual": server_residual is not None,
    }
    check_call(name, x, ranks, problem, facts, validate=validate)
    coding = QuantizedCoding(format, block)
    pending = start_all_reduce(x, coding, states, ranks, average, operation=name, async_op=async_op)
    return pending if async_op else pending.wait()


def quantized_reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    format: str = "int8",
    block: int | None = 256,
    residual: Tensor | None = None,
    rng_state: Tensor | None = None,
    residual_in: Tensor | None = None,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Return this rank's shard of the mean over ranks, with messages of quantised values.

    This is the first half of `quantized_all_reduce_`: values are quantised once and summed in
    float32 (ZeRO++ qgZ).

    Args:
        output (Tensor): float32, bfloat16 or float16, contiguous, N / P elements; filled.
        input (Tensor): float32, bfloat16 or float16, contiguous, N elements: shard p is for rank p.
        format (str): as `quantized_all_reduce_`.
        block (int or None): as `quantized_all_reduce_`; each shard starts a new block.
        residual (Tensor[N]): as `quantized_all_reduce_`.
        rng_state (Tensor[4]): as `quantized_all_reduce_`.
        residual_in (Tensor[N]): as `quantized_all_reduce_`.
        group: as `quantized_all_reduce_`.
        average (bool): as `quantized_all_reduce_`.
        validate (bool): as `quantized_all_reduce_`.
        async_op (bool): as `quantized_all_reduce_`.

    Returns:
        Tensor: output; or a `Reduction` of it. A group of one rank copies input plus residual, and
        the residual becomes zero.

    Raises:
        ValueError: as `quantized_all_reduce_`.
        RankFailureError: a rank died or did not answer; output and residual are unchanged.

    Deterministic: shards are added in the order of the ranks.
    """
    name = "quantized_reduce_scatter"
    ranks = resolve_group(group, name)
    states = States(residual=residual, rng_state=rng_state, residual_in=residual_in)
    problem = (
        _shards_problem(input, output, group_size(ranks), ("input", "output"))
        or _option_problem(format, block, rng_state)
        or _states_problem(states, input.numel(), 0)
        or (finite_problem(input, "input") if validate else None)
    )
    facts = {
        "format": format,
        "block": block,
        "average": average,
        "having a residual": residual is not None,
    }
    check_call(name, input, ranks, problem, facts, validate=validate)
    coding = QuantizedCoding(format, block)
    pending = start_reduce_scatter(
        output, input, coding, states, ranks, average, operation=name, async_op=async_op
    )
    return pending if async_op else pending.wait()


def quantized_all_gather(
    output: Tensor,
    input: Tensor,
    *,
    format: str = "int8",
    block: int | None = 256,
    rng_state: Tensor | None = None,
    group: ProcessGroup | None = None,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Gather the tensors of all ranks, with messages of quantised values (ZeRO++ qwZ).

    Args:
        output (Tensor): float32, bfloat16 or float16, contiguous, N elements; filled. A rank
            decodes its own shard as well, so that all ranks get the same bits.
        input (Tensor): float32, bfloat16 or float16, contiguous, N / P elements.
        format (str): as `quantized_all_reduce_`.
        block (int or None): as `quantized_all_reduce_`; each shard starts a new block.
        rng_state (Tensor[4]): as `quantized_all_reduce_`.
        group: as `quantized_all_reduce_`.
        validate (bool): as `quantized_all_reduce_`.
        async_op (bool): as `quantized_all_reduce_`.

    Returns:
        Tensor: output; or a `Reduction` of it. A group of one rank copies its input.

    Raises:
        ValueError: as `quantized_all_reduce_`.
        RankFailureError: a rank died or did not answer; output is unchanged.

    Deterministic.
    """
    name = "quantized_all_gather"
    ranks = resolve_group(group, name)
    problem = (
        _shards_problem(output, input, group_size(ranks), ("output", "input"))
        or _option_problem(format, block, rng_state)
        or (finite_problem(input, "input") if validate else None)
    )
    facts = {"numel": output.numel(), "format": format, "block": block}
    check_call(name, input, ranks, problem, facts, validate=validate)
    coding = QuantizedCoding(format, block)
    pending = start_all_gather(
        output, input, coding, rng_state, ranks, operation=name, async_op=async_op
    )
    return pending if async_op else pending.wait()


def piece_numel(x: Tensor, shard: int, coding: Coding) -> int:
    """Return the elements of a piece of a shard; the whole shard if nothing would overlap."""
    if x.device.type != "cpu" or coding.native is None:
        return max(shard, 1)
    count = min(max(coding.payload_bytes(shard) // _LEAST_BYTES, 1), _MAX_PIECES)
    return max(-(-shard // (count * _GRAIN)) * _GRAIN, 1)


def start_all_reduce(
    x: Tensor,
    coding: Coding,
    states: States,
    group: ProcessGroup | None,
    average: bool,
    *,
    operation: str,
    async_op: bool = True,
    restores: bool = True,
    on_nonfinite: Callable[[Tensor], None] | None = None,
) -> Pending[Tensor]:
    """Start `quantized_all_reduce_` with any coding, without its checks.

    Further arguments are:

        coding: encodes and decodes the messages.
        operation: name for error messages.
        restores: an error leaves x and the residuals unchanged. If False, x is overwritten while
            messages are still underway, and no residual is copied.
        on_nonfinite: called at the end with a tensor that holds NaN or infinity, if any was found:
            x or the new residual, or infinity if only the sum over ranks overflowed. Needs a CPU,
            both residuals, and a coding that turns NaN into NaN residuals. None does not look.
    """
    size, numel, states = group_size(group), x.numel(), states.flat()
    if size == 1 or numel == 0:
        for new, old in zip(states[:2], states[3:], strict=True):
            if new is not None and size == 1:
                x.view(-1).add_((new if old is None else old)[:numel])
                new.zero_()
        if on_nonfinite is not None and is_nonfinite(x):
            on_nonfinite(x)
        return Pending.done(x)
    shard = shard_numel(numel, size, coding.align)

    def finish(found: list[Tensor]) -> Tensor:
        if on_nonfinite is not None and not bool(torch.isfinite(found[1]).all()):
            _find_nonfinite(states, on_nonfinite)
        return x

    args = (
        x.detach().view(-1),
        states,
        shard,
        piece_numel(x, shard, coding),
        size if average else 1,
        restores,
        on_nonfinite is not None,
    )
    return workers.start(
        partial(_all_reduce, coding),
        args,
        group,
        operation,
        compiled=_compiled("quantized_all_reduce", coding),
        finish=finish,
        async_op=async_op,
    )


def _find_nonfinite(states: States, on_nonfinite: Callable[[Tensor], None]) -> None:
    """Call `on_nonfinite` if a new residual is not finite.

    The sums that `looks` asks for are a hint alone: a sum of finite numbers may overflow, too.
    """
    owed, of_sum = states.residual, states.server_residual
    assert owed is not None and of_sum is not None
    if is_nonfinite(owed):
        on_nonfinite(owed)
    elif bool(of_sum.isinf().any()):
        # Finite tensors of all ranks may overflow to infinity in the sum, but not to NaN. NaN comes
        # from the tensor of one rank, and that rank reports it.
        on_nonfinite(torch.full_like(owed, torch.inf))


def start_reduce_scatter(
    output: Tensor,
    input: Tensor,
    coding: Coding,
    states: States,
    group: ProcessGroup | None,
    average: bool,
    *,
    operation: str,
    async_op: bool = True,
) -> Pending[Tensor]:
    """Start `quantized_reduce_scatter` with any coding, unchecked; args as `start_all_reduce`."""
    size, states = group_size(group), states.flat()
    if size == 1 or input.numel() == 0:
        output.view(-1).copy_(input.view(-1))
        owed = states.residual if states.residual_in is None else states.residual_in
        if states.residual is not None and owed is not None and size == 1:
            output.view(-1).copy_(input.view(-1) + owed)
            states.residual.zero_()
        return Pending.done(output)
    args = (
        output.detach().view(-1),
        input.detach().view(-1),
        states,
        piece_numel(input, output.numel(), coding),
        size if average else 1,
    )
    return workers.start(
        partial(_reduce_scatter, coding),
        args,
        group,
        operation,
        compiled=_compiled("quantized_reduce_scatter", coding),
        finish=lambda _: output,
        async_op=async_op,
    )


def start_all_gather(
    output: Tensor,
    input: Tensor,
    coding: Coding,
    rng_state: Tensor | None,
    group: ProcessGroup | None,
    *,
    operation: str,
    async_op: bool = True,
) -> Pending[Tensor]:
    """Start `quantized_all_gather` with any coding, unchecked; args as `start_all_reduce`."""
    if group_size(group) == 1 or input.numel() == 0:
        output.view(-1).copy_(input.view(-1))
        return Pending.done(output)
    piece = piece_numel(output, input.numel(), coding)
    args = (output.detach().view(-1), input.detach().view(-1), rng_state, piece)
    return workers.start(
        partial(_all_gather, coding),
        args,
        group,
        operation,
        compiled=_compiled("quantized_all_gather", coding),
        finish=lambda _: output,
        async_op=async_op,
    )


def _compiled(method: str, coding: Coding) -> tuple[Any, ...]:
    """Return the compiled method and its first argument, or () if it does not know the coding."""
    return () if coding.native is None else (method, coding.native)


# `residual_N` and `residual_in` of `Coding.encode`.
_Owed = tuple[Tensor | None, Tensor | None]


@dataclass
class _Shards:
    """N elements in shards of M, one for each rank; the last shards may lie past the end.

    This is the Python version of `Shards` in csrc/runtime/quantized.cpp.
    """

    messages: Messages
    coding: Coding
    numel: int
    shard: int
    piece: int
    looks: bool = False
    restores: bool = True
    # With `looks`, the sum of each piece's residual, which is NaN if the piece was not finite.
    sums: list[Tensor] = field(default_factory=list)

    def pieces(self) -> list[tuple[int, int]]:
        """Return the first element and the length of each piece of a shard."""
        return [(at, min(self.piece, self.shard - at)) for at in range(0, self.shard, self.piece)]

    def length(self, rank: int, first: int, room: int) -> int:
        """Return the number of elements of a piece that lie before the end of the tensor."""
        return min(max(self.numel - rank * self.shard - first, 0), room)

    def ask(self, room: int, like: Tensor) -> Message:
        """Post receives of the payload of a piece from every rank.

        This comes after the payload of this rank was made, because a codec may refuse to make it,
        and a posted receive cannot be withdrawn.
        """
        return self.messages.ask(self.coding.payload_bytes(room), like)

    def owed_at(self, owed: _Owed, start: int, length: int) -> list[Any]:
        """Slice both residuals. Keep a copy if an error must restore a residual read in place."""
        found = [None if x is None else x[start : start + length] for x in owed]
        if self.restores and found[0] is not None and found[1] is None:
            self.messages.keep(found[0])
        return found

    def encode(
        self, x: Tensor, room: int, owed: Sequence[Any], rng_state: Tensor | None, first: int
    ) -> Tensor:
        """Encode a piece, padded with zero bytes to the payload of `room` elements."""
        row = x.new_zeros(self.coding.payload_bytes(room), dtype=torch.uint8)
        if x.numel():
            stream: dict[str, Any] = {}
            if rng_state is not None:
                stream = {"rng_state": rng_state, "first": first}
            payload = self.coding.encode(x, *owed, **stream)
            row[: payload.numel()] = payload
            if self.looks:
                self.sums.append(owed[0].sum())
        return row

    def scatter(self, x: Tensor, owed: _Owed, rng_state: Tensor | None) -> list[Message]:
        """Send every piece to the owner of its shard; what comes of this rank's own."""
        arriving = []
        for first, room in self.pieces():
            payloads = []
            for rank in range(self.messages.size):
                start, length = rank * self.shard + first, self.length(rank, first, room)
                found = self.owed_at(owed, start, length)
                stream = _stream(rng_state, shard=rank)
                payloads.append(self.encode(x[start : start + length], room, found, stream, first))
            arriving.append(self.ask(room, x))
            self.messages.all_to_all(arriving[-1], torch.cat(payloads))
        return arriving

    def payload(self, row: Tensor, rank: int, room: int, length: int) -> Tensor:
        """Slice the payload of a rank from the row that arrived for a piece."""
        start = rank * self.coding.payload_bytes(room)
        return row[start : start + self.coding.payload_bytes(length)]

    def add_up(self, total: Tensor, arriving: Message, room: int) -> None:
        """Overwrite `total` with the sum of a piece over ranks, added in the order of ranks."""
        row = arriving.wait()
        if total.numel():
            for rank in range(self.messages.size):
                payload = self.payload(row, rank, room, total.numel())
                self.coding.decode_add_(total, payload, overwrite=rank == 0)

    def spread(self, x: Tensor, gathered: Message, first: int, room: int, divisor: int) -> None:
        """Decode and divide what arrived for a piece, and overwrite the piece of every shard."""
        row = gathered.wait()
        for rank in range(self.messages.size):
            start, length = rank * self.shard + first, self.length(rank, first, room)
            if length:
                payload = self.payload(row, rank, room, length)
                piece = x[start : start + length]
                self.coding.decode_add_(piece, payload, divisor=divisor, overwrite=True)


def _stream(rng_state: Tensor | None, *, shard: int = 0, seed: int = 0) -> Tensor | None:
    """Return the random stream of a shard, in which elements are counted from 0."""
    if rng_state is None:
        return None
    moved = rng_state.clone()
    moved[:1].bitwise_xor_(seed).add_(shard)
    return moved


def _all_reduce(
    coding: Coding,
    x_N: Tensor,
    states: States,
    shard: int,
    piece: int,
    divisor: int,
    restores: bool,
    looks: bool,
    messages: Messages,
) -> list[Tensor]:
    residual, server, rng_state, residual_in, server_in = states
    shards = _Shards(messages, coding, x_N.numel(), shard, piece, looks, restores)
    arriving, gathered = shards.scatter(x_N, (residual, residual_in), rng_state), []
    stream = _stream(rng_state, seed=_SECOND_SEED)
    for i, (first, room) in enumerate(shards.pieces()):
        length = shards.length(messages.rank, first, room)
        total = torch.empty(length, device=x_N.device, dtype=torch.float32)
        shards.add_up(total, arriving[i], room)
        owed_of_sum = shards.owed_at((server, server_in), first, length)
        row = shards.encode(total, room, owed_of_sum, stream, first)
        gathered.append(shards.ask(room, x_N))
        messages.all_gather(gathered[i], row)
    if server is not None and server_in is not None:
        # No rank encodes elements past the end, so their residuals are copied.
        length = shards.length(messages.rank, 0, shard)
        server[length:] = server_in[length:]
    if restores:
        # x may only be overwritten when no message can fail any more.
        for message in gathered:
            message.wait()
    for message, (first, room) in zip(gathered, shards.pieces(), strict=True):
        shards.spread(x_N, message, first, room, divisor)
    return [x_N, torch.stack(shards.sums)] if looks else [x_N]


def _reduce_scatter(
    coding: Coding,
    out_M: Tensor,
    x_N: Tensor,
    states: States,
    piece: int,
    divisor: int,
    messages: Messages,
) -> list[Tensor]:
    shards = _Shards(messages, coding, x_N.numel(), out_M.numel(), piece)
    arriving = shards.scatter(x_N, (states.residual, states.residual_in), states.rng_state)
    total = torch.empty(out_M.numel(), device=x_N.device, dtype=torch.float32)
    for message, (first, room) in zip(arriving, shards.pieces(), strict=True):
        shards.add_up(total[first : first + room], message, room)
    out_M.copy_(total if divisor == 1 else total.div_(divisor))
    return [out_M]


def _all_gather(
    coding: Coding,
    out_N: Tensor,
    x_M: Tensor,
    rng_state: Tensor | None,
    piece: int,
    messages: Messages,
) -> list[Tensor]:
    shards = _Shards(messages, coding, out_N.numel(), x_M.numel(), piece)
    gathered = []
    for first, room in shards.pieces():
        row = shards.encode(x_M[first : first + room], room, (None, None), rng_state, first)
        gathered.append(shards.ask(room, x_M))
        messages.all_gather(gathered[-1], row)
    for message in gathered:
        message.wait()
    for message, (first, room) in zip(gathered, shards.pieces(), strict=True):
        shards.spread(out_N, message, first, room, 1)
    return [out_N]
