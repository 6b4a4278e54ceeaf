"""Multi-head self-attention over a sequence in shards, with its projections.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D head dim, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.attention.layouts import LAYOUTS, Layout, make_layout
from moe_ext.attention.self_attention_ring import ring_self_attention
from moe_ext.attention.sharding import check_lengths, gathered_lengths
from moe_ext.attention.sharding import position_ids as position_ids_of
from moe_ext.distributed.groups import GroupHandle, check_group

_NAME = "RingSelfAttention"


def _require(condition: bool, argument: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{_NAME}: expected {argument} to be {rule}, got {value}")


class RingSelfAttention(nn.Module):
    """Self-attention with projections, each rank with its positions of the sequence.

    The sequence-parallel form of `nn.MultiheadAttention(batch_first=True)` for self-attention;
    `ring_self_attention` between the projections. Every rank holds all parameters, and their
    gradients are those of its own positions: sum them over the group, as for every parameter that
    its ranks hold alike.

    Args:
        model_dim: dim of inputs and outputs.
        num_heads: H, a divisor of model_dim.
        group: the P ranks; None is this process alone.
        num_kv_heads: Hkv, a divisor of H; None for H.
        bias: add biases to the projections.
        dropout: share of the softmax dropped in training.
        is_causal: a query sees no key after it.
        layout: who holds which positions, see `make_layout`.
        rotary_base: rotate queries and keys by their positions with angles
            position * rotary_base^(-2i/D), halves of the head as pairs (as Llama); None for none.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: a number out of its range.
        TypeError: `group` is none of this rank's.

    Reference:
        Li, Xue, Baranwal, Li, You: Sequence Parallelism (2021, arXiv 2105.13120).
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        group: ProcessGroup | None,
        num_kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        is_causal: bool = False,
        layout: str | Layout = "contiguous",
        rotary_base: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_group(group, _NAME)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _require(num_heads >= 1, "num_heads", "at least 1", num_heads)
        divides = model_dim >= 1 and model_dim % num_heads == 0
        _require(divides, "model_dim", f"a multiple of the {num_heads} heads", model_dim)
        divides = kv_heads >= 1 and num_heads % kv_heads == 0
        _require(divides, "num_kv_heads", f"a divisor of the {num_heads} heads", kv_heads)
        _require(0 <= dropout < 1, "dropout", "in [0, 1)", dropout)
        known = isinstance(layout, Layout) or layout in LAYOUTS
        _require(known, "layout", f"a Layout or one of {LAYOUTS}", repr(layout))
        self.head_dim = model_dim // num_heads
        if rotary_base is not None:
            _require(rotary_base > 0, "rotary_base", "more than 0", rotary_base)
            _require(self.head_dim % 2 == 0, "head dim", "even for rotary_base", self.head_dim)
        self.model_dim, self.num_heads, self.num_kv_heads = model_dim, num_heads, kv_heads
        self.dropout, self.is_causal, self.layout = dropout, is_causal, layout
        self.rotary_base = rotary_base
        self._group = GroupHandle(group)
        kv_dim = kv_heads * self.head_dim
        self.q_proj = nn.Linear(model_dim, model_dim, bias, device, dtype)
        self.k_proj = nn.Linear(model_dim, kv_dim, bias, device, dtype)
        self.v_proj = nn.Linear(model_dim, kv_dim, bias, device, dtype)
        self.out_proj = nn.Linear(model_dim, model_dim, bias, device, dtype)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share a sequence."""
        return self._group.group

    @classmethod
    def from_multihead_attention(
        cls,
        module: nn.MultiheadAttention,
        *,
        group: ProcessGroup | None,
        is_causal: bool = False,
        layout: str | Layout = "contiguous",
    ) -> RingSelfAttention:
        """A copy of a self-attention of torch, with its parameters, dropout and mode.

        Raises:
            ValueError: the module has what this one has not: other dims for keys and values, added
                keys, or a sequence in front of the batch.
        """
        own_dims = module.in_proj_weight is not None
        _require(own_dims, "kdim and vdim", "embed_dim", (module.kdim, module.vdim))
        added = module.bias_k is not None or module.add_zero_attn
        _require(not added, "module", "without add_bias_kv and add_zero_attn", "one of them")
        _require(module.batch_first, "module", "batch_first=True", False)
        weight, bias = module.in_proj_weight, module.in_proj_bias
        made = cls(
            module.embed_dim,
            module.num_heads,
            group=group,
            bias=bias is not None,
            dropout=module.dropout,
            is_causal=is_causal,
            layout=layout,
            device=weight.device,
            dtype=weight.dtype,
        )
        projections = (made.q_proj, made.k_proj, made.v_proj)
        with torch.no_grad():
            for i, projection in enumerate(projections):
                projection.weight.copy_(weight.chunk(3)[i])
                if bias is not None:
                    projection.bias.copy_(bias.chunk(3)[i])
            made.out_proj.load_state_dict(module.out_proj.state_dict())
        return made.train(module.training)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        position_ids: Tensor | None = None,
        layout: str | Layout | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Attend from this rank's positions to those of all ranks.

        Args:
            x: `[B, L, model_dim]`, this rank's positions.
            key_mask: `[B, L]` bool, True for real keys: the opposite of torch's key_padding_mask.
            attn_mask: as `ring_self_attention`; bool, True for seen, as in
                `F.scaled_dot_product_attention` and the opposite of `nn.MultiheadAttention`.
            cu_seqlens: offsets of packed documents in the whole sequence.
            position_ids: `[L]` or `[B, L]`, for the rotation; None for the positions in the whole
                sequence (from 0 in each document), at the cost of a small message.
            layout: in the place of the module's.
            seed: of the dropout, see `ring_self_attention`.

        Returns:
            `[B, L, model_dim]`.
        """
        fits = x.dim() == 3 and x.shape[2] == self.model_dim
        _require(fits, "x", f"of shape [B, L, {self.model_dim}]", list(x.shape))
        made = self.layout if layout is None else layout
        q, k, v = (
            projection(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary_base is not None:
            if position_ids is None:
                position_ids = self._positions(x, made, cu_seqlens)
            q, k = (self._rotated(y, position_ids) for y in (q, k))
        out = ring_self_attention(
            q,
            k,
            v,
            group=self.group,
            is_causal=self.is_causal,
            layout=made,
            cu_seqlens=cu_seqlens,
            key_mask=key_mask,
            attn_mask=attn_mask,
            dropout_p=self.dropout if self.training else 0.0,
            seed=seed,
        )
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _positions(
        self,
        x: Tensor,
        layout: str | Layout,
        cu_seqlens: Tensor | Sequence[int] | None,
    ) -> Tensor:
        lengths = gathered_lengths(x.shape[1], self.group, x.device, operation=_NAME)
        made = make_layout(layout, sum(lengths), len(lengths), cu_seqlens=cu_seqlens)
        check_lengths(made, lengths, _NAME, self.group)
        return position_ids_of(
            made.seq_len, group=self.group, layout=made, cu_seqlens=cu_seqlens, device=x.device
        )

    def _rotated(self, x_BHLD: Tensor, position_ids: Tensor) -> Tensor:
        """Halves (a, b) of each head to (a cos - b sin, b cos + a sin)."""
        length, half = x_BHLD.shape[2], self.head_dim // 2
        fits = position_ids.shape[-1:] == (length,) and position_ids.dim() in (1, 2)
        rule = f"[{length}] or [B, {length}], this rank's"
        _require(fits, "position_ids", rule, list(position_ids.shape))
        assert self.rotary_base is not None
        # float64: a float32 angle of position 10^6 is off by a twentieth.
        steps = torch.arange(half, dtype=torch.float64, device=x_BHLD.device) / half
        angles = position_ids[..., None].double() * self.rotary_base**-steps
        if angles.dim() == 3:
            angles = angles[:, None]
        cos, sin = angles.cos().to(x_BHLD.dtype), angles.sin().to(x_BHLD.dtype)
        a, b = x_BHLD.split(half, 3)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], 3)

    def extra_repr(self) -> str:
        """Of `repr`."""
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{heads}, is_causal={self.is_causal}, dropout={self.dropout}"
