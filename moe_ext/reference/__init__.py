"""Slow, obvious formulas in plain PyTorch: the tests' oracle, and the maths to read."""

from moe_ext.reference.activation import activation, gated_activation
from moe_ext.reference.assignment import (
    balanced_assignment,
    expert_choice_gate,
    sequence_balance_loss,
    sequence_load,
    sinkhorn_gate,
)
from moe_ext.reference.capacity import limit_capacity
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
    "balanced_assignment",
    "expert_choice_gate",
    "gate_weights",
    "gated_activation",
    "grouped_mm",
    "limit_capacity",
    "load_balance_loss",
    "permute_tokens",
    "router_z_loss",
    "sequence_balance_loss",
    "sequence_load",
    "sinkhorn_gate",
    "topk_gate",
    "unpermute_tokens",
]
