"""Assignment: experts that choose tokens, balanced choices, and the load of each sequence.

Shape suffixes: T tokens, E experts, K top-k, B sequences.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext.ops.autograd import register_derivatives
from moe_ext.ops.fakes import acc_dtype, fake_gate, register_fake_like
from moe_ext.ops.gating import GateOutput, gate_weights, topk_gate


def expert_choice_gate(
    logits_TE: Tensor, capacity: int, *, token_mask: Tensor | None = None
) -> GateOutput:
    r"""Each expert takes the ``capacity`` tokens that score it highest.

    With :math:`p_t = \mathrm{softmax}(x_t)` over the experts, expert e takes the real tokens with
    the largest :math:`p_{t,e}`, equal ones in the order of the tokens. If there are at most
    ``capacity`` real tokens, an expert takes all of them. A token may have no expert or several,
    and its weights are :math:`p_{t,e}`.

    The choice for a token depends on every other token, later ones included. This gate therefore
    does not fit autoregressive decoding.

    Args:
        logits_TE (Tensor[T, E]): float32, float64, bfloat16 or float16. Arithmetic is in float32,
            in float64 for float64.
        capacity (int): tokens that an expert takes, >= 1.
        token_mask (Tensor[T]): bool, True for a real token. No expert takes the other tokens. Their
            logits are not looked at, and get zero gradient.

    Returns:
        GateOutput: with K = E columns. ``topk_idx[t, e]`` is e where expert e takes token t and -1
        elsewhere, ``topk_weights[t, e]`` is the weight or 0, ``num_tokens_per_expert`` is the same
        for all experts. Differentiable in ``logits_TE`` through ``topk_weights`` and ``score_sum``.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; on CPU, a real
            token's logit is NaN or +inf, or all are -inf (the message names the token). On CUDA the
            choice is not specified then.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.

    Reference: Zhou et al., Mixture-of-Experts with Expert Choice Routing, 2022 (arXiv 2202.09368),
    section 3.2.
    """
    return GateOutput(*torch.ops.moe_ext.expert_choice_gate(logits_TE, capacity, token_mask))


@torch.library.register_fake("moe_ext::expert_choice_gate")
def _(logits: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
    return fake_gate("expert_choice_gate", logits, logits.shape[-1])


register_derivatives(
    "expert_choice_gate",
    {
        "logits": "_expert_choice_gate_backward(grad_topk_weights, grad_score_sum, logits, "
        "topk_idx, token_mask)"
    },
)


register_fake_like("moe_ext::_expert_choice_gate_backward", 2)


def sinkhorn_gate(
    logits_TE: Tensor,
    top_k: int,
    *,
    num_iters: int = 100,
    tolerance: float = 1e-4,
    token_mask: Tensor | None = None,
) -> GateOutput:
    r"""Chooses ``top_k`` experts from logits that Sinkhorn's algorithm has balanced.

    Rows and columns of :math:`C_{t,e} = e^{x_{t,e}}` are scaled in turn so that each token's
    numbers sum to 1/T and each expert's to 1/E,

    .. math::
        r_t \leftarrow \frac{1}{T \sum_e c_e C_{t,e}}, \qquad
        c_e \leftarrow \frac{1}{E \, (\sum_t r_t C_{t,e} + 10^{-8})},

    from :math:`c = 1`, until the mean change of c is at most ``tolerance`` or after ``num_iters``
    rounds. A token takes the experts with the largest :math:`r_t C_{t,e} c_e`, compared as
    :math:`x_{t,e} + \log c_e`; ties go to the lower expert. Up to rounding, this is the function of
    Megatron-LM with two additions. Rows are divided by their largest number first, so that no logit
    overflows, and the number of rounds has a bound.

    Weights are those of the original logits, without renormalisation: :math:`\sigma(x)` for
    ``top_k == 1`` and :math:`\mathrm{softmax}(x)` over all experts otherwise. The choice has no
    gradient.

    Args:
        logits_TE (Tensor[T, E]): float32, float64, bfloat16 or float16. Arithmetic is in float32,
            in float64 for float64.
        top_k (int): experts a token goes to, in [1, E].
        num_iters (int): largest number of rounds, >= 1.
        tolerance (float): mean absolute change of c at which the rounds end, >= 0.
        token_mask (Tensor[T]): bool, True for a real token. The other tokens get ``topk_idx`` -1
            and weight 0, and T is the number of real tokens.

    Returns:
        GateOutput: as `topk_gate` with ``renormalize=False`` gives it, for ``score_fn`` "sigmoid"
        (``top_k`` 1) or "softmax"; differentiable in the same way.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; on CPU, a real
            token's logit is NaN or +inf, or fewer than ``top_k`` are above -inf.

    Deterministic, with the same bits for any number of threads. Does not synchronise the device: on
    CUDA ``num_iters`` rounds are launched, and rounds that are not needed return at once.

    Reference: Clark et al., Unified Scaling Laws for Routed Language Models, 2022 (arXiv
    2202.01169), section 3.1 (S-BASE).
    """
    logits = logits_TE.detach()
    scale_E = torch.ops.moe_ext._sinkhorn_scale(logits, num_iters, tolerance, token_mask)
    idx_TK = topk_gate(logits + scale_E, top_k, token_mask=token_mask).topk_idx
    score_fn = "sigmoid" if top_k == 1 else "softmax"
    return gate_weights(logits_TE, idx_TK, score_fn=score_fn, renormalize=False)


@torch.library.register_fake("moe_ext::_sinkhorn_scale")
def _(logits: Tensor, *_rest: Any) -> Tensor:
    return logits.new_empty((logits.shape[1],), dtype=acc_dtype(logits.dtype))


def balanced_assignment(scores_TE: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    r"""Gives every expert an even share of the tokens, with the largest sum of scores.

    Maximises :math:`\sum_t s_{t, e(t)}` over all assignments in which each expert has
    :math:`\lfloor T/E \rfloor` or :math:`\lceil T/E \rceil` of the T real tokens. The assignment
    also decides which experts have one more.

    The problem is solved by an auction with falling eps. Scores are rounded to a step of
    :math:`2^{-24}` of their range R, so that the sum is within :math:`2^{-23} T R` of the best.
    Equal scores make the auction slower, but the result stays right.

    Args:
        scores_TE (Tensor[T, E]): float32, float64, bfloat16 or float16; not differentiated.
        token_mask (Tensor[T]): bool, True for a real token; the scores of other tokens are not
            looked at.

    Returns:
        Tensor[T]: int64 expert of each token, -1 for a masked one.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape; on CPU, a real token's score
            is not finite. On CUDA such a score counts as the lowest.

    Deterministic: the same assignment on every device and for any number of threads. Does not
    synchronise the device; on CUDA one block runs the whole auction.

    Reference: Lewis et al., BASE Layers, 2021 (arXiv 2103.16716), section 3.1; Bertsekas and
    Castanon, The Auction Algorithm for the Transportation Problem, 1989.
    """
    return torch.ops.moe_ext.balanced_assignment(scores_TE.detach(), token_mask)


@torch.library.register_fake("moe_ext::balanced_assignment")
def _(scores: Tensor, token_mask: Tensor | None = None) -> Tensor:
    return scores.new_empty((scores.shape[0],), dtype=torch.int64)


class SequenceLoad(NamedTuple):
    """Load that each sequence puts on the experts; unpacks in this order.

    Attributes:
        score_sum (Tensor[B, E]): sum over a sequence's real tokens of the normalised scores,
            float32, or float64 for float64 logits.
        num_tokens_per_expert (Tensor[B, E]): int64, choices of each expert by these tokens.
    """

    score_sum: Tensor
    num_tokens_per_expert: Tensor


def sequence_load(
    logits_TE: Tensor,
    topk_idx_TK: Tensor,
    num_sequences: int,
    *,
    score_fn: str = "softmax",
    token_mask: Tensor | None = None,
) -> SequenceLoad:
    r"""Sums the scores and counts the choices of each sequence, for `sequence_balance_loss`.

    Tokens are B sequences of T / B tokens, one after the other. The score of an expert is
    :math:`\mathrm{softmax}(x)_e`, or :math:`s_e / \sum_j s_j` with the :math:`s` of `topk_gate`.
    ``GateOutput.score_sum`` is the sum of these scores over all sequences.

    Args:
        logits_TE (Tensor[T, E]): float32, float64, bfloat16 or float16.
        topk_idx_TK (Tensor[T, K]): int64 choices, -1 for none.
        num_sequences (int): B, a divisor of T; 0 only without tokens.
        score_fn (str): ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        token_mask (Tensor[T]): bool, True for a real token; other tokens are not counted.

    Returns:
        SequenceLoad: the sums are differentiable in the logits.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; on CPU, an index is
            out of range, or a real token's logit is NaN or +inf.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.

    Reference: DeepSeek-V3, 2024 (arXiv 2412.19437), eq. 17-20.
    """
    return SequenceLoad(
        *torch.ops.moe_ext.sequence_load(
            logits_TE, topk_idx_TK, num_sequences, score_fn, token_mask
        )
    )


@torch.library.register_fake("moe_ext::sequence_load")
def _(logits: Tensor, topk_idx: Tensor, num_sequences: int, *_rest: Any) -> tuple[Tensor, Tensor]:
    shape = (num_sequences, logits.shape[1])
    return (
        logits.new_empty(shape, dtype=acc_dtype(logits.dtype)),
        logits.new_empty(shape, dtype=torch.int64),
    )


register_derivatives(
    "sequence_load",
    {"logits": "_sequence_load_backward(grad_score_sum, logits, score_fn, token_mask)"},
)


register_fake_like("moe_ext::_sequence_load_backward", 1)


def sequence_balance_loss(
    score_sum_BE: Tensor, num_tokens_per_expert_BE: Tensor, top_k: int
) -> Tensor:
    r"""Averages the `load_balance_loss` of each sequence: 1.0 if every sequence is balanced.

    The mean is over the sequences with a choice, and 0 if there is none. DeepSeek-V3's loss is this
    mean times its coefficient alpha.

    Args:
        score_sum_BE (Tensor[B, E]): ``SequenceLoad.score_sum``.
        num_tokens_per_expert_BE (Tensor[B, E]): ``SequenceLoad.num_tokens_per_expert``.
        top_k (int): choices of each token, >= 1.

    Returns:
        Tensor[]: in the dtype of the score sums. Differentiable in the score sums.

    Raises:
        ValueError: the shapes differ, or top_k is below 1.

    Reference: DeepSeek-V3, 2024 (arXiv 2412.19437), eq. 17-20.
    """
    if score_sum_BE.dim() != 2 or score_sum_BE.shape != num_tokens_per_expert_BE.shape:
        raise ValueError(
            "sequence_balance_loss: expected score_sum and num_tokens_per_expert to be of one "
            f"shape [B, E], got {tuple(score_sum_BE.shape)} and "
            f"{tuple(num_tokens_per_expert_BE.shape)}"
        )
    if top_k < 1:
        raise ValueError(f"sequence_balance_loss: expected top_k to be at least 1, got {top_k}")
    counts_BE = num_tokens_per_expert_BE.to(score_sum_BE.dtype)
    num_choices_B = counts_BE.sum(dim=1)
    # E sum_e (c_e / N) (S_e K / N) with N = T K choices.
    slope_B = score_sum_BE.shape[1] * top_k / num_choices_B.clamp(min=1).square()
    loss_B = slope_B * (counts_BE * score_sum_BE).sum(dim=1)
    return loss_B.sum() / (num_choices_B > 0).sum().clamp(min=1)
