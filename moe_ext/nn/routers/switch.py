"""Router of the Switch Transformer.

Shapes: T tokens, D model, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._checks import check_numbers, check_rule
from moe_ext.nn.routers.base import LinearRouter, Tokens


class SwitchRouter(LinearRouter):
    """One expert per token, weighted by its softmax probability, with input jitter in training.

    `p = softmax((x * u) @ weight.T)`, with `u ~ U[1 - jitter_eps, 1 + jitter_eps)` for every
    element of every token in training mode, and u = 1 in eval mode. The expert of the largest p has
    the weight `scale * p`. A renormalised weight would be constant, and teach the router nothing.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        jitter_eps: in [0, 1); 0.01 in the paper, and 0 turns the jitter off.
        seed: seed of the jitter.
        scale: finite factor on the weights.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: the jitter depends only on seed, layer, step and the token's index in the global
    batch (see `set_routing_step`), not on the number of ranks. No host synchronisation.

    Reference: Fedus et al. 2021 (arXiv 2101.03961), eq. 1-2 and section 2.4.
    """

    fills_slots = True

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        *,
        jitter_eps: float = 0.01,
        seed: int = 0,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_numbers("SwitchRouter", SwitchRouter.__init__.__annotations__, locals())
        check_rule("SwitchRouter", "jitter_eps", jitter_eps, "in [0, 1)", 0 <= jitter_eps < 1)
        super().__init__(
            model_dim,
            num_experts,
            1,
            scale=scale,
            seed=seed if jitter_eps else None,
            device=device,
            dtype=dtype,
        )
        self.jitter_eps = jitter_eps
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return f"{super().extra_repr()}, jitter_eps={self.jitter_eps}"

    def logits(self, tokens: Tokens) -> Tensor:
        """Return `(x * u) @ weight.T`. The jitter does not change the input of the experts."""
        rng_state = self.training_rng_state()
        if rng_state is None:
            return super().logits(tokens)
        x_TD = ops.routing_jitter(tokens.x_TD, rng_state, self.jitter_eps, token_idx=tokens.idx_T)
        return ops.router_logits(x_TD, self.weight)
