"""Router of GShard.

Shapes: T tokens, D model, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._checks import check_choice, check_numbers
from moe_ext.nn.routers.base import BalanceTerms, LinearRouter, RouterOutput, Tokens
from moe_ext.nn.torch_state import without_autocast

_SECOND_EXPERT = ("random", "gumbel", "always")
# Stream of the draws of Gumbel noise.
_GUMBEL_STREAM = 6


class GShardRouter(LinearRouter):
    """Two experts per token; the second is kept with probability `min(1, 2 g2)`, or drawn.

    `g1` and `g2` are the two largest softmax probabilities divided by their sum. With
    `second_expert="gumbel"` the second expert has the largest of the other logits after Gumbel
    noise is added. This is a draw from the softmax over these, and is always kept. The balance loss
    counts only first choices (`RouterOutput.balance`, with top_k 1). In eval mode the second expert
    is that of the second largest logit, and is always kept.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks, at least 2.
        second_expert: "random" (as in the paper), "gumbel" ("sampling" in NLLB) or "always".
        seed: seed of the draws.
        scale: finite factor on the weights.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: a draw depends only on seed, layer, step and the token's index in the global batch
    (see `set_routing_step`), not on the number of ranks. No host synchronisation.

    Reference: Lepikhin et al. 2020 (arXiv 2006.16668), algorithm 1; NLLB team 2022 (arXiv
    2207.04672) and fairseq's `moe_second_expert_policy="sampling"` ("gumbel").
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        *,
        second_expert: str = "random",
        seed: int = 0,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_numbers("GShardRouter", GShardRouter.__init__.__annotations__, locals())
        check_choice("GShardRouter", "second_expert", second_expert, _SECOND_EXPERT)
        super().__init__(
            model_dim,
            num_experts,
            2,
            renormalize=True,
            scale=scale,
            seed=None if second_expert == "always" else seed,
            device=device,
            dtype=dtype,
        )
        self.second_expert = second_expert
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return f"{super().extra_repr()}, second_expert={self.second_expert!r}"

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose one or two experts for every token; index -1 and weight 0 for a dropped second."""
        rng_state = self.training_rng_state()
        if rng_state is not None and self.second_expert == "gumbel":
            return self._choose_drawn(logits_TE, tokens, rng_state)
        chosen = ops.gshard_gate(
            logits_TE,
            rng_state,
            scale=self.scale,
            token_mask=tokens.mask_T,
            token_idx=tokens.idx_T,
        )
        balance = BalanceTerms(chosen.score_sum, chosen.num_first_choices, 1)
        return RouterOutput(logits_TE, ops.GateOutput(*chosen[:4]), balance=balance)

    def _choose_drawn(self, logits_TE: Tensor, tokens: Tokens, rng_state: Tensor) -> RouterOutput:
        """Choose the largest logit, and the largest of the others plus Gumbel noise."""
        x_TE = logits_TE.detach()
        first = ops.topk_gate(x_TE, 1, token_mask=tokens.mask_T)
        uniform_TE = ops.routing_uniform(
            rng_state, *x_TE.shape, stream=_GUMBEL_STREAM, token_idx=tokens.idx_T
        )
        # Half a step is added to the draws, which are then neither 0 nor 1. The noise of 0 or 1
        # would be infinite.
        noise_TE = -(-(uniform_TE.double() + 2**-25).log()).log()
        others_TE = (x_TE + noise_TE).scatter(1, first.topk_idx.clamp(min=0), -torch.inf)
        second = ops.topk_gate(others_TE, 1, token_mask=tokens.mask_T)
        both_TK = torch.cat([first.topk_idx, second.topk_idx], dim=1)
        gate = self.gate_weights(logits_TE, both_TK)
        balance = BalanceTerms(gate.score_sum, first.num_tokens_per_expert, 1)
        return RouterOutput(logits_TE, gate, balance=balance)

    def with_choice(self, routed: RouterOutput, topk_idx_TK: Tensor) -> RouterOutput:
        """See `Router.with_choice`.

        If the second choice of a token was dropped, its first weight is still divided by the sum
        over two experts, the first and the best of the others. The gate does the same.
        """
        logits_TE = routed.logits
        first_T, second_T = topk_idx_TK.unbind(dim=1)
        dropped_T = (first_T >= 0) & (second_T < 0)
        others_TE = logits_TE.detach().scatter(1, first_T.clamp(min=0)[:, None], -torch.inf)
        both_TK = torch.stack(
            [first_T, torch.where(dropped_T, others_TE.argmax(dim=1), second_T)], dim=1
        )
        with without_autocast(logits_TE.device):
            gate = self.gate_weights(logits_TE, both_TK)
        none_E = torch.zeros_like(gate.num_tokens_per_expert)
        too_many_E = none_E.scatter_add(0, both_TK[:, 1].clamp(min=0), dropped_T.long())
        first_E = none_E.scatter_add(0, first_T.clamp(min=0), (first_T >= 0).long())
        gate = gate._replace(
            topk_weights=gate.topk_weights.masked_fill(topk_idx_TK < 0, 0.0),
            topk_idx=topk_idx_TK,
            num_tokens_per_expert=gate.num_tokens_per_expert - too_many_E,
        )
        return routed._replace(gate=gate, balance=BalanceTerms(gate.score_sum, first_E, 1))
