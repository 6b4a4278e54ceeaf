"""Experts within their capacity: which slots keep an expert, and rows of equal shapes.

Shapes: T tokens, D model, E experts, K top-k, N rows, C rows of an expert, L local experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_ext import ops
from moe_ext.nn.routers import Router, RouterOutput

if TYPE_CHECKING:
    from moe_ext.nn.moe_layer import MoELayer

# Stream of the draws that order the slots of the "random" policy.
_DROP_STREAM = 3


class Choice(NamedTuple):
    """Experts of the tokens, within the capacity.

    Attributes:
        topk_idx: `[T, K]`, -1 for none.
        topk_weights: `[T, K]`.
        capacity: rows that an expert takes from this rank, None for all.
        num_dropped: slots that found no room, 0-d; None without a capacity of the layer.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    capacity: int | None
    num_dropped: Tensor | None


def limit_choice(layer: MoELayer, routed: RouterOutput, token_idx_T: Tensor | None) -> Choice:
    """Take experts from the slots that have no room.

    Args:
        layer: whose capacity it is.
        routed: what its router said.
        token_idx_T: index of each token in the global batch, for random draws.
    """
    gate, capacity, training = routed.gate, layer.capacity, layer.training
    if capacity is None:
        return Choice(gate.topk_idx, gate.topk_weights, routed.capacity, None)
    if routed.capacity is not None:
        raise ValueError(
            "MoELayer: expected capacity to be None with a router that sets the rows of each "
            f"expert itself, got {capacity}"
        )
    num_tokens, num_experts = routed.logits.shape
    rows = capacity.rows_per_group(num_tokens, layer.top_k, num_experts, training=training)
    policy, priority = capacity.drop, None
    if policy == "random" and training:
        priority = _random_priority(layer.router, gate.topk_idx, token_idx_T)
    elif policy == "random":
        # The output of a model that is evaluated must not depend on the step.
        policy = "position"
    weights = None if policy == "position" else gate.topk_weights.detach()
    reroute = capacity.overflow == "reroute"
    # Groups are of one size: the last one is filled up with tokens that go nowhere.
    missing = -num_tokens % capacity.groups

    def filled(per_token: Tensor | None, value: float) -> Tensor | None:
        if per_token is None or capacity.groups == 1:
            return per_token
        return functional.pad(per_token, (0, 0, 0, missing), value=value)

    topk_idx = filled(gate.topk_idx, -1)
    assert topk_idx is not None
    topk_idx, num_dropped = ops.limit_capacity(
        topk_idx,
        num_experts,
        rows,
        topk_weights=filled(weights, 0.0),
        policy=policy,
        priority=filled(priority, 0.0),
        num_groups=capacity.groups,
        ranked_idx=filled(_ranked_experts(layer.router, routed), -1) if reroute else None,
        overflow=capacity.overflow,
    )
    topk_weights = gate.topk_weights
    if capacity.groups > 1:
        topk_idx = topk_idx[:num_tokens]
    if reroute:
        assert isinstance(layer.router, Router)
        topk_weights = layer.router.with_choice(routed, topk_idx).gate.topk_weights
    return Choice(topk_idx, topk_weights, rows * capacity.groups, num_dropped)


def _random_priority(router: nn.Module, topk_idx_TK: Tensor, token_idx_T: Tensor | None) -> Tensor:
    """Draws of every slot that depend on seed, layer, step and token alone, `[T, K]`."""
    assert isinstance(router, Router)
    assert router.rng_state is not None
    num_tokens, num_columns = topk_idx_TK.shape
    return ops.routing_uniform(
        router.rng_state, num_tokens, num_columns, stream=_DROP_STREAM, token_idx=token_idx_T
    )


def _ranked_experts(router: nn.Module, routed: RouterOutput) -> Tensor:
    """The experts of every token, best first, `[T, E]`."""
    # Scores order experts as logits do; a bias is added to the scores, as in the selection itself.
    key_TE = routed.logits.detach()
    bias = getattr(router, "selection_bias", None)
    if bias is not None:
        sigmoid = routed.score_fn == "sigmoid"
        key_TE = (key_TE.sigmoid() if sigmoid else key_TE.softmax(1)) + bias
    return key_TE.argsort(dim=1, descending=True, stable=True)


def run_padded(experts: nn.Module, rows_ND: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Run experts on exactly C rows each, zero rows behind the tokens; results as for `rows_ND`.

    Args:
        experts: maps `([L * C, D], offsets)` to `[L * C, D]`.
        rows_ND: rows grouped by expert, at most C each.
        offsets: `[L + 1]`.
        capacity: C.
    """
    num_rows, num_experts = rows_ND.shape[0], offsets.shape[0] - 1
    place_LC = torch.arange(capacity, device=offsets.device).expand(num_experts, -1)
    row_LC = (offsets[:-1, None] + place_LC).where(place_LC < offsets.diff()[:, None], -1)
    row_of_place = row_LC.reshape(-1)
    place_of_row = row_of_place.new_full((num_rows + 1,), -1)
    # Places without a row (-1) write to the last entry, which is cut off.
    place_of_row[row_of_place] = torch.arange(row_of_place.shape[0], device=offsets.device)
    place_of_row = place_of_row[:-1]
    padded = _moved_rows(rows_ND, place_of_row, row_of_place)
    even = torch.arange(num_experts + 1, device=offsets.device) * capacity
    return _moved_rows(experts(padded, even), row_of_place, place_of_row)


def _moved_rows(rows: Tensor, to: Tensor, origin: Tensor) -> Tensor:
    """Rows in another order, `out[i] = rows[origin[i]]`, zero where `origin` is -1."""
    counts = origin.new_zeros(())
    permutation = ops.Permutation(to, origin, counts, counts, counts, 1)
    return ops.unpermute_tokens(rows, permutation)
