"""Hugging Face transformers 5: moe_ext as the experts of a model, on one rank or many."""

from moe_ext.integrations.huggingface.expert_parallel import full_state_dict
from moe_ext.integrations.huggingface.replacement import IMPLEMENTATION, register, replace
from moe_ext.integrations.huggingface.verification import VerifyReport, verify

__all__ = ["IMPLEMENTATION", "VerifyReport", "full_state_dict", "register", "replace", "verify"]
