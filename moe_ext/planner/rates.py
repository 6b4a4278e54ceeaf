"""Codecs that plans weigh: their names in a cost table, and calls that measure them.

Shapes: N elements, D elements of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from moe_ext import ops
from moe_ext.comm.rates import Rehearsal
from moe_ext.compression import codec_of
from moe_ext.compression.probe import rehearsal_of
from moe_ext.dispatch.wire import LOSSLESS, ROW_WIRES

# Elements of a row that is measured.
DIM = 1024
# Codecs of gradients that round.
ROUNDED = ("bf16", "fp8", "int8", "int4")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Calls = tuple[int, int, Callable[[], object], Callable[[], object]]


def rows_rate(format: str, dtype: torch.dtype) -> str:
    """Name of a format of rows in a cost table; "lossless" has a rate for each dtype."""
    return f"lossless {_SHORT[dtype]}" if format == LOSSLESS else f"rows {format}"


def lossless(
    numel: int, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Calls:
    """Exponents of normally distributed elements; see `CostTable.measure`."""
    generator = torch.Generator().manual_seed(0)
    x_N = torch.randn(numel, generator=generator).to(device, dtype)
    sent, out_N = ops.encode_exponents(x_N), torch.empty_like(x_N)
    return (
        x_N.nbytes,
        sent.numel(),
        lambda: ops.encode_exponents(x_N),
        lambda: ops.decode_exponents_(out_N, sent),
    )


def rows(
    numel: int,
    *,
    format: str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Calls:
    """Rows of a dispatch; see `CostTable.measure`."""
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(numel // DIM, DIM, generator=generator).to(device, dtype)
    sent = ops.quantize_rows(x_ND, format)
    return (
        x_ND.nbytes,
        sent.nbytes,
        lambda: ops.quantize_rows(x_ND, format),
        lambda: ops.dequantize_rows(sent, DIM, format, dtype=dtype),
    )


def row_rehearsals(
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> dict[str, Rehearsal]:
    """Rehearsals of all formats of rows but "lossless", by name."""
    formats = [format for format in ROW_WIRES if format is not None]
    return {
        rows_rate(format, dtype): functools.partial(rows, format=format, dtype=dtype, device=device)
        for format in formats
    }


def rehearsals(dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Rehearsal]:
    """Rehearsals of all codecs that plans weigh for a job in this dtype, by name."""
    exact = functools.partial(lossless, dtype=dtype, device=device)
    return {
        **{name: rehearsal_of(codec_of(name), device) for name in ROUNDED},
        rows_rate(LOSSLESS, dtype): exact,
        **row_rehearsals(dtype, device),
    }
