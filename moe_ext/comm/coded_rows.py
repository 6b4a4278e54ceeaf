"""Decodes payloads of `ops.encode_exponent_rows` that have arrived, and finds damaged ones."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.comm.streams import HostCopy

_SOUND = torch.iinfo(torch.int64).max


class Payloads:
    """Decodes the payloads of one collective, and notes the first damaged block."""

    def __init__(self) -> None:
        self._damaged: Tensor | None = None
        self._told: HostCopy | None = None

    def read(self, out: Tensor, row: Tensor) -> None:
        """Decode a payload into its part of the result."""
        if self._damaged is None:
            self._damaged = torch.full((1,), _SOUND, device=row.device)
        ops.decode_exponent_row_(out, row, self._damaged)

    def tell(self) -> None:
        """Start to copy the findings to the host, after the last payload was read."""
        if self._damaged is not None:
            self._told = HostCopy(self._damaged.view(1, 1))

    def check(self, operation: str) -> None:
        """Raise RuntimeError if a payload was damaged. NOTE: device-to-host sync."""
        if self._told is not None and (block := self._told.rows()[0][0]) != _SOUND:
            raise RuntimeError(
                f"{operation}: expected payloads to arrive as they were sent, got a damaged block "
                f"{block}"
            )
