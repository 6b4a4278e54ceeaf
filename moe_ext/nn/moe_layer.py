"""Mixture-of-experts layer.

Shapes: T tokens, D model, F ffn, E experts, K top-k, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._compile import outside_graphs
from moe_ext.distributed.dispatch import DispatchMetadata, TokenDispatcher
from moe_ext.distributed.groups import check_group
from moe_ext.distributed.placement import declare_experts
from moe_ext.nn._autocast import as_autocast, autocast_dtype
from moe_ext.nn._options import (
    capacity_of,
    check_experts,
    check_options,
    check_router,
    make_dispatcher,
)
from moe_ext.nn._replay import apply_sessions
from moe_ext.nn._tally import moved
from moe_ext.nn.accounting import Record, account, check_scores, read_losses, read_metrics
from moe_ext.nn.balance import Balance, GlobalCounts
from moe_ext.nn.capacity import Capacity, RowBudget
from moe_ext.nn.chunks import run_chunks
from moe_ext.nn.expert_activation import Activation
from moe_ext.nn.experts import GroupedExperts
from moe_ext.nn.feed_forward import FeedForward
from moe_ext.nn.limits import Choice, limit_choice, run_padded
from moe_ext.nn.metrics import LayerMetrics
from moe_ext.nn.routers import Router, RouterOutput, TopKRouter

__all__ = ["FeedForward", "MoELayer", "collect_losses", "set_loss_scale"]


class MoELayer(nn.Module):
    """Mixture of experts, `[..., D] -> [..., D]`, in the place of a dense feed-forward network.

    `y[t] = sum_k w[t, k] * expert[idx[t, k]](x[t]) (+ shared_expert(x[t]))`. Dropless unless a
    capacity is given. The balance loss, the z-loss and the router's own losses act by themselves:
    in training mode a backward pass through the output also adds the gradient of
    `loss_scale * (balance_loss_coef * balance_loss + z_loss_coef * z_loss + ...)`.

    Args:
        model_dim: D.
        ffn_dim: F of each expert.
        num_experts: E, over all ranks of `ep_group`.
        top_k: K, experts per token; a router module brings its own.
        router: score function of a `TopKRouter`, "softmax", "topk_softmax" or "sigmoid"; or a
            module that maps `(x_TD, token_mask=)` to a `RouterOutput`.
        experts: module that maps `(rows [N, D], expert_offsets)` to `[N, D]`; by default
            `GroupedExperts`. An expert's rows may end in zero rows, whose results go nowhere. In an
            expert-parallel layer it holds this rank's experts and has the attributes `ep_group` and
            `num_experts` (E).
        activation: of the default experts and of the shared expert; see `GroupedExperts`.
        bias: biases in the default experts and in the shared expert.
        capacity_factor: short for `capacity=Capacity(capacity_factor)`.
        capacity: how many rows an expert takes from the T tokens of this rank (masked ones included
            in T), and what becomes of the others; None takes all.
        row_budget: how many rows this rank holds at once; None holds all that come.
        balance: over which tokens the balance loss counts; None is `Balance()`, those of the pass.
        balance_loss_coef: factor on `ops.load_balance_loss`; a router that is balanced by
            construction gets none.
        z_loss_coef: factor on `ops.router_z_loss`.
        loss_mode: "inject" adds the losses' gradients in the backward pass of the output; "return"
            leaves them to the caller, in the graph, in `losses` (see `collect_losses`); "both" does
            both, for a caller who looks at them without adding them.
        shared_ffn_dim: F of an expert that sees every token, masked ones too; 0 for none.
        shared_expert_gate: weigh the shared expert by `sigmoid(x @ w)`, as Qwen2-MoE does.
        ep_group: process group to spread the experts over; None keeps all experts on this rank.
        dispatcher: "auto", "local", "alltoall", or a `TokenDispatcher`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        loss_scale: factor on the injected losses, a number or a 0-d tensor, 1.0 at first. Set it to
            what the caller's loss is multiplied by: 1/steps under gradient accumulation, the scale
            of a `GradScaler`.
        metrics: of the last forward pass on this rank, detached: `num_tokens_per_expert` [E] int64
            (chosen, before any drop), `num_dropped`, `balance_loss`, `z_loss`, and `<name>_loss` of
            each of the router's own; and what follows from them, see `LayerMetrics`. Overwritten,
            never accumulated, so a recomputation leaves the same values. Reading them is what
            synchronises with the device, and what computes those that no loss needed.
        losses: the terms of the last forward pass, `balance`, `z` and the router's own: coefficient
            times loss; detached where loss_mode is "inject".
        choices: `[E]` int64, choices of each expert by this rank's tokens in training, counted for
            `update_selection_bias`, once a token; only where the router has a `selection_bias`.

    Raises:
        ValueError: sizes or options out of range, or E not a multiple of the size of `ep_group`.

    Determinism: the same input gives the same bits. A layer on one rank does not synchronise; an
    expert-parallel one reads the split sizes once per forward pass.
    """

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        router: str | nn.Module = "softmax",
        experts: nn.Module | None = None,
        activation: Activation = "swiglu",
        bias: bool = False,
        capacity_factor: float | None = None,
        capacity: Capacity | None = None,
        row_budget: RowBudget | None = None,
        balance: Balance | None = None,
        balance_loss_coef: float = 0.01,
        z_loss_coef: float = 0.0,
        loss_mode: str = "inject",
        shared_ffn_dim: int = 0,
        shared_expert_gate: bool = False,
        ep_group: ProcessGroup | None = None,
        dispatcher: str | TokenDispatcher = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_group(ep_group, "MoELayer")
        self.model_dim = model_dim
        self.num_experts = num_experts
        self.capacity = capacity_of(capacity_factor, capacity)
        self.row_budget = row_budget
        self.balance = balance or Balance()
        self.balance_loss_coef = balance_loss_coef
        self.z_loss_coef = z_loss_coef
        self.loss_mode = loss_mode
        check_options(self, shared_ffn_dim, shared_expert_gate)
        self.loss_scale: float | Tensor = 1.0
        self._record: Record = {}
        self.dispatcher = make_dispatcher(dispatcher, num_experts, ep_group)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if isinstance(router, str):
            router = TopKRouter(model_dim, num_experts, top_k, score_fn=router, **made)
        check_router(self, router)
        self.router = router
        self.top_k = router.top_k if isinstance(router, Router) else top_k
        made.update(activation=activation, bias=bias)
        if experts is None:
            experts = GroupedExperts(num_experts, model_dim, ffn_dim, ep_group=ep_group, **made)
        else:
            check_experts(self, experts, ep_group)
            declare_experts(experts, num_experts, ep_group)
        self.experts = experts
        self.shared_expert = (
            FeedForward(model_dim, shared_ffn_dim, **made) if shared_ffn_dim else None
        )
        self.shared_expert_gate: nn.Linear | None = None
        if shared_expert_gate:
            self.shared_expert_gate = nn.Linear(model_dim, 1, False, device=device, dtype=dtype)
        self._add_counters(device)

    def _add_counters(self, device: torch.device | str | None) -> None:
        # Plain tensors, no buffers: DistributedDataParallel would overwrite them with rank 0's.
        self.choices = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        self.counting = False
        self.global_counts: GlobalCounts | None = None
        if self.balance.scope == "global_batch":
            self.global_counts = GlobalCounts(self.num_experts, self.balance.group, device)
        capacity = self.capacity
        if capacity is not None and capacity.drop == "random":
            assert isinstance(self.router, Router)
            if self.router.rng_state is None:
                self.router.add_rng_state(capacity.seed, device=device)

    def reset_parameters(self) -> None:
        """Draw all parameters anew; the values depend on the seed but not on `ep_group`."""
        for module in (self.router, self.experts, self.shared_expert, self.shared_expert_gate):
            if module is not None:
                module.reset_parameters()  # type: ignore[operator]
        if isinstance(self.router, Router):
            self.router.reset_rng_state()

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        text = (
            f"model_dim={self.model_dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"balance_loss_coef={self.balance_loss_coef}, z_loss_coef={self.z_loss_coef}, "
            f"dispatcher={type(self.dispatcher).__name__}"
        )
        if self.capacity is not None:
            text += f", capacity={self.capacity}"
        if self.row_budget is not None:
            text += f", row_budget={self.row_budget}"
        if self.balance.scope != "micro_batch":
            text += f", balance={self.balance.scope!r}"
        return text if self.loss_mode == "inject" else f"{text}, loss_mode={self.loss_mode!r}"

    @property
    def metrics(self) -> LayerMetrics:
        """See the class."""
        return read_metrics(self._record)

    @property
    def losses(self) -> dict[str, Tensor]:
        """See the class."""
        return read_losses(self._record)

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        token_idx: Tensor | None = None,
    ) -> Tensor:
        """Run every token through its experts.

        Args:
            x: tokens, `[..., D]`, floating point.
            token_mask: `[...]` bool, True = real token. A masked token reaches no routed expert and
                counts in no loss; its output is that of the shared expert, or zero.
            token_ids: `[...]` int64, entry of the vocabulary of each token, for routers that look
                at it (hash routing).
            token_idx: `[...]` int64, index of each token in the global batch, for routers and
                capacities that draw random numbers; by default counted from `set_routing_step`'s
                `first_token`.

        Returns:
            `[..., D]`, in the dtype of x, or under autocast in that of autocast.

        Raises:
            ValueError: x, token_mask, token_ids or token_idx has the wrong shape.
            TypeError: x is not floating point, token_mask not bool, or an index not int64.
        """
        per_token = {"token_mask": token_mask, "token_ids": token_ids, "token_idx": token_idx}
        if self.dispatcher.in_graph:
            return self._forward(x, per_token)
        return self._forward_outside_of_graphs(x, per_token)

    @outside_graphs
    def _forward_outside_of_graphs(self, x: Tensor, per_token: dict[str, Tensor | None]) -> Tensor:
        return self._forward(x, per_token)

    def _forward(self, x: Tensor, per_token: dict[str, Tensor | None]) -> Tensor:
        with self.dispatcher.routing(x):
            self._check_inputs(x, per_token)
            x_TD = x.reshape(-1, self.model_dim)
            flat = {name: t.reshape(-1) for name, t in per_token.items() if t is not None}
            mask_T = flat.pop("token_mask", None)
            # A router of the caller's own may know no others than the mask.
            routed: RouterOutput = self.router(x_TD, token_mask=mask_T, **flat)
            check_scores(self, routed)
            routed = apply_sessions(self, routed, mask_T)
            choice = limit_choice(self, routed, flat.get("token_idx"))
        # Under autocast the experts would cast anyway; here it halves what is permuted and sent.
        x_TD = as_autocast(x_TD)
        y_TD, num_dropped = self._run_experts(x_TD, choice)
        if choice.num_dropped is not None:
            num_dropped = num_dropped + choice.num_dropped
        num_sequences = math.prod(x.shape[:-2])
        y_TD, self._record = account(self, y_TD, routed, mask_T, num_sequences, num_dropped)
        return y_TD.reshape(x.shape)

    def _run_experts(self, x_TD: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """Dispatch, experts, combine: `y [T, D]`, and the slots that the dispatcher dropped."""
        dispatcher, (topk_idx, topk_weights, capacity, _) = self.dispatcher, choice
        metadata: DispatchMetadata
        if self.row_budget is None:
            rows, offsets, metadata = dispatcher.dispatch(
                x_TD, topk_idx, topk_weights, capacity=capacity
            )
        else:
            chunks = dispatcher.chunks(
                x_TD,
                topk_idx,
                topk_weights,
                max_rows=self.row_budget.rows,
                capacity=capacity,
                drop=self.row_budget.overflow == "drop",
            )
            if len(chunks) > 1:
                y_TD = run_chunks(dispatcher, chunks, self.experts, x_TD, topk_weights)
                if self.shared_expert is not None:
                    y_TD = y_TD + self._run_shared_expert(x_TD)
                return y_TD, chunks[0].whole.num_dropped
            rows, offsets, metadata = dispatcher.send(chunks[0].take(x_TD), chunks[0], topk_weights)
        if self.capacity is not None and self.capacity.pad:
            assert metadata.expert_capacity is not None
            rows = run_padded(self.experts, rows, offsets, metadata.expert_capacity)
        else:
            rows = self.experts(rows, offsets)
        if self.shared_expert is None:
            return dispatcher.combine(rows, metadata), metadata.num_dropped
        shared_TD: list[Tensor] = []
        y_TD = dispatcher.combine(
            rows, metadata, meanwhile=lambda: shared_TD.append(self._run_shared_expert(x_TD))
        )
        return y_TD + shared_TD[0], metadata.num_dropped

    def _run_shared_expert(self, x_TD: Tensor) -> Tensor:
        assert self.shared_expert is not None
        y_TD: Tensor = self.shared_expert(x_TD)
        if self.shared_expert_gate is not None:
            y_TD = y_TD * torch.sigmoid(self.shared_expert_gate(x_TD))
        return y_TD

    def _check_inputs(self, x: Tensor, per_token: dict[str, Tensor | None]) -> None:
        if not x.is_floating_point():
            raise TypeError(f"MoELayer: expected x to be floating point, got {x.dtype}")
        if x.dim() < 1 or x.shape[-1] != self.model_dim:
            raise ValueError(
                f"MoELayer: expected x to be of shape [..., {self.model_dim}], got {tuple(x.shape)}"
            )
        if isinstance(self.experts, GroupedExperts):
            dtype = self.experts.down_proj.dtype
            if x.dtype != dtype and autocast_dtype(x.device) is None:
                raise TypeError(
                    f"MoELayer: expected x to be of dtype {dtype}, that of the parameters, got "
                    f"{x.dtype}"
                )
        for name, value in per_token.items():
            if value is None:
                continue
            wanted, word = (torch.bool, "bool") if name == "token_mask" else (torch.int64, "int64")
            if value.dtype != wanted:
                raise TypeError(f"MoELayer: expected {name} to be {word}, got {value.dtype}")
            if value.shape != x.shape[:-1]:
                raise ValueError(
                    f"MoELayer: expected {name} to be of shape {tuple(x.shape[:-1])}, got "
                    f"{tuple(value.shape)}"
                )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MoELayer:
        """Move the counters along, which are no buffers."""
        super()._apply(fn, recurse)
        self.choices = moved(self.choices, fn)
        if self.global_counts is not None:
            self.global_counts.total = moved(self.global_counts.total, fn)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # What is in the graph can be neither copied nor stored.
        return {**self.__dict__, "_record": {}}


def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Set `loss_scale` of every `MoELayer` in a model.

    The injected losses do not see what the caller does to the loss: a loss that is divided by the
    number of accumulation steps, or multiplied by a `GradScaler`, needs the same factor here before
    the forward pass.

    Args:
        model: any module.
        scale: the factor, a number or a 0-d tensor on the model's device.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.loss_scale = scale


def collect_losses(model: nn.Module) -> Tensor:
    """Sum the losses of every `MoELayer` of a model, as of their last forward passes.

    What to add to the caller's loss where the layers have `loss_mode="return"`: it is in the graph
    then, and scaled by nothing but the coefficients. The terms of layers that inject theirs are in
    the sum too, detached. Call it before the backward pass. Under activation checkpointing the
    layers need `use_reentrant=False`: the reentrant one has no graph until the backward pass.

    Args:
        model: any module.

    Returns:
        0-d tensor; 0.0 for a model whose layers have no losses.
    """
    terms = [
        term
        for module in model.modules()
        if isinstance(module, MoELayer)
        for term in module.losses.values()
    ]
    return torch.stack(terms).sum() if terms else torch.zeros(())
