"""Slow, obvious formulas in plain PyTorch: the tests' oracle, and the maths to read."""

from moe_ext.reference.activation import activation, gated_activation
from moe_ext.reference.gating import (
    gate_weights,
    load_balance_loss,
    router_z_loss,
    topk_gate,
)
from moe_ext.reference.grouped_gemm import grouped_mm
from moe_ext.reference.permutation import permute_tokens, unpermute_tokens

__all__ = [
    "activation",
    "gate_weights",
    "gated_activation",
    "grouped_mm",
    "load_balance_loss",
    "permute_tokens",
    "router_z_loss",
    "topk_gate",
    "unpermute_tokens",
]
