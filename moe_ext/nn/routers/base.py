"""What every router shares: its result, its checks and its random state.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.nn._tally import moved


class BalanceTerms(NamedTuple):
    """The arguments of `ops.load_balance_loss`, for a router whose gate counts otherwise.

    Attributes:
        score_sum: `[E]`, differentiable.
        num_tokens_per_expert: `[E]` int64.
        top_k: choices that a token counts with.
    """

    score_sum: Tensor
    num_tokens_per_expert: Tensor
    top_k: int


class DrawnNoise(NamedTuple):
    """What `ops.noisy_topk_gate` draws its noise from, kept to draw the same again.

    Attributes:
        noise_logits: `[T, E]`, in the graph.
        rng_state: `[4]`, a copy.
        token_mask: as the router was given it.
        token_idx: as the router was given it.
    """

    noise_logits: Tensor
    rng_state: Tensor
    token_mask: Tensor | None
    token_idx: Tensor | None


class RouterOutput(NamedTuple):
    """What a router hands to a layer.

    Attributes:
        logits: `[T, E]`, float32 (float64 for float64 inputs).
        gate: the selection, an `ops.GateOutput`. A slot with index -1 goes to no expert.
        losses: name to 0-d term of this router's own losses, coefficient applied; None for none.
        capacity: rows that an expert takes, where the router decides it; None leaves it to the
            layer.
        balance: what the balance loss counts, where that is not what the gate counted.
        noise: what moved the logits that the gate saw, where that is not `logits`.
    """

    logits: Tensor
    gate: ops.GateOutput
    losses: dict[str, Tensor] | None = None
    capacity: int | None = None
    balance: BalanceTerms | None = None
    noise: DrawnNoise | None = None


class Router(nn.Module):
    """Base of the routers: `(x_TD, token_mask=, token_ids=, token_idx=)` to a `RouterOutput`.

    Attributes:
        num_experts: E, over all ranks.
        top_k: K, columns of the gate.
        balanced: the router fills its experts evenly by construction: a layer adds no balance loss.
        sets_capacity: the router decides how many rows an expert takes (`RouterOutput.capacity`).
        rng_state: `[4]` int64 `(seed, layer, step, first_token)` of a router that draws random
            numbers, None in the others. A draw depends on these, on the token's index and on
            nothing else: not on the number of ranks, not on a recomputation. See
            `set_routing_step`.
    """

    balanced: bool = False
    sets_capacity: bool = False
    rng_state: Tensor | None

    def __init__(self, model_dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        name = type(self).__name__
        for size_name, size in (("model_dim", model_dim), ("num_experts", num_experts)):
            if size < 1:
                raise ValueError(f"{name}: expected {size_name} to be at least 1, got {size}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"{name}: expected top_k to be in 1..num_experts={num_experts}, got {top_k}"
            )
        self.model_dim = model_dim
        self.num_experts = num_experts
        self.top_k = top_k
        # No buffer: DistributedDataParallel would overwrite first_token with rank 0's.
        self.rng_state = None
        self._rng_seed = 0

    def add_rng_state(self, seed: int, *, device: torch.device | str | None = None) -> None:
        """Give the router its random state: `(seed, 0, 0, 0)`, kept in the state dict."""
        if not 0 <= seed < 2**63:
            raise ValueError(
                f"{type(self).__name__}: expected seed to be in 0..2**63-1, got {seed}"
            )
        self.rng_state = torch.zeros(4, dtype=torch.int64, device=device)
        self._rng_seed = seed
        self.reset_rng_state()

    def reset_rng_state(self) -> None:
        """Set the random state to that of a new router; after `to_empty` it holds nothing."""
        if self.rng_state is not None:
            self.rng_state.zero_()
            self.rng_state[0] = self._rng_seed

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        """Move the random state along."""
        super()._apply(fn, recurse)
        if self.rng_state is not None:
            self.rng_state = moved(self.rng_state, fn)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.rng_state is not None:
            destination[f"{prefix}rng_state"] = self.rng_state

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key = f"{prefix}rng_state"
        if self.rng_state is None:
            return
        state = state_dict.get(key)
        if state is None:
            if strict:
                missing_keys.append(key)
            return
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        if state.shape != (4,) or state.dtype != torch.int64:
            error_msgs.append(
                f"expected {key} to be int64 of shape (4,), got {state.dtype} of shape "
                f"{tuple(state.shape)}"
            )
        elif local_metadata.get("assign_to_params_buffers", False):
            self.rng_state = state
        else:
            self.rng_state.copy_(state)

    def with_choice(self, routed: RouterOutput, topk_idx_TK: Tensor) -> RouterOutput:
        """The output for a choice that was made elsewhere, its weights from the same logits.

        What `RoutingRecord` and `pinned_routing` replay a choice by. A router that weighs the
        chosen experts in another way than `ops.gate_weights` overrides it.

        Args:
            routed: what this router returned.
            topk_idx_TK: the experts to go to, of the shape of its choice; -1 = none.

        Returns:
            `routed` with the gate, and what follows from it, replaced.

        Raises:
            TypeError: the router is of a class that cannot do it.
        """
        raise TypeError(
            f"{type(self).__name__}: expected a router that can replay a choice (with_choice), "
            "got one that cannot"
        )


def set_routing_step(model: nn.Module, step: int, *, first_token: int = 0) -> None:
    """Tell the random routers of a model which draws are due.

    To be called before each training step (and before each micro-batch, with another
    `first_token`): routing is then the same however the batch is cut over ranks and micro-batches.

    Args:
        model: any module.
        step: number of the step, at least 0.
        first_token: index in the global batch of this rank's first token.

    Raises:
        ValueError: a negative number.
    """
    for name, value in (("step", step), ("first_token", first_token)):
        if value < 0:
            raise ValueError(f"set_routing_step: expected {name} to be at least 0, got {value}")
    for module in model.modules():
        if isinstance(module, Router) and module.rng_state is not None:
            module.rng_state[2] = step
            module.rng_state[3] = first_token


def number_routers(model: nn.Module) -> int:
    """Give every random router its place in the model as `layer` of its random state.

    Args:
        model: the whole model, in which routers are numbered in the order of `modules()`. A stage
            of a pipeline sets `router.rng_state[1]` itself.

    Returns:
        Number of routers, those without a random state included.
    """
    index = 0
    for module in model.modules():
        if isinstance(module, Router):
            if module.rng_state is not None:
                module.rng_state[1] = index
            index += 1
    return index
