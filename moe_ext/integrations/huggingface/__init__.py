"""Hugging Face transformers 5: moe_ext as the experts or the attention of a model."""

from moe_ext.attention.huggingface.interface import ATTENTION, register_ring_attention
from moe_ext.attention.huggingface.packing import causal_lm_loss, shard_batch
from moe_ext.distributed import full_state_dict
from moe_ext.integrations.huggingface.experts import IMPLEMENTATION
from moe_ext.integrations.huggingface.replacement import from_pretrained, register, replace
from moe_ext.integrations.huggingface.trainer import SavesExperts
from moe_ext.integrations.huggingface.verification import VerifyReport, verify

__all__ = [
    "ATTENTION",
    "IMPLEMENTATION",
    "SavesExperts",
    "VerifyReport",
    "causal_lm_loss",
    "from_pretrained",
    "full_state_dict",
    "register",
    "register_ring_attention",
    "replace",
    "shard_batch",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
