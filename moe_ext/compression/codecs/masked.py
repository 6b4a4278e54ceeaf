"""Codecs for pruned weights: elements that a mask keeps, and two of four neighbours.

Shape suffixes: N elements of a flat gradient, n of them kept.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext._checks import check_choice, check_rule
from moe_ext.comm.pending import Pending
from moe_ext.compression.codecs.base import Calls, Codec, PayloadCodec, StartOptions
from moe_ext.compression.codecs.dense import Dense, dense_reduction
from moe_ext.compression.feedback import CodecMemory
from moe_ext.compression.masks import ElementMask

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, eq=False)
class Masked(Codec):
    """A plain all-reduce of the elements that a mask keeps; other elements become zero.

    No indices are sent, because all ranks have the same mask. Ranks compare masks when a bucket is
    made, and in `Pruning.update`.

    Args:
        mask: mask of the one parameter that this codec reduces, as from `Pruning.codecs`.
    """

    name: ClassVar[str] = "masked"
    lossy: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False
    linear: ClassVar[bool] = True
    shardable: ClassVar[bool] = False

    mask: ElementMask

    def __repr__(self) -> str:
        """Return a text that is equal on ranks with the same mask, for comparison over ranks."""
        return f"Masked({self.mask.count} elements, checksum {self.mask.checksum})"

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        return Dense().sent_bytes(self.mask.count, world_size)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 2 * (world_size - 1)

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `Codec`."""
        memory.take_owed(grad_N)
        bitmap = self.mask.bitmap

        def back(packed_n: Tensor) -> Tensor:
            ops.unpack_masked_(grad_N, packed_n, bitmap)
            return grad_N

        packed_n = self.mask.pack(grad_N)
        return dense_reduction(packed_n, how.group, how.average).then(back)

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""
        packed_n, out_N = self.mask.pack(grad_N), torch.empty_like(grad_N)
        return (
            lambda: self.mask.pack(grad_N),
            lambda: ops.unpack_masked_(out_N, packed_n, self.mask.bitmap),
        )


@dataclass(frozen=True)
class TwoOfFour(PayloadCodec):
    """Sends two of four neighbours, and two bits for the place of each; the other two must be zero.

    Exact, except that -0.0 becomes 0.0. For masks that not all ranks know: a message takes 9/16 of
    the bytes of bfloat16. If all ranks know the mask, `Masked` and `pack_fsdp_messages` send half.

    Args:
        dtype: dtype of the sent values, "bf16", "fp16" or "fp32".

    Raises:
        ValueError: by `encode`, for another dtype, or for four neighbours with three values.
    """

    name: ClassVar[str] = "2:4"
    lossy: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False
    align: ClassVar[int] = 8

    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_choice("TwoOfFour", "dtype", self.dtype, tuple(_DTYPES))

    def payload_bytes(self, numel: int) -> int:
        """See `PayloadCodec`: values, and one bit per element, which is two bits per value."""
        whole = -(-numel // 8) * 8
        return whole // 2 * _DTYPES[self.dtype].itemsize + whole // 8

    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        """See `PayloadCodec`."""
        dtype = _DTYPES[self.dtype]
        check_rule("TwoOfFour", "x", x_N.dtype, str(dtype), x_N.dtype == dtype)
        # Products with a mask may be -0.0, which `pack_bits` counts as non-zero. Adding zero turns
        # -0.0 into 0.0.
        x_N = torch.nn.functional.pad(x_N, (0, -x_N.numel() % 8)) + 0.0
        bitmap = _completed(x_N.device)[ops.pack_bits(x_N).int()]
        if bool((bitmap == 0).any()):
            raise ValueError(
                "TwoOfFour: expected two of four neighbours to be zero at least, got three values"
            )
        values = x_N.new_empty(x_N.numel() // 2)
        ops.pack_masked_(values, x_N, bitmap)
        return torch.cat([as_bytes(values), bitmap])

    def decode_add_(self, out_N: Tensor, payload: Tensor) -> None:
        """See `PayloadCodec`."""
        whole = -(-out_N.numel() // 8) * 8
        bitmap = payload[payload.numel() - whole // 8 :]
        values = payload[: payload.numel() - whole // 8].clone().view(_DTYPES[self.dtype])
        x_N = values.new_empty(whole)
        ops.unpack_masked_(x_N, values, bitmap)
        out_N += x_N[: out_N.numel()]


@functools.cache
def _completed(device: torch.device) -> Tensor:
    """Map each byte of a bitmap to one with two bits set in each half; to 0 if a half has three."""

    def half(bits: int) -> int:
        for place in range(4):
            if bits.bit_count() < 2:
                bits |= 1 << place
        return bits

    halves = [half(bits) for bits in range(16)]
    found = [
        0
        if max((byte & 15).bit_count(), (byte >> 4).bit_count()) > 2
        else halves[byte & 15] | halves[byte >> 4] << 4
        for byte in range(256)
    ]
    return torch.tensor(found, dtype=torch.uint8, device=device)
