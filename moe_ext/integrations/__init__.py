"""Drop-in use in models of other libraries."""

from moe_ext.integrations import deepspeed
from moe_ext.integrations.huggingface import VerifyReport, replace, verify

__all__ = ["VerifyReport", "deepspeed", "replace", "verify"]
