"""Base classes of the routers: common forward pass, result and random state.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._checks import check_integer, check_rule, check_sizes
from moe_ext.nn.feed_forward import without_bad_padding
from moe_ext.nn.torch_state import moved, without_autocast


class Tokens(NamedTuple):
    """Tokens of a forward pass, for `logits` and `choose` of a router.

    Attributes:
        x_TD: `[T, D]`, any floating dtype. Masked tokens are finite.
        mask_T: `[T]` bool, True = real token; None for all. A masked token chooses no expert.
        ids_T: `[T]` int64, entries of the vocabulary; None if the caller gave none.
        idx_T: `[T]` int64, indices in the global batch; None for `first_token + t`.
    """

    x_TD: Tensor
    mask_T: Tensor | None
    ids_T: Tensor | None
    idx_T: Tensor | None


class BalanceTerms(NamedTuple):
    """Arguments of `ops.load_balance_loss`, if they differ from the counts of the gate.

    Attributes:
        score_sum: `[E]`, differentiable.
        num_tokens_per_expert: `[E]` int64.
        top_k: number of choices of a token that count.
    """

    score_sum: Tensor
    num_tokens_per_expert: Tensor
    top_k: int


class DrawnNoise(NamedTuple):
    """Inputs of the noise of `ops.noisy_topk_gate`, from which the same noise is drawn again.

    Attributes:
        noise_logits: `[T, E]`, with its graph.
        rng_state: `[4]`, copy of the random state.
        token_mask: argument of the router.
        token_idx: argument of the router.
    """

    noise_logits: Tensor
    rng_state: Tensor
    token_mask: Tensor | None
    token_idx: Tensor | None


class RouterOutput(NamedTuple):
    """Result of a router, for a layer.

    Attributes:
        logits: `[T, E]`, float32 (float64 for float64 inputs).
        gate: the selection, an `ops.GateOutput`. A slot with index -1 goes to no expert.
        losses: 0-d losses of the router by name, multiplied by their coefficients, or None.
        capacity: number of rows that an expert takes; None leaves it to the layer.
        balance: counts for the balance loss; None takes those of the gate.
        noise: noise that was added to `logits` for the gate, or None.
        score_fn: function from logits to scores, a name for `ops.topk_gate`. None if it is not
            known; the layer then has no balance loss by sequence.
    """

    logits: Tensor
    gate: ops.GateOutput
    losses: dict[str, Tensor] | None = None
    capacity: int | None = None
    balance: BalanceTerms | None = None
    noise: DrawnNoise | None = None
    score_fn: str | None = None


class Router(nn.Module):
    """Base of the routers: `(x_TD, token_mask=, token_ids=, token_idx=)` to a `RouterOutput`.

    A subclass defines `logits` and `choose`, which both run outside autocast.

    Attributes:
        num_experts: E, number of experts over all ranks.
        top_k: K, number of columns of the gate.
        balanced: True if experts are filled evenly by construction, so that a layer adds no
            balance loss.
        fills_slots: True if every slot of a token that is not masked goes to an expert.
        sets_capacity: True if the router sets `RouterOutput.capacity`.
        score_fn: see `RouterOutput.score_fn`.
        rng_state: `[4]` int64 `(seed, layer, step, first_token)` of a router that draws random
            numbers, otherwise None. A draw depends only on this state and on the token's index. It
            is the same for any number of ranks, and in a recomputation. See `set_routing_step`.
    """

    balanced: bool = False
    fills_slots: bool = False
    sets_capacity: bool = False
    score_fn: str | None = None
    rng_state: Tensor | None

    def __init__(self, model_dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        name = type(self).__name__
        check_sizes(name, model_dim=model_dim, num_experts=num_experts)
        check_integer(name, "top_k", top_k)
        rule, fits = f"in 1..num_experts={num_experts}", 1 <= top_k <= num_experts
        check_rule(name, "top_k", top_k, rule, fits)
        self.model_dim = model_dim
        self.num_experts = num_experts
        self.top_k = top_k
        # The state is not a buffer: DistributedDataParallel would overwrite buffers with those of
        # rank 0, and `first_token` differs between ranks.
        self.rng_state = None
        self._rng_seed = 0

    def forward(
        self,
        x_TD: Tensor,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        token_idx: Tensor | None = None,
    ) -> RouterOutput:
        """Choose the experts of every token.

        Args:
            x_TD: tokens, `[T, D]`, any floating dtype.
            token_mask: `[T]` bool, True = real token; a masked token chooses no expert.
            token_ids: `[T]` int64, entries of the vocabulary, for routers that use them.
            token_idx: `[T]` int64, indices in the global batch, for routers that draw random
                numbers; None for `first_token + t`.
        """
        if token_mask is not None and token_mask.shape == x_TD.shape[:1]:
            x_TD = without_bad_padding(x_TD, token_mask)
        tokens = Tokens(x_TD, token_mask, token_ids, token_idx)
        with without_autocast(x_TD.device):
            routed = self.choose(self.logits(tokens), tokens)
        if self.score_fn in (None, routed.score_fn):
            return routed
        return routed._replace(score_fn=self.score_fn)

    def logits(self, tokens: Tokens) -> Tensor:
        """Return the logits of every token, `[T, E]`, float32 (float64 for float64 tokens)."""
        raise NotImplementedError(f"{type(self).__name__} has no logits")

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Return the output for these logits."""
        raise NotImplementedError(f"{type(self).__name__} has no choose")

    def training_rng_state(self) -> Tensor | None:
        """Return the random state in training mode; None in eval mode, which draws nothing."""
        return self.rng_state if self.training else None

    def add_rng_state(self, seed: int, *, device: torch.device | str | None = None) -> None:
        """Give the router the random state `(seed, 0, 0, 0)`, which is part of the state dict."""
        check_rule(type(self).__name__, "seed", seed, "in 0..2**63-1", 0 <= seed < 2**63)
        self.rng_state = torch.zeros(4, dtype=torch.int64, device=device)
        self._rng_seed = seed
        self.reset_rng_state()

    def reset_rng_state(self) -> None:
        """Set the random state to that of a new router, for example after `to_empty`."""
        if self.rng_state is not None:
            self.rng_state.zero_()
            self.rng_state[0] = self._rng_seed

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        """Apply `fn` as `nn.Module` does, and move the random state to the same device."""
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
        """Return the output for another choice, with weights from the same logits.

        `RoutingRecord` and `pinned_routing` call this to replay a choice. `Router` refuses, and
        `ScoreRouter` computes `ops.gate_weights`. A router with other weights overrides this.

        Args:
            routed: output of this router.
            topk_idx_TK: experts of each token, in the shape of the router's choice; -1 = none.

        Returns:
            `routed` with another gate, and other values that depend on the gate.

        Raises:
            TypeError: the class of the router cannot compute such weights.
        """
        raise TypeError(
            f"{type(self).__name__}: expected a router that can replay a choice (with_choice), "
            "got one that cannot"
        )


class ScoreRouter(Router):
    """Router whose weights are `ops.gate_weights` of its logits for the chosen experts.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        top_k: number of columns of the gate.
        score_fn: see `ops.topk_gate`.
        renormalize: divide the K weights of a token by their sum.
        scale: finite factor on the weights.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int,
        *,
        score_fn: str = "softmax",
        renormalize: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__(model_dim, num_experts, top_k)
        check_rule(type(self).__name__, "scale", scale, "finite", math.isfinite(scale))
        self.score_fn = score_fn
        self.renormalize = renormalize
        self.scale = scale

    def topk_gate(self, logits_TE: Tensor, tokens: Tokens, **options: Any) -> ops.GateOutput:
        """Call `ops.topk_gate` with the options of this router."""
        assert self.score_fn is not None
        return ops.topk_gate(
            logits_TE,
            self.top_k,
            score_fn=self.score_fn,
            renormalize=self.renormalize,
            scale=self.scale,
            token_mask=tokens.mask_T,
            **options,
        )

    def gate_weights(self, logits_TE: Tensor, topk_idx_TK: Tensor) -> ops.GateOutput:
        """Call `ops.gate_weights` with the options of this router."""
        assert self.score_fn is not None
        return ops.gate_weights(
            logits_TE,
            topk_idx_TK,
            score_fn=self.score_fn,
            renormalize=self.renormalize,
            scale=self.scale,
        )

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose the K experts with the largest scores."""
        gate = self.topk_gate(logits_TE, tokens)
        return RouterOutput(logits_TE, gate, score_fn=self.score_fn)

    def with_choice(self, routed: RouterOutput, topk_idx_TK: Tensor) -> RouterOutput:
        """See `Router.with_choice`."""
        with without_autocast(routed.logits.device):
            gate = self.gate_weights(routed.logits, topk_idx_TK)
        return routed._replace(gate=gate)


class LinearRouter(ScoreRouter):
    """Router whose logits are `x @ weight.T`.

    The logits are computed in float32 (float64 for float64 inputs) for any dtype of the model,
    because rounding to bfloat16 would flip the choice between close experts.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        top_k: number of columns of the gate.
        score_fn: see `ScoreRouter`.
        renormalize: see `ScoreRouter`.
        scale: see `ScoreRouter`.
        seed: seed of the random state; None for a router that draws nothing.
        device: device of the weight.
        dtype: dtype of the weight.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int,
        *,
        score_fn: str = "softmax",
        renormalize: bool = False,
        scale: float = 1.0,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            model_dim, num_experts, top_k, score_fn=score_fn, renormalize=renormalize, scale=scale
        )
        self.seed = seed
        self.bias: nn.Parameter | None = None
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim, device=device, dtype=dtype))
        if seed is not None:
            self.add_rng_state(seed, device=device)

    def reset_parameters(self) -> None:
        """Draw the weight uniformly in +-1/sqrt(D), and reset the random state."""
        bound = 1.0 / math.sqrt(self.model_dim)
        nn.init.uniform_(self.weight, -bound, bound)
        self.reset_rng_state()

    def logits(self, tokens: Tokens) -> Tensor:
        """Return `x @ weight.T`, plus the bias if there is one."""
        logits_TE = ops.router_logits(tokens.x_TD, self.weight)
        return logits_TE if self.bias is None else logits_TE + self.bias.to(logits_TE.dtype)

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        text = f"model_dim={self.model_dim}, num_experts={self.num_experts}, top_k={self.top_k}"
        if self.scale != 1.0:
            text += f", scale={self.scale}"
        return text if self.seed is None else f"{text}, seed={self.seed}"


def renormalizes(owner: str, renormalize: bool | None, top_k: int) -> bool:
    """Resolve `renormalize`: None means True for more than one expert per token."""
    if renormalize is None:
        return top_k > 1
    if renormalize and top_k == 1:
        warn_of_constant_weights(owner, "renormalize=True")
    return renormalize


def warn_of_constant_weights(owner: str, option: str) -> None:
    """Warn that a weight divided by itself is constant, so that the router learns nothing."""
    warnings.warn(
        f"{owner}: {option} makes every weight the same with top_k=1, and the router learns "
        "nothing from the task; take a score that is not divided by itself",
        stacklevel=4,
    )


def set_routing_step(model: nn.Module, step: int, *, first_token: int = 0) -> None:
    """Set the step, from which the random routers of a model derive their draws.

    Call it before each training step, and before each micro-batch with its `first_token`. Routing
    is then the same for any division of the batch into ranks and micro-batches.

    Args:
        model: any module.
        step: number of the step, at least 0.
        first_token: index in the global batch of this rank's first token.

    Raises:
        ValueError: a number is negative.
    """
    for name, value in (("step", step), ("first_token", first_token)):
        check_rule("set_routing_step", name, value, "at least 0", value >= 0)
    for module in model.modules():
        if isinstance(module, Router) and module.rng_state is not None:
            module.rng_state[2] = step
            module.rng_state[3] = first_token


def number_routers(model: nn.Module) -> int:
    """Number the routers of a model; the number is `layer` in the random state of a router.

    Args:
        model: the whole model, whose routers are numbered in the order of `modules()`. For a stage
            of a pipeline, set `router.rng_state[1]` instead.

    Returns:
        Number of routers, including those without a random state.
    """
    index = 0
    for module in model.modules():
        if isinstance(module, Router):
            if module.rng_state is not None:
                module.rng_state[1] = index
            index += 1
    return index
