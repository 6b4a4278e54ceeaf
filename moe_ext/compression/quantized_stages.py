"""The stages of reductions of quantised tensors, pieces of which travel while others are coded.

Shapes: N elements, P ranks, M elements of a shard.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_ext.compression.pairs import aligned, code_bytes, joined, taken
from moe_ext.compression.stages import Slot, Stages

# Elements, a multiple of all blocks; and into how many chunks a tensor is divided at most.
_CHUNK, _MAX_CHUNKS = 262144, 256
# Pieces are multiples of this, so that their codes and scales have no padding between them.
_GRAIN = 4096
# Of a piece's payload: below it, latency takes longer than what is hidden. And pieces of a shard.
_LEAST_BYTES, _MAX_PIECES = 131072, 8
# The second rounding of a step draws from another stream than the first.
_SECOND_SEED = 0x5851F42D4C957F2D


def payload_bytes(numel: int, format: str, block: int) -> int:
    """Bytes of `numel` quantised elements: codes and scales, each padded to 16."""
    return aligned(code_bytes(numel, format)) + aligned(4 * -(-numel // block))


@dataclass(frozen=True)
class Plan:
    """What the stages of a reduction depend on.

    Attributes:
        numel: N.
        shard: M.
        size: P.
        rank: of this process.
        format: of the codes.
        block: elements that share a scale.
        piece: elements of a shard that travel at a time.
        chunk: elements to decode at a time.
        divisor: of the result.
        given: names of the states that are among the inputs, in their order.
        restores: whether an error leaves all tensors as they were.
        looks: whether sums of the scales are a second result; one that is not finite may tell of
            NaN or infinity.
    """

    numel: int
    shard: int
    size: int
    rank: int
    format: str
    block: int
    piece: int
    chunk: int
    divisor: int = 1
    given: tuple[str, ...] = ()
    restores: bool = True
    looks: bool = False

    def pieces(self) -> list[tuple[int, int]]:
        """First element of each piece of a shard, and elements."""
        return [(at, min(self.piece, self.shard - at)) for at in range(0, self.shard, self.piece)]

    def existing(self, part: int, first: int, room: int) -> int:
        """Elements of a piece of the shard of rank `part` that are not behind the end."""
        return min(max(self.numel - part * self.shard - first, 0), room)

    def payload(self, numel: int) -> int:
        """Bytes of so many elements."""
        return payload_bytes(numel, self.format, self.block)


def chunk_numel(x: torch.Tensor) -> int:
    """Elements to decode at a time: on a CPU, few enough to stay in the cache meanwhile."""
    if x.device.type != "cpu":
        return max(x.numel(), 1)
    return max(_CHUNK, -(-x.numel() // (_MAX_CHUNKS * _CHUNK)) * _CHUNK)


def piece_numel(x: torch.Tensor, shard: int, format: str, block: int) -> int:
    """Elements of a shard that travel at a time; all where there is nothing to hide."""
    if x.device.type != "cpu":
        return max(shard, 1)
    count = min(max(payload_bytes(shard, format, block) // _LEAST_BYTES, 1), _MAX_PIECES)
    return max(-(-shard // (count * _GRAIN)) * _GRAIN, 1)


class _Builder:
    """Adds the stages that turn pieces of tensors into payloads and back."""

    def __init__(self, plan: Plan, num_tensors: int) -> None:
        self.plan = plan
        self.stages = Stages(num_tensors + len(plan.given))
        inputs = self.stages.inputs()
        self.tensors = inputs[:num_tensors]
        self.states = dict(zip(plan.given, inputs[num_tensors:], strict=True))
        self.rng_states = self._rng_slots()
        self.sums_of_scales: list[Slot] = []

    def _rng_slots(self) -> list[Slot | None]:
        """A stream of random numbers for each shard, and one for the second rounding."""
        rng_state, stages = self.states.get("rng_state"), self.stages
        if rng_state is None:
            return [None] * (self.plan.size + 1)
        found: list[Slot | None] = []
        for part in range(self.plan.size + 1):
            # The number of an element starts at 0 in every shard.
            moved = stages.call("aten::clone", rng_state)
            seed = stages.call("aten::narrow", moved, 0, 0, 1)
            if part < self.plan.size:
                stages.call("aten::add_.Scalar", seed, part)
            else:
                stages.call("aten::bitwise_xor_.Scalar", seed, _SECOND_SEED)
            found.append(moved)
        return found

    def owed(self, name: str, start: int, length: int) -> tuple[Slot | None, Slot | None]:
        """A piece of a residual, and of what it is made from where that is elsewhere."""
        if name not in self.states:
            return None, None
        place = (0, start if length else 0, length)
        owed = self.stages.call("aten::narrow", self.states[name], *place)
        if f"{name}_in" in self.states:
            return owed, self.stages.call("aten::narrow", self.states[f"{name}_in"], *place)
        if self.plan.restores:
            self.stages.keep(owed, 4 * length)
        return owed, None

    def pad_server(self) -> None:
        """What lies behind the end in the residual of the sum is what it was."""
        length = self.plan.existing(self.plan.rank, 0, self.plan.shard)
        old, new = (self.states.get(f"server_residual{suffix}") for suffix in ("_in", ""))
        if old is not None and length < self.plan.shard:
            place = (0, length, self.plan.shard - length)
            old, new = (self.stages.call("aten::narrow", x, *place) for x in (old, new))
            self.stages.call("aten::copy_", new, old)

    def encode(
        self,
        x: Slot,
        length: int,
        room: int,
        owed: tuple[Slot | None, Slot | None],
        rng_state: Slot | None,
        first: int,
    ) -> list[tuple[Slot, int]]:
        """Codes and scales of a piece, with zeros up to those of `room` elements."""
        plan, (residual, residual_in) = self.plan, owed
        codes, scales = self.stages.call_many(
            "moe_ext::quantize_blockwise",
            2,
            *(x, plan.format, plan.block, residual, rng_state, False, residual_in, first),
        )
        if plan.looks:
            self.sums_of_scales.append(self.stages.call("aten::sum", scales))
        parts: list[tuple[Slot, int]] = []
        for part, here, wanted in (
            (codes, code_bytes(length, plan.format), code_bytes(room, plan.format)),
            (scales, 4 * -(-length // plan.block), 4 * -(-room // plan.block)),
        ):
            parts.append((part, here))
            if aligned(wanted) > aligned(here):
                more = aligned(wanted) - aligned(here)
                zeros = self.stages.call("aten::new_zeros", part, [more], torch.uint8)
                parts.append((zeros, more))
        return parts

    def decode(self, out: Slot, row: Slot, starts: Sequence[int], length: int, room: int) -> None:
        """Overwrite `length` elements with the sum of the payloads at some bytes of a row."""
        plan, stages = self.plan, self.stages
        scales_at = aligned(code_bytes(room, plan.format))
        for first in range(0, length, plan.chunk):
            count = min(plan.chunk, length - first)
            piece = stages.call("aten::narrow", out, 0, first, count)
            for start in starts:
                at = start + code_bytes(first, plan.format)
                codes = taken(stages, row, at, code_bytes(count, plan.format), torch.uint8)
                at = start + scales_at + 4 * first // plan.block
                scales = taken(stages, row, at, 4 * -(-count // plan.block), torch.float32)
                adds = start != starts[0]
                args = (piece, codes, scales, plan.format, plan.block, adds)
                stages.call_many("moe_ext::dequantize_add_", 0, *args)

    def scatter(self, x: Slot) -> list[Slot]:
        """Send every piece to the owner of its shard; rows of P payloads, one for each piece."""
        plan, found = self.plan, []
        for first, room in plan.pieces():
            parts: list[tuple[Slot, int]] = []
            for part in range(plan.size):
                length = plan.existing(part, first, room)
                start = part * plan.shard + first
                piece = self.stages.call("aten::narrow", x, 0, start if length else 0, length)
                owed = self.owed("residual", start, length)
                parts += self.encode(piece, length, room, owed, self.rng_states[part], first)
            row = joined(self.stages, parts)
            found.append(self.stages.all_to_all(row, plan.size * plan.payload(room)))
        return found

    def add_up(self, out: Slot, row: Slot, first: int, room: int) -> int:
        """Float32 sum over ranks of a piece of this rank's shard; returns its elements."""
        payload, length = self.plan.payload(room), self.plan.existing(self.plan.rank, first, room)
        self.decode(out, row, range(0, self.plan.size * payload, payload), length, room)
        return length

    def gather(self, parts: list[tuple[Slot, int]], room: int) -> Slot:
        """A payload of each rank, in one row."""
        row = joined(self.stages, parts)
        return self.stages.all_gather(row, self.plan.size * self.plan.payload(room))

    def spread(self, x: Slot, row: Slot, first: int, room: int) -> None:
        """Overwrite a piece of every shard with what a row of payloads says."""
        plan = self.plan
        payload = plan.payload(room)
        for part in range(plan.size):
            self._divide(row, part * payload, room)
            length = plan.existing(part, first, room)
            if length:
                place = (0, part * plan.shard + first, length)
                piece = self.stages.call("aten::narrow", x, *place)
                self.decode(piece, row, (part * payload,), length, room)

    def _divide(self, row: Slot, start: int, room: int) -> None:
        """Divide the scales of a payload, in place."""
        if self.plan.divisor != 1:
            at = start + aligned(code_bytes(room, self.plan.format))
            num_bytes = 4 * -(-room // self.plan.block)
            scales = taken(self.stages, row, at, num_bytes, torch.float32)
            self.stages.call("aten::div_.Scalar", scales, self.plan.divisor)


@functools.lru_cache(256)
def all_reduce_stages(plan: Plan) -> Stages:
    """Of x[N] in place; states "residual", "server_residual", both also with "_in", "rng_state".

    What is not finite, here or in the sum, reaches all ranks as blocks of NaN.
    """
    builder = _Builder(plan, 1)
    stages, (x,) = builder.stages, builder.tensors
    arriving = builder.scatter(x)
    room_for_sums = stages.scratch(x, 4 * min(plan.piece, plan.shard), torch.float32)
    gathered = []
    for row, (first, room) in zip(arriving, plan.pieces(), strict=True):
        length = plan.existing(plan.rank, first, room)
        total = stages.call("aten::narrow", room_for_sums, 0, 0, length)
        builder.add_up(total, row, first, room)
        owed = builder.owed("server_residual", first, length)
        rng_state = builder.rng_states[plan.size]
        parts = builder.encode(total, length, room, owed, rng_state, first)
        gathered.append(builder.gather(parts, room))
    builder.pad_server()
    if plan.restores:
        stages.wait()
    for row, (first, room) in zip(gathered, plan.pieces(), strict=True):
        builder.spread(x, row, first, room)
    stages.results = [x.index]
    if plan.looks:
        stages.results.append(stages.call("aten::stack", builder.sums_of_scales).index)
    return stages


@functools.lru_cache(256)
def reduce_scatter_stages(plan: Plan) -> Stages:
    """Of x[N] into out[M]; states "residual", "residual_in", "rng_state"."""
    builder = _Builder(plan, 2)
    stages, (x, out) = builder.stages, builder.tensors
    arriving = builder.scatter(x)
    total = stages.scratch(x, 4 * plan.shard, torch.float32)
    for row, (first, room) in zip(arriving, plan.pieces(), strict=True):
        builder.add_up(stages.call("aten::narrow", total, 0, first, room), row, first, room)
    if plan.divisor != 1:
        stages.call("aten::div_.Scalar", total, plan.divisor)
    stages.wait()
    stages.call("aten::copy_", out, total)
    return stages


@functools.lru_cache(256)
def all_gather_stages(plan: Plan) -> Stages:
    """Of x[M] into out[N]; state "rng_state"."""
    builder = _Builder(plan, 2)
    stages, (x, out) = builder.stages, builder.tensors
    gathered = []
    for first, room in plan.pieces():
        piece = stages.call("aten::narrow", x, 0, first, room)
        rng_state = builder.states.get("rng_state")
        parts = builder.encode(piece, room, room, (None, None), rng_state, first)
        gathered.append(builder.gather(parts, room))
    stages.wait()
    for row, (first, room) in zip(gathered, plan.pieces(), strict=True):
        builder.spread(out, row, first, room)
    return stages
