"""Noisy top-k router.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._checks import check_numbers, check_rule
from moe_ext.nn.routers.base import (
    DrawnNoise,
    LinearRouter,
    RouterOutput,
    Tokens,
    warn_of_constant_weights,
)
from moe_ext.nn.torch_state import without_autocast


class NoisyTopKRouter(LinearRouter):
    """Top-k of logits with learned noise, balanced by two losses of the router.

    In training mode `h = x @ weight.T + normal * (softplus(x @ noise_weight.T) + noise_epsilon)`,
    and in eval mode `h = x @ weight.T`. The weights are the softmax of the K largest h. The losses
    are the squared coefficients of variation of the experts' importance (sum of gates) and load
    (expected number of tokens), over the tokens of this rank. A layer adds no balance loss.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        top_k: K, number of experts per token, at most E.
        importance_coef: factor on the importance loss, at least 0.
        load_coef: factor on the load loss, at least 0.
        noise_epsilon: least standard deviation of the noise; 0.01 in tensor2tensor, 0 in the paper.
        seed: seed of the noise.
        scale: finite factor on the weights.
        device: device of the weights.
        dtype: dtype of the weights.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: the noise depends only on seed, layer, step and the token's index in the global
    batch (see `set_routing_step`), not on the number of ranks. No host synchronisation.

    Reference: Shazeer et al. 2017 (arXiv 1701.06538), eq. 3-11.
    """

    fills_slots = True
    balanced = True

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        importance_coef: float = 0.1,
        load_coef: float = 0.1,
        noise_epsilon: float = 0.01,
        seed: int = 0,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_numbers("NoisyTopKRouter", NoisyTopKRouter.__init__.__annotations__, locals())
        options = (
            ("importance_coef", importance_coef),
            ("load_coef", load_coef),
            ("noise_epsilon", noise_epsilon),
        )
        for name, value in options:
            fits = 0 <= value < math.inf
            check_rule("NoisyTopKRouter", name, value, "finite and at least 0", fits)
        super().__init__(
            model_dim, num_experts, top_k, scale=scale, seed=seed, device=device, dtype=dtype
        )
        if top_k == 1:
            warn_of_constant_weights("NoisyTopKRouter", "a softmax over the chosen experts")
        self.importance_coef = importance_coef
        self.load_coef = load_coef
        self.noise_epsilon = noise_epsilon
        self.noise_weight = nn.Parameter(torch.empty_like(self.weight))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both weights to zero, as in the paper. The choice then depends only on noise."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.noise_weight)
        self.reset_rng_state()

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return (
            f"{super().extra_repr()}, importance_coef={self.importance_coef}, "
            f"load_coef={self.load_coef}, noise_epsilon={self.noise_epsilon}"
        )

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose the K experts with the largest noisy logits, and compute the losses.

        The logits of the output have no noise. `score_sum` of the gate is the importance. The
        losses "importance" and "load" are multiplied by their coefficients.
        """
        rng_state, noise_TE, noise = self.training_rng_state(), None, None
        if rng_state is not None:
            noise_TE = ops.router_logits(tokens.x_TD, self.noise_weight)
            noise = DrawnNoise(noise_TE, rng_state.clone(), tokens.mask_T, tokens.idx_T)
        chosen = ops.noisy_topk_gate(
            logits_TE,
            noise_TE,
            rng_state,
            self.top_k,
            noise_epsilon=self.noise_epsilon,
            scale=self.scale,
            token_mask=tokens.mask_T,
            token_idx=tokens.idx_T,
        )
        losses = {}
        if self.importance_coef:
            variation = ops.squared_variation(chosen.importance)
            losses["importance"] = self.importance_coef * variation
        if self.load_coef:
            losses["load"] = self.load_coef * ops.squared_variation(chosen.load)
        gate = ops.GateOutput(*chosen[:4])
        return RouterOutput(logits_TE, gate, losses or None, noise=noise)

    def with_choice(self, routed: RouterOutput, topk_idx_TK: Tensor) -> RouterOutput:
        """See `Router.with_choice`.

        The same noise is drawn again. The losses remain those of the router's own choice.
        """
        with without_autocast(routed.logits.device):
            logits_TE = self._noisy_logits(routed)
            gate = ops.gate_weights(logits_TE, topk_idx_TK, score_fn="topk_softmax")
        # A slot without an expert has weight 0, which is added to expert 0.
        idx_TK, nothing_TE = topk_idx_TK.clamp(min=0), torch.zeros_like(logits_TE)
        importance_E = nothing_TE.scatter_add(1, idx_TK, gate.topk_weights).sum(dim=0)
        dtype = routed.gate.topk_weights.dtype
        gate = gate._replace(
            topk_weights=(self.scale * gate.topk_weights).to(dtype),
            score_sum=importance_E.to(dtype),
        )
        return routed._replace(gate=gate)

    def _noisy_logits(self, routed: RouterOutput) -> Tensor:
        """Return the log-softmax of the gate's noisy logits, `[T, E]`, in float64."""
        logits_TE, noise = routed.logits.double(), routed.noise
        if noise is None:
            return logits_TE
        # A gate with K = E returns the softmax over all experts, with the same noise. In float64 no
        # expert whose logit is within 700 of the best underflows.
        whole = ops.noisy_topk_gate(
            logits_TE,
            noise.noise_logits.double(),
            noise.rng_state,
            self.num_experts,
            noise_epsilon=self.noise_epsilon,
            token_mask=noise.token_mask,
            token_idx=noise.token_idx,
        )
        tiny = torch.finfo(torch.float64).tiny
        log_TE = whole.topk_weights.clamp(min=tiny).log()
        return torch.zeros_like(logits_TE).scatter(1, whole.topk_idx.clamp(min=0), log_TE)
