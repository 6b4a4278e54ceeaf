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
# Stream of the draws that move the second expert.
_GUMBEL_STREAM = 6


class GShardRouter(LinearRouter):
    """Two experts per token; the second is kept with probability `min(1, 2 g2)`, or drawn.

    `g1` and `g2` are the two largest softmax probabilities divided by their sum. With
    `second_expert="gumbel"` the second is the largest of the other logits with Gumbel noise added,
    a draw from the softmax over them, and always kept. The balance loss counts first choices alone
    (`RouterOutput.balance`, with top_k 1). In evaluation mode the second expert is that of the
    second largest logit, and always kept.

    Args:
        model_dim: D, the elements of a token.
        num_experts: E, over all ranks, at least 2.
        second_expert: "random" (the paper's), "gumbel" (NLLB's "sampling") or "always".
        seed: of the draws.
        scale: finite factor on the weights.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range.

    Determinism: a draw depends on seed, layer, step and the token's index in the global batch (see
    `set_routing_step`), hence not on the number of ranks; no host synchronisation.

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
        """One or two experts for every token; a dropped second has index -1 and weight 0."""
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
        """The largest logit, and the largest of the others plus Gumbel noise."""
        x_TE = logits_TE.detach()
        first = ops.topk_gate(x_TE, 1, token_mask=tokens.mask_T)
        uniform_TE = ops.routing_uniform(
            rng_state, *x_TE.shape, stream=_GUMBEL_STREAM, token_idx=tokens.idx_T
        )
        # Half a step up: neither 0 nor 1, whose noise is infinite.
        noise_TE = -(-(uniform_TE.double() + 2**-25).log()).log()
        others_TE = (x_TE + noise_TE).scatter(1, first.topk_idx.clamp(min=0), -torch.inf)
        second = ops.topk_gate(others_TE, 1, token_mask=tokens.mask_T)
        both_TK = torch.cat([first.topk_idx, second.topk_idx], dim=1)
        gate = self.gate_weights(logits_TE, both_TK)
        balance = BalanceTerms(gate.score_sum, first.num_tokens_per_expert, 1)
        return RouterOutput(logits_TE, gate, balance=balance)

    def with_choice(self, routed: RouterOutput, topk_idx_TK: Tensor) -> RouterOutput:
        """See `Router.with_choice`.

        The first weight of a token whose second choice was dropped is divided by the sum over its
        first and its best other expert, as the gate does it.
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
