"""Router of the BASE layers.

Shapes: T tokens, D model, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.nn._autocast import without_autocast
from moe_ext.nn.routers._linear import LinearRouter
from moe_ext.nn.routers.base import RouterOutput


class BaseRouter(LinearRouter):
    """One expert per token, every expert the same number; see `ops.balanced_assignment`.

    In training mode the assignment with the largest sum of scores `x @ weight.T` among all that
    give each expert `floor(T / E)` or `ceil(T / E)` of the real tokens; in evaluation each token's
    best expert. The weight is `sigmoid(score)`.

    Args:
        model_dim: D.
        num_experts: E, over all ranks.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size is out of its range.

    Determinism: as `ops.balanced_assignment`; no host synchronisation. In training the choice for a
    token depends on the other tokens of this rank. The paper shuffles the tokens over the workers
    first; here each rank assigns its own.

    Reference: Lewis et al. 2021 (arXiv 2103.16716), section 3.
    """

    balanced = True
    score_fn = "sigmoid"

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model_dim, num_experts, 1, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw orthogonal expert embeddings of length 0.1, as the paper's code."""
        drawn = torch.empty(self.weight.shape, dtype=torch.float32, device=self.weight.device)
        nn.init.orthogonal_(drawn, gain=0.1)
        with torch.no_grad():
            self.weight.copy_(drawn)

    def forward(
        self,
        x_TD: Tensor,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        token_idx: Tensor | None = None,
    ) -> RouterOutput:
        """Choose an expert for every token.

        Args:
            x_TD: tokens, `[T, D]`, any floating dtype.
            token_mask: `[T]` bool, True = real token; a masked token has no expert.
            token_ids: not looked at.
            token_idx: not looked at.

        Returns:
            `RouterOutput(logits [T, E], gate)` with one column.
        """
        with without_autocast(x_TD.device):
            logits_TE = ops.router_logits(x_TD, self.weight)
            if self.training:
                expert_T = ops.balanced_assignment(logits_TE, token_mask=token_mask)
                gate = ops.gate_weights(
                    logits_TE, expert_T[:, None], score_fn="sigmoid", renormalize=False
                )
            else:
                gate = ops.topk_gate(
                    logits_TE, 1, score_fn="sigmoid", renormalize=False, token_mask=token_mask
                )
        return RouterOutput(logits_TE, gate)

    def with_choice(self, routed: RouterOutput, topk_idx_TK: Tensor) -> RouterOutput:
        """See `Router.with_choice`."""
        with without_autocast(routed.logits.device):
            gate = ops.gate_weights(
                routed.logits, topk_idx_TK, score_fn="sigmoid", renormalize=False
            )
        return routed._replace(gate=gate)
