"""Expert choice: experts choose tokens.

Shapes: T tokens, D model, E experts.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._checks import check_numbers, check_rule
from moe_ext.nn.routers.base import LinearRouter, RouterOutput, Tokens


class ExpertChoiceRouter(LinearRouter):
    """Each expert takes the tokens that score it highest; see `ops.expert_choice_gate`.

    With `p = softmax(x @ weight.T)` over the experts, expert e takes the `C = ceil(T *
    capacity_factor / E)` tokens with the largest p_e, and their weight is p_e. The load is even by
    construction. A token has `capacity_factor` experts on average. It may have no expert; the
    routed output of a layer is then zero.

    This router suits encoders and vision models, but not autoregressive models. The choice of an
    expert depends on later tokens, which do not exist yet when text is generated.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        capacity_factor: average number of experts per token, positive.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: as `ops.expert_choice_gate`; no host synchronisation. Experts choose separately
    among the tokens of each rank.

    Reference: Zhou et al. 2022 (arXiv 2202.09368).
    """

    balanced = True
    sets_capacity = True

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        *,
        capacity_factor: float = 2.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_numbers("ExpertChoiceRouter", ExpertChoiceRouter.__init__.__annotations__, locals())
        fits = 0 < capacity_factor < math.inf
        check_rule("ExpertChoiceRouter", "capacity_factor", capacity_factor, "positive", fits)
        super().__init__(model_dim, num_experts, num_experts, device=device, dtype=dtype)
        self.capacity_factor = capacity_factor
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return (
            f"model_dim={self.model_dim}, num_experts={self.num_experts}, "
            f"capacity_factor={self.capacity_factor}"
        )

    def capacity(self, num_tokens: int) -> int:
        """Return the number of tokens, at least 1, that an expert takes of T (with masked ones)."""
        share = Fraction(float(self.capacity_factor)).limit_denominator(1 << 20) / self.num_experts
        # Integer arithmetic also works if T is a symbolic size under `torch.compile`.
        taken = (num_tokens * share.numerator + share.denominator - 1) // share.denominator
        return torch.sym_max(1, taken)

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Let every expert take its tokens. The gate has E columns; column e holds e or -1."""
        capacity = self.capacity(logits_TE.shape[0])
        gate = ops.expert_choice_gate(logits_TE, capacity, token_mask=tokens.mask_T)
        return RouterOutput(logits_TE, gate, capacity=capacity)
