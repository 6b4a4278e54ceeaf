"""Codec that loses nothing: exponents in fewer bits.

Shape suffixes: N elements of a flat gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.comm.groups import resolve_group
from moe_ext.comm.pending import Pending
from moe_ext.compression.codecs.base import Calls, Codec, OnNonfinite, nothing_to_do
from moe_ext.compression.codecs.dense import dense_reduction
from moe_ext.compression.collectives.lossless import DTYPES, start_all_reduce
from moe_ext.compression.collectives.quantized import shard_numel
from moe_ext.compression.feedback import CodecMemory

# Bytes of four of float32 that normally distributed numbers take.
_SHARE = 26.8 / 32


@dataclass(frozen=True)
class Lossless(Codec):
    """Every bit, with exponents in two or three bits instead of eight.

    Float32 takes 0.84 of its bytes, float16 0.86, bfloat16 0.67. The sum is that of
    `lossless_all_reduce_`. Float64 is reduced as by `Dense`.
    """

    name: ClassVar[str] = "lossless"
    lossy: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False
    linear: ClassVar[bool] = True

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`; of float32 in a normal distribution, since the rest depends on the data."""
        if world_size == 1:
            return 0
        payload = int(4 * _SHARE * shard_numel(numel, world_size, 1)) + 64
        return 2 * (world_size - 1) * (payload + 8)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 0 if world_size == 1 else 4

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
        on_nonfinite: OnNonfinite | None = None,
    ) -> Pending[Tensor]:
        """See `Codec`."""
        memory.take_owed(grad_N)
        group = resolve_group(group, "Lossless")
        if grad_N.dtype not in DTYPES:
            return dense_reduction(grad_N, group, average)
        return start_all_reduce(grad_N, group, average, operation="Lossless")

    def passes(self, world_size: int) -> tuple[float, float]:
        """See `Codec`: shards come from all others, and their sums go to all others."""
        return 1.0, 2.0 * (world_size - 1) / world_size

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""
        if grad_N.dtype not in DTYPES:
            return nothing_to_do()
        rows_1B, num_bytes_1 = ops.encode_exponent_rows(grad_N, 1)
        payload_B, out_N = rows_1B[0, : int(num_bytes_1)], torch.empty_like(grad_N)
        return (
            lambda: ops.encode_exponent_rows(grad_N, 1),
            lambda: ops.decode_exponent_row_(out_N, payload_B, num_bytes_1),
        )
