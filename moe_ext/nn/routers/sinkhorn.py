"""Sinkhorn router.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._checks import check_numbers, check_rule, check_sizes
from moe_ext.nn.routers.base import LinearRouter, RouterOutput, Tokens


class SinkhornRouter(LinearRouter):
    """Top-k of logits that Sinkhorn's algorithm has balanced; see `ops.sinkhorn_gate`.

    The choice is made from the balanced logits in training mode, and from the logits of each token
    in eval mode. The weights come from the logits in both modes: `sigmoid` for `top_k=1`, otherwise
    `softmax` over all experts, not renormalised. The same as the Sinkhorn router of Megatron-LM.
    The load is nearly even by construction.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        top_k: K, number of experts per token, at most E.
        num_iters: largest number of iterations.
        tolerance: change of the experts' factors below which the iterations stop.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: as `ops.sinkhorn_gate`; no host synchronisation. In training the choice for a token
    depends on the other tokens of this rank.

    Reference: Clark et al. 2022 (arXiv 2202.01169), section 3.1.
    """

    fills_slots = True
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
        check_numbers("SinkhornRouter", SinkhornRouter.__init__.__annotations__, locals())
        check_sizes("SinkhornRouter", num_iters=num_iters)
        fits = 0 <= tolerance < math.inf
        check_rule("SinkhornRouter", "tolerance", tolerance, "finite and at least 0", fits)
        super().__init__(
            model_dim,
            num_experts,
            top_k,
            score_fn="sigmoid" if top_k == 1 else "softmax",
            device=device,
            dtype=dtype,
        )
        self.num_iters = num_iters
        self.tolerance = tolerance
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return f"{super().extra_repr()}, num_iters={self.num_iters}, tolerance={self.tolerance}"

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose by balanced logits in training mode, by the logits in eval mode."""
        if not self.training:
            return super().choose(logits_TE, tokens)
        gate = ops.sinkhorn_gate(
            logits_TE,
            self.top_k,
            num_iters=self.num_iters,
            tolerance=self.tolerance,
            token_mask=tokens.mask_T,
        )
        return RouterOutput(logits_TE, gate)
