"""The gates that FastMoE and PaddlePaddle share.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.comm.groups import GroupHandle
from moe_ext.integrations._base import (
    Gate,
    counts_of,
    float32_logits,
    slots_with_room_on_all_ranks,
)
from moe_ext.nn.routers import RouterOutput, Tokens

GateHook = Callable[[Tensor, Tensor, Any], object]


class LinearGate(Gate, abc.ABC):
    """A linear gate; what it chooses is up to the subclasses.

    Args:
        d_model: D, the elements of a token.
        num_expert: experts of each rank.
        world_size: ranks that the experts are spread over; E = num_expert * world_size.
        top_k: K, experts of a token.
        gate_bias: add a bias to the logits.

    Attributes:
        hook: called with (indices, weights, None) after every choice.
    """

    def __init__(
        self, d_model: int, num_expert: int, world_size: int, top_k: int, gate_bias: bool
    ) -> None:
        super().__init__(d_model, num_expert * world_size, top_k)
        self.num_expert = num_expert
        self.world_size = world_size
        self.tot_expert = num_expert * world_size
        self.gate = nn.Linear(d_model, self.tot_expert, bias=gate_bias)
        self._group = GroupHandle(None)
        self.hook: GateHook | None = None

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that the experts are spread over, None for this one alone."""
        return self._group.group

    @group.setter
    def group(self, group: ProcessGroup | None) -> None:
        self._group = GroupHandle(group)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as `nn.Linear` does."""
        self.gate.reset_parameters()

    @property
    def has_loss(self) -> bool:
        """True if a loss waits to be fetched."""
        return self.loss is not None

    def set_loss(self, loss: Tensor | None) -> None:
        """Replace the loss."""
        self.loss = loss

    def get_loss(self, clear: bool = True) -> Tensor | None:
        """Balance loss of the last forward pass; `clear` forgets it and its graph."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    @abc.abstractmethod
    def decide(self, logits_TE: Tensor) -> RouterOutput:
        """Choose experts from logits."""

    def logits(self, tokens: Tokens) -> Tensor:
        """In float32."""
        return float32_logits(tokens.x_TD, self.gate.weight, self.gate.bias)

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose K experts for every token, and tell the hook."""
        assert tokens.mask_T is None, "the layers of these libraries take no mask"
        decided = self.decide(logits_TE)
        if self.hook is not None:
            self.hook(decided.gate.topk_idx, decided.gate.topk_weights, None)
        return decided


def gshard_output(
    gate: LinearGate,
    logits_TE: Tensor,
    chosen: ops.GateOutput,
    kept: Tensor,
    *,
    random_routing: bool,
) -> RouterOutput:
    """GShard: drop for lack of room, then drop second experts at random (kept iff u <= 2 * w2).

    Args:
        gate: whose loss is set.
        logits_TE: `[T, E]`.
        chosen: the two best experts; `u` is compared with the weight of the second.
        kept: slots that their expert has room for, `[T, K]` bool.
        random_routing: False drops none at random.
    """
    weights_TK, idx = chosen.topk_weights, chosen.topk_idx
    first_E = counts_of(idx[:, 0], gate.num_experts)
    gate.loss = ops.load_balance_loss(chosen.score_sum, first_E, 1)
    if random_routing:
        drawn_T = torch.rand(idx.shape[0], device=idx.device)
        second_T = 2 * weights_TK[:, 1].detach() >= drawn_T
        stays = torch.stack([torch.ones_like(second_T), second_T], dim=1)
        idx = idx.masked_fill(~stays, -1)
        weights_TK = weights_TK.masked_fill(~stays, 0.0)
    counts = (chosen.num_tokens_per_expert, first_E)
    return gate.output(logits_TE, weights_TK, idx, kept, counts, chosen.score_sum)


def switch_output(gate: LinearGate, logits_TE: Tensor, eps: float, capacity: int) -> RouterOutput:
    """Switch: additive noise in training, top-1, capacity over all ranks, loss over what is kept.

    Args:
        gate: whose loss is set.
        logits_TE: `[T, E]`.
        eps: the noise is uniform in 1 - eps .. 1 + eps.
        capacity: rows that an expert takes from all ranks.
    """
    if gate.training:
        logits_TE = logits_TE + (torch.rand_like(logits_TE) * 2 * eps + 1.0 - eps)
    chosen = ops.topk_gate(logits_TE, 1, renormalize=False)
    idx, num_experts = chosen.topk_idx, logits_TE.shape[1]
    kept = slots_with_room_on_all_ranks(idx, num_experts, capacity, gate.group)
    kept_E = counts_of(idx.masked_fill(~kept, -1), num_experts)
    valid = kept_E.sum().clamp(min=1)
    share_E = kept_E.to(chosen.score_sum.dtype) / valid
    gate.loss = (chosen.score_sum / valid) @ share_E * num_experts
    counts = (chosen.num_tokens_per_expert, chosen.num_tokens_per_expert)
    return gate.output(logits_TE, chosen.topk_weights, idx, kept, counts, chosen.score_sum)


def check_capacity(owner: str, capacity: tuple[float, float]) -> tuple[float, float]:
    """The rates for training and evaluation; ValueError where they are not two positive ones."""
    rates = tuple(capacity)
    if len(rates) != 2 or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"{owner}: expected capacity to be two positive rates, got {capacity}")
    return rates
