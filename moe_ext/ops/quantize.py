"""Block quantisers with error feedback, and rows that carry their scales.

Shape suffixes: N elements, B blocks of neighbouring elements; of rows: N rows, D columns, B bytes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext.ops.fakes import register_fake_like

# Bits of a code in each format.
CODE_BITS = {"int8": 8, "int6": 6, "int4": 4, "int3": 3, "int2": 2, "sign": 1, "fp8": 8}
# For each format of rows: elements of a row that share a scale, and bytes of a scale.
ROW_SCALES = {"int8": (128, 4), "fp8": (128, 4), "mx": (32, 1)}
_FORMATS = {bits: format for format, bits in CODE_BITS.items() if format != "fp8"}


class QuantizedBlocks(NamedTuple):
    """Codes and scales of a tensor.

    Attributes:
        codes (Tensor): uint8. Codes of q bits follow each other without gaps, the lowest bit first:
            element i has the bits q i to q i + q - 1, where bit b is bit b % 8 of byte b // 8.
            Eight elements take q bytes. Integers are two's complement, fp8 is e4m3fn, a sign is 1
            for negative; bits that are left in the last byte are zero.
        scales (Tensor[B]): float32, the value of a code of one.
    """

    codes: Tensor
    scales: Tensor


def format_of(op: str, bits: int, format: str | None) -> str:
    """Return the named format, or that of a number of bits; raise a ValueError for others."""
    if format is not None:
        return format
    if bits not in _FORMATS:
        raise ValueError(f"{op}: expected bits to be one of {tuple(_FORMATS)}, got {bits!r}")
    return _FORMATS[bits]


def quantize_blockwise(
    x: Tensor,
    *,
    bits: int = 8,
    block: int | None = 128,
    format: str | None = None,
    residual: Tensor | None = None,
    rng_state: Tensor | None = None,
    check_finite: bool = True,
    residual_in: Tensor | None = None,
    element_offset: int = 0,
) -> QuantizedBlocks:
    r"""Codes blocks of neighbouring elements with a scale each, and keeps the error.

    .. math::
        a = e + x,\quad s = \max |a| / c,\quad q = \mathrm{round}(a / s),\quad e \leftarrow a - s q

    with :math:`c = 2^{bits - 1} - 1` (127, 31, 7, 3 and 1 for 8, 6, 4, 3 and 2 bits) and 448 for
    fp8. Two bits are the ternary numbers -1, 0 and 1. Rounded to the nearest, an element is off by
    at most :math:`s / 2 = \max |a| / 2 c`, at random by less than :math:`s`. Signs are 1 bit:
    :math:`s` is the mean of :math:`|a|` and :math:`q = \pm 1`, so that signs need a residual. A
    block of zeros has scale 0 and comes back as zeros.

    Args:
        x (Tensor[N]): float32, bfloat16 or float16, of any shape; not changed.
        bits (int): 8, 6, 4, 3, 2 or 1: the formats "int8" to "int2", and "sign".
        block (int or None): elements of a block, a power of two from 64 to 1024; the last may be
            shorter. None is one scale for the whole tensor, which is then read once more. Signs do
            not take None, because their scale is the mean of a block.
        format (str): one of the names above, or "fp8" (e4m3fn); overrides ``bits``.
        residual (Tensor[N]): e, float32, contiguous, of the shape of x; changed in place. Without
            it :math:`a = x` and the error is lost.
        rng_state (Tensor[4]): int64 ``(seed, tensor, step, rank)``: rounds up or down at random,
            so that the expectation is exact (Philox, stream 5, column = element, see
            `routing_uniform`); None rounds to the nearest, ties to even.
        check_finite (bool): look for NaN and infinity before a residual is changed in place, which
            reads everything once more. If False, a block that holds one is not refused. On a CPU
            the block comes back as NaN, and the residual keeps all of its :math:`a`.
        residual_in (Tensor[N]): e is read here, and not changed. ``residual``, in memory of its
            own, is only written, whatever was in it. The check is then part of the pass, and a
            caller that may have to undo the step need not copy the residual first.
        element_offset (int): number of the first element in the stream of random numbers, a
            multiple of ``block`` (of 1024 for None). Pieces of a tensor then give the codes of the
            whole, if each block has its scale.

    Returns:
        QuantizedBlocks: codes and scales.

    Raises:
        ValueError: an unknown number of bits.
        RuntimeError: an argument has the wrong device, dtype, shape or value; with
            ``check_finite``, an element of :math:`a` is NaN or infinite (the message names the
            first). The tensor that e was read from has not changed then. With ``residual_in``,
            ``residual`` may hold anything.

    Deterministic, with the same bits for any number of threads and every instruction set.

    Reference: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022 (arXiv
    2110.02861); Micikevicius et al., FP8 Formats for Deep Learning, 2022 (arXiv 2209.05433); Wen
    et al., TernGrad, 2017 (arXiv 1705.07878);
    Seide et al., 1-bit SGD, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019 (arXiv
    1901.09847), algorithm 1.
    """
    name = format_of("quantize_blockwise", bits, format)
    found = torch.ops.moe_ext.quantize_blockwise(
        x,
        name,
        block or 0,
        residual,
        rng_state,
        check_finite,
        residual_in=residual_in,
        element_offset=element_offset,
    )
    if residual is not None:
        torch.autograd.graph.increment_version(residual)
    return QuantizedBlocks(*found)


def code_bytes(numel: int, format: str) -> int:
    """Return the bytes of the codes of `numel` elements."""
    return (numel * CODE_BITS[format] + 7) // 8


def num_scales(numel: int, block: int | None) -> int:
    """Return the number of scales of `numel` elements."""
    return (numel + block - 1) // block if block else min(numel, 1)


@torch.library.register_fake("moe_ext::quantize_blockwise")
def _(x: Tensor, format: str, block: int, *_rest: Any, **_options: Any) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((code_bytes(x.numel(), format),), dtype=torch.uint8)
    return codes, x.new_empty((num_scales(x.numel(), block),), dtype=torch.float32)


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    numel: int,
    *,
    bits: int = 8,
    block: int | None = 128,
    format: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the numbers that the codes of `quantize_blockwise` stand for.

    Args:
        codes (Tensor): uint8, as `quantize_blockwise` returns them.
        scales (Tensor[B]): float32.
        numel (int): N.
        bits (int): as given to `quantize_blockwise`.
        block (int or None): as given to `quantize_blockwise`.
        format (str): as given to `quantize_blockwise`.
        dtype (torch.dtype): float32, bfloat16 or float16.

    Returns:
        Tensor[N]: code times scale, rounded once.

    Raises:
        ValueError: an unknown number of bits.
        RuntimeError: an argument has the wrong device, dtype, size or value.

    Deterministic.
    """
    name = format_of("dequantize_blockwise", bits, format)
    return torch.ops.moe_ext.dequantize_blockwise(codes, scales, numel, name, block or 0, dtype)


@torch.library.register_fake("moe_ext::dequantize_blockwise")
def _(
    codes: Tensor,
    scales: Tensor,
    numel: int,
    format: str,
    block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return codes.new_empty((numel,), dtype=dtype)


def dequantize_add_(
    out: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    bits: int = 8,
    block: int | None = 128,
    format: str | None = None,
    accumulate: bool = True,
) -> None:
    """Adds the result of `dequantize_blockwise` to a tensor, without memory for that result.

    Args:
        out (Tensor): float32, bfloat16 or float16, contiguous, of any shape; changed in place.
        codes (Tensor): as `dequantize_blockwise`, of as many elements.
        scales (Tensor[B]): as `dequantize_blockwise`.
        bits (int): as `dequantize_blockwise`.
        block (int or None): as `dequantize_blockwise`.
        format (str): as `dequantize_blockwise`.
        accumulate (bool): False overwrites the tensor.

    Raises:
        ValueError: an unknown number of bits.
        RuntimeError: an argument has the wrong device, dtype, size or value.

    Deterministic.
    """
    name = format_of("dequantize_add_", bits, format)
    torch.ops.moe_ext.dequantize_add_(out, codes, scales, name, block or 0, accumulate)
    torch.autograd.graph.increment_version(out)


register_fake_like("moe_ext::dequantize_add_")


def quantize_rows(x: Tensor, format: str) -> Tensor:
    r"""Codes each row of a matrix into a row of bytes, which has its codes and scales.

    A row of D elements becomes D bytes of codes, followed by the scales of its blocks. The last
    block may be shorter.

    - "int8", "fp8": :math:`D + 4 \lceil D / 128 \rceil` bytes. Codes and scales of 128 elements are
      those of `quantize_blockwise`; a scale is a float32 of the machine.
    - "mx": :math:`D + \lceil D / 32 \rceil` bytes, MXFP8 of the OCP: fp8 (e4m3fn) codes with a
      power of two as scale, of which the byte is the exponent plus 127 (e8m0). The scale is the
      least by which the block's largest element is at most 448, so that no element is cut off.

    Codes are rounded to the nearest, ties to even. With :math:`m = \max |x|` of the block, an
    element is off by at most :math:`m / 254` for "int8". For "fp8" and "mx" it is off by 1/16 of
    itself, or where that is less by :math:`m / 2^{18}` and :math:`m / 2^{17}`. A block with a NaN
    or an infinity comes back as NaN, all of it, and no other block does.

    Args:
        x (Tensor[N, D]): float32, bfloat16 or float16.
        format (str): "int8", "fp8" or "mx".

    Returns:
        Tensor[N, B]: uint8. Not differentiable.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value.

    Deterministic, with the same bits for any number of threads, every instruction set and device. A
    row's bytes do not depend on the other rows.

    Reference: OCP Microscaling Formats (MX) Specification v1.0, 2023; Rouhani et al., Microscaling
    Data Formats for Deep Learning, 2023 (arXiv 2310.10537); for the scale that cuts nothing off,
    Mishra et al., Recipes for Pre-training LLMs with MXFP8, 2025 (arXiv 2506.08027).
    """
    return torch.ops.moe_ext.quantize_rows(x, format)


def row_bytes(dim: int, format: str) -> int:
    """Return the bytes of a row of `dim` elements."""
    block, size = ROW_SCALES[format]
    return dim + num_scales(dim, block) * size


@torch.library.register_fake("moe_ext::quantize_rows")
def _(x: Tensor, format: str) -> Tensor:
    return x.new_empty((x.shape[0], row_bytes(x.shape[1], format)), dtype=torch.uint8)


def dequantize_rows(
    rows: Tensor, dim: int, format: str, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns the numbers that the rows of `quantize_rows` stand for.

    Args:
        rows (Tensor[N, B]): uint8, as `quantize_rows` returns them.
        dim (int): D.
        format (str): as given to `quantize_rows`.
        dtype (torch.dtype): float32, bfloat16 or float16.

    Returns:
        Tensor[N, D]: code times scale, rounded once. Finite numbers stay finite in the dtype that
        they had before.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, size or value.

    Deterministic.
    """
    return torch.ops.moe_ext.dequantize_rows(rows, dim, format, dtype)


@torch.library.register_fake("moe_ext::dequantize_rows")
def _(rows: Tensor, dim: int, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return rows.new_empty((rows.shape[0], dim), dtype=dtype)
