"""Runs the experts of a transformers block by the operators of moe_ext.

Shapes: T tokens, D model, F ffn, E experts, K top-k, N = T*K rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations._base import activate
from moe_ext.nn.balance.moved import ExpertMoves
from moe_ext.nn.capacity import Capacity
from moe_ext.nn.expert_activation import (
    GATED_KIND_OF,
    ClampedSwiGLU,
    plain_kind,
    run_activation,
)
from moe_ext.nn.torch_state import autocast_dtype
from moe_ext.ops.grouped_gemm import row_alignment

IMPLEMENTATION = "moe_ext"
# Flags of `use_experts_implementation` that `experts_forward` honours.
KNOWN_FLAGS = frozenset(
    ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm")
)


def has_norm(experts: Any) -> bool:
    """Return True if a norm follows the experts; transformers before 5.20 has no such experts."""
    return getattr(experts, "has_post_expert_norm", False)


def weight_names(experts: Any) -> dict[str, int]:
    """Return name to number of dimensions of the stacked parameters of an experts module."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    names = {up: 3, "down_proj": 3}
    if experts.has_bias:
        names.update({f"{up}_bias": 2, "down_proj_bias": 2})
    return names


def _activate(experts: Any, up: Tensor) -> Tensor:
    """Run the module's own gate or activation, by a fused operator if one exists."""
    if not experts.has_gate:
        return activate(up, experts.act_fn)
    gate = getattr(experts._apply_gate, "__func__", None)
    # The gate is compared by name, because transformers may not be installed.
    name = getattr(gate, "__qualname__", "")
    if name == "_default_apply_gate":
        gated = GATED_KIND_OF.get(plain_kind(experts.act_fn) or "")
        if gated is not None:
            return ops.gated_activation(up, kind=gated)
    elif name == "GptOssExperts._apply_gate":
        clamped = ClampedSwiGLU(experts.alpha, experts.limit)
        return run_activation(up, clamped, gated=True, layout="interleaved")
    return experts._apply_gate(up)


def run_rows(
    experts: Any, rows_ND: Tensor, expert_offsets: Tensor, moves: ExpertMoves | None = None
) -> Tensor:
    """Run rows grouped by expert through the experts of a module, `[N, D] -> [N, D]`.

    In the offsets, experts that moved to this rank follow the rank's own experts.
    """

    def product(name: str, x: Tensor) -> Tensor:
        weight = local_part(getattr(experts, name))
        bias_EM = local_part(getattr(experts, f"{name}_bias")) if experts.has_bias else None
        if moves is not None:
            weight = moves.extend(weight)
            bias_EM = None if bias_EM is None else moves.extend(bias_EM)
        weight_EMK = weight.transpose(1, 2) if experts.is_transposed else weight
        return ops.grouped_mm(x, weight_EMK, expert_offsets, bias_EM=bias_EM)

    up = product("gate_up_proj" if experts.has_gate else "up_proj", rows_ND)
    return product("down_proj", _activate(experts, up))


def after_experts(experts: Any, rows_ND: Tensor) -> Tensor:
    """Apply the norm that some families have between the experts and the weighted sum."""
    return experts.post_expert_norm(rows_ND) if has_norm(experts) else rows_ND


def known_experts(topk_idx_TK: Tensor, num_experts: int) -> Tensor:
    """Replace indices past the last expert by -1; eager experts skip such choices."""
    return torch.where(topk_idx_TK < num_experts, topk_idx_TK, -1)


def expert_rows(experts: Any, topk_idx_TK: Tensor) -> int | None:
    """Return the most rows that an expert takes from these tokens; None without a capacity."""
    capacity: Capacity | None = getattr(experts, "_capacity", None)
    if capacity is None:
        return None
    num_tokens, top_k = topk_idx_TK.shape
    return capacity.rows_per_group(num_tokens, top_k, experts.num_experts)


def as_weight(experts: Any, hidden_states: Tensor) -> Tensor:
    """Cast tokens to the dtype of the weights, as transformers' implementations do.

    Under autocast, tokens keep their dtype.
    """
    if autocast_dtype(hidden_states.device) is not None:
        return hidden_states
    return hidden_states.to(experts.down_proj.dtype)


def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts of a block, with the signature of transformers' `ExpertsInterface`.

    Args:
        experts: module of a class that `use_experts_implementation` decorated, with any flags.
        hidden_states: `[T, D]`, not written to.
        top_k_index: `[T, K]`, in [0, E), or E for an expert that is not on this rank.
        top_k_weights: `[T, K]`.

    Returns:
        `[T, D]` in the dtype of the tokens.
    """
    num_experts: int = experts.num_experts  # type: ignore[assignment]
    x_TD = as_weight(experts, hidden_states)
    rows_ND, permutation = ops.permute_tokens(
        x_TD,
        known_experts(top_k_index, num_experts),
        num_experts,
        capacity=expert_rows(experts, top_k_index),
        align=row_alignment(x_TD, top_k_index.numel(), num_experts),
    )
    out_ND = after_experts(experts, run_rows(experts, rows_ND, permutation.expert_offsets))
    return ops.unpermute_tokens(out_ND, permutation, top_k_weights).to(hidden_states.dtype)
