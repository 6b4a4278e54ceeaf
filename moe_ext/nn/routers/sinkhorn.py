"""Sinkhorn router.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.nn._autocast import without_autocast
from moe_ext.nn.routers._linear import LinearRouter
from moe_ext.nn.routers.base import RouterOutput


class SinkhornRouter(LinearRouter):
    """Top-k of logits that Sinkhorn's algorithm has balanced; see `ops.sinkhorn_gate`.

    In training mode the choice is made from the balanced logits, in evaluation from the logits
    themselves, token by token. The weights are those of the logits either way: `sigmoid` for
    `top_k=1`, else `softmax` over all experts, not renormalised. As Megatron-LM's router of this
    name. The load is nearly even by construction.

    Args:
        model_dim: D.
        num_experts: E, over all ranks.
        top_k: K, experts per token, at most E.
        num_iters: the most rounds.
        tolerance: change of the experts' factors to stop at.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: as `ops.sinkhorn_gate`; no host synchronisation. In training the choice for a token
    depends on the other tokens of this rank.

    Reference: Clark et al. 2022 (arXiv 2202.01169), section 3.1.
    """

    balanced = True

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        *,
        top_k: int = 1,
        num_iters: int = 100,
        tolerance: float = 1e-4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_iters < 1:
            raise ValueError(
                f"SinkhornRouter: expected num_iters to be at least 1, got {num_iters}"
            )
        if not 0 <= tolerance < math.inf:
            raise ValueError(
                f"SinkhornRouter: expected tolerance to be finite and at least 0, got {tolerance}"
            )
        super().__init__(model_dim, num_experts, top_k, device=device, dtype=dtype)
        self.num_iters = num_iters
        self.tolerance = tolerance
        self.score_fn = "sigmoid" if top_k == 1 else "softmax"
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return f"{super().extra_repr()}, num_iters={self.num_iters}, tolerance={self.tolerance}"

    def forward(
        self,
        x_TD: Tensor,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        token_idx: Tensor | None = None,
    ) -> RouterOutput:
        """Choose K experts for every token.

        Args:
            x_TD: tokens, `[T, D]`, any floating dtype.
            token_mask: `[T]` bool, True = real token; a masked token chooses no expert.
            token_ids: not looked at.
            token_idx: not looked at.

        Returns:
            `RouterOutput(logits [T, E], gate)`.
        """
        with without_autocast(x_TD.device):
            logits_TE = ops.router_logits(x_TD, self.weight)
            if self.training:
                gate = ops.sinkhorn_gate(
                    logits_TE,
                    self.top_k,
                    num_iters=self.num_iters,
                    tolerance=self.tolerance,
                    token_mask=token_mask,
                )
            else:
                gate = ops.topk_gate(
                    logits_TE,
                    self.top_k,
                    score_fn=self.score_fn,
                    renormalize=False,
                    token_mask=token_mask,
                )
        return RouterOutput(logits_TE, gate)

    def with_choice(self, routed: RouterOutput, topk_idx_TK: Tensor) -> RouterOutput:
        """See `Router.with_choice`."""
        with without_autocast(routed.logits.device):
            gate = ops.gate_weights(
                routed.logits, topk_idx_TK, score_fn=self.score_fn, renormalize=False
            )
        return routed._replace(gate=gate)
