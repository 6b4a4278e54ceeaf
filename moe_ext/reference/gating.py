"""Gating written with PyTorch's own functions.

Shape suffixes: T tokens, E experts, K top-k, G groups, R real (unmasked) tokens.
"""

import math

import torch
from torch import Tensor

from moe_ext.ops.gating import GateOutput


def topk_gate(
    logits_TE: Tensor,
    top_k: int,
    *,
    score_fn: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    selection_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    token_mask: Tensor | None = None,
    group_score: str | None = None,
) -> GateOutput:
    """Same as `moe_ext.ops.topk_gate`: the formulas one after another, on the real tokens."""
    num_tokens, num_experts = logits_TE.shape
    real_T = real_tokens(logits_TE, token_mask)
    x_RE = widened(logits_TE[real_T])
    score_RE = scores(x_RE, score_fn)
    share_RE = score_RE / _denominator(score_RE)
    default = "max" if selection_bias is None else "top2"
    terms = {"max": 1, "top2": 2, "topk": top_k // top_groups}[group_score or default]
    if selection_bias is None and (terms == 1 or top_groups == num_groups):
        key_RE = x_RE
    else:
        bias_E = 0.0 if selection_bias is None else selection_bias.to(x_RE.dtype)
        key_RE = (score_RE + bias_E).masked_fill(x_RE == -math.inf, -math.inf)
    key_RE = _limit_groups(key_RE.detach(), num_groups, top_groups, terms)
    idx_RK = best(key_RE, top_k)
    if score_fn == "topk_softmax" or (score_fn == "softmax" and renormalize):
        weights_RK = x_RE.gather(1, idx_RK).softmax(dim=1)
    else:
        weights_RK = score_RE.gather(1, idx_RK)
        if renormalize:
            weights_RK = weights_RK / _denominator(weights_RK)
    weights_TK = x_RE.new_zeros((num_tokens, top_k)).index_put((real_T,), scale * weights_RK)
    idx_TK = torch.full_like(weights_TK, -1, dtype=torch.int64).index_put((real_T,), idx_RK)
    counts_E = torch.bincount(idx_RK.flatten(), minlength=num_experts)
    return GateOutput(weights_TK, idx_TK, counts_E, share_RE.sum(dim=0))


def gate_weights(
    logits_TE: Tensor,
    topk_idx_TK: Tensor,
    *,
    score_fn: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> GateOutput:
    """Same as `moe_ext.ops.gate_weights`."""
    num_experts = logits_TE.shape[1]
    real_T = (topk_idx_TK >= 0).any(dim=1)
    x_RE = widened(logits_TE[real_T])
    idx_RK = topk_idx_TK[real_T].clamp(min=0)
    absent_RK = topk_idx_TK[real_T] < 0
    score_RE = scores(x_RE, score_fn)
    if score_fn == "topk_softmax" or (score_fn == "softmax" and renormalize):
        chosen_RK = x_RE.gather(1, idx_RK).masked_fill(absent_RK, -math.inf)
        weights_RK = chosen_RK.softmax(dim=1)
    else:
        weights_RK = score_RE.gather(1, idx_RK).masked_fill(absent_RK, 0.0)
        if renormalize:
            weights_RK = weights_RK / _denominator(weights_RK)
    shape = topk_idx_TK.shape
    weights_TK = x_RE.new_zeros(shape).index_put((real_T,), scale * weights_RK)
    counts_E = torch.bincount(topk_idx_TK[topk_idx_TK >= 0], minlength=num_experts)
    share_RE = score_RE / _denominator(score_RE)
    return GateOutput(weights_TK, topk_idx_TK, counts_E, share_RE.sum(dim=0))


def router_z_loss(logits_TE: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Same as `moe_ext.ops.router_z_loss`."""
    x_RE = widened(logits_TE if token_mask is None else logits_TE[token_mask])
    return x_RE.logsumexp(dim=1).square().sum() / max(1, x_RE.shape[0])


def load_balance_loss(score_sum_E: Tensor, num_tokens_per_expert_E: Tensor, top_k: int) -> Tensor:
    """Same as `moe_ext.ops.load_balance_loss`."""
    counts_E = num_tokens_per_expert_E.to(score_sum_E.dtype)
    num_choices = counts_E.sum().clamp(min=1)
    mean_score_E = score_sum_E * top_k / num_choices
    return score_sum_E.shape[0] * (counts_E / num_choices * mean_score_E).sum()


def scores(x_TE: Tensor, score_fn: str) -> Tensor:
    """Return the scores of all experts: their softmax, or those of another function by name."""
    if score_fn == "sigmoid":
        return x_TE.sigmoid()
    if score_fn == "sqrtsoftplus":
        return torch.logaddexp(x_TE, torch.zeros_like(x_TE)).sqrt()
    return x_TE.softmax(dim=1)


def widened(x: Tensor) -> Tensor:
    """Return numbers in the dtype in which operators compute: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def real_tokens(x_TE: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return the mask; all True for None."""
    if token_mask is not None:
        return token_mask
    return torch.ones(x_TE.shape[0], dtype=torch.bool, device=x_TE.device)


def _denominator(scores: Tensor) -> Tensor:
    return scores.sum(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def best(keys: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest keys, best first, and in a tie the lower index first."""
    return keys.sort(dim=1, descending=True, stable=True).indices[:, :k]


def _limit_groups(key_RE: Tensor, num_groups: int, top_groups: int, terms: int) -> Tensor:
    if top_groups == num_groups:
        return key_RE
    num_tokens, num_experts = key_RE.shape
    key_RGS = key_RE.reshape(num_tokens, num_groups, num_experts // num_groups)
    first_RG, *others_RG = key_RGS.sort(dim=2, descending=True).values[:, :, :terms].unbind(dim=2)
    group_RG = first_RG
    for other_RG in others_RG:
        group_RG = group_RG + other_RG.masked_fill(other_RG == -math.inf, 0)
    keep_RG = torch.zeros_like(group_RG, dtype=torch.bool)
    keep_RG.scatter_(1, best(group_RG, top_groups), True)
    return key_RGS.masked_fill(~keep_RG[:, :, None], -math.inf).reshape(num_tokens, num_experts)
