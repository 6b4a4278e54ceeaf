"""MegaBlocks' `dMoE` on moe_ext.

Shapes: T tokens, D model, F ffn, E experts, L local experts, K top-k, N rows.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from moe_ext import ops
from moe_ext._checks import check_numbers_of_fields, check_rule
from moe_ext.comm.groups import group_rank, group_size
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations._base import (
    FacadeExperts,
    Gate,
    RenamedLayer,
    activate,
    check_option,
    counts_of,
    float32_logits,
)
from moe_ext.nn.routers import RouterOutput, Tokens

InitFn = Callable[[Tensor], Any]


@dataclasses.dataclass
class Arguments:
    """The configuration of MegaBlocks, with the same fields.

    Some fields differ in meaning: `device=None` means torch's default device. `mlp_impl` and the
    `fp32` switches have no effect, and losses are always in float32.
    """

    FREE_TO_DIFFER: ClassVar[tuple[str, ...]] = ("device",)

    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_layers: int = 1
    bias: bool = True
    return_bias: bool = True
    activation_fn: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")
    moe_num_experts: int = 1
    moe_top_k: int = 1
    moe_capacity_factor: float = 1
    moe_normalize_expert_weights: float | None = None
    moe_loss_weight: float = 0.1
    moe_jitter_eps: float | None = None
    moe_lbl_in_fp32: bool = False
    moe_expert_model_parallelism: bool = False
    expert_parallel_group: ProcessGroup | None = None
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    memory_optimized_mlp: bool = False
    mlp_type: str = "mlp"
    mlp_impl: str = "grouped"
    fp16: bool = True
    bf16: bool = False
    device: torch.device | str | int | None = None
    init_method: InitFn = partial(nn.init.normal_, mean=0.0, std=0.02)
    output_layer_init_method: InitFn = partial(nn.init.normal_, mean=0.0, std=0.02)
    uniform_expert_assignment: bool = False
    shared_expert: bool = False
    fc_cls: Any = nn.Linear
    fc_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    remat_act_fn: bool = True
    shared_expert_hidden_size: int | None = None
    shared_expert_weighted_sum: bool = False
    moe_zloss_weight: float = 0
    moe_zloss_in_fp32: bool = False

    def __post_init__(self) -> None:
        check_numbers_of_fields(self, [each.name for each in dataclasses.fields(self)])
        check_option("megablocks.Arguments", "mlp_type", self.mlp_type, "mlp", "glu")
        check_option("megablocks.Arguments", "mlp_impl", self.mlp_impl, "grouped", "sparse")
        if self.shared_expert_hidden_size is None:
            self.shared_expert_hidden_size = self.ffn_hidden_size

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the parameters: float16, bfloat16, or torch's default."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None

    @property
    def num_layers_here(self) -> int:
        """Number of layers of this pipeline stage."""
        if self.num_layers_per_virtual_pipeline_stage is not None:
            return self.num_layers_per_virtual_pipeline_stage
        return self.num_layers // self.pipeline_model_parallel_size


def from_megatron(megatron_args: Any) -> Arguments:
    """Make `Arguments` from an object that has some of the fields as attributes."""
    names = [field.name for field in dataclasses.fields(Arguments)]
    given = {name: getattr(megatron_args, name) for name in names if hasattr(megatron_args, name)}
    return Arguments(**given)


def _made(args: Arguments) -> dict[str, Any]:
    """Return the options for creating parameters."""
    return {"dtype": args.dtype, "device": args.device}


class LearnedRouter(Gate):
    """MegaBlocks' router: softmax, then top-k.

    Args:
        args: the configuration.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__(args.hidden_size, args.moe_num_experts, args.moe_top_k)
        self.args = args
        self.layer = nn.Linear(args.hidden_size, args.moe_num_experts, bias=False, **_made(args))
        self.zloss: Tensor | None = None
        self.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "zloss": None}

    def reset_parameters(self) -> None:
        """Draw the weight by `init_method`."""
        with torch.no_grad():
            self.args.init_method(self.layer.weight)

    def logits(self, tokens: Tokens) -> Tensor:
        """Compute the logits in float32, of tokens with jitter in training."""
        x_TD, eps = tokens.x_TD, self.args.moe_jitter_eps
        if self.training and eps is not None:
            noise = torch.rand(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
            low, high = 1.0 - eps, 1.0 + eps
            x_TD = x_TD * (low + noise * (high - low))
        return float32_logits(x_TD, self.layer.weight)

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose K experts for every token."""
        assert tokens.mask_T is None, "dMoE takes no mask"
        args = self.args
        chosen = ops.topk_gate(logits_TE, self.top_k, renormalize=False)
        weights, idx, counts_E, score_sum = chosen
        if args.moe_normalize_expert_weights:
            order = float(args.moe_normalize_expert_weights)
            weights = weights / weights.norm(p=order, dim=-1, keepdim=True)
        if args.uniform_expert_assignment:
            slots = torch.arange(idx.numel(), device=idx.device)
            idx = (slots % self.num_experts).view_as(idx)
            counts_E = counts_of(idx, self.num_experts)
        self.loss = ops.load_balance_loss(score_sum, counts_E, self.top_k)
        if args.moe_zloss_weight:
            self.zloss = ops.router_z_loss(logits_TE)
        return self.output(logits_TE, weights, idx, None, (counts_E, counts_E), score_sum)


class _MLP(FacadeExperts):
    """MegaBlocks' experts: `w1`, `w2` and for "glu" `v1`, each `[L*F, D]`."""

    def __init__(self, args: Arguments, group: ProcessGroup | None) -> None:
        super().__init__(args.moe_num_experts // group_size(group), group)
        self.args = args
        rows = self.num_local_experts * args.ffn_hidden_size
        for name in ("w1", "w2", "v1")[: 3 if args.mlp_type == "glu" else 2]:
            empty = torch.empty(rows, args.hidden_size, **_made(args))
            self.register_parameter(name, nn.Parameter(empty))
        self._spread()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all E experts, and keep those of this rank.

        Equal seeds then give equal experts for every number of ranks.
        """
        args, first = self.args, group_rank(self.ep_group) * self.num_local_experts
        shape = (self.num_experts, args.ffn_hidden_size, args.hidden_size)
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                drawn = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                init = args.output_layer_init_method if name == "w2" else args.init_method
                init(drawn)
                own = drawn[first : first + self.num_local_experts]
                local_part(parameter).copy_(own.flatten(0, 1))

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        if self.args.memory_optimized_mlp:
            return checkpoint(self._run, rows_ND, expert_offsets, use_reentrant=False)
        return self._run(rows_ND, expert_offsets)

    def _run(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        shape = (self.num_local_experts, self.args.ffn_hidden_size, self.args.hidden_size)
        # `checkpoint` calls `_run` again in the backward pass, outside the forward hooks that give
        # modules the parts of their DTensors.
        weights = {
            n: local_part(p).view(shape) for n, p in self._parameters.items() if p is not None
        }
        up = ops.grouped_mm(rows_ND, weights["w1"], expert_offsets)
        hidden = activate(up, self.args.activation_fn)
        if "v1" in weights:
            hidden = hidden * ops.grouped_mm(rows_ND, weights["v1"], expert_offsets)
        return ops.grouped_mm(hidden, weights["w2"].transpose(1, 2), expert_offsets)


class _Experts(nn.Module):
    """Experts under their name in MegaBlocks, and the bias, which every rank holds whole."""

    def __init__(self, mlp: nn.Module, args: Arguments) -> None:
        super().__init__()
        self.mlp = mlp
        bias = torch.zeros(args.hidden_size, **_made(args))
        self.bias = nn.Parameter(bias) if args.bias else None

    def reset_parameters(self) -> None:
        self.mlp.reset_parameters()  # type: ignore[operator]
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        return self.mlp(rows_ND, expert_offsets)


class _SharedMLP(nn.Module):
    """The shared expert, which runs every token and multiplies its output by `scale`."""

    def __init__(self, args: Arguments, scale: float) -> None:
        super().__init__()
        self.args, self.scale = args, scale
        options = {"bias": args.bias, "device": args.device, **args.fc_kwargs}
        sizes = (args.hidden_size, args.shared_expert_hidden_size)
        self.up_proj = args.fc_cls(*sizes, **options)
        self.down_proj = args.fc_cls(*sizes[::-1], **options)
        if args.mlp_type == "glu":
            self.gate_proj = args.fc_cls(*sizes, **options)

    def reset_parameters(self) -> None:
        for layer in self.children():
            layer.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.args.mlp_type == "glu":
            hidden = activate(self.gate_proj(x), self.args.activation_fn) * up
        else:
            hidden = activate(up, self.args.activation_fn)
        return self.down_proj(hidden) * self.scale


# Loss of the last forward pass of each layer, in the order of the passes. A layer that runs again
# replaces its loss, so that the dictionaries do not grow if nobody clears them.
_balance: weakref.WeakKeyDictionary[dMoE, Tensor] = weakref.WeakKeyDictionary()
_zlosses: weakref.WeakKeyDictionary[dMoE, Tensor] = weakref.WeakKeyDictionary()


class dMoE(RenamedLayer):  # noqa: N801 - MegaBlocks' name
    """Dropless mixture of experts with the results and parameter names of MegaBlocks' `dMoE`.

    Args:
        args: the configuration.

    Raises:
        ValueError: an option is not supported; the message names it.
    """

    def __init__(self, args: Arguments) -> None:
        owner = "megablocks.dMoE"
        group = args.expert_parallel_group
        fits = args.moe_expert_model_parallelism or group is None
        rule = "None without moe_expert_model_parallelism"
        check_rule(owner, "expert_parallel_group", group, rule, fits)
        ranks, num_experts = group_size(group), args.moe_num_experts
        rule = f"a multiple of the size of expert_parallel_group, {ranks}"
        check_rule(owner, "moe_num_experts", num_experts, rule, num_experts % ranks == 0)
        fits = not (args.shared_expert and args.bias and args.return_bias)
        check_rule(owner, "return_bias", True, "False with a shared expert", fits)
        router = LearnedRouter(args)
        super().__init__(args.hidden_size, router, _MLP(args, group if ranks > 1 else None))
        self.args = args
        self.experts = _Experts(self.experts, args)
        if args.shared_expert:
            scale = 1.0 / args.moe_top_k if args.shared_expert_weighted_sum else 1.0
            self.shared_expert = _SharedMLP(args, scale)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """Run every token through its experts.

        Args:
            x: `[S, B, D]`.

        Returns:
            `[S, B, D]` with the bias added. With `return_bias` and `bias`, a pair of the output
            without the bias, and the bias.
        """
        args = self.args
        y = self.run(x)
        gate: Any = self.router
        self._keep(_balance, gate.loss if self.training and args.moe_loss_weight > 0 else None)
        self._keep(_zlosses, gate.zloss)
        gate.loss = gate.zloss = None
        bias: Tensor | None = self.experts.bias  # type: ignore[assignment]
        if bias is not None:
            if args.return_bias:
                return y, bias
            y = y + bias
        if args.shared_expert and args.shared_expert_weighted_sum:
            y = y * (args.moe_top_k / (args.moe_top_k + 1))
        return y

    def _keep(self, kept: weakref.WeakKeyDictionary[dMoE, Tensor], loss: Tensor | None) -> None:
        if loss is not None:
            kept.pop(self, None)
            kept[self] = loss


def batched_load_balancing_loss(args: Arguments) -> Tensor | float:
    """Return `moe_loss_weight / num_layers` times the sum of the balance losses of all layers.

    Raises:
        ValueError: the number of layers that have run is not that of the pipeline stage.
    """
    if args.moe_loss_weight == 0:
        return 0.0
    losses = list(_balance.values())
    if len(losses) != args.num_layers_here:
        raise ValueError(
            "batched_load_balancing_loss: expected the losses of "
            f"{args.num_layers_here} layers since the last clear, got {len(losses)}"
        )
    return torch.stack(losses).sum() * (args.moe_loss_weight / args.num_layers)


def clear_load_balancing_loss() -> None:
    """Drop the balance losses of all layers."""
    _balance.clear()


def batched_router_zloss(args: Arguments) -> Tensor:
    """Return `moe_zloss_weight` times the z-loss of every layer, one entry per layer.

    Raises:
        ValueError: the weight is zero, or no layer has run.
    """
    weight = args.moe_zloss_weight
    check_rule("batched_router_zloss", "moe_zloss_weight", weight, "positive", bool(weight))
    if not _zlosses:
        raise ValueError(
            "batched_router_zloss: expected a layer to have run since the last clear, got none"
        )
    return torch.stack(list(_zlosses.values())) * weight


def clear_router_zloss() -> None:
    """Drop the z-losses of all layers."""
    _zlosses.clear()
