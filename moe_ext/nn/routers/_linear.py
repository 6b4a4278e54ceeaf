"""What routers with one linear layer share.

Shapes: T tokens, D model, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moe_ext.nn.routers.base import Router


class LinearRouter(Router):
    """Router whose scores are `x @ weight.T`, with a scale on its weights and a seed.

    Args:
        model_dim: D.
        num_experts: E, over all ranks.
        top_k: columns of the gate.
        scale: finite factor on the weights of the gate.
        seed: of the random state; None for a router that draws nothing.
        device: device of the weight.
        dtype: dtype of the weight.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int,
        *,
        scale: float = 1.0,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model_dim, num_experts, top_k)
        if not math.isfinite(scale):
            raise ValueError(f"{type(self).__name__}: expected scale to be finite, got {scale}")
        self.scale = scale
        self.seed = seed
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim, device=device, dtype=dtype))
        if seed is not None:
            self.add_rng_state(seed, device=device)

    def reset_parameters(self) -> None:
        """Draw the weight uniformly in +-1/sqrt(D); the random state becomes (seed, 0, 0, 0)."""
        bound = 1.0 / math.sqrt(self.model_dim)
        nn.init.uniform_(self.weight, -bound, bound)
        self.reset_rng_state()

    def training_rng_state(self) -> Tensor | None:
        """The random state where this router is to draw: in training mode."""
        return self.rng_state if self.training else None

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        text = f"model_dim={self.model_dim}, num_experts={self.num_experts}, top_k={self.top_k}"
        if self.scale != 1.0:
            text += f", scale={self.scale}"
        return text if self.seed is None else f"{text}, seed={self.seed}"
