"""Top-k router.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext.nn.routers.base import LinearRouter, RouterOutput, Tokens

_SCORE_FNS = ("softmax", "topk_softmax", "sigmoid")


class TopKRouter(LinearRouter):
    """Linear router with top-k selection: `logits = x @ weight.T`, then `ops.topk_gate`.

    The logits are computed in float32 (float64 for float64 inputs) whatever the dtype of the model,
    and outside autocast: logits rounded to bfloat16 flip the choice between close experts.

    Args:
        model_dim: D.
        num_experts: E, over all ranks.
        top_k: K, experts per token, at most E.
        score_fn: "softmax", "topk_softmax" or "sigmoid"; see `ops.topk_gate`.
        renormalize: divide the K weights of a token by their sum.
        scale: finite factor on the weights.
        num_groups: number of equal groups of experts.
        top_groups: groups a token may choose its experts from.
        selection_bias: keep a float32 buffer `selection_bias` [E], added to the scores for the
            selection only (initially zero; updated by whoever balances the load with it).
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: as `ops.topk_gate`; no host synchronisation.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        score_fn: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        selection_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            model_dim,
            num_experts,
            top_k,
            score_fn=score_fn,
            renormalize=renormalize,
            scale=scale,
            device=device,
            dtype=dtype,
        )
        if score_fn not in _SCORE_FNS:
            raise ValueError(
                f"TopKRouter: expected score_fn to be one of {_SCORE_FNS}, got {score_fn!r}"
            )
        if num_groups < 1 or num_experts % num_groups != 0:
            raise ValueError(
                f"TopKRouter: expected num_groups to divide num_experts={num_experts}, "
                f"got {num_groups}"
            )
        if not 1 <= top_groups <= num_groups or top_groups * (num_experts // num_groups) < top_k:
            raise ValueError(
                f"TopKRouter: expected top_groups to be in 1..num_groups={num_groups} and to leave "
                f"at least top_k={top_k} experts, got {top_groups}"
            )
        self.num_groups = num_groups
        self.top_groups = top_groups
        bias = torch.zeros(num_experts, device=device) if selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight uniformly in +-1/sqrt(D); set the selection bias to zero."""
        super().reset_parameters()
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TopKRouter:
        """Move or cast, but leave the selection bias in float32: its updates are tiny."""
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias is not None:
            dtype = torch.promote_types(self.selection_bias.dtype, torch.float32)
            if dtype != self.selection_bias.dtype and not bias.is_meta:
                self.selection_bias = bias.to(self.selection_bias.device, dtype)
        return self

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        text = (
            f"model_dim={self.model_dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score_fn={self.score_fn!r}, renormalize={self.renormalize}, scale={self.scale}"
        )
        if self.num_groups > 1:
            text += f", num_groups={self.num_groups}, top_groups={self.top_groups}"
        return text

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """The K experts of the largest scores, the bias added."""
        gate = self.topk_gate(
            logits_TE,
            tokens,
            selection_bias=self.selection_bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )
        return RouterOutput(logits_TE, gate)
