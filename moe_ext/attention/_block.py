"""Attention of one block of queries and keys, in plain torch: the slow path of the ring.

Shapes: B batch, H heads, G heads that share a head of keys, L queries, M keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ext.attention.masks import Mask
from moe_ext.reference.noisy_gating import philox4x32

_DROPOUT_STREAM = 4
_BITS = 1 << 24


@dataclass(frozen=True)
class BlockOptions:
    """What is the same for every block of one attention.

    Attributes:
        scale: factor on q.k.
        mask: which keys are seen, by position.
        softcap: scores are cap * tanh(score / cap); 0 for none.
        dropout_p: share of the softmax that is dropped.
        seed: of the dropout.
        first_head: number of the first head here in the whole model, for the dropout.
    """

    scale: float
    mask: Mask
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    first_head: int = 0


@dataclass(frozen=True)
class Block:
    """Queries and keys of one block, with their global positions.

    Attributes:
        q: `[B, H, L, D]`.
        k: `[B, Hkv, M, D]`.
        v: `[B, Hkv, M, Dv]`.
        q_positions: `[L]`.
        k_positions: `[M]`.
        key_mask: `[B, M]` bool, True = real key.
        alibi_slopes: `[H]` float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_positions: Tensor
    k_positions: Tensor
    key_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """`[B, H, L, D]` as `[B, Hkv, G * L, D]`."""
    batch, heads, length, dim = x.shape
    return x.reshape(batch, num_kv_heads, heads // num_kv_heads * length, dim)


def _visible(block: Block, options: BlockOptions) -> Tensor:
    """`[B or 1, 1, L, M]` bool."""
    mask = options.mask
    distance_LM = block.k_positions[None, :] - block.q_positions[:, None]
    seen_LM = torch.ones_like(distance_LM, dtype=torch.bool)
    right = 0 if mask.is_causal else mask.right
    if right >= 0:
        seen_LM &= distance_LM <= right
    if mask.left >= 0:
        seen_LM &= distance_LM >= -mask.left
    if mask.cu_seqlens is not None:
        edges = torch.tensor(mask.cu_seqlens, device=block.q.device)
        q_documents = torch.bucketize(block.q_positions, edges, right=True)
        k_documents = torch.bucketize(block.k_positions, edges, right=True)
        seen_LM &= q_documents[:, None] == k_documents[None, :]
    seen = seen_LM[None, None]
    return seen if block.key_mask is None else seen & block.key_mask[:, None, None, :]


def _scores(block: Block, options: BlockOptions) -> tuple[Tensor, Tensor]:
    """`[B, H, L, M]` scores, -inf where masked, and d score / d (scaled q.k)."""
    dtype = accumulation_dtype(block.q.dtype)
    batch, heads, length, _ = block.q.shape
    q = _grouped(block.q, block.k.shape[1]).to(dtype)
    scores = q @ block.k.to(dtype).transpose(2, 3) * options.scale
    scores = scores.view(batch, heads, length, -1)
    slope = torch.ones((), dtype=dtype, device=scores.device)
    if options.softcap > 0:
        tanh = (scores / options.softcap).tanh()
        scores, slope = tanh * options.softcap, 1 - tanh.square()
    if block.alibi_slopes is not None:
        distance_LM = (block.q_positions[:, None] - block.k_positions[None, :]).abs().to(dtype)
        scores = scores - block.alibi_slopes.to(dtype)[:, None, None] * distance_LM
    return scores.masked_fill(~_visible(block, options), -torch.inf), slope


def _kept(block: Block, options: BlockOptions) -> Tensor | None:
    """`[B, H, L, M]`: 0 where dropped, else 1 / (1 - p)."""
    if options.dropout_p == 0.0:
        return None
    device = block.q.device
    shape = (*block.q.shape[:3], block.k.shape[2])
    heads_H = torch.arange(shape[1], device=device) + options.first_head
    last_H = ((heads_H & 0xFFFF) << 16) | (_DROPOUT_STREAM << 8)
    counter = (
        (block.k_positions // 4).expand(shape),
        block.q_positions[:, None].expand(shape),
        torch.arange(shape[0], device=device)[:, None, None, None].expand(shape),
        last_H[:, None, None].expand(shape),
    )
    words = philox4x32(counter, (options.seed & 0xFFFFFFFF, options.seed >> 32 & 0xFFFFFFFF))
    column = (block.k_positions % 4).expand(shape)[..., None]
    draws = torch.stack(words, dim=-1).gather(-1, column)[..., 0] >> 8
    keep = draws >= int(options.dropout_p * _BITS + 0.5)
    return keep.to(accumulation_dtype(block.q.dtype)) / (1 - options.dropout_p)


def attend_(out: Tensor, lse: Tensor, block: Block, options: BlockOptions) -> None:
    """Add the keys of a block to `out` `[B, H, L, Dv]` and `lse` `[B, H, L]`, in place.

    Both are float32 (float64); 0 and -inf stand for no keys yet.
    """
    scores, _ = _scores(block, options)
    block_lse = torch.logsumexp(scores, dim=-1)
    shift = block_lse.masked_fill(block_lse == -torch.inf, 0.0)
    weights = (scores - shift[..., None]).exp()
    kept = _kept(block, options)
    if kept is not None:
        weights = weights * kept
    block_out = _grouped(weights, block.k.shape[1]) @ block.v.to(weights.dtype)
    merged = _merge(out, lse, block_out.reshape(out.shape), block_lse)
    out.copy_(merged[0])
    lse.copy_(merged[1])


def block_backward(
    grad_out: Tensor, lse: Tensor, delta: Tensor, block: Block, options: BlockOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of this block in float32 (float64).

    Args:
        grad_out: `[B, H, L, Dv]`.
        lse: `[B, H, L]` over the keys of all blocks.
        delta: `[B, H, L]`, rowsum(grad_out * out) - grad_lse, with the out of all blocks.
        block: as in the forward pass.
        options: as in the forward pass.
    """
    scores, slope = _scores(block, options)
    num_kv_heads = block.k.shape[1]
    # A row without any key gives exp(-inf - inf) = 0.
    shift = lse.masked_fill(lse == -torch.inf, torch.inf)
    weights = (scores - shift[..., None]).exp()
    grad_out = _grouped(grad_out.to(scores.dtype), num_kv_heads)
    grad_weights = grad_out @ block.v.to(scores.dtype).transpose(2, 3)
    grad_weights = grad_weights.view(scores.shape)
    kept = _kept(block, options)
    dropped = weights if kept is None else weights * kept
    grad_v = _grouped(dropped, num_kv_heads).transpose(2, 3) @ grad_out
    if kept is not None:
        grad_weights = grad_weights * kept
    grad_scores = weights * (grad_weights - delta[..., None]) * slope * options.scale
    grad_scores = _grouped(grad_scores, num_kv_heads)
    grad_q = (grad_scores @ block.k.to(scores.dtype)).view(block.q.shape)
    q = _grouped(block.q.to(scores.dtype), num_kv_heads)
    return grad_q, grad_scores.transpose(2, 3) @ q, grad_v


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results as one, safe where a side has no keys (lse -inf)."""
    most = torch.maximum(lse_a, lse_b)
    shift = most.masked_fill(most == -torch.inf, 0.0)
    a, b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = a + b
    inverse = torch.where(total > 0, 1 / total, 0.0)
    out = (a * inverse)[..., None] * out_a + (b * inverse)[..., None] * out_b
    return out, shift + total.log()
