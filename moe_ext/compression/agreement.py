"""Checks that all ranks call a collective alike; see `moe_ext.distributed.agreement`."""

from __future__ import annotations

from moe_ext.distributed.agreement import agree as check_call
from moe_ext.distributed.agreement import is_nonfinite as non_finite
from moe_ext.distributed.groups import resolve_group as resolve

__all__ = ["check_call", "non_finite", "resolve"]
