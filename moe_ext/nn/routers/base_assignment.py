"""Router of BASE layers.

Shapes: T tokens, D model, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.nn.routers.base import LinearRouter, RouterOutput, Tokens


class BaseRouter(LinearRouter):
    """One expert per token, and equally many tokens per expert; see `ops.balanced_assignment`.

    In training mode each expert gets `floor(T / E)` or `ceil(T / E)` of the real tokens. Among all
    such assignments, the router takes one with the largest sum of scores `x @ weight.T`. In eval
    mode each token takes its best expert. The weight is `sigmoid(score)`.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size is out of its range.

    Determinism: as `ops.balanced_assignment`; no host synchronisation. In training the choice for a
    token depends on the other tokens of this rank. The paper first shuffles the tokens over the
    workers; here each rank assigns its own tokens.

    Reference: Lewis et al. 2021 (arXiv 2103.16716), section 3.
    """

    balanced = True

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model_dim, num_experts, 1, score_fn="sigmoid", device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw orthogonal expert embeddings of length 0.1, as the paper's code does."""
        drawn = torch.empty(self.weight.shape, dtype=torch.float32, device=self.weight.device)
        nn.init.orthogonal_(drawn, gain=0.1)
        with torch.no_grad():
            self.weight.copy_(drawn)

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Assign tokens evenly in training; choose each token's best expert in eval mode."""
        if not self.training:
            return super().choose(logits_TE, tokens)
        expert_T = ops.balanced_assignment(logits_TE, token_mask=tokens.mask_T)
        return RouterOutput(logits_TE, self.gate_weights(logits_TE, expert_T[:, None]))
