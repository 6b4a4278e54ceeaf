"""Codecs with few bits per element.

Shape suffixes: N elements of a flat gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext._checks import check_choice, check_numbers_of_fields, check_rule
from moe_ext.compression.codecs.base import PayloadCodec
from moe_ext.compression.collectives.coding import (
    FORMATS,
    Coding,
    QuantizedCoding,
    aligned,
    joined,
)
from moe_ext.compression.collectives.quantized import BLOCKS


@dataclass(frozen=True)
class Rounded(Coding, PayloadCodec):
    """Sends bfloat16 and sums in float32, with error feedback. `Dense("bf16")` sums in bfloat16.

    Args:
        feedback: keep the rounding error in the residual.
    """

    name: ClassVar[str] = "bf16"

    feedback: bool = True

    @property
    def feeds_back(self) -> bool:
        """See `Codec`."""
        return self.feedback

    def payload_bytes(self, numel: int) -> int:
        """See `Coding`."""
        return aligned(2 * numel)

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
        owed_N = residual_N if residual_in is None else residual_in
        whole_N = x_N if owed_N is None else x_N + owed_N
        sent_N = whole_N.bfloat16()
        if residual_N is not None:
            torch.sub(whole_N, sent_N, out=residual_N)
        return joined(sent_N)

    def decode_add_(
        self, out_N: Tensor, payload: Tensor, *, divisor: int = 1, overwrite: bool = False
    ) -> None:
        """See `Coding`."""
        found_N = payload[: 2 * out_N.numel()].view(torch.bfloat16).float() / divisor
        out_N.copy_(found_N) if overwrite else out_N.add_(found_N)


@dataclass(frozen=True)
class Quantize(QuantizedCoding, PayloadCodec):
    """Sends blocks of few bits with one scale each; the owner of a shard sums in float32.

    Args:
        format: "int8", "int6", "int4", "int3", "int2", "fp8" (e4m3) or "sign".
        block: elements that share a scale, a power of two from 64 to 1024; None for one scale per
            payload (see `quantized_all_reduce_`), not for signs.
        stochastic: round up or down at random, without bias, instead of to the nearest.
        feedback: keep the rounding errors, those of this rank and those of its shard of the sum,
            and send them with the next gradient. If False, no residual is stored and the errors
            are lost.
    """

    format: str = "int8"
    block: int | None = 256
    stochastic: bool = False
    feedback: bool = True

    def __post_init__(self) -> None:
        check_numbers_of_fields(self)
        check_choice("Quantize", "format", self.format, FORMATS)
        blocks = BLOCKS if self.format == "sign" else (None, *BLOCKS)
        check_choice("Quantize", "block", self.block, blocks)
        rule = "False for signs, which have no neighbours to choose from"
        fits = self.format != "sign" or not self.stochastic
        check_rule("Quantize", "stochastic", True, rule, fits)

    @property
    def name(self) -> str:
        """See `Codec`."""
        return "onebit" if self.format == "sign" else self.format

    @property
    def feeds_back(self) -> bool:
        """See `Codec`."""
        return self.feedback

    @property
    def finds_nonfinite(self) -> bool:
        """See `Codec`. NaN and infinity show in the residuals, so these are needed."""
        return self.feedback

    @property
    def needs_feedback(self) -> bool:
        """See `PayloadCodec`."""
        return self.format == "sign"


@dataclass(frozen=True)
class Outliers(PayloadCodec):
    """Sends the largest elements exactly, and few bits per element for the rest.

    For weights, of which few are large. Without the large elements the scale of a block is smaller,
    and so is the error of the other elements.

    Args:
        format: format of the rest, as `Quantize`, except "sign".
        fraction: share of the elements that are exact, in (0, 1).
        block: elements that share a scale.

    Reference: Dettmers et al., SpQR, 2023 (arXiv 2306.03078).
    """

    feeds_back: ClassVar[bool] = True

    format: str = "int4"
    fraction: float = 0.005
    block: int = 128

    def __post_init__(self) -> None:
        check_numbers_of_fields(self)
        formats = tuple(format for format in FORMATS if format != "sign")
        check_choice("Outliers", "format", self.format, formats)
        check_choice("Outliers", "block", self.block, BLOCKS)
        check_rule("Outliers", "fraction", self.fraction, "in (0, 1)", 0 < self.fraction < 1)

    @property
    def name(self) -> str:
        """See `Codec`."""
        return f"{self.format}+outliers"

    @property
    def align(self) -> int:
        """See `PayloadCodec`."""
        return self.block

    def _count(self, numel: int) -> int:
        return min(numel, math.ceil(self.fraction * numel))

    def payload_bytes(self, numel: int) -> int:
        """See `PayloadCodec`."""
        count = self._count(numel)
        rest = QuantizedCoding(self.format, self.block).payload_bytes(numel)
        return rest + aligned(4 * count) + ops.packed_index_bytes(count, numel)

    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        """See `PayloadCodec`."""
        numel = x_N.numel()
        rest_N = x_N.new_zeros(numel, dtype=torch.float32) if residual_N is None else residual_N
        values, indices = ops.topk_compress_(x_N.float(), rest_N, self._count(numel))
        coding = QuantizedCoding(self.format, self.block)
        codes = coding.encode(rest_N)
        if residual_N is not None:
            coding.decode_add_(residual_N, codes, divisor=-1)
        padded = torch.nn.functional.pad(as_bytes(values), (0, -4 * len(values) % 16))
        return torch.cat([codes, padded, ops.pack_indices(indices, numel)])

    def decode_add_(self, out_N: Tensor, payload: Tensor) -> None:
        """See `PayloadCodec`."""
        numel, count = out_N.numel(), self._count(out_N.numel())
        coding = QuantizedCoding(self.format, self.block)
        start = coding.payload_bytes(numel)
        coding.decode_add_(out_N, payload[:start])
        values = payload[start : start + 4 * count].clone().view(torch.float32)
        packed = payload[start + aligned(4 * count) :].clone()
        ops.add_pairs_(out_N, values, packed, numel)


@dataclass(frozen=True)
class OneBit(Quantize):
    """Sends signs and the mean magnitude of each block, with error feedback.

    For momentum rather than for gradients of Adam (see `moe_ext.optim.OneBitAdam`).

    Args:
        block: elements that share a magnitude.
    """

    format: str = field(default="sign", init=False, repr=False)
    block: int | None = 256
    stochastic: bool = field(default=False, init=False, repr=False)
    feedback: bool = field(default=True, init=False, repr=False)
