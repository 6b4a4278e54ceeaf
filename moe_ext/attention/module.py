"""Attention over a sharded sequence as a module.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D and Dv head
    dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._checks import check_numbers
from moe_ext.attention.call import OPERATION, AttentionOptions, Inputs
from moe_ext.attention.functional import run
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import Offsets, PrefixLen
from moe_ext.comm.groups import GroupHandle

# Options that are stored as attributes of the module, unchanged.
_OPTIONS = (
    *("layout", "is_causal", "scale", "window", "softcap", "scheme", "precision"),
    *("kv_grad_dtype", "wire"),
)


class RingAttention(nn.Module):
    """`ring_attention` with fixed options, as a module that replaces the attention of a model.

    The module has no parameters. Projections and rotary embeddings stay with the caller, and the
    rotary embeddings need the `position_ids` of this rank's shard.

    Args:
        group: the ranks that share each sequence, see `ring_attention`; None is this process alone.
        layout: see `make_layout`.
        is_causal: if True, a query sees no key after it.
        scale: factor on q k^T; None for 1 / sqrt(D).
        window: (left, right), -1 for no limit.
        softcap: see `ring_attention`.
        dropout_p: share of the softmax that is dropped in training. Nothing is dropped in
            evaluation.
        scheme: see `ring_attention`.
        precision: see `ring_attention`.
        kv_grad_dtype: see `ring_attention`.
        wire: see `ring_attention`.

    Raises:
        ValueError: an option is out of range.
        TypeError: this rank does not belong to the group.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None,
        *,
        layout: str | Layout = "zigzag",
        is_causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        dropout_p: float = 0.0,
        scheme: str = "ring",
        precision: str = "exact",
        kv_grad_dtype: torch.dtype | None = None,
        wire: str | None = None,
    ) -> None:
        super().__init__()
        check_numbers("RingAttention", RingAttention.__init__.__annotations__, locals())
        self._handle = GroupHandle(group)
        self.layout = layout
        self.is_causal = is_causal
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.dropout_p = dropout_p
        self.scheme = scheme
        self.precision = precision
        self.kv_grad_dtype = kv_grad_dtype
        self.wire = wire
        # Options of an enclosing module that the ranks compare as well, see `AttentionOptions`.
        self._told: tuple[str, ...] = ()
        self._options("RingAttention").check()

    @property
    def group(self) -> ProcessGroup | DeviceMesh | None:
        """The ranks that share each sequence."""
        return self._handle.group

    def extra_repr(self) -> str:
        """Options for `repr`."""
        layout = self.layout if isinstance(self.layout, str) else self.layout.name
        text = f"layout={layout!r}, is_causal={self.is_causal}, scheme={self.scheme!r}"
        for name in ("scale", "window", "softcap", "kv_grad_dtype", "wire"):
            if getattr(self, name) is not None:
                text += f", {name}={getattr(self, name)}"
        return f"{text}, dropout_p={self.dropout_p}" if self.dropout_p else text

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Offsets | None = None,
        prefix_len: PrefixLen | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """This rank's rows of the attention over the whole sequence.

        Args:
            q: `[B, H, L, D]`.
            k: `[B, Hkv, L, D]`.
            v: `[B, Hkv, L, Dv]`.
            cu_seqlens: offsets of packed documents in the whole sequence, see `ring_attention`.
            prefix_len: number of positions at the start of each document that all its queries see,
                see `ring_attention`.
            key_mask: `[B, L]` bool, False for those of this rank's keys that no query sees.
            attn_mask: `[B or 1, H or 1, L, S]`, bool, or a bias that is added to the scores.
            alibi_slopes: `[H]`.
            sinks: `[H]`, see `ring_attention`.
            seed: seed of the dropout, equal on every rank; None draws one.

        Returns:
            `[B, H, L, Dv]`.

        Raises:
            ValueError: see `ring_attention`.
            RankFailureError: a rank died or did not answer; the message names it.
        """
        inputs = Inputs(q, k, v, key_mask, alibi_slopes, sinks, cu_seqlens, prefix_len, attn_mask)
        out = run(inputs, self._options(OPERATION), seed, return_lse=False)
        assert isinstance(out, Tensor)
        return out

    if TYPE_CHECKING:
        __call__ = forward

    def _options(self, operation: str) -> AttentionOptions:
        """The current options; TypeError with the name `operation` for an invalid group."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        dropout_p = self.dropout_p if self.training else 0.0
        return AttentionOptions.of(
            self.group, operation, dropout_p=dropout_p, told=self._told, **options
        )
