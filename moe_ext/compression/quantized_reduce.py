"""Reductions of quantised tensors: quantise, all-to-all, sum in float32, quantise, all-gather.

Shapes: N elements, P ranks, M elements of a shard.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.agreement import check_call, non_finite, resolve
from moe_ext.compression.pairs import aligned, code_bytes, joined, taken
from moe_ext.compression.reduction import Reduction, run
from moe_ext.compression.stages import Slot, Stages
from moe_ext.distributed.groups import group_rank, group_size

FORMATS = ("int8", "int4", "fp8", "sign")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements, a multiple of all blocks; and into how many chunks a tensor is divided at most.
_CHUNK, _MAX_CHUNKS = 262144, 256
# The second rounding of a step draws from another stream than the first.
_SECOND_SEED = 0x5851F42D4C957F2D


def shard_numel(numel: int, world_size: int, block: int = 256) -> int:
    """Elements of a rank's shard in `quantized_all_reduce_`: whole blocks, the same for all.

    Args:
        numel (int): N.
        world_size (int): P.
        block (int): as there.

    Returns:
        int: M, with P M at least N; the last shards may lie behind the end.
    """
    return -(-numel // (world_size * block)) * block


def payload_bytes(numel: int, format: str, block: int) -> int:
    """Bytes of `numel` quantised elements: codes and scales, each padded to 16."""
    return aligned(code_bytes(numel, format)) + aligned(4 * -(-numel // block))


def quantized_all_reduce_bytes(numel: int, world_size: int, format: str, block: int = 256) -> int:
    """What leaves a rank in one `quantized_all_reduce_`: two rounds of a payload for each other."""
    shard = shard_numel(numel, world_size, block)
    return 2 * (world_size - 1) * payload_bytes(shard, format, block)


class _Codec:
    """Adds the stages that turn parts of tensors into payloads and back."""

    def __init__(self, stages: Stages, format: str, block: int, chunk: int) -> None:
        self.stages, self.format, self.block, self.chunk = stages, format, block, chunk

    def encode(
        self, x: Slot, length: int, room: int, residual: Slot | None, rng_state: Slot | None
    ) -> list[tuple[Slot, int]]:
        """Codes and scales of `length` elements, with zeros up to those of `room`."""
        codes, scales = self.stages.call_many(
            "moe_ext::quantize_blockwise", 2, x, self.format, self.block, residual, rng_state, False
        )
        parts: list[tuple[Slot, int]] = []
        for part, here, wanted in (
            (codes, code_bytes(length, self.format), code_bytes(room, self.format)),
            (scales, 4 * -(-length // self.block), 4 * -(-room // self.block)),
        ):
            parts.append((part, here))
            if aligned(wanted) > aligned(here):
                more = aligned(wanted) - aligned(here)
                zeros = self.stages.call("aten::new_zeros", part, [more], torch.uint8)
                parts.append((zeros, more))
        return parts

    def decode(self, out: Slot, row: Slot, starts: Sequence[int], length: int, room: int) -> None:
        """Overwrite `length` elements with the sum of the payloads at some bytes of a row."""
        scales_at = aligned(code_bytes(room, self.format))
        for first in range(0, length, self.chunk):
            count = min(self.chunk, length - first)
            piece = self.stages.call("aten::narrow", out, 0, first, count)
            self.stages.call("aten::zero_", piece)
            for start in starts:
                at = start + code_bytes(first, self.format)
                codes = taken(self.stages, row, at, code_bytes(count, self.format), torch.uint8)
                at = start + scales_at + 4 * first // self.block
                scales = taken(self.stages, row, at, 4 * -(-count // self.block), torch.float32)
                name = "moe_ext::dequantize_add_"
                self.stages.call_many(name, 0, piece, codes, scales, self.format, self.block)

    def divide(self, row: Slot, count: int, room: int, divisor: int) -> None:
        """Divide the scales of `count` payloads in a row, in place."""
        if divisor == 1:
            return
        size = payload_bytes(room, self.format, self.block)
        first = aligned(code_bytes(room, self.format))
        num_bytes = 4 * -(-room // self.block)
        for part in range(count):
            scales = taken(self.stages, row, part * size + first, num_bytes, torch.float32)
            self.stages.call("aten::div_.Scalar", scales, divisor)


def _chunk(x: Tensor) -> int:
    """Elements to decode at a time: on a CPU, few enough to stay in the cache meanwhile."""
    if x.device.type != "cpu":
        return max(x.numel(), 1)
    return max(_CHUNK, -(-x.numel() // (_MAX_CHUNKS * _CHUNK)) * _CHUNK)


def _lengths(numel: int, size: int, shard: int) -> list[int]:
    """Elements of each shard that exist."""
    return [min(max(numel - part * shard, 0), shard) for part in range(size)]


def _scatter(
    codec: _Codec,
    x: Slot,
    lengths: Sequence[int],
    shard: int,
    residual: Slot | None,
    rng_states: Sequence[Slot | None],
    rank: int,
) -> Slot:
    """Float32 sum over ranks [lengths[rank]] of this rank's shard."""
    stages = codec.stages
    parts: list[tuple[Slot, int]] = []
    for part, length in enumerate(lengths):
        place = (0, part * shard if length else 0, length)
        piece = stages.call("aten::narrow", x, *place)
        owed = None if residual is None else stages.call("aten::narrow", residual, *place)
        parts += codec.encode(piece, length, shard, owed, rng_states[part])
    found = stages.all_to_all(joined(stages, parts))
    total = stages.scratch(x, 4 * lengths[rank], torch.float32)
    size = payload_bytes(shard, codec.format, codec.block)
    starts = range(0, len(lengths) * size, size)
    codec.decode(total, found, starts, lengths[rank], shard)
    return total


def _rng_slots(stages: Stages, rng_state: Slot | None, size: int) -> list[Slot | None]:
    """A stream of random numbers for each shard, and one for the second rounding."""
    if rng_state is None:
        return [None] * (size + 1)
    found: list[Slot | None] = []
    for part in range(size):
        # The number of an element starts at 0 in every shard.
        moved = stages.call("aten::clone", rng_state)
        seed = stages.call("aten::narrow", moved, 0, 0, 1)
        stages.call("aten::add_.Scalar", seed, part)
        found.append(moved)
    moved = stages.call("aten::clone", rng_state)
    seed = stages.call("aten::narrow", moved, 0, 0, 1)
    stages.call("aten::bitwise_xor_.Scalar", seed, _SECOND_SEED)
    return [*found, moved]


@functools.lru_cache(256)
def _all_reduce_stages(
    numel: int,
    size: int,
    rank: int,
    format: str,
    block: int,
    divisor: int,
    chunk: int,
    has: tuple[bool, bool, bool],
    restores: bool,
) -> Stages:
    has_residual, has_server, has_rng = has
    stages = Stages(1 + sum(has))
    x, *others = stages.inputs()
    residual = others.pop(0) if has_residual else None
    server = others.pop(0) if has_server else None
    rng_states = _rng_slots(stages, others.pop(0) if has_rng else None, size)
    codec, shard = _Codec(stages, format, block, chunk), shard_numel(numel, size, block)
    for kept, length in ((residual, numel), (server, shard)):
        if kept is not None and restores:
            stages.keep(kept, 4 * length)
    lengths = _lengths(numel, size, shard)
    total = _scatter(codec, x, lengths, shard, residual, rng_states, rank)
    own = None if server is None else stages.call("aten::narrow", server, 0, 0, lengths[rank])
    row = joined(stages, codec.encode(total, lengths[rank], shard, own, rng_states[size]))
    found = stages.all_gather(row)
    codec.divide(found, size, shard, divisor)
    row_bytes = payload_bytes(shard, format, block)
    for part, length in enumerate(lengths):
        if length:
            piece = stages.call("aten::narrow", x, 0, part * shard, length)
            codec.decode(piece, found, (part * row_bytes,), length, shard)
    stages.results = [x.index]
    return stages


def _tensor_problem(x: Tensor, name: str) -> str | None:
    if x.dtype not in _DTYPES or not x.is_contiguous():
        return (
            f"expected {name} to be contiguous float32, bfloat16 or float16, got {x.dtype} of "
            f"shape {tuple(x.shape)} and strides {x.stride()}"
        )
    return None


def _state_problem(x: Tensor | None, name: str, numel: int) -> str | None:
    if x is None:
        return None
    if x.dtype != torch.float32 or x.numel() != numel or not x.is_contiguous():
        return (
            f"expected {name} to be contiguous float32 of {numel} elements, got {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )
    return None


def _option_problem(format: str, block: int, rng_state: Tensor | None) -> str | None:
    if format not in FORMATS:
        return f"expected format to be one of {FORMATS}, got {format!r}"
    if block not in (64, 128, 256, 512, 1024):
        return f"expected block to be a power of two from 64 to 1024, got {block}"
    if rng_state is not None and format == "sign":
        return "expected rng_state to be None for signs, which are not rounded, got one"
    if rng_state is not None and (rng_state.dtype != torch.int64 or rng_state.shape != (4,)):
        return (
            f"expected rng_state to be int64 of shape (4,), got {rng_state.dtype} of shape "
            f"{tuple(rng_state.shape)}"
        )
    return None


def _finite_problem(x: Tensor, name: str) -> str | None:
    return f"expected {name} to be finite, got NaN or infinity" if non_finite(x) else None


def quantized_all_reduce_(
    x: Tensor,
    *,
    format: str = "int8",
    block: int = 256,
    residual: Tensor | None = None,
    server_residual: Tensor | None = None,
    rng_state: Tensor | None = None,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Reduction:
    r"""The mean over ranks, in place, of which only codes travel.

    Every rank quantises its tensor (with ``residual``) and sends each shard to its owner, who adds
    them up in float32, quantises the sum (with ``server_residual``) and sends it to all. What both
    residuals keep is in units of the sum: :math:`P` times the mean, plus all residuals and server
    residuals, is conserved up to the rounding of float32.

    Args:
        x (Tensor): float32, bfloat16 or float16, contiguous, of any shape; changed in place.
        format (str): "int8", "int4", "fp8" or "sign", see `quantize_blockwise`.
        block (int): elements that share a scale, a power of two from 64 to 1024.
        residual (Tensor[N]): float32, contiguous: what this rank owes; changed in place.
        server_residual (Tensor[M]): float32, of `shard_numel` elements: what the owner of a shard
            owes; changed in place.
        rng_state (Tensor[4]): int64, as `quantize_blockwise`: rounds at random. Its rank must
            differ between ranks for the errors to be independent.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first, and look for NaN and infinity.
            False is for layouts that were agreed on, and numbers that were checked.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor: x, with the same bits on all ranks; or a `Reduction` of it. A rank alone sends
        nothing and loses nothing: x plus both residuals, which become zero.

    Raises:
        ValueError: on every rank (of the others only with ``validate``): an argument has the wrong
            dtype, shape or value, or differs between ranks; the message names them.
        RankFailureError: a rank died or did not answer; x and the residuals are as they were.

    Deterministic: shards are added in the order of the ranks.

    Reference: Tang et al., 1-bit Adam, 2021 (arXiv 2102.02888), figure 3; Wang et al., ZeRO++, 2023
    (arXiv 2306.10209), section 3.3.
    """
    name = "quantized_all_reduce_"
    ranks = resolve(group, name)
    size, numel = group_size(ranks), x.numel()
    problem = _tensor_problem(x, "x") or _option_problem(format, block, rng_state)
    problem = problem or _state_problem(residual, "residual", numel)
    if problem is None:
        shard = shard_numel(numel, size, block)
        problem = _state_problem(server_residual, "server_residual", shard)
    if problem is None and validate:
        problem = _finite_problem(x, "x")
    facts = {
        "numel": numel,
        "dtype": x.dtype,
        "format": format,
        "block": block,
        "average": average,
        "having a residual": residual is not None,
        "having a server_residual": server_residual is not None,
    }
    check_call(name, facts, problem, ranks, x.device, validate=validate)
    states = (residual, server_residual, rng_state)
    underway = start_all_reduce(x, states, format, block, ranks, average, async_op=async_op)
    return underway if async_op else underway.wait()


def start_all_reduce(
    x: Tensor,
    states: tuple[Tensor | None, Tensor | None, Tensor | None],
    format: str,
    block: int,
    group: ProcessGroup | None,
    average: bool,
    *,
    async_op: bool = True,
    restores: bool = True,
) -> Reduction:
    """`quantized_all_reduce_` without its checks; states: residual, server_residual, rng_state.

    Args as there, but `restores`: whether an error leaves the residuals as they were, for which
    they are copied.
    """
    residual, server_residual, rng_state = states
    size, numel = group_size(group), x.numel()
    if size == 1 or numel == 0:
        for owed in (residual, server_residual):
            if owed is not None and size == 1:
                x.view(-1).add_(owed.view(-1)[:numel])
                owed.zero_()
        return Reduction.done(x)
    has = (residual is not None, server_residual is not None, rng_state is not None)
    divisor, chunk = size if average else 1, _chunk(x)
    plan = (numel, size, group_rank(group), format, block, divisor, chunk, has, restores)
    inputs = [x.detach().view(-1), *(state.view(-1) for state in states if state is not None)]
    name = "quantized_all_reduce_"
    found = run(
        _all_reduce_stages(*plan), inputs, group, name, finish=lambda _: x, async_op=async_op
    )
    return found if isinstance(found, Reduction) else Reduction.done(found)


def _check_shards(
    name: str, whole: Tensor, shard: Tensor, size: int, names: tuple[str, str]
) -> str | None:
    problem = _tensor_problem(whole, names[0]) or _tensor_problem(shard, names[1])
    if problem is None and whole.numel() != size * shard.numel():
        return (
            f"expected {names[0]} to hold {size} times the {shard.numel()} elements of {names[1]}, "
            f"got {whole.numel()}"
        )
    return problem


def quantized_reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    format: str = "int8",
    block: int = 256,
    residual: Tensor | None = None,
    rng_state: Tensor | None = None,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Reduction:
    """This rank's shard of the mean over ranks, of which only codes travel.

    The first half of `quantized_all_reduce_`: one quantisation, sum in float32 (ZeRO++ qgZ).

    Args:
        output (Tensor): float32, bfloat16 or float16, contiguous, N / P elements; filled.
        input (Tensor): float32, bfloat16 or float16, contiguous, N elements: shard p is for rank p.
        format (str): as `quantized_all_reduce_`.
        block (int): as `quantized_all_reduce_`; blocks begin anew in each shard.
        residual (Tensor[N]): as `quantized_all_reduce_`.
        rng_state (Tensor[4]): as `quantized_all_reduce_`.
        group: as `quantized_all_reduce_`.
        average (bool): as `quantized_all_reduce_`.
        validate (bool): as `quantized_all_reduce_`.
        async_op (bool): as `quantized_all_reduce_`.

    Returns:
        Tensor: output; or a `Reduction` of it. A rank alone copies input plus residual, which
        becomes zero.

    Raises:
        ValueError: as `quantized_all_reduce_`.
        RankFailureError: a rank died or did not answer; output and residual are as they were.

    Deterministic: shards are added in the order of the ranks.
    """
    name = "quantized_reduce_scatter"
    ranks = resolve(group, name)
    size, numel = group_size(ranks), input.numel()
    problem = _check_shards(name, input, output, size, ("input", "output"))
    problem = problem or _option_problem(format, block, rng_state)
    problem = problem or _state_problem(residual, "residual", numel)
    if problem is None and validate:
        problem = _finite_problem(input, "input")
    facts = {
        "numel": numel,
        "dtype": input.dtype,
        "format": format,
        "block": block,
        "average": average,
        "having a residual": residual is not None,
    }
    check_call(name, facts, problem, ranks, input.device, validate=validate)
    if size == 1 or numel == 0:
        if residual is not None and size == 1:
            output.view(-1).copy_(input.view(-1) + residual.view(-1))
            residual.zero_()
        else:
            output.view(-1).copy_(input.view(-1))
        return Reduction.done(output) if async_op else output
    stages = Stages(2 + (residual is not None) + (rng_state is not None))
    x, out, *others = stages.inputs()
    owed = others.pop(0) if residual is not None else None
    rng_states = _rng_slots(stages, others.pop(0) if rng_state is not None else None, size)
    if owed is not None:
        stages.keep(owed, 4 * numel)
    shard = numel // size
    codec = _Codec(stages, format, block, _chunk(input))
    total = _scatter(codec, x, [shard] * size, shard, owed, rng_states, group_rank(ranks))
    if average:
        stages.call("aten::div_.Scalar", total, size)
    stages.call("aten::copy_", out, total)
    states = [state.view(-1) for state in (residual, rng_state) if state is not None]
    inputs = [input.detach().view(-1), output.detach().view(-1), *states]
    return run(stages, inputs, ranks, name, finish=lambda _: output, async_op=async_op)


def quantized_all_gather(
    output: Tensor,
    input: Tensor,
    *,
    format: str = "int8",
    block: int = 256,
    rng_state: Tensor | None = None,
    group: ProcessGroup | None = None,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Reduction:
    """What all ranks hold, of which only codes travel (ZeRO++ qwZ).

    Args:
        output (Tensor): float32, bfloat16 or float16, contiguous, N elements; filled. Every rank's
            own shard is read from its codes too, so that all hold the same.
        input (Tensor): float32, bfloat16 or float16, contiguous, N / P elements.
        format (str): as `quantized_all_reduce_`.
        block (int): as `quantized_all_reduce_`; blocks begin anew in each shard.
        rng_state (Tensor[4]): as `quantized_all_reduce_`.
        group: as `quantized_all_reduce_`.
        validate (bool): as `quantized_all_reduce_`.
        async_op (bool): as `quantized_all_reduce_`.

    Returns:
        Tensor: output; or a `Reduction` of it. A rank alone copies its input.

    Raises:
        ValueError: as `quantized_all_reduce_`.
        RankFailureError: a rank died or did not answer; output is as it was.

    Deterministic.
    """
    name = "quantized_all_gather"
    ranks = resolve(group, name)
    size, shard = group_size(ranks), input.numel()
    problem = _check_shards(name, output, input, size, ("output", "input"))
    problem = problem or _option_problem(format, block, rng_state)
    if problem is None and validate:
        problem = _finite_problem(input, "input")
    facts = {"numel": output.numel(), "dtype": input.dtype, "format": format, "block": block}
    check_call(name, facts, problem, ranks, input.device, validate=validate)
    if size == 1 or shard == 0:
        output.view(-1).copy_(input.view(-1))
        return Reduction.done(output) if async_op else output
    stages = Stages(2 + (rng_state is not None))
    x, out, *others = stages.inputs()
    codec = _Codec(stages, format, block, _chunk(output))
    row = joined(stages, codec.encode(x, shard, shard, None, others[0] if others else None))
    found = stages.all_gather(row)
    row_bytes = payload_bytes(shard, format, block)
    for part in range(size):
        piece = stages.call("aten::narrow", out, 0, part * shard, shard)
        codec.decode(piece, found, (part * row_bytes,), shard, shard)
    inputs = [
        input.detach().view(-1),
        output.detach().view(-1),
        *([] if rng_state is None else [rng_state]),
    ]
    return run(stages, inputs, ranks, name, finish=lambda _: output, async_op=async_op)
