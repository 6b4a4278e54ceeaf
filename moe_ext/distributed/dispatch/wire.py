"""Formats in which rows travel between ranks.

Shapes: N rows, D model, B bytes of a coded row.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._checks import check_choice
from moe_ext.ops.quantize import ROW_SCALES, row_bytes

WIRES = (None, *ROW_SCALES)
# Formats of the rows of an exchange and of their gradients; None is the dtype of the rows.
Formats = tuple[str | None, str | None]


@dataclass(frozen=True)
class Wire:
    """Formats in which rows travel, each of the four ways of a step by itself.

    None sends rows as they are; "int8", "fp8" and "mx" are formats of `ops.quantize_rows`: codes of
    one byte, and scales beside them in the same message. Gradients pass the rounding as if it were
    not there (straight-through), and are rounded for themselves where it is asked for.

    The string that `MoELayer(wire=)` takes in the place of a `Wire` sets `dispatch` and
    `backward_dispatch`, as in DeepSeek-V3: what goes to the experts is rounded, where it is the
    input of one product; what comes back is not, since it is added to a residual stream that all
    layers before or after it read.

    Args:
        dispatch: tokens on their way to the experts.
        combine: results on their way back.
        backward_dispatch: gradients of the results on their way to the experts.
        backward_combine: gradients of the tokens on their way back.

    Raises:
        ValueError: a format is none of these.

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
        """The formats that a string stands for."""
        if isinstance(wire, Wire):
            return wire
        check_choice(owner, "wire", wire, WIRES)
        return cls(dispatch=wire, backward_dispatch=wire)

    @property
    def out(self) -> Formats:
        """Formats of tokens on their way out, and of their gradients on the way back."""
        return self.dispatch, self.backward_combine

    @property
    def back(self) -> Formats:
        """Formats of results on their way back, and of their gradients on the way out."""
        return self.combine, self.backward_dispatch

    @property
    def number(self) -> int:
        """A number for each set of formats; 0 for none."""
        return sum(WIRES.index(way) * len(WIRES) ** i for i, way in enumerate(astuple(self)))

    @classmethod
    def from_number(cls, number: int) -> Wire:
        """The formats with that `number`."""
        count = len(WIRES)
        return cls(*(WIRES[number // count**i % count] for i in range(4)))


def sent_row_bytes(format: str | None, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a row on its way: short ones may be no longer than their codes and scales."""
    plain = dim * dtype.itemsize
    return plain if format is None else min(plain, row_bytes(dim, format))


def encode(rows_ND: Tensor, format: str | None) -> Tensor:
    """Encode rows: bytes `[N, B]`, or the rows as they are where coding saves none."""
    dim, dtype = rows_ND.shape[1], rows_ND.dtype
    if format is None or sent_row_bytes(format, dim, dtype) == dim * dtype.itemsize:
        return rows_ND
    return ops.quantize_rows(rows_ND, format)


def decode(sent: Tensor, format: str | None, dim: int, dtype: torch.dtype) -> Tensor:
    """The rows `[N, D]` of what `encode` gave for rows of that size and dtype."""
    if format is None or sent_row_bytes(format, dim, dtype) == dim * dtype.itemsize:
        return sent
    return ops.dequantize_rows(sent, dim, format, dtype=dtype)
