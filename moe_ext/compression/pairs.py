"""Values and indices as one row of bytes, of a size that both ends know beforehand.

Unlike the wire format of `moe_ext.ops.encode_gradient` it has no header, which the layout that both
ends agreed on replaces, and it may hold indices that repeat (unused slots). What a payload says is
brought into range as it is read: a foreign one gives wrong numbers, never a write elsewhere.

Shape suffixes: K pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ext.compression.stages import Slot, Stages

# Signs cannot say that a slot is unused.
PAIR_CODECS = ("fp32", "bf16", "fp8", "int8", "int4")
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
_RUN = 65536


def aligned(num_bytes: int) -> int:
    """Up to the next multiple of 16, so that parts can be read as numbers."""
    return -(-num_bytes // 16) * 16


def code_bytes(numel: int, codec: str) -> int:
    """Bytes of the codes of `numel` values, without their scales."""
    bits = {"fp32": 32, "bf16": 16, "int4": 4, "sign": 1}.get(codec, 8)
    return (numel * bits + 7) // 8


@dataclass(frozen=True)
class PairLayout:
    """Where things are in a payload.

    Attributes:
        count: K.
        numel: elements of the tensor that the indices point into.
        value_codec: one of `PAIR_CODECS`.
        block: values that share a scale, for the codecs that have one.
    """

    count: int
    numel: int
    value_codec: str = "fp32"
    block: int = 128

    @property
    def num_runs(self) -> int:
        """Runs of 65536 elements, each of which says where its indices end; 0 for 4-byte ones."""
        runs = -(-self.numel // _RUN)
        return runs if 4 * runs < 2 * self.count or self.numel > 2**31 else 0

    @property
    def value_bytes(self) -> int:
        """Codes and scales."""
        size = aligned(code_bytes(self.count, self.value_codec))
        if self.value_codec not in _PLAIN:
            size += aligned(4 * -(-self.count // self.block))
        return size

    @property
    def index_bytes(self) -> int:
        """Ends of the runs and offsets in them, or whole indices."""
        if self.num_runs:
            return aligned(4 * self.num_runs + 2 * self.count)
        return aligned(4 * self.count)

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return self.value_bytes + self.index_bytes


def _zeros(stages: Stages, like: Slot, num_bytes: int) -> Slot:
    return stages.call("aten::new_zeros", like, [num_bytes], torch.uint8)


def joined(stages: Stages, parts: list[tuple[Slot, int]]) -> Slot:
    """One row of bytes of parts (slot, its bytes), each padded to 16."""
    row: list[Slot] = []
    for part, num_bytes in parts:
        row.append(stages.call("aten::view.dtype", part, torch.uint8))
        if aligned(num_bytes) != num_bytes:
            row.append(_zeros(stages, part, aligned(num_bytes) - num_bytes))
    room = stages.scratch(row[0], sum(aligned(num_bytes) for _, num_bytes in parts))
    return stages.call("aten::cat.out", row, 0, room)


def taken(stages: Stages, row: Slot, start: int, num_bytes: int, dtype: torch.dtype) -> Slot:
    """Part of a row of bytes, as numbers."""
    part = stages.call("aten::narrow", row, 0, start, num_bytes)
    return part if dtype is torch.uint8 else stages.call("aten::view.dtype", part, dtype)


def pack_values(
    stages: Stages, values_K: Slot, count: int, codec: str, block: int
) -> list[tuple[Slot, int]]:
    """Codes, and scales where the codec has them, as parts for `joined`."""
    if codec in _PLAIN:
        codes = stages.call("aten::to.dtype", values_K, _PLAIN[codec])
        return [(codes, code_bytes(count, codec))]
    codes, scales = stages.call_many(
        "moe_ext::quantize_blockwise", 2, values_K, codec, block, None, None, False
    )
    return [(codes, code_bytes(count, codec)), (scales, 4 * -(-count // block))]


def unpack_values(
    stages: Stages, row: Slot, start: int, count: int, codec: str, block: int
) -> Slot:
    """What `pack_values` wrote from byte `start` on; float32."""
    num_bytes = code_bytes(count, codec)
    if codec in _PLAIN:
        codes = taken(stages, row, start, num_bytes, _PLAIN[codec])
        return stages.call("aten::to.dtype", codes, torch.float32)
    codes = taken(stages, row, start, num_bytes, torch.uint8)
    num_scales = -(-count // block)
    scales = taken(stages, row, start + aligned(num_bytes), 4 * num_scales, torch.float32)
    return stages.call(
        "moe_ext::dequantize_blockwise", codes, scales, count, codec, block, torch.float32
    )


def pack_pairs(
    stages: Stages, values_K: Slot, indices_K: Slot, layout: PairLayout
) -> list[tuple[Slot, int]]:
    """The parts of a payload; the indices never descend."""
    count, runs = layout.count, layout.num_runs
    parts = pack_values(stages, values_K, count, layout.value_codec, layout.block)
    if not runs:
        whole = stages.call("aten::to.dtype", indices_K, torch.int32)
        return [*parts, (whole, 4 * count)]
    edges = stages.call("aten::new_ones", indices_K, [runs])
    edges = stages.call("aten::cumsum", edges, 0)
    edges = stages.call("aten::mul.Scalar", edges, _RUN)
    ends = stages.call("aten::searchsorted.Tensor", indices_K, edges, True)
    offsets = stages.call("aten::to.dtype", indices_K, torch.int16)
    row = [stages.call("aten::view.dtype", part, torch.uint8) for part in (ends, offsets)]
    return [*parts, (stages.call("aten::cat", row, 0), 4 * runs + 2 * count)]


def _counts(stages: Stages, ends: Slot, runs: int, count: int) -> Slot:
    """Pairs of each run; whatever the ends are, none is negative and their sum is `count`."""
    inner = stages.call("aten::narrow", ends, 0, 0, runs - 1)
    inner = stages.call("aten::clamp", inner, 0, count)
    bounds = stages.call("aten::constant_pad_nd", inner, [0, 1], count)
    bounds, _ = stages.call_many("aten::cummax", 2, bounds, 0)
    bounds = stages.call("aten::constant_pad_nd", bounds, [1, 0], 0)
    return stages.call("aten::diff", bounds)


def unpack_pairs(stages: Stages, row: Slot, start: int, layout: PairLayout) -> tuple[Slot, Slot]:
    """Values (float32) and indices (int64, in range) that begin at byte `start` of a row."""
    count, runs = layout.count, layout.num_runs
    values_K = unpack_values(stages, row, start, count, layout.value_codec, layout.block)
    start += layout.value_bytes
    if runs:
        ends = taken(stages, row, start, 4 * runs, torch.int32)
        offsets = taken(stages, row, start + 4 * runs, 2 * count, torch.int16)
        run = stages.call(
            "aten::repeat_interleave.Tensor", _counts(stages, ends, runs, count), count
        )
        base = stages.call(
            "aten::mul.Scalar", stages.call("aten::to.dtype", run, torch.int64), _RUN
        )
        offsets = stages.call("aten::to.dtype", offsets, torch.int64)
        offsets = stages.call("aten::bitwise_and.Scalar", offsets, _RUN - 1)
        indices_K = stages.call("aten::add.Tensor", base, offsets)
    else:
        whole = taken(stages, row, start, 4 * count, torch.int32)
        indices_K = stages.call("aten::to.dtype", whole, torch.int64)
    return values_K, stages.call("aten::clamp", indices_K, 0, max(layout.numel - 1, 0))
