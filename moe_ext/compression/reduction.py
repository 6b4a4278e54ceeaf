"""The name that a collective underway has among the public names of moe_ext.compression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moe_ext.distributed.comm import Pending

if TYPE_CHECKING:
    Reduction = Pending[Tensor]
else:
    # A class, for isinstance.
    Reduction = Pending
