"""Noisy gating written with PyTorch's own functions.

Shape suffixes: T tokens, C columns, D model, E experts, K top-k, R real (unmasked) tokens.
"""

import math

import torch
from torch import Tensor

from moe_ext.ops.noisy_gating import GShardGateOutput, NoisyGateOutput
from moe_ext.reference.gating import best, real_tokens, widened

_MASK32 = 0xFFFFFFFF


def routing_uniform(
    rng_state: Tensor,
    num_tokens: int,
    num_columns: int,
    *,
    stream: int,
    token_idx: Tensor | None = None,
) -> Tensor:
    """Same as `moe_ext.ops.routing_uniform`."""
    words_TC = _routing_words(rng_state, num_tokens, num_columns, stream, token_idx)
    return (words_TC >> 8).to(torch.float32) * 2.0**-24


def routing_normal(
    rng_state: Tensor,
    num_tokens: int,
    num_columns: int,
    *,
    stream: int,
    token_idx: Tensor | None = None,
) -> Tensor:
    """Return the normal numbers of the noisy gate, by Box-Muller in float64.

    Two neighbouring columns share two words.
    """
    even_columns = num_columns + num_columns % 2
    words_TC = _routing_words(rng_state, num_tokens, even_columns, stream, token_idx)
    radius = (-2 * (((words_TC[:, 0::2] >> 8) + 1).double() * 2.0**-24).log()).sqrt()
    angle = words_TC[:, 1::2].double() * (2 * math.pi * 2.0**-32)
    normals = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=2)
    return normals.flatten(1)[:, :num_columns]


def routing_jitter(
    x_TD: Tensor, rng_state: Tensor, eps: float, *, token_idx: Tensor | None = None
) -> Tensor:
    """Same as `moe_ext.ops.routing_jitter`."""
    uniform_TD = routing_uniform(rng_state, *x_TD.shape, stream=0, token_idx=token_idx)
    factor_TD = (1 - eps) + 2 * eps * uniform_TD.to(widened(x_TD).dtype)
    return (widened(x_TD) * factor_TD).to(x_TD.dtype)


def gshard_gate(
    logits_TE: Tensor,
    rng_state: Tensor | None = None,
    *,
    scale: float = 1.0,
    token_mask: Tensor | None = None,
    token_idx: Tensor | None = None,
) -> GShardGateOutput:
    """Same as `moe_ext.ops.gshard_gate`: algorithm 1 of the paper, without its capacity."""
    num_tokens, num_experts = logits_TE.shape
    real_T = real_tokens(logits_TE, token_mask)
    p_RE = widened(logits_TE[real_T]).softmax(dim=1)
    idx_R2 = best(widened(logits_TE[real_T]), 2)
    g_R2 = p_RE.gather(1, idx_R2)
    g_R2 = g_R2 / g_R2.sum(dim=1, keepdim=True)
    kept_R2 = torch.ones_like(g_R2, dtype=torch.bool)
    if rng_state is not None:
        u_T = routing_uniform(rng_state, num_tokens, 1, stream=1, token_idx=token_idx)[:, 0]
        kept_R2[:, 1] = u_T[real_T] < 2 * g_R2[:, 1]
    weights_R2 = scale * g_R2 * kept_R2
    chosen_R2 = idx_R2.masked_fill(~kept_R2, -1)
    return GShardGateOutput(
        weights_R2.new_zeros((num_tokens, 2)).index_put((real_T,), weights_R2),
        torch.full((num_tokens, 2), -1, device=idx_R2.device).index_put((real_T,), chosen_R2),
        torch.bincount(idx_R2[kept_R2], minlength=num_experts),
        p_RE.sum(dim=0),
        torch.bincount(idx_R2[:, 0], minlength=num_experts),
    )


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
    """Same as `moe_ext.ops.noisy_topk_gate`: eq. 3 to 10 of the paper, one after another."""
    num_tokens, num_experts = clean_logits_TE.shape
    real_T = real_tokens(clean_logits_TE, token_mask)
    clean_RE = h_RE = widened(clean_logits_TE[real_T])
    if noise_logits_TE is not None:
        assert rng_state is not None
        normal_TE = routing_normal(
            rng_state, num_tokens, num_experts, stream=2, token_idx=token_idx
        )
        deviation_RE = (
            torch.nn.functional.softplus(widened(noise_logits_TE[real_T])) + noise_epsilon
        )
        # The operator draws in float32, whatever the dtype of the logits.
        h_RE = clean_RE + normal_TE[real_T].float().to(clean_RE.dtype) * deviation_RE
    idx_RK = best(h_RE.detach(), top_k)
    gates_RK = h_RE.gather(1, idx_RK).softmax(dim=1)
    gates_RE = torch.zeros_like(h_RE).scatter(1, idx_RK, gates_RK)
    counts_E = torch.bincount(idx_RK.flatten(), minlength=num_experts)
    load_E = counts_E + 0 * h_RE.sum(dim=0)
    if noise_logits_TE is not None and top_k < num_experts:
        p_RE = _normal_cdf((clean_RE - _kth_excluding(h_RE, top_k)) / deviation_RE)
        load_E = p_RE.sum(dim=0)
    weights_TK = gates_RK.new_zeros((num_tokens, top_k)).index_put((real_T,), scale * gates_RK)
    idx_TK = torch.full_like(weights_TK, -1, dtype=torch.int64).index_put((real_T,), idx_RK)
    return NoisyGateOutput(weights_TK, idx_TK, counts_E, gates_RE.sum(dim=0), load_E)


def squared_variation(x_E: Tensor) -> Tensor:
    """Same as `moe_ext.ops.squared_variation`."""
    mean = x_E.mean()
    return x_E.var(correction=0) / mean.square().clamp(min=torch.finfo(x_E.dtype).tiny)


def _kth_excluding(h_RE: Tensor, k: int) -> Tensor:
    """Return `[R, E]`: the k-th largest of a row without the column itself, for k < E."""
    order_RE = best(h_RE.detach(), h_RE.shape[1])
    sorted_RE = h_RE.gather(1, order_RE)
    chosen_RE = torch.zeros_like(h_RE, dtype=torch.bool).scatter(1, order_RE[:, :k], True)
    return torch.where(chosen_RE, sorted_RE[:, k : k + 1], sorted_RE[:, k - 1 : k])


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(-x * math.sqrt(0.5))


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a product of two 32-bit numbers, held in int64."""
    low_half, high_half = a * (b & 0xFFFF), a * (b >> 16)
    carry = (low_half >> 16) + (high_half & 0xFFFF)
    return ((high_half >> 16) + (carry >> 16)) & _MASK32, (
        ((carry & 0xFFFF) << 16) | (low_half & 0xFFFF)
    )


def philox4x32(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10 on 32-bit words held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(0xD2511F53, c0)
        high1, low1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def _routing_words(
    rng_state: Tensor, num_tokens: int, num_columns: int, stream: int, token_idx: Tensor | None
) -> Tensor:
    """Return `[T, C]` words of 32 bits, in int64."""
    seed, layer, step, first_token = rng_state.tolist()
    if token_idx is None:
        token_idx = first_token + torch.arange(num_tokens, device=rng_state.device)
    token_T1 = token_idx[:, None]
    columns_C = torch.arange(0, num_columns, 4, device=rng_state.device) // 4
    shape = (num_tokens, columns_C.shape[0])
    last_T1 = ((layer & 0xFFFF) << 16) | (stream << 8) | ((token_T1 >> 32) & 0xFF)
    counter = (
        columns_C.expand(shape),
        (token_T1 & _MASK32).expand(shape),
        torch.full(shape, step & _MASK32, device=rng_state.device),
        last_T1.expand(shape),
    )
    words = philox4x32(counter, (seed & _MASK32, seed >> 32 & _MASK32))
    return torch.stack(words, dim=2).flatten(1)[:, :num_columns]
