"""Gates that draw random numbers: input jitter, GShard's second expert, noisy top-k.

Shape suffixes: T tokens, C columns, D model, E experts, K top-k.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext.ops.autograd import once_differentiable, register_autograd, register_derivatives
from moe_ext.ops.fakes import acc_dtype, fake_gate, register_fake_like


class GShardGateOutput(NamedTuple):
    """Decision of `gshard_gate`; the first four are those of a `GateOutput`.

    Attributes:
        topk_weights (Tensor[T, 2]): float32, or float64 for float64 logits; 0 where there is no
            choice.
        topk_idx (Tensor[T, 2]): int64; -1 for a dropped second choice and for a masked token.
        num_tokens_per_expert (Tensor[E]): int64, choices of each expert that were kept.
        score_sum (Tensor[E]): sum over the real tokens of each expert's softmax probability.
        num_first_choices (Tensor[E]): int64, first choices of each expert, for GShard's balance
            loss ``load_balance_loss(score_sum, num_first_choices, 1)``.
    """

    topk_weights: Tensor
    topk_idx: Tensor
    num_tokens_per_expert: Tensor
    score_sum: Tensor
    num_first_choices: Tensor


class NoisyGateOutput(NamedTuple):
    """Decision of `noisy_topk_gate`.

    Attributes:
        topk_weights (Tensor[T, K]): float32, or float64 for float64 logits; 0 for a masked token.
        topk_idx (Tensor[T, K]): int64, best first; -1 for a masked token.
        num_tokens_per_expert (Tensor[E]): int64, choices of each expert by real tokens.
        importance (Tensor[E]): sum over the real tokens of each expert's gate.
        load (Tensor[E]): a smooth estimate of ``num_tokens_per_expert``.
    """

    topk_weights: Tensor
    topk_idx: Tensor
    num_tokens_per_expert: Tensor
    importance: Tensor
    load: Tensor


def routing_uniform(
    rng_state: Tensor,
    num_tokens: int,
    num_columns: int,
    *,
    stream: int,
    token_idx: Tensor | None = None,
) -> Tensor:
    """Draws uniform numbers that depend on seed, layer, step, stream, token and column alone.

    Philox4x32-10, with key ``(seed low, seed high)`` and counter ``(column // 4, token low,
    step low, (layer & 0xffff) << 16 | stream << 8 | (token >> 32 & 0xff))``; column ``c`` is the
    upper 24 bits of word ``c % 4``. The same bits on every device, for any number of threads, and
    however the tokens are spread over ranks.

    Args:
        rng_state (Tensor[4]): int64, ``(seed, layer, step, first_token)``; read on its device.
        num_tokens (int): T.
        num_columns (int): C.
        stream (int): in [0, 256): 0 for jitter, 1 for GShard's second expert, 2 for the noise of
            noisy top-k, 3 for random drop priorities, 4 for dropout, 5 for rounding.
        token_idx (Tensor[T]): int64, indices of the tokens in the global batch; by default
            ``first_token + arange(T)``.

    Returns:
        Tensor[T, C]: float32 in [0, 1), multiples of 2^-24. Not differentiable.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value.

    Deterministic; does not synchronise the device.

    Reference: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    return torch.ops.moe_ext.routing_uniform(rng_state, num_tokens, num_columns, stream, token_idx)


@torch.library.register_fake("moe_ext::routing_uniform")
def _(rng_state: Tensor, num_tokens: int, num_columns: int, *_rest: Any) -> Tensor:
    return rng_state.new_empty((num_tokens, num_columns), dtype=torch.float32)


def routing_jitter(
    x_TD: Tensor, rng_state: Tensor, eps: float, *, token_idx: Tensor | None = None
) -> Tensor:
    r"""Multiplies every number by its own factor: :math:`x \cdot u,\ u \sim U[1 - eps, 1 + eps)`.

    Args:
        x_TD (Tensor[T, D]): float32, float64, bfloat16 or float16; never changed.
        rng_state (Tensor[4]): as `routing_uniform`, stream 0.
        eps (float): in [0, 1).
        token_idx (Tensor[T]): as `routing_uniform`.

    Returns:
        Tensor[T, D]: in the dtype of x; the product is taken in float32 (float64 for float64) and
        rounded once. Differentiable any number of times; a backward pass draws the factors again,
        and keeps nothing but ``rng_state``.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.

    Reference: Fedus et al., Switch Transformers, 2021 (arXiv 2101.03961), section 2.4 and appendix.
    """
    return torch.ops.moe_ext.routing_jitter(x_TD, rng_state, eps, token_idx)


register_fake_like("moe_ext::routing_jitter", 0)


def _jitter_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, rng_state, ctx.eps, token_idx = inputs
    # The state is copied, because the caller may set that of the next step before this backward
    # pass.
    ctx.save_for_backward(rng_state.clone(), token_idx)


def _jitter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rng_state, token_idx = ctx.saved_tensors
    return torch.ops.moe_ext.routing_jitter(grad, rng_state, ctx.eps, token_idx), None, None, None


register_autograd("moe_ext::routing_jitter", _jitter_backward, setup_context=_jitter_setup_context)


def gshard_gate(
    logits_TE: Tensor,
    rng_state: Tensor | None = None,
    *,
    scale: float = 1.0,
    token_mask: Tensor | None = None,
    token_idx: Tensor | None = None,
) -> GShardGateOutput:
    r"""GShard's top-2 gate: the second expert is kept at random, more often with a larger weight.

    With :math:`p = \mathrm{softmax}(x)`, the two largest :math:`p_1 \ge p_2` and
    :math:`g_i = p_i / (p_1 + p_2)`, the first expert gets weight :math:`g_1`; the second gets
    :math:`g_2` where :math:`u < 2 g_2` and is dropped elsewhere, :math:`u \sim U[0, 1)`. As in the
    paper, :math:`u` is compared with the normalised :math:`g_2`, and :math:`g_1` stays as it is
    where the second is dropped. Equal logits go to the lower index; -inf is never chosen.

    Args:
        logits_TE (Tensor[T, E]): float32, float64, bfloat16 or float16, E at least 2. Arithmetic is
            in float32, in float64 for float64.
        rng_state (Tensor[4]): as `routing_uniform`, stream 1, column 0; None always keeps the
            second expert.
        scale (float): finite factor of the weights, applied last.
        token_mask (Tensor[T]): bool, True for a real token; other tokens are not looked at.
        token_idx (Tensor[T]): as `routing_uniform`.

    Returns:
        GShardGateOutput: differentiable in the logits through ``topk_weights`` and ``score_sum``;
        the gradient does not go through the choice.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; a real token's logit
            is NaN or +inf, or leaves fewer than two experts above -inf (the message names the
            token). On CUDA such a choice is -1 with weight 0, as for `topk_gate`.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.

    Reference: Lepikhin et al., GShard, 2020 (arXiv 2006.16668), algorithm 1.
    """
    return GShardGateOutput(
        *torch.ops.moe_ext.gshard_gate(logits_TE, rng_state, scale, token_mask, token_idx)
    )


@torch.library.register_fake("moe_ext::gshard_gate")
def _(logits: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
    found = fake_gate("gshard_gate", logits, 2)
    return *found, logits.new_empty((logits.shape[1],), dtype=torch.int64)


register_derivatives(
    "gshard_gate",
    {"logits": "_gshard_gate_backward(grad_topk_weights, grad_score_sum, logits, topk_idx, scale)"},
)


register_fake_like("moe_ext::_gshard_gate_backward", 2)


def noisy_topk_gate(
    clean_logits_TE: Tensor,
    noise_logits_TE: Tensor | None,
    rng_state: Tensor | None,
    top_k: int,
    *,
    noise_epsilon: float = 0.0,
    scale: float = 1.0,
    token_mask: Tensor | None = None,
    token_idx: Tensor | None = None,
) -> NoisyGateOutput:
    r"""Noisy top-k gating, with the sums from which its two losses are computed.

    .. math::
        h = c + \epsilon \odot \sigma,\quad \epsilon \sim N(0, 1),\quad
        \sigma = \mathrm{softplus}(n) + \texttt{noise\_epsilon}

    The K largest :math:`h` are chosen, and their softmax :math:`G` gives the weights.
    ``importance[e]`` is the sum over tokens of :math:`G_e`. ``load[e]`` is the sum of the
    probability that :math:`e` would be chosen again if its own noise alone were drawn anew,
    :math:`\Phi((c_e - \mathrm{kth\_excluding}(h, K, e)) / \sigma_e)`. Without noise ``load`` is
    ``num_tokens_per_expert``, which has no gradient.

    Args:
        clean_logits_TE (Tensor[T, E]): float32, float64, bfloat16 or float16. Arithmetic is in
            float32, in float64 for float64.
        noise_logits_TE (Tensor[T, E]): in the dtype of the clean logits, finite; None for no noise.
        rng_state (Tensor[4]): as `routing_uniform`, stream 2; None with ``noise_logits_TE``. Expert
            ``e`` takes its normal from the uniform words of columns ``e - e % 2`` and the next, by
            Box-Muller in float32.
        top_k (int): in [1, E].
        noise_epsilon (float): at least 0; the paper has none, tensor2tensor and FastMoE add 0.01.
        scale (float): finite factor of the weights; ``importance`` is without it.
        token_mask (Tensor[T]): bool, True for a real token; other tokens are not looked at.
        token_idx (Tensor[T]): as `routing_uniform`.

    Returns:
        NoisyGateOutput: differentiable in both logits through ``topk_weights``, ``importance`` and
        ``load``, the threshold of ``load`` included; a backward pass draws the noise again.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; a real token's clean
            logit is NaN or +inf, or leaves fewer than ``top_k`` experts above -inf; a noise logit
            is not finite (the message names the token). On CUDA such a choice is -1 with weight 0,
            as for `topk_gate`.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.

    Reference: Shazeer et al. 2017 (arXiv 1701.06538), eq. 3-5, 6 and 8-10.
    """
    return NoisyGateOutput(
        *torch.ops.moe_ext.noisy_topk_gate(
            clean_logits_TE,
            noise_logits_TE,
            rng_state,
            top_k,
            noise_epsilon,
            scale,
            token_mask,
            token_idx,
        )
    )


@torch.library.register_fake("moe_ext::noisy_topk_gate")
def _(logits: Tensor, _noise: Any, _state: Any, top_k: int, *_rest: Any) -> tuple[Tensor, ...]:
    found = fake_gate("noisy_topk_gate", logits, top_k)
    return *found, logits.new_empty((logits.shape[1],), dtype=acc_dtype(logits.dtype))


def _noisy_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    clean_logits, noise_logits, rng_state, _, ctx.noise_epsilon, ctx.scale, _, token_idx = inputs
    _, topk_idx, num_tokens_per_expert, _, load = output
    ctx.mark_non_differentiable(topk_idx, num_tokens_per_expert)
    if noise_logits is None:
        ctx.mark_non_differentiable(load)
    ctx.set_materialize_grads(False)
    # The state is copied, because the caller may set that of the next step before this backward
    # pass.
    state = None if rng_state is None else rng_state.clone()
    ctx.save_for_backward(clean_logits, noise_logits, state, topk_idx, token_idx)


_noisy_gradient = once_differentiable("moe_ext::_noisy_topk_gate_backward")


def _noisy_backward(
    ctx: Any,
    grad_weights: Tensor | None,
    _idx: Any,
    _counts: Any,
    grad_importance: Tensor | None,
    grad_load: Tensor | None,
) -> tuple[Tensor | None, ...]:
    clean_logits, noise_logits, rng_state, topk_idx, token_idx = ctx.saved_tensors
    grads = (grad_weights, grad_importance, grad_load)
    grad_clean = grad_noise = None
    if any(ctx.needs_input_grad[:2]) and any(grad is not None for grad in grads):
        grad_clean, grad_noise = _noisy_gradient(
            *grads,
            clean_logits,
            noise_logits,
            rng_state,
            topk_idx,
            ctx.noise_epsilon,
            ctx.scale,
            token_idx,
        )
    grad_noise = None if noise_logits is None else grad_noise
    return grad_clean, grad_noise, None, None, None, None, None, None


register_autograd("moe_ext::noisy_topk_gate", _noisy_backward, setup_context=_noisy_setup_context)


@torch.library.register_fake("moe_ext::_noisy_topk_gate_backward")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    _, _, _, clean_logits, noise_logits, *_ = arguments
    num_tokens, num_experts = clean_logits.shape
    noisy_tokens = 0 if noise_logits is None else num_tokens
    grad_clean = clean_logits.new_empty((num_tokens, num_experts))
    return grad_clean, clean_logits.new_empty((noisy_tokens, num_experts))


def squared_variation(x_E: Tensor) -> Tensor:
    r"""The square of the coefficient of variation, :math:`\mathrm{Var}(x) / \mathrm{Mean}(x)^2`.

    For ``importance`` and for ``load`` it is the loss of noisy top-k gating: 0 if balanced, E - 1
    if one expert has all.

    Args:
        x_E (Tensor[E]): any floating dtype, at least 0.

    Returns:
        Tensor[]: in the dtype of x, with the variance over E experts (not E - 1); 0 if all are
        zero. Differentiable.

    Reference: Shazeer et al. 2017 (arXiv 1701.06538), eq. 7 and 11.
    """
    mean = x_E.mean()
    variance = (x_E - mean).square().mean()
    return variance / mean.square().clamp(min=torch.finfo(x_E.dtype).tiny)
