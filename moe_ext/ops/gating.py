"""Gating: scores, the choice of experts and their weights, and the router losses.

Shape suffixes: T tokens, E experts, K top-k.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext.ops.autograd import register_derivatives
from moe_ext.ops.fakes import acc_dtype, fake_gate, register_fake_like


class GateOutput(NamedTuple):
    """Decision of a gate; unpacks in this order.

    Attributes:
        topk_weights (Tensor[T, K]): weights of the chosen experts, float32, or float64 for float64
            logits; 0 for a masked token.
        topk_idx (Tensor[T, K]): int64, the chosen experts, best first; -1 for a masked token.
        num_tokens_per_expert (Tensor[E]): int64, choices of each expert by real tokens.
        score_sum (Tensor[E]): sum over the real tokens of each expert's normalised score.
    """

    topk_weights: Tensor
    topk_idx: Tensor
    num_tokens_per_expert: Tensor
    score_sum: Tensor


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
    r"""Chooses ``top_k`` experts for each token and weighs them, in one pass over the logits.

    With :math:`p = \mathrm{softmax}(x)`, :math:`s = \sigma(x)`, or for ``sqrtsoftplus`` :math:`s =
    \sqrt{\log(1 + e^x)}`, and the chosen experts :math:`C`, the weight of :math:`i \in C` is
    ``scale`` times

    ================  =========================================  =====================
    ``score_fn``      ``renormalize=True``                       ``renormalize=False``
    ================  =========================================  =====================
    ``softmax``       :math:`p_i / \sum_{j \in C} p_j`           :math:`p_i`
    ``topk_softmax``  :math:`e^{x_i} / \sum_{j \in C} e^{x_j}`   the same
    ``sigmoid``       :math:`s_i / \sum_{j \in C} s_j`           :math:`s_i`
    ``sqrtsoftplus``  :math:`s_i / \sum_{j \in C} s_j`           :math:`s_i`
    ================  =========================================  =====================

    where a sum of :math:`s` below the smallest normal number is replaced by that number.

    *Selection.* Experts are ranked by a key. Without ``selection_bias`` the key is the logit, which
    orders experts as any of the scores does and still tells them apart where the scores underflow
    or saturate. With a bias, the key is :math:`p_i + b_i` or :math:`s_i + b_i`; the bias changes
    the choice and never the weights. Equal keys go to the lower index. An expert with a logit of
    -inf is never chosen.

    *Groups.* With ``top_groups < num_groups``, experts are cut into ``num_groups`` groups of
    neighbours, and only those of the ``top_groups`` groups with the best score can be chosen. A
    ``group_score`` is a group's largest key (``"max"``), the sum of its two largest (``"top2"``),
    or that of its ``top_k // top_groups`` largest (``"topk"``). Keys of -inf are left out. None
    stands for ``"top2"`` with ``selection_bias``, else for ``"max"``. Keys that are added are
    scores, even without a bias. Equal scores go to the lower group.

    *Statistics.* ``score_sum[e]`` is the sum over real tokens of :math:`p_e`, or of
    :math:`s_e / \sum_j s_j`; with `load_balance_loss` it makes the balance loss.

    Args:
        logits_TE (Tensor[T, E]): float32, float64, bfloat16 or float16. Arithmetic is in float32,
            in float64 for float64.
        top_k (int): experts a token goes to, in [1, E] and within the kept groups.
        score_fn (str): ``"softmax"`` over all experts before the choice, ``"topk_softmax"`` over
            the chosen ones after it, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        renormalize (bool): make each token's weights sum to ``scale``.
        scale (float): finite factor of the weights, applied last.
        selection_bias (Tensor[E]): finite, any floating dtype; not differentiated.
        num_groups (int): groups of experts, a divisor of E.
        top_groups (int): groups that a token may choose from, in [1, num_groups].
        token_mask (Tensor[T]): bool, True for a real token. The logits of other tokens are not
            looked at: they get ``topk_idx`` -1, weight 0, no count and zero gradient.
        group_score (str): see above; for ``"topk"``, ``top_k`` must be at least ``top_groups``.

    Returns:
        GateOutput: differentiable in ``logits_TE`` through ``topk_weights`` and ``score_sum``; the
        gradient has the dtype of the logits and does not go through the choice.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; a real token's logit
            is NaN or +inf, or leaves fewer than ``top_k`` experts above -inf in the kept groups
            (the message names the token). On CUDA, which does not wait for the values, NaN is
            never chosen and a choice that does not exist is -1 with weight 0; the weights and
            sums of such a token are not specified.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.

    Reference: Shazeer et al. 2017 (arXiv 1701.06538), eq. 3-5 (``topk_softmax``); Fedus et al. 2021
    (arXiv 2101.03961), eq. 1-2 (``softmax``); DeepSeek-V2 (arXiv 2405.04434), section 2.2.2 (groups
    by their largest score); DeepSeek-V3 (arXiv 2412.19437), eq. 13-16 (``sigmoid``, bias, groups by
    their two largest); Megatron-LM's ``group_limited_topk`` (groups by ``"topk"``); DeepSeek-V4 in
    transformers (``sqrtsoftplus``).
    """
    bias = None if selection_bias is None else selection_bias.detach()
    return GateOutput(
        *torch.ops.moe_ext.topk_gate(
            logits_TE,
            top_k,
            score_fn,
            renormalize,
            scale,
            bias,
            num_groups,
            top_groups,
            token_mask,
            group_score,
        )
    )


@torch.library.register_fake("moe_ext::topk_gate")
def _(logits: Tensor, top_k: int, *_rest: Any) -> tuple[Tensor, ...]:
    return fake_gate("topk_gate", logits, top_k)


_GATE_DERIVATIVES = {
    "logits": "_topk_gate_backward(grad_topk_weights, grad_score_sum, logits, topk_idx, score_fn, "
    "renormalize, scale)"
}
register_derivatives("topk_gate", _GATE_DERIVATIVES)


register_fake_like("moe_ext::_topk_gate_backward", 2)


def gate_weights(
    logits_TE: Tensor,
    topk_idx_TK: Tensor,
    *,
    score_fn: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> GateOutput:
    r"""Weighs experts that are already chosen: `topk_gate` with the choice given.

    For replayed routing: the weights, counts and sums of scores are those that `topk_gate` returns
    for logits that lead to this choice. With the same order of columns they have the same bits.

    Args:
        logits_TE (Tensor[T, E]): float32, float64, bfloat16 or float16.
        topk_idx_TK (Tensor[T, K]): int64 in [0, E), a token's choices all different, K at most E.
            -1 is no expert: its weight is 0, and neither counts nor the sum that renormalizes
            include it. A token with -1 in all columns is masked: its logits are not looked at.
        score_fn (str): as in `topk_gate`.
        renormalize (bool): as in `topk_gate`.
        scale (float): as in `topk_gate`.

    Returns:
        GateOutput: with ``topk_idx_TK`` itself as ``topk_idx``; differentiable in ``logits_TE``
        through ``topk_weights`` and ``score_sum``.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; an index is outside
            of [-1, E) or twice in a row; a logit of a token that is not masked is NaN or +inf, or
            -inf where it was chosen (the message names the token). CUDA does not wait for the
            values. An index outside has weight 0, and weights of such logits are not specified.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    """
    weights, counts, score_sum = torch.ops.moe_ext.gate_weights(
        logits_TE, topk_idx_TK, score_fn, renormalize, scale
    )
    return GateOutput(weights, topk_idx_TK, counts, score_sum)


@torch.library.register_fake("moe_ext::gate_weights")
def _(logits: Tensor, topk_idx: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    weights, _, counts, score_sum = fake_gate("gate_weights", logits, topk_idx.shape[1])
    return weights, counts, score_sum


register_derivatives("gate_weights", _GATE_DERIVATIVES)


def router_z_loss(logits_TE: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    r"""Keeps router logits small: :math:`\frac{1}{T} \sum_t (\log \sum_e e^{x_{t,e}})^2`.

    The mean is over the real tokens, and 0 if there is none.

    Args:
        logits_TE (Tensor[T, E]): float32, float64, bfloat16 or float16. Arithmetic is in float32,
            in float64 for float64, and the mean over tokens in float64.
        token_mask (Tensor[T]): bool, True for a real token; the logits of other tokens are not
            looked at and get zero gradient.

    Returns:
        Tensor[]: float32, or float64 for float64 logits. Differentiable in the logits. Logits that
        are NaN or infinite give the value that the formula gives.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.

    Reference: Zoph et al., ST-MoE, 2022 (arXiv 2202.08906), eq. 5.
    """
    return torch.ops.moe_ext.router_z_loss(logits_TE, token_mask)


@torch.library.register_fake("moe_ext::router_z_loss")
def _(logits: Tensor, token_mask: Tensor | None = None) -> Tensor:
    return logits.new_empty((), dtype=acc_dtype(logits.dtype))


register_derivatives(
    "router_z_loss", {"logits": "_router_z_loss_backward(grad_result, logits, token_mask)"}
)


register_fake_like("moe_ext::_router_z_loss_backward", 1)


def load_balance_loss(score_sum_E: Tensor, num_tokens_per_expert_E: Tensor, top_k: int) -> Tensor:
    r"""Rewards an even load: :math:`E \sum_e f_e P_e`, 1.0 when the load is balanced.

    :math:`f_e = c_e / (T K)` is the share of the choices that went to expert e and
    :math:`P_e = S_e / T` its mean score, with :math:`T K = \sum_e c_e`. The loss is 0 without
    tokens. Both arguments are sums over tokens. For the loss of a global batch, add those of its
    ranks or micro-batches before the call.

    Args:
        score_sum_E (Tensor[E]): float32 or float64, ``GateOutput.score_sum``.
        num_tokens_per_expert_E (Tensor[E]): int32 or int64, ``GateOutput.num_tokens_per_expert``.
        top_k (int): choices of each token, >= 1.

    Returns:
        Tensor[]: in the dtype of the score sums. Differentiable in the score sums.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value.

    Deterministic; does not synchronise the device.

    Reference: Fedus et al., Switch Transformers, 2021 (arXiv 2101.03961), eq. 4-6, with the choices
    of all K experts counted.
    """
    return torch.ops.moe_ext.load_balance_loss(score_sum_E, num_tokens_per_expert_E, top_k)


@torch.library.register_fake("moe_ext::load_balance_loss")
def _(score_sum: Tensor, num_tokens_per_expert: Tensor, top_k: int) -> Tensor:
    return score_sum.new_empty(())


register_derivatives(
    "load_balance_loss",
    {
        "score_sum": "_load_balance_loss_backward(grad_result, score_sum, num_tokens_per_expert, "
        "top_k)"
    },
)


register_fake_like("moe_ext::_load_balance_loss_backward", 1)
