"""Formats in which rows travel between ranks.

Shapes: N rows, D model, B bytes of a coded row, P ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext._checks import check_choice
from moe_ext.comm.coded_rows import Payloads
from moe_ext.comm.rates import Rehearsal, Rehearsed
from moe_ext.ops.quantize import ROW_SCALES, row_bytes

# Formats that code each row separately, and the format that codes all rows for a rank together.
ROW_WIRES = (None, *ROW_SCALES)
LOSSLESS = "lossless"
WIRES = (*ROW_WIRES, LOSSLESS)
# Coded bytes per byte for normally distributed numbers, see `ops.encode_exponents`.
_SHARES = {torch.float32: 26.8 / 32, torch.bfloat16: 10.8 / 16, torch.float16: 13.8 / 16}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Number of elements of a row in measurements of the coding rate.
REHEARSED_DIM = 1024
# Formats of the rows of an exchange and of their gradients; None is the dtype of the rows.
Formats = tuple[str | None, str | None]


@dataclass(frozen=True)
class Wire:
    """Formats in which rows travel, for each of the four exchanges of a step.

    None sends rows unchanged. "int8", "fp8" and "mx" are formats of `ops.quantize_rows`: codes of
    one byte, with scales in the same message. The backward pass ignores this rounding
    (straight-through); gradients are rounded only by their own format. "lossless" keeps every bit:
    `ops.encode_exponents` codes all rows for a rank, and a message of 8 bytes to each rank sends
    the lengths first.

    A string for `Dispatch(wire=)`, instead of a `Wire`, sets `dispatch` and `backward_dispatch`, as
    in DeepSeek-V3. Rows that go to the experts are rounded, since they are the input of one
    product. Rows that come back are not rounded, since they are added to a residual stream, which
    other layers read too. "lossless" sets all four.

    Args:
        dispatch: tokens on their way to the experts.
        combine: results on their way back.
        backward_dispatch: gradients of the results on their way to the experts.
        backward_combine: gradients of the tokens on their way back.

    Raises:
        ValueError: a format is unknown.

    Reference: DeepSeek-V3 Technical Report, 2024 (arXiv 2412.19437), section 3.3.3.
    """

    dispatch: str | None = None
    combine: str | None = None
    backward_dispatch: str | None = None
    backward_combine: str | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check_choice("Wire", name, getattr(self, name), WIRES)

    @classmethod
    def of(cls, owner: str, wire: Wire | str | None) -> Wire:
        """Return the formats for a string or a `Wire`."""
        if isinstance(wire, Wire):
            return wire
        check_choice(owner, "wire", wire, WIRES)
        if wire == LOSSLESS:
            return cls(wire, wire, wire, wire)
        return cls(dispatch=wire, backward_dispatch=wire)

    @property
    def out(self) -> Formats:
        """Formats of tokens on the way out, and of their gradients on the way back."""
        return self.dispatch, self.backward_combine

    @property
    def back(self) -> Formats:
        """Formats of results on the way back, and of their gradients on the way out."""
        return self.combine, self.backward_dispatch

    @functools.cached_property
    def number(self) -> int:
        """Number that identifies these formats; 0 if all are None."""
        return sum(WIRES.index(way) * len(WIRES) ** i for i, way in enumerate(astuple(self)))

    @classmethod
    def from_number(cls, number: int) -> Wire:
        """Return the formats with this `number`."""
        count = len(WIRES)
        return cls(*(WIRES[number // count**i % count] for i in range(4)))


def sent_row_bytes(format: str | None, dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a sent row: those of codes and scales, or of the plain row if fewer.

    For "lossless" these are the expected bytes for normally distributed numbers.
    """
    plain = dim * dtype.itemsize
    if format == LOSSLESS:
        return math.ceil(plain * _SHARES[dtype])
    return plain if format is None else min(plain, row_bytes(dim, format))


def encode(rows_ND: Tensor, format: str | None) -> Tensor:
    """Encode rows as bytes `[N, B]`, or return them unchanged if coding saves no bytes.

    "lossless" leaves rows unchanged too, because `encode_messages` codes all rows of a message.
    """
    dim, dtype = rows_ND.shape[1], rows_ND.dtype
    if format in (None, LOSSLESS) or sent_row_bytes(format, dim, dtype) == dim * dtype.itemsize:
        return rows_ND
    return ops.quantize_rows(rows_ND, format)


def decode(sent: Tensor, format: str | None, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the rows `[N, D]` of a result of `encode`, given their size and dtype."""
    if format in (None, LOSSLESS) or sent_row_bytes(format, dim, dtype) == dim * dtype.itemsize:
        return sent
    return ops.dequantize_rows(sent, dim, format, dtype=dtype)


def encode_messages(
    rows_ND: Tensor, counts: Sequence[int], own: int
) -> tuple[list[Tensor], Tensor]:
    """Code the rows for each rank by their exponents; rows for this rank are not coded.

    Args:
        rows_ND: float32, bfloat16 or float16, contiguous; the first `counts[0]` for rank 0, ....
        counts: number of rows for each of P ranks.
        own: this rank.

    Returns:
        P messages, uint8 `[bytes]`, which may have unused bytes at the end, and their lengths,
        int64 `[P]` on the device of the rows. If a length equals the bytes of the rows, the plain
        rows are the message.
    """
    parts = [part.reshape(-1) for part in rows_ND.split(list(counts))]
    sizes_P = torch.tensor([part.nbytes for part in parts], device=rows_ND.device)
    messages, lengths = [], []
    for rank, part in enumerate(parts):
        if rank == own or not len(part):
            messages.append(as_bytes(part))
            lengths.append(sizes_P[rank : rank + 1])
        else:
            code_1B, length_1 = ops.encode_exponent_rows(part, 1)
            messages.append(code_1B[0])
            lengths.append(length_1)
    return messages, torch.minimum(torch.cat(lengths), sizes_P)


def join_messages(
    rows_ND: Tensor, counts: Sequence[int], messages: Sequence[Tensor], lengths: Sequence[int]
) -> Tensor:
    """Join the results of `encode_messages` to `[bytes]` uint8, one message after the other."""
    parts = [as_bytes(part) for part in rows_ND.split(list(counts))]
    return torch.cat(
        [
            part if length == len(part) else message[:length]
            for part, message, length in zip(parts, messages, lengths, strict=True)
        ]
    )


def decode_messages(
    messages: Tensor, lengths: Sequence[int], out_ND: Tensor, counts: Sequence[int], operation: str
) -> Tensor:
    """Decode a result of `join_messages` into `out_ND`, and return `out_ND`.

    NOTE: device-to-host sync, which reads whether a message is damaged.

    Args:
        messages: `[bytes]` uint8.
        lengths: number of bytes from each of P ranks.
        out_ND: memory for the rows, contiguous.
        counts: number of rows from each of P ranks.
        operation: name for error messages.

    Raises:
        RuntimeError: a message is damaged.
    """
    payloads = Payloads()
    for part, message in zip(
        out_ND.split(list(counts)), messages.split(list(lengths)), strict=True
    ):
        if len(message) == part.nbytes:
            as_bytes(part).copy_(message)
        else:
            payloads.read(part, message)
    payloads.tell()
    payloads.check(operation)
    return out_ND


def rows_rate(format: str, dtype: torch.dtype) -> str:
    """Return the name of a format in a cost table; "lossless" has a rate for each dtype."""
    return f"lossless {_SHORT[dtype]}" if format == LOSSLESS else f"rows {format}"


def lossless(
    numel: int, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Rehearsed:
    """Make the rehearsal of "lossless" on normally distributed numbers, see `CostTable.measure`."""
    generator = torch.Generator().manual_seed(0)
    x_N = torch.randn(numel, generator=generator, device="cpu").to(device, dtype)
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
) -> Rehearsed:
    """Make the rehearsal of a format for rows of a dispatch, see `CostTable.measure`."""
    generator = torch.Generator().manual_seed(0)
    shape = numel // REHEARSED_DIM, REHEARSED_DIM
    x_ND = torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
    sent = ops.quantize_rows(x_ND, format)
    return (
        x_ND.nbytes,
        sent.nbytes,
        lambda: ops.quantize_rows(x_ND, format),
        lambda: ops.dequantize_rows(sent, REHEARSED_DIM, format, dtype=dtype),
    )


def row_rehearsals(
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> dict[str, Rehearsal]:
    """Return the rehearsals of all formats of rows except "lossless", by name."""
    formats = [format for format in ROW_WIRES if format is not None]
    return {
        rows_rate(format, dtype): functools.partial(rows, format=format, dtype=dtype, device=device)
        for format in formats
    }
