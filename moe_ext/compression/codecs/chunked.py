"""Codec that keeps the largest elements of each chunk, of the gradient or of its cosine transform.

Shape suffixes: C chunks of L elements, k of them kept in each chunk, N elements.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext._checks import check_numbers_of_fields, check_rule
from moe_ext.compression.codecs.base import PayloadCodec
from moe_ext.compression.masks import unpacked_bits

_MOST_TRANSFORMED = 1024


@dataclass(frozen=True)
class ChunkedTopK(PayloadCodec):
    """Sends the k largest elements of each chunk, in 2 bits or float32, with error feedback.

    A chunk of L elements takes k ceil(log2 L) / 8 bytes for places. With 32 bits its values take
    4 k bytes. With 2 bits they take 2 k / 8 + 4 bytes: each value is a sign and one of two
    magnitudes, and a chunk has both magnitudes in bfloat16. The residual is multiplied by `decay`
    before the gradient is added, which makes it a momentum. SparseLoCo and DeMo use it as theirs.

    Args:
        k: elements kept of a chunk.
        chunk: L; the last chunk is padded with zeros.
        bits: bits of a value, 2 or 32.
        dct: keep the largest coefficients of the orthonormal cosine transform (DCT-II) of each
            chunk, which may then have at most 1024 elements.
        decay: factor on the residual in each step.

    Raises:
        ValueError: an argument is out of its range.

    Reference: SparseLoCo (arXiv 2508.15706); DeMo (arXiv 2411.19870).
    """

    name: ClassVar[str] = "chunked_topk"
    shardable: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = True

    k: int = 64
    chunk: int = 4096
    bits: int = 2
    dct: bool = False
    decay: float = 1.0

    def __post_init__(self) -> None:
        check_numbers_of_fields(self)
        most = _MOST_TRANSFORMED if self.dct else 65536
        k, chunk, owner = self.k, self.chunk, "ChunkedTopK"
        check_rule(owner, "chunk", chunk, f"in [2, {most}]", 2 <= chunk <= most)
        check_rule(owner, "k", k, f"in [1, {chunk}]", 1 <= k <= chunk)
        check_rule(owner, "bits", self.bits, "2 or 32", self.bits in (2, 32))
        check_rule(owner, "decay", self.decay, "in [0, 1]", 0.0 <= self.decay <= 1.0)

    def _sizes(self, numel: int) -> tuple[int, int, int]:
        """Return the bytes of a payload's places, of its codes or values, and of its magnitudes."""
        chunks = -(-numel // self.chunk)
        count = chunks * self.k
        places = math.ceil(count * self._width / 8)
        if self.bits == 32:
            return places, 4 * count, 0
        return places, math.ceil(count / 4), 4 * chunks

    @property
    def _width(self) -> int:
        return (self.chunk - 1).bit_length()

    def payload_bytes(self, numel: int) -> int:
        """See `PayloadCodec`."""
        return sum(self._sizes(numel))

    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        """See `PayloadCodec`."""
        total_N = x_N.float()
        if residual_N is not None:
            total_N = torch.add(total_N, residual_N, alpha=self.decay)
        padded = torch.nn.functional.pad(total_N, (0, -total_N.numel() % self.chunk))
        found_CL = padded.view(-1, self.chunk)
        if self.dct:
            found_CL = found_CL @ _cosines(self.chunk, total_N.device).T
        # Places are sorted so that equal inputs have equal payloads.
        places_Ck = found_CL.abs().topk(self.k, dim=1).indices.sort(dim=1).values
        values_Ck = found_CL.gather(1, places_Ck)
        payload = torch.cat([_pack(places_Ck.flatten(), self._width), *self._coded(values_Ck)])
        if residual_N is not None:
            residual_N.copy_(total_N)
            self._add(residual_N, payload, -1.0)
        return payload

    def _coded(self, values_Ck: Tensor) -> list[Tensor]:
        if self.bits == 32:
            return [as_bytes(values_Ck)]
        sizes_Ck = values_Ck.abs()
        large_Ck = sizes_Ck > sizes_Ck.mean(dim=1, keepdim=True)
        means_2C = torch.stack([_mean_of(sizes_Ck, ~large_Ck), _mean_of(sizes_Ck, large_Ck)])
        codes_Ck = large_Ck.long() + 2 * (values_Ck < 0).long()
        magnitudes = as_bytes(means_2C.bfloat16())
        return [_pack(codes_Ck.flatten(), 2), magnitudes]

    def decode_add_(self, out_N: Tensor, payload: Tensor) -> None:
        """See `PayloadCodec`."""
        self._add(out_N, payload, 1.0)

    def _add(self, out_N: Tensor, payload: Tensor, factor: float) -> None:
        chunks = -(-out_N.numel() // self.chunk)
        places, codes, magnitudes = payload.split(self._sizes(out_N.numel()))
        # Places come from another rank. One past the end of the chunk would be written out of
        # bounds.
        places_Ck = _unpack(places, chunks * self.k, self._width).view(chunks, self.k)
        places_Ck = places_Ck.clamp(max=self.chunk - 1)
        if self.bits == 32:
            values_Ck = codes.clone().view(torch.float32).view(chunks, self.k)
        else:
            codes_Ck = _unpack(codes, chunks * self.k, 2).view(chunks, self.k)
            means_2C = magnitudes.clone().view(torch.bfloat16).float().view(2, chunks)
            values_Ck = means_2C.T.gather(1, codes_Ck & 1)
            values_Ck = torch.where(codes_Ck >= 2, -values_Ck, values_Ck)
        dense_CL = out_N.new_zeros((chunks, self.chunk), dtype=torch.float32)
        dense_CL.scatter_(1, places_Ck, values_Ck)
        if self.dct:
            dense_CL = dense_CL @ _cosines(self.chunk, out_N.device)
        out_N.add_(dense_CL.view(-1)[: out_N.numel()], alpha=factor)


def _mean_of(sizes_Ck: Tensor, mask_Ck: Tensor) -> Tensor:
    """Return the mean of the marked elements of each row; 0 for a row without any."""
    return (sizes_Ck * mask_Ck).sum(dim=1) / mask_Ck.sum(dim=1).clamp(min=1)


@functools.lru_cache(maxsize=8)
def _cosines(length: int, device: torch.device) -> Tensor:
    """Return the matrix of the orthonormal DCT-II: the coefficients of x are `matrix @ x`."""
    row = torch.arange(length, dtype=torch.float64)
    matrix = torch.cos(math.pi / length * row[:, None] * (row + 0.5)) * math.sqrt(2 / length)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


def _pack(numbers_n: Tensor, width: int) -> Tensor:
    """Pack the lowest `width` bits of each number, the lowest bit first."""
    bits = (numbers_n[:, None] >> torch.arange(width, device=numbers_n.device)) & 1
    return ops.pack_bits(bits)


def _unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Unpack `count` numbers of `_pack`, as int64."""
    rows = unpacked_bits(packed, count * width).view(count, width).long()
    return (rows << torch.arange(width, device=packed.device)).sum(dim=1)
