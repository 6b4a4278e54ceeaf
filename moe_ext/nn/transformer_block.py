"""Transformer block with sequences and experts that are divided over ranks.

Shapes: B batch, L positions of this rank, D model, H heads, Hkv heads of keys and values,
    C channels of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_numbers
from moe_ext.attention import Layout, RingAttention
from moe_ext.attention.layouts import ranks_of
from moe_ext.attention.sharding import document_ids, rotate
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_size
from moe_ext.nn.moe_layer import MoELayer


def _takes(ffn: nn.Module, name: str) -> bool:
    """Return True if a network takes an argument; ValueError if only a `MoELayer` in it does."""
    parameters = inspect.signature(ffn.forward).parameters
    if name in parameters:
        return True
    if not any(isinstance(module, MoELayer) for module in ffn.modules()):
        return False
    # Wrappers, such as that of activation checkpointing, pass their arguments on.
    if any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return True
    raise ValueError(
        f"TransformerBlock: expected ffn to take {name}, which the MoELayer in it needs, "
        f"got {type(ffn).__name__}"
    )


def _by_sequence(ffn: nn.Module) -> list[MoELayer]:
    """Return the layers of a network whose balance loss has the scope "sequence"."""
    layers = [module for module in ffn.modules() if isinstance(module, MoELayer)]
    return [layer for layer in layers if layer.balance.scope == "sequence"]


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and a feed-forward network, `[B, L, D] -> [B, L, D]`.

    The ranks of `cp_group` share each sequence, and attend over all of it. If the network is a
    `MoELayer` with an `ep_group`, the ranks of that group share the experts. `MoEMesh(cp=, ep=)`
    makes both groups, which may be equal.

    Args:
        model_dim: D, number of elements of a token.
        num_heads: H, number of attention heads.
        ffn: network that maps `[B, L, D]` to `[B, L, D]`, such as a `MoELayer`. A layer with
            `Balance("sequence")` gets the documents, and needs `cp_group` as the group of the
            balance.
        num_kv_heads: Hkv, a divisor of H; None for H.
        cp_group: the ranks that share each sequence; None for this rank alone.
        layout: see `moe_ext.attention.make_layout`.
        window: (left, right) of the attention.
        dropout_p: dropout probability of the attention, in training.
        rope_base: base of the rotary embedding.
        scheme: see `moe_ext.attention.ring_attention`.
        precision: see `moe_ext.attention.ring_attention`.
        eps: eps of the norms.
        device: device of the parameters made here.
        dtype: dtype of the parameters made here.

    Raises:
        ValueError: sizes do not divide each other, or options are out of range.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        ffn: nn.Module,
        *,
        num_kv_heads: int | None = None,
        cp_group: ProcessGroup | None = None,
        layout: str | Layout = "zigzag",
        window: tuple[int, int] | None = None,
        dropout_p: float = 0.0,
        rope_base: float = 10000.0,
        scheme: str = "ring",
        precision: str = "exact",
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_numbers("TransformerBlock", TransformerBlock.__init__.__annotations__, locals())
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or model_dim % (2 * num_heads):
            raise ValueError(
                "TransformerBlock: expected model_dim to be a multiple of twice num_heads "
                f"{num_heads} (rotary pairs), got {model_dim}"
            )
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"TransformerBlock: expected num_kv_heads to divide {num_heads} heads, "
                f"got {kv_heads}"
            )
        for layer in _by_sequence(ffn):
            if group_size(cp_group) > 1 and layer.balance.group is None:
                raise ValueError(
                    "TransformerBlock: expected the MoELayer in ffn to have balance="
                    "Balance('sequence', group=cp_group), since ranks share the sequences, got "
                    "group=None"
                )
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.head_dim = model_dim // num_heads
        self.rope_base = rope_base
        self._widths = [heads * self.head_dim for heads in (num_heads, kv_heads, kv_heads)]
        self.attention_norm = nn.RMSNorm(model_dim, eps=eps, **made)
        self.qkv_proj = nn.Linear(model_dim, sum(self._widths), bias=False, **made)
        self.attention = RingAttention(
            cp_group,
            layout=layout,
            is_causal=True,
            window=window,
            dropout_p=dropout_p,
            scheme=scheme,
            precision=precision,
        )
        self.o_proj = nn.Linear(model_dim, model_dim, bias=False, **made)
        self.ffn_norm = nn.RMSNorm(model_dim, eps=eps, **made)
        self.ffn = ffn

    def _attend(
        self,
        x_BLD: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | Sequence[int] | None,
        token_mask: Tensor | None,
    ) -> Tensor:
        group = ranks_of(self.attention.group, "TransformerBlock")
        # This agreement reports an error of a rank. Without an error, the attention compares its
        # inputs over the ranks itself.
        with Agreement("TransformerBlock", group, x_BLD.device):
            parts = self.qkv_proj(self.attention_norm(x_BLD)).split(self._widths, dim=-1)
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
            q, k = (rotate(x, position_ids, self.rope_base) for x in (q, k))
        eps = self.attention_norm.eps
        self.attention._told = (f"rope_base={self.rope_base}", f"eps={eps}")
        mixed_BHLC = self.attention(q, k, v, cu_seqlens=cu_seqlens, key_mask=token_mask)
        return self.o_proj(mixed_BHLC.transpose(1, 2).flatten(2))

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        token_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this block.

        Args:
            x: `[B, L, D]`, this rank's shard.
            position_ids: `[L]` or `[B, L]`, see `moe_ext.attention.position_ids`.
            cu_seqlens: offsets of packed documents in the whole sequence.
            token_mask: `[B, L]` bool, True = real token. No query attends to a masked token. In a
                `MoELayer` it reaches no expert, and counts in no loss.

        Returns:
            `[B, L, D]`.

        Raises:
            ValueError: the network has a `MoELayer` inside, but does not take `token_mask` or
                `document_ids`, which the layer needs.
        """
        x = x + self._attend(x, position_ids, cu_seqlens, token_mask)
        told: dict[str, Tensor] = {}
        if token_mask is not None and _takes(self.ffn, "token_mask"):
            told["token_mask"] = token_mask
        if cu_seqlens is not None and _by_sequence(self.ffn) and _takes(self.ffn, "document_ids"):
            told["document_ids"] = document_ids(
                cu_seqlens,
                group=self.attention.group,
                layout=self.attention.layout,
                device=x.device,
            )
        return x + self.ffn(self.ffn_norm(x), **told)
