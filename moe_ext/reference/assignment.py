"""Assignments written with PyTorch's own functions, and Hungarian's method in plain Python.

Shape suffixes: T tokens, E experts, K top-k, B sequences, R real (unmasked) tokens.
"""

import math

import torch
from torch import Tensor

from moe_ext.ops.assignment import SequenceLoad
from moe_ext.ops.gating import GateOutput
from moe_ext.reference.gating import real_tokens, scores, widened


def expert_choice_gate(
    logits_TE: Tensor, capacity: int, *, token_mask: Tensor | None = None
) -> GateOutput:
    """Same as `moe_ext.ops.expert_choice_gate`."""
    real_T = real_tokens(logits_TE, token_mask)
    p_RE = widened(logits_TE[real_T]).softmax(dim=1)
    p_TE = p_RE.new_zeros(logits_TE.shape).index_put((real_T,), p_RE)
    key_TE = p_TE.detach().masked_fill(~real_T[:, None], -1)
    taken = min(capacity, p_RE.shape[0])
    # A stable sort leaves the lower token first in a tie.
    token_CE = key_TE.sort(dim=0, descending=True, stable=True).indices[:taken]
    taken_TE = torch.zeros_like(p_TE, dtype=torch.bool).scatter(0, token_CE, True)
    expert_TE = torch.arange(logits_TE.shape[1], device=logits_TE.device).expand_as(p_TE)
    return GateOutput(
        p_TE * taken_TE,
        torch.where(taken_TE, expert_TE, -1),
        taken_TE.sum(dim=0),
        p_RE.sum(dim=0),
    )


def sinkhorn_gate(
    logits_TE: Tensor,
    top_k: int,
    *,
    num_iters: int = 100,
    tolerance: float = 1e-4,
    token_mask: Tensor | None = None,
) -> GateOutput:
    """Same as `moe_ext.ops.sinkhorn_gate`."""
    real_T = real_tokens(logits_TE, token_mask)
    x_RE = widened(logits_TE[real_T])
    scale_E = sinkhorn_scale(x_RE.detach(), num_iters, tolerance)
    key_RE = x_RE.detach() + scale_E.log()
    idx_RK = key_RE.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    if top_k == 1:
        score_RE = x_RE.sigmoid()
        share_RE = score_RE / score_RE.sum(dim=1, keepdim=True)
    else:
        score_RE = share_RE = x_RE.softmax(dim=1)
    weights_TK = x_RE.new_zeros((logits_TE.shape[0], top_k))
    weights_TK = weights_TK.index_put((real_T,), score_RE.gather(1, idx_RK))
    idx_TK = torch.full_like(weights_TK, -1, dtype=torch.int64).index_put((real_T,), idx_RK)
    counts_E = torch.bincount(idx_RK.flatten(), minlength=logits_TE.shape[1])
    return GateOutput(weights_TK, idx_TK, counts_E, share_RE.sum(dim=0))


def sinkhorn_scale(x_RE: Tensor, num_iters: int, tolerance: float) -> Tensor:
    """Return the factors c of the experts."""
    num_tokens, num_experts = x_RE.shape
    scale_E = x_RE.new_ones(num_experts)
    if num_tokens == 0:
        return scale_E
    cost_RE = (x_RE - x_RE.amax(dim=1, keepdim=True)).exp()
    for _ in range(num_iters):
        factor_R = 1 / (num_tokens * (cost_RE * scale_E).sum(dim=1))
        sums_E = (factor_R[:, None] * cost_RE).sum(dim=0)
        former_E, scale_E = scale_E, 1 / (num_experts * (sums_E + 1e-8))
        if (scale_E - former_E).abs().mean() <= tolerance:
            break
    return scale_E


def balanced_assignment(scores_TE: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Same as `moe_ext.ops.balanced_assignment`, exact, in time cubic in the number of tokens."""
    real_T = real_tokens(scores_TE, token_mask)
    scores = scores_TE[real_T].double().tolist()
    num_tokens, num_experts = len(scores), scores_TE.shape[1]
    even, rest = divmod(num_tokens, num_experts)
    # Every expert has `even` places for tokens alone. If tokens are left over, every expert has one
    # more place, which a token or a dummy may take.
    places = [e for e in range(num_experts) for _ in range(even)]
    num_even = len(places)
    if rest:
        places += range(num_experts)
    costs = [[-row[e] for e in places] for row in scores]
    never = 1 + sum(2 * max(map(abs, row), default=0) for row in costs)
    for _ in range(len(places) - num_tokens):
        costs.append([never] * num_even + [0.0] * num_experts)
    expert_T = torch.full_like(real_T, -1, dtype=torch.int64)
    chosen = [places[place] for place in _hungarian(costs)][:num_tokens]
    expert_T[real_T] = torch.tensor(chosen, dtype=torch.int64, device=scores_TE.device)
    return expert_T


def _hungarian(costs: list[list[float]]) -> list[int]:
    """Return a column for each row of a square matrix, with the least sum.

    The columns are found by shortest augmenting paths.
    """
    n = len(costs)
    row_price, column_price = [0.0] * (n + 1), [0.0] * (n + 1)
    row_of_column, previous = [0] * (n + 1), [0] * (n + 1)
    for row in range(1, n + 1):
        row_of_column[0], column = row, 0
        slack, done = [math.inf] * (n + 1), [False] * (n + 1)
        while row_of_column[column]:
            done[column] = True
            here = row_of_column[column]
            for j in range(1, n + 1):
                reduced = costs[here - 1][j - 1] - row_price[here] - column_price[j]
                if not done[j] and reduced < slack[j]:
                    slack[j], previous[j] = reduced, column
            step, following = min((slack[j], j) for j in range(1, n + 1) if not done[j])
            for j in range(n + 1):
                if done[j]:
                    row_price[row_of_column[j]] += step
                    column_price[j] -= step
                else:
                    slack[j] -= step
            column = following
        while column:
            row_of_column[column] = row_of_column[previous[column]]
            column = previous[column]
    columns = [0] * n
    for column in range(1, n + 1):
        columns[row_of_column[column] - 1] = column - 1
    return columns


def sequence_load(
    logits_TE: Tensor,
    topk_idx_TK: Tensor,
    num_sequences: int,
    *,
    score_fn: str = "softmax",
    token_mask: Tensor | None = None,
) -> SequenceLoad:
    """Same as `moe_ext.ops.sequence_load`."""
    real_T = real_tokens(logits_TE, token_mask)
    x_TE = widened(logits_TE).masked_fill(~real_T[:, None], 0)
    share_TE = scores(x_TE, score_fn)
    share_TE = share_TE / share_TE.sum(dim=1, keepdim=True)
    chosen_TE = (topk_idx_TK[:, :, None] == torch.arange(x_TE.shape[1], device=x_TE.device)).sum(1)
    shape = (num_sequences, x_TE.shape[0] // max(1, num_sequences), x_TE.shape[1])
    return SequenceLoad(
        (share_TE * real_T[:, None]).view(shape).sum(dim=1),
        (chosen_TE * real_T[:, None]).view(shape).sum(dim=1),
    )


def sequence_balance_loss(
    score_sum_BE: Tensor, num_tokens_per_expert_BE: Tensor, top_k: int
) -> Tensor:
    """Same as `moe_ext.ops.sequence_balance_loss`, one sequence after the other."""
    losses = []
    for score_sum_E, counts_E in zip(score_sum_BE, num_tokens_per_expert_BE, strict=True):
        num_tokens = counts_E.sum() / top_k
        if num_tokens > 0:
            share_E = counts_E / (num_tokens * top_k)
            losses.append(score_sum_BE.shape[1] * (share_E * score_sum_E / num_tokens).sum())
    return torch.stack(losses).mean() if losses else score_sum_BE.sum() * 0
