"""Cosine router.

Shapes: T tokens, D model, P projection, E experts, K top-k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._checks import check_numbers, check_rule, check_sizes
from moe_ext.nn.routers.base import ScoreRouter, Tokens, renormalizes


class CosineRouter(ScoreRouter):
    """Top-k of the cosine between a projected token and an embedding of each expert.

    `logits[t, e] = cos(proj_weight @ x[t] + proj_bias, expert_embedding[e]) / temperature`, then
    `ops.topk_gate` with softmax. All of this is computed in float32 (float64 for float64 tokens).
    The temperature is learned through its logarithm, `temperature = exp(-log_scale)`. It is at
    least `min_temperature`; below that, the gradient of `log_scale` is zero.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        top_k: K, number of experts per token, at most E.
        proj_dim: P, 256 in Tutel.
        init_temperature: first temperature, 0.5 in Tutel; at least `min_temperature`.
        min_temperature: least temperature, 0.01 in Tutel.
        renormalize: divide the K weights of a token by their sum. None does so for K > 1, and keeps
            the probability for K = 1, since the router learns nothing from a constant weight.
        scale: finite factor on the weights.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: as `ops.topk_gate`; no host synchronisation.

    Reference: Chi et al., On the Representation Collapse of Sparse Mixture of Experts, 2022 (arXiv
    2204.09179), section 3; the constants are those of Tutel's cosine gate.
    """

    fills_slots = True

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int = 1,
        *,
        proj_dim: int = 256,
        init_temperature: float = 0.5,
        min_temperature: float = 0.01,
        renormalize: bool | None = None,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_numbers("CosineRouter", CosineRouter.__init__.__annotations__, locals())
        renormalize = renormalizes("CosineRouter", renormalize, top_k)
        super().__init__(model_dim, num_experts, top_k, renormalize=renormalize, scale=scale)
        check_sizes("CosineRouter", proj_dim=proj_dim)
        fits = 0 < min_temperature < math.inf
        check_rule("CosineRouter", "min_temperature", min_temperature, "positive", fits)
        rule = f"at least min_temperature={min_temperature}"
        fits = min_temperature <= init_temperature < math.inf
        check_rule("CosineRouter", "init_temperature", init_temperature, rule, fits)
        self.proj_dim = proj_dim
        self.init_temperature = init_temperature
        self.min_temperature = min_temperature
        self.proj_weight = nn.Parameter(
            torch.empty(proj_dim, model_dim, device=device, dtype=dtype)
        )
        self.proj_bias = nn.Parameter(torch.empty(proj_dim, device=device, dtype=dtype))
        self.expert_embedding = nn.Parameter(
            torch.empty(num_experts, proj_dim, device=device, dtype=dtype)
        )
        self.log_scale = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection uniformly in +-1/sqrt(D), embeddings with standard deviation 0.01."""
        bound = 1.0 / math.sqrt(self.model_dim)
        nn.init.uniform_(self.proj_weight, -bound, bound)
        nn.init.uniform_(self.proj_bias, -bound, bound)
        nn.init.normal_(self.expert_embedding, 0.0, 0.01)
        nn.init.constant_(self.log_scale, -math.log(self.init_temperature))

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return (
            f"model_dim={self.model_dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"proj_dim={self.proj_dim}, min_temperature={self.min_temperature}"
        )

    def logits(self, tokens: Tokens) -> Tensor:
        """Return the cosines, divided by the temperature."""
        projected_TP = ops.router_logits(tokens.x_TD, self.proj_weight)
        acc_dtype = projected_TP.dtype
        projected_TP = projected_TP + self.proj_bias.to(acc_dtype)
        embedding_EP = nn.functional.normalize(self.expert_embedding.to(acc_dtype), dim=1)
        cosine_TE = ops.router_logits(nn.functional.normalize(projected_TP, dim=1), embedding_EP)
        most = -math.log(self.min_temperature)
        return cosine_TE * self.log_scale.to(acc_dtype).clamp(max=most).exp()
