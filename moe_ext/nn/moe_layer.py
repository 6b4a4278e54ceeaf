"""Mixture-of-experts layer.

Shapes: T tokens, D model, F ffn, E experts, K top-k, N rows.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.distributed.dispatcher import AllToAllDispatcher, LocalDispatcher, TokenDispatcher
from moe_ext.distributed.groups import check_group, group_size
from moe_ext.nn._autocast import as_autocast, autocast_dtype
from moe_ext.nn.experts import GroupedExperts, is_gated
from moe_ext.nn.losses import inject_loss
from moe_ext.nn.routers import RouterOutput, TopKRouter


class FeedForward(nn.Module):
    """Dense two-layer feed-forward network, the shared expert of a `MoELayer`.

    Args:
        model_dim: D.
        ffn_dim: F.
        activation: as `GroupedExperts`; gated ones have `gate_up_proj`, plain ones `up_proj`.
        bias: add biases.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gated = is_gated(activation, "FeedForward")
        self.activation = activation
        up_dim = 2 * ffn_dim if self.gated else ffn_dim
        up = nn.Linear(model_dim, up_dim, bias=bias, device=device, dtype=dtype)
        self._up_name = "gate_up_proj" if self.gated else "up_proj"
        self.add_module(self._up_name, up)
        self.down_proj = nn.Linear(ffn_dim, model_dim, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as `nn.Linear` does."""
        self.get_submodule(self._up_name).reset_parameters()  # type: ignore[operator]
        self.down_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D] -> [..., D]`."""
        up = self.get_submodule(self._up_name)(x)
        if self.gated:
            return self.down_proj(ops.gated_activation(up, kind=self.activation))
        return self.down_proj(ops.activation(up, kind=self.activation))


class MoELayer(nn.Module):
    """Mixture of experts, `[..., D] -> [..., D]`, in the place of a dense feed-forward network.

    `y[t] = sum_k w[t, k] * expert[idx[t, k]](x[t]) (+ shared_expert(x[t]))`. Dropless unless
    `capacity_factor` is given. The balance loss and the z-loss act by themselves: in training mode
    a backward pass through the output also adds the gradient of
    `loss_scale * (balance_loss_coef * balance_loss + z_loss_coef * z_loss)`.

    Args:
        model_dim: D.
        ffn_dim: F of each expert.
        num_experts: E, over all ranks of `ep_group`.
        top_k: K, experts per token.
        router: score function of a `TopKRouter`, "softmax", "topk_softmax" or "sigmoid"; or a
            module that maps `(x_TD, token_mask=)` to a `RouterOutput`.
        experts: module that maps `(rows [N, D], expert_offsets)` to `[N, D]`; by default
            `GroupedExperts`. An expert's rows may end in zero rows, whose results go nowhere. In an
            expert-parallel layer it holds this rank's experts and has the attributes `ep_group` and
            `num_experts` (E).
        activation: of the default experts and of the shared expert.
        bias: biases in the default experts and in the shared expert.
        capacity_factor: an expert takes at most `ceil(T * K / E * capacity_factor)` rows from the T
            tokens of this rank (masked ones included in T), the earliest tokens first; the others
            skip it.
        balance_loss_coef: factor on `ops.load_balance_loss` over this rank's tokens.
        z_loss_coef: factor on `ops.router_z_loss` over this rank's tokens.
        shared_ffn_dim: F of an expert that sees every token, masked ones too; 0 for none.
        ep_group: process group to spread the experts over; None keeps all experts on this rank.
        dispatcher: "auto", "local", "alltoall", or a `TokenDispatcher`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        loss_scale: factor on the injected losses, a number or a 0-d tensor, 1.0 at first. Set it to
            what the caller's loss is multiplied by: 1/steps under gradient accumulation, the scale
            of a `GradScaler`.
        metrics: of the last forward pass on this rank, detached: `num_tokens_per_expert` [E] int64
            (chosen, before any drop), `num_dropped`, `balance_loss`, `z_loss`. Overwritten, never
            accumulated, so a recomputation leaves the same values. Reading them is what
            synchronises with the device.
        losses: the terms that were injected, `balance` and `z`: coefficient times loss, detached.

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
        activation: str = "swiglu",
        bias: bool = False,
        capacity_factor: float | None = None,
        balance_loss_coef: float = 0.01,
        z_loss_coef: float = 0.0,
        shared_ffn_dim: int = 0,
        ep_group: ProcessGroup | None = None,
        dispatcher: str | TokenDispatcher = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_group(ep_group, "MoELayer")
        if capacity_factor is not None and not (0 < capacity_factor < math.inf):
            raise ValueError(
                f"MoELayer: expected capacity_factor to be positive or None, got {capacity_factor}"
            )
        for name, coef in (("balance_loss_coef", balance_loss_coef), ("z_loss_coef", z_loss_coef)):
            if not (0 <= coef < math.inf):
                raise ValueError(f"MoELayer: expected {name} to be at least 0, got {coef}")
        if shared_ffn_dim < 0:
            raise ValueError(
                f"MoELayer: expected shared_ffn_dim to be at least 0, got {shared_ffn_dim}"
            )
        self.model_dim = model_dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.balance_loss_coef = balance_loss_coef
        self.z_loss_coef = z_loss_coef
        self.loss_scale: float | Tensor = 1.0
        self.metrics: dict[str, Tensor] = {}
        self.losses: dict[str, Tensor] = {}
        self.dispatcher = _make_dispatcher(dispatcher, num_experts, ep_group)
        if isinstance(router, str):
            router = TopKRouter(
                model_dim, num_experts, top_k, score_fn=router, device=device, dtype=dtype
            )
        self.router = router
        if experts is None:
            experts = GroupedExperts(
                num_experts,
                model_dim,
                ffn_dim,
                activation=activation,
                bias=bias,
                ep_group=ep_group,
                device=device,
                dtype=dtype,
            )
        elif group_size(ep_group) > 1 and getattr(experts, "ep_group", None) is not ep_group:
            raise ValueError(
                "MoELayer: expected experts to carry the layer's group as attribute ep_group, "
                f"got {getattr(experts, 'ep_group', None)}"
            )
        self.experts = experts
        self.shared_expert: FeedForward | None = None
        if shared_ffn_dim:
            self.shared_expert = FeedForward(
                model_dim,
                shared_ffn_dim,
                activation=activation,
                bias=bias,
                device=device,
                dtype=dtype,
            )

    def reset_parameters(self) -> None:
        """Draw all parameters anew; the values depend on the seed but not on `ep_group`."""
        for module in (self.router, self.experts, self.shared_expert):
            if module is not None:
                module.reset_parameters()  # type: ignore[operator]

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return (
            f"model_dim={self.model_dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"capacity_factor={self.capacity_factor}, balance_loss_coef={self.balance_loss_coef}, "
            f"z_loss_coef={self.z_loss_coef}, dispatcher={type(self.dispatcher).__name__}"
        )

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Run every token through its experts.

        Args:
            x: tokens, `[..., D]`, floating point.
            token_mask: `[...]` bool, True = real token. A masked token reaches no routed expert and
                counts in no loss; its output is that of the shared expert, or zero.

        Returns:
            `[..., D]`, in the dtype of x, or under autocast in that of autocast.

        Raises:
            ValueError: x or token_mask has the wrong shape.
            TypeError: x is not floating point or token_mask is not bool.
        """
        if isinstance(self.dispatcher, AllToAllDispatcher):
            return self._forward_across_ranks(x, token_mask, self.dispatcher)
        return self._run_experts(x, *self._route(x, token_mask))

    # Split sizes are known on the host only after an exchange, so a graph cannot hold the layer.
    @torch.compiler.disable
    def _forward_across_ranks(
        self, x: Tensor, token_mask: Tensor | None, dispatcher: AllToAllDispatcher
    ) -> Tensor:
        with dispatcher.reporting_failures(x):
            routed = self._route(x, token_mask)
        return self._run_experts(x, *routed)

    def _run_experts(
        self, x: Tensor, x_TD: Tensor, mask_T: Tensor | None, routed: RouterOutput
    ) -> Tensor:
        """Dispatch, experts, combine, and the account of it."""
        # Under autocast the experts would cast anyway; here it halves what is permuted and sent.
        x_TD = as_autocast(x_TD)
        gate = routed.gate
        rows, offsets, metadata = self.dispatcher.dispatch(
            x_TD, gate.topk_idx, gate.topk_weights, capacity=self._capacity(x_TD.shape[0])
        )
        y_TD = self.dispatcher.combine(self.experts(rows, offsets), metadata)
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD)
        y_TD = self._account(y_TD, routed, mask_T, metadata.num_dropped)
        return y_TD.reshape(x.shape)

    def _route(
        self, x: Tensor, token_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, RouterOutput]:
        """Check the inputs, flatten them, choose experts: what can fail on one rank alone."""
        self._check_inputs(x, token_mask)
        x_TD = x.reshape(-1, self.model_dim)
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        return x_TD, mask_T, self.router(x_TD, token_mask=mask_T)

    def _check_inputs(self, x: Tensor, token_mask: Tensor | None) -> None:
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
        if token_mask is None:
            return
        if token_mask.dtype != torch.bool:
            raise TypeError(f"MoELayer: expected token_mask to be bool, got {token_mask.dtype}")
        if token_mask.shape != x.shape[:-1]:
            raise ValueError(
                f"MoELayer: expected token_mask to be of shape {tuple(x.shape[:-1])}, got "
                f"{tuple(token_mask.shape)}"
            )

    def _capacity(self, num_tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        slots = num_tokens * self.top_k * self.capacity_factor
        # An empty rank still takes part; its experts have room for one row that never comes.
        return max(1, math.ceil(slots / self.num_experts))

    def _account(
        self, y_TD: Tensor, routed: RouterOutput, mask_T: Tensor | None, num_dropped: Tensor
    ) -> Tensor:
        """Record metrics; return y with the losses attached."""
        gate = routed.gate
        balance = ops.load_balance_loss(gate.score_sum, gate.num_tokens_per_expert, self.top_k)
        z = ops.router_z_loss(routed.logits, token_mask=mask_T)
        self.metrics = {
            "num_tokens_per_expert": gate.num_tokens_per_expert.detach(),
            "num_dropped": num_dropped.detach(),
            "balance_loss": balance.detach(),
            "z_loss": z.detach(),
        }
        terms: dict[str, Tensor] = {}
        if self.balance_loss_coef:
            terms["balance"] = self.balance_loss_coef * balance
        if self.z_loss_coef:
            terms["z"] = self.z_loss_coef * z
        self.losses = {name: term.detach() for name, term in terms.items()}
        if terms and self.training and torch.is_grad_enabled():
            total = functools.reduce(torch.add, terms.values())
            y_TD = inject_loss(y_TD, total, self.loss_scale)
        return y_TD


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


def _make_dispatcher(
    dispatcher: str | TokenDispatcher, num_experts: int, ep_group: ProcessGroup | None
) -> TokenDispatcher:
    if not isinstance(dispatcher, str):
        return dispatcher
    if dispatcher == "auto":
        dispatcher = "alltoall" if group_size(ep_group) > 1 else "local"
    if dispatcher == "local":
        if group_size(ep_group) > 1:
            raise ValueError(
                "MoELayer: expected dispatcher to be 'auto' or 'alltoall' for an ep_group of "
                f"{group_size(ep_group)} ranks, got 'local'"
            )
        return LocalDispatcher(num_experts)
    if dispatcher == "alltoall":
        if ep_group is None:
            raise ValueError(
                "MoELayer: expected ep_group to be a process group for dispatcher='alltoall', "
                "got None"
            )
        return AllToAllDispatcher(num_experts, ep_group)
    raise ValueError(
        "MoELayer: expected dispatcher to be 'auto', 'local', 'alltoall' or a TokenDispatcher, got "
        f"{dispatcher!r}"
    )
