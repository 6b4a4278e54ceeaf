"""Payloads: tensors encoded as rows of bytes whose length sender and receiver know beforehand.

Shape suffixes: N elements of a tensor, K pairs of a value and an index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ext._bytes import as_bytes
from moe_ext.ops import packed_index_bytes
from moe_ext.ops.quantize import code_bytes, num_scales

FORMATS = ("int8", "int6", "int4", "int3", "int2", "fp8", "sign")
# "sign" is missing because it cannot encode zero, the value of an unused slot.
PAIR_CODECS = ("fp32", "bf16", "fp8", "int8", "int6", "int4", "int3", "int2")
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The length of a shard is a multiple of this number if a whole payload shares one scale.
LEAST_BLOCK = 64
# Number of values of pairs that share a scale.
_PAIR_BLOCK = 128


class Coding(ABC):
    """Encodes the elements of a flat tensor as one row of bytes, and decodes them.

    The interface of a codec for collectives. A coding compares equal on all ranks.
    """

    @property
    def align(self) -> int:
        """Divisor of the number of elements of a shard; 1 allows any number."""
        return 1

    @property
    def native(self) -> tuple[str, int] | None:
        """Format and block for the compiled collectives; None if only Python can run the coding."""
        return None

    @property
    def means_of_blocks(self) -> bool:
        """True if scales are mean magnitudes of blocks, so that padding in a block changes them."""
        return False

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Return the length of the payload of `numel` elements, which must not depend on data."""

    @abstractmethod
    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        residual_in: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Encode the sum of a tensor and a residual.

        Args:
            x_N: float32, bfloat16 or float16; not changed.
            residual_N: float32 [N], added to x, then overwritten with the exact encoding error.
                None adds nothing, and the encoding error is lost.
            residual_in: float32 [N], added to x instead of ``residual_N``, which is then
                write-only.
            rng_state: int64 [4], a stream of random numbers; given to codecs that round at random.
            first: the number of the first element in that stream; given with ``rng_state``.
        """

    @abstractmethod
    def decode_add_(
        self, out_N: Tensor, payload: Tensor, *, divisor: int = 1, overwrite: bool = False
    ) -> None:
        """Decode a payload of N elements, divide, and add to `out_N`, or overwrite it."""


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of 16, so that a part that follows can be viewed in any dtype."""
    return -(-num_bytes // 16) * 16


def joined(*parts: Tensor) -> Tensor:
    """Concatenate parts into one row of bytes, each padded to a multiple of 16 bytes."""
    rows = map(as_bytes, parts)
    padded = ((row, row.new_zeros(aligned(row.numel()) - row.numel())) for row in rows)
    return torch.cat([part for pair in padded for part in pair])


@dataclass(frozen=True)
class QuantizedCoding(Coding):
    """Payloads that hold the codes of `quantize_blockwise`, then the scales of the blocks.

    Args:
        format: one of `FORMATS`.
        block: number of elements that share a scale; None for one scale per payload.
    """

    format: str
    block: int | None

    @property
    def align(self) -> int:
        """See `Coding`."""
        return self.block or LEAST_BLOCK

    @property
    def native(self) -> tuple[str, int] | None:
        """See `Coding`."""
        return self.format, self.block or 0

    @property
    def means_of_blocks(self) -> bool:
        """See `Coding`."""
        return self.format == "sign"

    def payload_bytes(self, numel: int) -> int:
        """See `Coding`."""
        scale_bytes = 4 * num_scales(numel, self.block)
        return aligned(code_bytes(numel, self.format)) + aligned(scale_bytes)

    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        residual_in: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """See `Coding`."""
        codes, scales = torch.ops.moe_ext.quantize_blockwise(
            x_N,
            self.format,
            self.block or 0,
            residual_N,
            rng_state,
            False,
            residual_in=residual_in,
            element_offset=first,
        )
        return joined(codes, scales)

    def decode_add_(
        self, out_N: Tensor, payload: Tensor, *, divisor: int = 1, overwrite: bool = False
    ) -> None:
        """See `Coding`."""
        numel = out_N.numel()
        num_bytes = code_bytes(numel, self.format)
        codes, start = payload[:num_bytes], aligned(num_bytes)
        scale_bytes = 4 * num_scales(numel, self.block)
        scales = payload[start : start + scale_bytes].view(torch.float32)
        if divisor != 1:
            scales = scales / divisor
        torch.ops.moe_ext.dequantize_add_(
            out_N, codes, scales, self.format, self.block or 0, not overwrite
        )


@dataclass(frozen=True)
class PairCoding:
    """Payloads of K values with indices into N elements.

    Indices never descend; an unused slot repeats an index. Unlike the wire format of
    `moe_ext.ops.encode_gradient` a payload has no header. Indices are clamped into range as they
    are decoded, so that a damaged payload gives wrong sums but never writes outside the tensor.

    Args:
        count: K, number of pairs.
        numel: N, elements of the tensor.
        value_codec: one of `PAIR_CODECS`.
    """

    count: int
    numel: int
    value_codec: str = "fp32"

    @property
    def _values(self) -> QuantizedCoding:
        return QuantizedCoding(self.value_codec, _PAIR_BLOCK)

    @property
    def value_bytes(self) -> int:
        """Bytes of the values: codes and scales."""
        if self.value_codec in _PLAIN:
            return aligned(self.count * _PLAIN[self.value_codec].itemsize)
        return self._values.payload_bytes(self.count)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.value_bytes + packed_index_bytes(self.count, self.numel)

    def encode(self, values_K: Tensor, indices_K: Tensor) -> Tensor:
        """Encode pairs as a payload."""
        packed = torch.ops.moe_ext.pack_indices(indices_K, self.numel)
        if self.value_codec in _PLAIN:
            return joined(values_K.to(_PLAIN[self.value_codec]), packed)
        return joined(self._values.encode(values_K), packed)

    def _packed(self, payload: Tensor) -> Tensor:
        return payload[self.value_bytes : self.num_bytes]

    def values(self, payload: Tensor) -> Tensor:
        """Decode the values of a payload, as float32."""
        if self.value_codec in _PLAIN:
            dtype = _PLAIN[self.value_codec]
            return payload[: self.count * dtype.itemsize].view(dtype).to(torch.float32)
        found = torch.empty(self.count, device=payload.device, dtype=torch.float32)
        self._values.decode_add_(found, payload, overwrite=True)
        return found

    def indices(self, payload: Tensor) -> Tensor:
        """Decode the indices of a payload."""
        found: Tensor = torch.ops.moe_ext.unpack_indices(
            self._packed(payload), self.count, self.numel
        )
        return found

    def decode_add_(
        self, out: Tensor, payload: Tensor, *, divisor: int = 1, start: int = 0
    ) -> None:
        """Divide the values and add them to `out`, whose first element has the index `start`."""
        if self.count:
            values_K, packed = self.values(payload), self._packed(payload)
            torch.ops.moe_ext.add_pairs_(out, values_K, packed, self.numel, start, float(divisor))

    def add_lost_(self, residual_N: Tensor, payload: Tensor, values_K: Tensor) -> None:
        """Add the encoding error of the values to the residual."""
        if self.count and self.value_codec != "fp32":
            lost_K = values_K - self.values(payload)
            torch.ops.moe_ext.add_pairs_(
                residual_N, lost_K, self._packed(payload), self.numel, 0, 1.0
            )
