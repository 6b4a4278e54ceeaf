"""Quantile balancing: the selection bias at which each expert gets its share of the step's tokens.

Shapes: T tokens, E experts, B bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.nn.torch_state import in_backward

# Number of bins of a histogram, as in Kimi K3, appendix D.
NUM_BINS = 1000


def _bins_of(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower end of the first bin, and the width of a bin.

    A sigmoid is in [0, 1], so the cutoff of a token is in [min b, max b + 1]. The bias with which
    an expert reaches the cutoff is in [min b - 1, max b + 1].
    """
    low, high = bias_E.min(), bias_E.max()
    return low - 1, (high - low + 2) / NUM_BINS


# This is an operator so that a compiled layer checks at run time whether it is being recomputed.
@torch.library.custom_op("moe_ext::_tally_required_bias", mutates_args={"histogram_EB"})
def add_required_bias(
    histogram_EB: Tensor, logits_TE: Tensor, bias_E: Tensor, token_mask: Tensor | None, top_k: int
) -> None:
    """Count the bias with which each token would choose each expert, unless recomputing.

    This bias is `alpha_t - s_te`, with the (top_k + 1)-th largest biased score of the token as
    alpha.

    Args:
        histogram_EB: `[E, NUM_BINS]` int32, in place.
        logits_TE: logits of a router with sigmoid scores.
        bias_E: the selection bias with which the pass was routed.
        token_mask: `[T]` bool, True = real token; None for all.
        top_k: less than E.
    """
    if in_backward():
        return
    num_experts = logits_TE.shape[1]
    if token_mask is not None:
        logits_TE = logits_TE.masked_fill(~token_mask[:, None], 0.0)
    # NOTE: `ops` computes the scores. The last bit of torch.sigmoid depends on the position of a
    # token in the tensor, so one process would count differently from several.
    first = ops.topk_gate(
        logits_TE, top_k + 1, score_fn="sigmoid", renormalize=False, selection_bias=bias_E
    )
    experts_E = torch.arange(num_experts, device=logits_TE.device)
    scores_TE = ops.gate_weights(
        logits_TE, experts_E.expand_as(logits_TE), score_fn="sigmoid", renormalize=False
    ).topk_weights
    cutoff_T1 = first.topk_weights[:, -1:] + bias_E[first.topk_idx[:, -1:]]
    low, width = _bins_of(bias_E)
    bins_TE = (cutoff_T1 - scores_TE).sub_(low).div_(width).floor_().clamp_(0, NUM_BINS - 1).long()
    bins_TE += experts_E * NUM_BINS
    one_T = histogram_EB.new_ones(len(bins_TE)) if token_mask is None else token_mask.int()
    histogram_EB.view(-1).scatter_add_(
        0, bins_TE.view(-1), one_T[:, None].expand_as(bins_TE).reshape(-1)
    )


@add_required_bias.register_fake
def _(
    histogram_EB: Tensor, logits_TE: Tensor, bias_E: Tensor, token_mask: Tensor | None, top_k: int
) -> None:
    return None


def balanced_bias(histogram_EB: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return the `top_k / E` quantile of each expert's needed bias, minus the mean of them.

    Values within a bin are interpolated. Without any token the bias is unchanged.

    Args:
        histogram_EB: counts of `add_required_bias` over the step and the group.
        bias_E: the selection bias during the step.
        top_k: experts per token.
    """
    cumulative_EB = histogram_EB.cumsum(1, dtype=torch.int64)
    num_tokens = cumulative_EB[0, -1]
    target = num_tokens.double() * (top_k / len(bias_E))
    bin_E1 = (cumulative_EB < target).sum(1, keepdim=True).clamp(max=NUM_BINS - 1)
    inside_E1 = histogram_EB.gather(1, bin_E1)
    before_E1 = cumulative_EB.gather(1, bin_E1) - inside_E1
    position_E1 = bin_E1 + (target - before_E1) / inside_E1.clamp(min=1)
    _, width = _bins_of(bias_E)
    balanced_E = ((position_E1 - position_E1.mean()) * width).squeeze(1).to(bias_E.dtype)
    return torch.where(num_tokens > 0, balanced_E, bias_E)
