"""Codecs that sum gradients unchanged: all elements, non-zero blocks, or losslessly compressed.

Shape suffixes: N elements of a flat gradient, B non-zero blocks, or B bytes of a payload.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_choice, check_rule
from moe_ext.comm import collectives
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.comm.pending import Pending
from moe_ext.compression.codecs.base import Calls, Codec, OnNonfinite, StartOptions, nothing_to_do
from moe_ext.compression.collectives.exact import bitmap_bytes, block_sparse_all_reduce_
from moe_ext.compression.collectives.lossless import DTYPES as LOSSLESS_DTYPES
from moe_ext.compression.collectives.lossless import start_all_reduce
from moe_ext.compression.collectives.quantized import shard_numel
from moe_ext.compression.feedback import CodecMemory

# Share of the bytes of float32 that `Lossless` sends for normally distributed numbers.
_SHARE = 26.8 / 32
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Dense(Codec):
    """A plain all-reduce.

    Args:
        dtype: "fp32" sends a gradient unchanged; "bf16" and "fp16" round it before it is sent.
    """

    feeds_back: ClassVar[bool] = False
    plain: ClassVar[bool] = True

    dtype: str = "fp32"

    def __post_init__(self) -> None:
        check_choice("Dense", "dtype", self.dtype, tuple(_DTYPES))

    @property
    def name(self) -> str:
        """See `Codec`."""
        return "none" if self.dtype == "fp32" else self.dtype

    @property
    def lossy(self) -> bool:
        """See `Codec`."""
        return self.dtype != "fp32"

    @property
    def finds_nonfinite(self) -> bool:
        """See `Codec`. False for "fp16": the caller searches for numbers that overflow in it."""
        return self.dtype != "fp16"

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """See `Codec`."""
        return torch.float16 if self.dtype == "fp16" else None

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        return collectives.all_reduce_bytes(numel * (2 if self.lossy else 4), world_size)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 2 * (world_size - 1)

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `Codec`."""
        memory.take_owed(grad_N)
        return dense_reduction(grad_N, how.group, how.average, self.dtype, how.on_nonfinite)

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""
        dtype = _DTYPES[self.dtype]
        if dtype is None:
            return nothing_to_do()
        looks = grad_N.device.type == "cpu" and self.finds_nonfinite
        how = (lambda _: None) if looks else None
        encode = functools.partial(_to_send, grad_N, dtype, 0.5, how)
        sent_N, out_N = encode(), torch.empty_like(grad_N)
        return encode, lambda: ops.scale_into_(out_N, sent_N, scale=1.0)

    def skipping_zeros(self) -> Codec:
        """See `Codec`."""
        return self if self.lossy else BlockSparse("row")


def _to_send(
    x_N: Tensor, dtype: torch.dtype, factor: float, on_nonfinite: OnNonfinite | None
) -> Tensor:
    """Round and scale a gradient for sending; in place if it already has the dtype."""
    if on_nonfinite is None:
        # Rounding comes before scaling, as in torch's hooks, so that the same numbers overflow.
        sent_N = x_N.to(dtype)
        return sent_N if factor == 1.0 else sent_N.mul_(factor)
    sent_N = x_N if x_N.dtype == dtype else torch.empty_like(x_N, dtype=dtype)
    if bool(ops.scale_into_(sent_N, x_N, scale=factor)):
        on_nonfinite(sent_N)
        # NaN in the first element of the sum tells every rank without a search.
        sent_N[0] = math.nan
    return sent_N


def dense_reduction(
    x_N: Tensor,
    group: ProcessGroup | None,
    average: bool,
    dtype: str = "fp32",
    on_nonfinite: OnNonfinite | None = None,
) -> Pending[Tensor]:
    """Start an all-reduce. For a mean, x is scaled before it is sent, as DDP does.

    Args:
        x_N: overwritten with the result.
        group: the ranks.
        average: take the mean; if False, the sum.
        dtype: as `Dense`.
        on_nonfinite: see `OnNonfinite`. If it is called, the first element of the result is NaN on
            every rank. None does not look.
    """
    operation = f"all-reduce in {dtype}"
    group = resolve_group(group, operation)
    size = group_size(group)
    sent = _DTYPES[dtype] or x_N.dtype
    # A sum may overflow in float16 although each number fits. The ranks then reduce the mean, and
    # multiply it by their number on arrival.
    back = size if sent == torch.float16 and x_N.dtype != sent and not average else 1
    factor = 1.0 / size if average or back > 1 else 1.0
    sent_N = _to_send(x_N, sent, factor, on_nonfinite)

    def finish(sum_N: Tensor) -> Tensor:
        if sum_N is not x_N:
            ops.scale_into_(x_N, sum_N, scale=back)
        return x_N

    return collectives.start_all_reduce_(sent_N, group, operation=operation, finish=finish)


@dataclass(frozen=True)
class BlockSparse(Codec):
    """Sends only blocks that are non-zero on at least one rank; exact.

    Args:
        block: elements of a block; "row" makes a block of each index of the first dimension of a
            parameter, which is a row of an embedding or one of several experts.
    """

    name: ClassVar[str] = "block_sparse"
    lossy: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False
    skips_zeros: ClassVar[bool] = True

    block: int | str = 256

    def __post_init__(self) -> None:
        block = self.block
        counts = isinstance(block, Integral) and not isinstance(block, bool) and block >= 1
        check_rule("BlockSparse", "block", block, "'row' or at least 1", block == "row" or counts)

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`; an upper bound, because the true number depends on the gradient."""
        block = 256 if isinstance(self.block, str) else self.block
        bitmap = (world_size - 1) * bitmap_bytes(numel, block)
        return Dense().sent_bytes(numel, world_size) + bitmap

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 3 * (world_size - 1)

    def _block_of(self, memory: CodecMemory) -> int:
        """Return the elements of a block."""
        if not isinstance(self.block, str):
            return self.block
        shape = memory.shapes[0]
        return max(1, memory.sizes[0] // max(1, shape[0])) if len(shape) else 1

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `Codec`."""
        # A residual may be non-zero in blocks that the gradient's bitmap does not mark.
        bitmap = None if memory.take_owed(grad_N) else memory.bitmap
        found = block_sparse_all_reduce_(
            grad_N,
            block=self._block_of(memory),
            bitmap=bitmap,
            group=how.group,
            average=how.average,
            validate=False,
            async_op=True,
        )
        assert isinstance(found, Pending)
        return found

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""
        block, out_N = self._block_of(memory), torch.empty_like(grad_N)

        def encode() -> tuple[Tensor, Tensor]:
            block_idx_B = ops.block_indices(ops.nonzero_blocks(grad_N, block=block))
            return ops.gather_blocks(grad_N, block_idx_B, block=block), block_idx_B

        packed = encode()
        return encode, lambda: ops.scatter_blocks_(out_N, *packed, block=block)

    def keeping_zeros(self) -> Codec:
        """See `Codec`."""
        return Dense()

    def find_zeros(
        self, grad_N: Tensor, memory: CodecMemory, reached: Callable[[], Tensor | None]
    ) -> float:
        """See `Codec`.

        Rows that the router has not reached are searched as well, because a penalty on the weights
        or another layer that shares them may add to their gradients.
        """
        block = self._block_of(memory)
        knows = self.block == "row" and memory.packing.window is None
        bitmap = reached() if knows else None
        num_blocks = -(-grad_N.numel() // block)
        if bitmap is None or ops.block_indices(bitmap).numel() < num_blocks:
            # The search of a block ends at its first non-zero element.
            seen = ops.nonzero_blocks(grad_N, block=block)
            bitmap = seen if bitmap is None else bitmap | seen
        memory.bitmap = bitmap
        return ops.block_indices(bitmap).numel() / max(num_blocks, 1)


@dataclass(frozen=True)
class Lossless(Codec):
    """Sends every bit, with exponents in two or three bits instead of eight.

    Messages take 0.84 of the bytes of float32, 0.86 of float16, 0.67 of bfloat16. The sum is that
    of `lossless_all_reduce_`. Float64 is reduced as by `Dense`.
    """

    name: ClassVar[str] = "lossless"
    lossy: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False
    linear: ClassVar[bool] = True

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`; an estimate for normally distributed float32, as lengths depend on data."""
        if world_size == 1:
            return 0
        payload = int(4 * _SHARE * shard_numel(numel, world_size, 1)) + 64
        return 2 * (world_size - 1) * (payload + 8)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 0 if world_size == 1 else 4

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `Codec`."""
        memory.take_owed(grad_N)
        if grad_N.dtype not in LOSSLESS_DTYPES:
            return dense_reduction(grad_N, how.group, how.average)
        return start_all_reduce(grad_N, how.group, how.average, operation="Lossless")

    def passes(self, world_size: int) -> tuple[float, float]:
        """See `Codec`: a rank decodes P - 1 shards of N / P elements, then P - 1 sums of shards."""
        return 1.0, 2.0 * (world_size - 1) / world_size

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""
        if grad_N.dtype not in LOSSLESS_DTYPES:
            return nothing_to_do()
        rows_1B, num_bytes_1 = ops.encode_exponent_rows(grad_N, 1)
        payload_B, out_N = rows_1B[0, : int(num_bytes_1)], torch.empty_like(grad_N)
        return (
            lambda: ops.encode_exponent_rows(grad_N, 1),
            lambda: ops.decode_exponent_row_(out_N, payload_B, num_bytes_1),
        )
