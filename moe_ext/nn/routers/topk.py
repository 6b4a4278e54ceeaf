"""Top-k router.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext._checks import check_choice, check_numbers, check_rule
from moe_ext.nn.routers.base import (
    LinearRouter,
    RouterOutput,
    Tokens,
    renormalizes,
    warn_of_constant_weights,
)

SCORE_FNS = ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus")
BIAS_UPDATES = ("sign", "quantile")
_GROUP_SCORES = (None, "max", "top2", "topk")


class TopKRouter(LinearRouter):
    """Linear router with top-k selection: `logits = x @ weight.T (+ bias)`, then `ops.topk_gate`.

    The logits are computed in float32 (float64 for float64 inputs) for any dtype of the model, and
    outside autocast, because rounding to bfloat16 would flip the choice between close experts.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        top_k: K, number of experts per token, at most E.
        score_fn: "softmax", "topk_softmax", "sigmoid" or "sqrtsoftplus"; see `ops.topk_gate`.
        renormalize: divide the K weights of a token by their sum; None does so for K > 1. A weight
            divided by itself is constant, and teaches the router nothing.
        scale: finite factor on the weights.
        num_groups: number of groups of experts, of equal size.
        top_groups: number of groups from which a token may choose its experts.
        group_score: score of a group, from the scores plus bias of its experts: the largest ("max",
            DeepSeek-V2), the sum of the two largest ("top2", DeepSeek-V3), or of the `top_k //
            top_groups` largest ("topk", Megatron-LM). None is "top2" with a selection bias,
            otherwise "max".
        bias: add a learned bias to the logit of each expert, as GPT-OSS does; zero at first.
        selection_bias: keep a float32 buffer `selection_bias` [E], which is added to the scores
            only for the selection; zero at first, see `update_selection_bias`.
        bias_update: how `update_selection_bias` changes that bias. "sign" moves it by a rate
            towards the mean load. "quantile" sets it so that the tokens of the step would have
            filled all experts evenly (quantile balancing). "quantile" needs sigmoid scores, whose
            range bounds the bins of its histogram, top_k below E, and no groups.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range, or options cannot be combined.
        TypeError: a size is not an integer.

    Determinism: as `ops.topk_gate`; no host synchronisation.
    """

    fills_slots = True
    selection_bias: Tensor | None

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        score_fn: str = "softmax",
        renormalize: bool | None = None,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: str | None = None,
        bias: bool = False,
        selection_bias: bool = False,
        bias_update: str = "sign",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_numbers("TopKRouter", TopKRouter.__init__.__annotations__, locals())
        super().__init__(
            model_dim,
            num_experts,
            top_k,
            score_fn=score_fn,
            renormalize=renormalizes("TopKRouter", renormalize, top_k),
            scale=scale,
            device=device,
            dtype=dtype,
        )
        check_choice("TopKRouter", "score_fn", score_fn, SCORE_FNS)
        if score_fn == "topk_softmax" and top_k == 1:
            warn_of_constant_weights("TopKRouter", "score_fn='topk_softmax'")
        if num_groups < 1 or num_experts % num_groups != 0:
            raise ValueError(
                f"TopKRouter: expected num_groups to divide num_experts={num_experts}, "
                f"got {num_groups}"
            )
        enough = top_groups * (num_experts // num_groups) >= top_k
        rule = f"in 1..num_groups={num_groups} and to leave at least top_k={top_k} experts"
        fits = 1 <= top_groups <= num_groups and enough
        check_rule("TopKRouter", "top_groups", top_groups, rule, fits)
        check_choice("TopKRouter", "group_score", group_score, _GROUP_SCORES)
        rule = f"at least top_groups={top_groups} with group_score='topk'"
        check_rule("TopKRouter", "top_k", top_k, rule, group_score != "topk" or top_k >= top_groups)
        check_choice("TopKRouter", "bias_update", bias_update, BIAS_UPDATES)
        if bias_update == "quantile" and not (
            selection_bias
            and score_fn == "sigmoid"
            and top_k < num_experts
            and top_groups == num_groups
        ):
            raise ValueError(
                "TopKRouter: expected selection_bias=True, score_fn='sigmoid', top_k below "
                f"num_experts={num_experts} and all groups kept with bias_update='quantile', got "
                f"selection_bias={selection_bias}, score_fn={score_fn!r}, top_k={top_k} and "
                f"top_groups={top_groups} of {num_groups}; take bias_update='sign'"
            )
        self.bias_update = bias_update
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.group_score = group_score
        if bias:
            self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype))
        zeros_E = None
        if selection_bias:
            zeros_E = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("selection_bias", zeros_E)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight uniformly in +-1/sqrt(D); set the biases to zero."""
        super().reset_parameters()
        for zeros_E in (self.bias, self.selection_bias):
            if zeros_E is not None:
                nn.init.zeros_(zeros_E)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TopKRouter:
        """Move or cast, but keep the selection bias in float32, because its updates are tiny."""
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias is not None:
            dtype = torch.promote_types(self.selection_bias.dtype, torch.float32)
            if dtype != self.selection_bias.dtype and not bias.is_meta:
                self.selection_bias = bias.to(self.selection_bias.device, dtype)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load, but keep the selection bias in float32 even if another dtype is assigned."""
        super()._load_from_state_dict(*args)
        if self.selection_bias is not None:
            dtype = torch.promote_types(self.selection_bias.dtype, torch.float32)
            self.selection_bias = self.selection_bias.to(dtype)

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        text = (
            f"model_dim={self.model_dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score_fn={self.score_fn!r}, renormalize={self.renormalize}, scale={self.scale}"
        )
        if self.num_groups > 1:
            text += f", num_groups={self.num_groups}, top_groups={self.top_groups}"
        if self.group_score is not None:
            text += f", group_score={self.group_score!r}"
        if self.bias_update != "sign":
            text += f", bias_update={self.bias_update!r}"
        return text if self.bias is None else f"{text}, bias=True"

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose the K experts with the largest scores plus selection bias."""
        gate = self.topk_gate(
            logits_TE,
            tokens,
            selection_bias=self.selection_bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
        )
        return RouterOutput(logits_TE, gate, score_fn=self.score_fn)
