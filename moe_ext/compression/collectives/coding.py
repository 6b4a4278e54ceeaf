"""Payloads: tensors as rows of bytes, of a size that both ends know beforehand.

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
# Signs cannot say that a slot is unused.
PAIR_CODECS = ("fp32", "bf16", "fp8", "int8", "int6", "int4", "int3", "int2")
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Elements that a shard is a multiple of where all of a payload share a scale.
LEAST_BLOCK = 64
# Values of pairs that share a scale.
_PAIR_BLOCK = 128


class Coding(ABC):
    """Turns the elements of a flat tensor into one row of bytes, and back.

    A value that is equal on all ranks; what collectives ask of a codec.
    """

    @property
    def align(self) -> int:
        """A shard of a tensor is a whole number of so many elements; 1 for any."""
        return 1

    @property
    def native(self) -> tuple[str, int] | None:
        """Format and block of `QuantizedCoding`, where the compiled collectives do the same."""
        return None

    @property
    def means_of_blocks(self) -> bool:
        """True if codes are signs and scales mean magnitudes, in which padding counts."""
        return False

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Length of the payload of so many elements: it depends on nothing else."""

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
        """The payload of a tensor plus what is owed.

        Args:
            x_N: float32, bfloat16 or float16; not changed.
            residual_N: float32 [N], overwritten with what the payload leaves out, exactly; it is
                added to x before. None: what is left out is lost.
            residual_in: float32 [N], added to x in the place of ``residual_N``, which is only
                written then.
            rng_state: int64 [4], a stream of random numbers; given to codecs that round at random.
            first: the number of the first element in that stream; given with it.
        """

    @abstractmethod
    def decode_add_(
        self, out_N: Tensor, payload: Tensor, *, divisor: int = 1, overwrite: bool = False
    ) -> None:
        """Add what a payload of N elements stands for, divided, or overwrite with it."""


def aligned(num_bytes: int) -> int:
    """Up to the next multiple of 16, so that parts can be read as numbers."""
    return -(-num_bytes // 16) * 16


def joined(*parts: Tensor) -> Tensor:
    """One row of bytes of some parts, each padded to 16."""
    rows = map(as_bytes, parts)
    padded = ((row, row.new_zeros(aligned(row.numel()) - row.numel())) for row in rows)
    return torch.cat([part for pair in padded for part in pair])


@dataclass(frozen=True)
class QuantizedCoding(Coding):
    """Blocks of elements that share a scale: the codes of `quantize_blockwise`, then the scales.

    Args:
        format: one of `FORMATS`.
        block: elements that share a scale; None for all of a payload.
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
    """K values with indices into N elements, which never descend and may repeat (unused slots).

    Unlike the wire format of `moe_ext.ops.encode_gradient` a payload has no header. Its numbers are
    brought into range as they are read: a foreign payload gives wrong numbers, never a write
    elsewhere.

    Args:
        count: K, values.
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
        """Codes and scales."""
        if self.value_codec in _PLAIN:
            return aligned(self.count * _PLAIN[self.value_codec].itemsize)
        return self._values.payload_bytes(self.count)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.value_bytes + packed_index_bytes(self.count, self.numel)

    def encode(self, values_K: Tensor, indices_K: Tensor) -> Tensor:
        """The payload of pairs."""
        packed = torch.ops.moe_ext.pack_indices(indices_K, self.numel)
        if self.value_codec in _PLAIN:
            return joined(values_K.to(_PLAIN[self.value_codec]), packed)
        return joined(self._values.encode(values_K), packed)

    def _packed(self, payload: Tensor) -> Tensor:
        return payload[self.value_bytes : self.num_bytes]

    def values(self, payload: Tensor) -> Tensor:
        """Values of a payload, float32."""
        if self.value_codec in _PLAIN:
            dtype = _PLAIN[self.value_codec]
            return payload[: self.count * dtype.itemsize].view(dtype).to(torch.float32)
        found = torch.empty(self.count, device=payload.device, dtype=torch.float32)
        self._values.decode_add_(found, payload, overwrite=True)
        return found

    def indices(self, payload: Tensor) -> Tensor:
        """Indices of a payload."""
        found: Tensor = torch.ops.moe_ext.unpack_indices(
            self._packed(payload), self.count, self.numel
        )
        return found

    def decode_add_(
        self, out: Tensor, payload: Tensor, *, divisor: int = 1, start: int = 0
    ) -> None:
        """Add the values, divided, to elements of which the first is that with index `start`."""
        if self.count:
            values_K, packed = self.values(payload), self._packed(payload)
            torch.ops.moe_ext.add_pairs_(out, values_K, packed, self.numel, start, float(divisor))

    def add_lost_(self, residual_N: Tensor, payload: Tensor, values_K: Tensor) -> None:
        """Add what a payload has lost of its values."""
        if self.count and self.value_codec != "fp32":
            lost_K = values_K - self.values(payload)
            torch.ops.moe_ext.add_pairs_(
                residual_N, lost_K, self._packed(payload), self.numel, 0, 1.0
            )
