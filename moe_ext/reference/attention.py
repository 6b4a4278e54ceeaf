"""Block attention written with PyTorch's own functions, over all scores at once.

Shape suffixes: B batch, H heads, G key heads, Q queries, K keys, D head dim.
"""

import math

import torch
from torch import Tensor

from moe_ext.reference.gating import widened
from moe_ext.reference.noisy_gating import routing_uniform

_DROPOUT_STREAM = 4


def attention_block(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    q_positions_Q: Tensor,
    k_positions_K: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    batch_offset: int = 0,
    head_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Same as `moe_ext.ops.attention_block`."""
    q, k, v = widened(q_BHQD), widened(k_BGKD), widened(v_BGKD)
    if k.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scores = q @ k.transpose(2, 3) * (1 / math.sqrt(max(q.shape[3], 1)) if scale is None else scale)
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    distance_QK = q_positions_Q[:, None] - k_positions_K
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * distance_QK.abs()
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    seen = _visible(distance_QK, causal, window_left, window_right)
    if q_documents is not None and k_documents is not None:
        seen = seen & (q_documents[:, None] == k_documents)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    if bias is not None:
        # A bias of -inf hides its key, because the gradient of a score of -inf would be NaN.
        seen = seen & (bias > -math.inf)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(dim=3)
    # In rows without keys, the difference of two infinities would be NaN, also in the gradient.
    empty = lse == -math.inf
    p = (scores - lse.masked_fill(empty, 0)[..., None]).exp()
    if dropout_p:
        assert seed is not None
        p = p * _keep(
            q, q_positions_Q, k_positions_K, int(seed), dropout_p, batch_offset, head_offset
        )
    return p @ v, lse


def attention_delta(
    grad_out_BHQD: Tensor, out_BHQD: Tensor, grad_lse_BHQ: Tensor | None = None
) -> Tensor:
    """Same as `moe_ext.ops.attention_delta`."""
    delta_BHQ = (grad_out_BHQD * out_BHQD).sum(dim=3)
    return delta_BHQ if grad_lse_BHQ is None else delta_BHQ - grad_lse_BHQ


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as `moe_ext.ops.merge_attention`: a softmax over two, of which either may be empty."""
    lses = torch.stack([lse_a, lse_b])
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.masked_fill(lse == -math.inf, 0)).exp()[..., None]
    outs = torch.stack([widened(out_a), widened(out_b)])
    return (weights * outs.masked_fill(weights == 0, 0)).sum(dim=0), lse


def merge_attention_sinks(out: Tensor, lse: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Same as `moe_ext.ops.merge_attention_sinks`: a key with its head's logit and value 0."""
    sinks_BHQ = sinks_H.to(lse.dtype)[:, None].expand(lse.shape)
    return merge_attention(out, lse, torch.zeros_like(out), sinks_BHQ)


def _visible(distance_QK: Tensor, causal: bool, window_left: int, window_right: int) -> Tensor:
    seen = torch.ones_like(distance_QK, dtype=torch.bool)
    if causal:
        seen &= distance_QK >= 0
    if window_left >= 0:
        seen &= distance_QK <= window_left
    if window_right >= 0:
        seen &= -distance_QK <= window_right
    return seen


def _keep(
    q: Tensor,
    q_positions_Q: Tensor,
    k_positions_K: Tensor,
    seed: int,
    dropout_p: float,
    batch_offset: int,
    head_offset: int,
) -> Tensor:
    """Return the factors of dropout on the softmax: 0, or 1 / (1 - p)."""
    columns = int(k_positions_K.max()) + 1 if k_positions_K.numel() else 0
    uniform = []
    for b in range(batch_offset, batch_offset + q.shape[0]):
        for h in range(head_offset, head_offset + q.shape[1]):
            rng_state = torch.tensor([seed, h, b, 0])
            u_QK = routing_uniform(
                rng_state,
                len(q_positions_Q),
                columns,
                stream=_DROPOUT_STREAM,
                token_idx=q_positions_Q.cpu(),
            )
            uniform.append(u_QK[:, k_positions_K.cpu()])
    shape = (*q.shape[:3], len(k_positions_K))
    # The threshold has 24 bits, like the random numbers.
    threshold = round(dropout_p * 2**24) * 2.0**-24
    keep = torch.stack(uniform).view(shape) >= threshold if uniform else torch.ones(shape)
    return keep.to(q) / (1 - dropout_p)
