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
from moe_ext.ops import packed_index_bytes

# Signs cannot say that a slot is unused.
PAIR_CODECS = ("fp32", "bf16", "fp8", "int8", "int4")
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    def value_bytes(self) -> int:
        """Codes and scales."""
        size = aligned(code_bytes(self.count, self.value_codec))
        if self.value_codec not in _PLAIN:
            size += aligned(4 * -(-self.count // self.block))
        return size

    @property
    def index_bytes(self) -> int:
        """Of `moe_ext.ops.pack_indices`."""
        return packed_index_bytes(self.count, self.numel)

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
    packed = stages.call("moe_ext::pack_indices", indices_K, layout.numel)
    parts = pack_values(stages, values_K, layout.count, layout.value_codec, layout.block)
    return [*parts, (packed, layout.index_bytes)]


def unpack_pairs(stages: Stages, row: Slot, start: int, layout: PairLayout) -> tuple[Slot, Slot]:
    """Values (float32) and packed indices that begin at byte `start` of a row."""
    values_K = unpack_values(stages, row, start, layout.count, layout.value_codec, layout.block)
    packed = taken(stages, row, start + layout.value_bytes, layout.index_bytes, torch.uint8)
    return values_K, packed


def add_pairs(
    stages: Stages,
    out: Slot,
    pairs: tuple[Slot, Slot],
    layout: PairLayout,
    *,
    start: int = 0,
    divisor: int = 1,
) -> None:
    """Add what `unpack_pairs` returned to elements from `start` on."""
    stages.call_many("moe_ext::add_pairs_", 0, out, *pairs, layout.numel, start, float(divisor))
