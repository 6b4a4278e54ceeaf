"""One block of queries and keys, as the operators take it.

Shapes: B batch, H heads, Hkv heads of keys and values, L queries, M keys, D and Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ext.attention.masks import Mask
from moe_ext.ops.attention import attention_block_, attention_block_backward


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
        q_documents: `[L]` or None.
        k_documents: `[M]` or None.
        key_mask: `[B, M]` bool, True = real key.
        alibi_slopes: `[H]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_positions: Tensor
    k_positions: Tensor
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    key_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def arguments(self, options: BlockOptions) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Of the operators, without what they work on."""
        tensors = (self.q, self.k, self.v, self.q_positions, self.k_positions)
        return tensors, {
            "scale": options.scale,
            "causal": options.mask.is_causal,
            "window_left": options.mask.left,
            "window_right": options.mask.right,
            "q_documents": self.q_documents,
            "k_documents": self.k_documents,
            "key_mask": self.key_mask,
            "alibi_slopes": self.alibi_slopes,
            "softcap": options.softcap,
            "dropout_p": options.dropout_p,
            "seed": options.seed if options.dropout_p > 0 else None,
            "head_offset": options.first_head,
        }


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend_(out: Tensor, lse: Tensor, block: Block, options: BlockOptions) -> None:
    """Add the keys of a block to `out` `[B, H, L, Dv]` and `lse` `[B, H, L]`, in place.

    Both are float32 (float64); 0 and -inf stand for no keys yet.
    """
    tensors, kwargs = block.arguments(options)
    attention_block_(out, lse, *tensors, **kwargs)


def block_backward(
    grad_out: Tensor, lse: Tensor, delta: Tensor, block: Block, options: BlockOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of this block in float32 (float64).

    Args:
        grad_out: `[B, H, L, Dv]` float32 (float64).
        lse: `[B, H, L]` over the keys of all blocks.
        delta: `[B, H, L]`, rowsum(grad_out * out) - grad_lse, with the out of all blocks.
        block: as in the forward pass.
        options: as in the forward pass.
    """
    tensors, kwargs = block.arguments(options)
    return attention_block_backward(grad_out, lse, delta, *tensors, **kwargs)
