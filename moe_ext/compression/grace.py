"""GRACE's interface by its earlier name; see `moe_ext.integrations.grace`."""

from moe_ext.integrations import grace as _grace
from moe_ext.integrations.grace import *  # noqa: F403

__all__ = _grace.__all__
