"""DeepSpeed's `MoE` on moe_ext.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._checks import check_rule
from moe_ext.integrations._base import (
    Gate,
    RenamedLayer,
    check_option,
    counts_of,
    expert_group,
    first_and_drawn,
    float32_logits,
    gumbel_noise,
    slots_with_room,
    uniform_noise,
)
from moe_ext.nn.module_experts import ModuleExperts
from moe_ext.nn.routers import RouterOutput, Tokens

_JITTER = 1e-2
_MAX_GROUP_SIZE = 178956971


class TopKGate(Gate):
    """DeepSpeed's gate: Switch for k = 1, GShard for k = 2, top-k with drops by score for k > 2.

    Logits, scores and losses are in float32. Random numbers are drawn as in DeepSpeed, so that
    equal seeds give equal decisions.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts of all ranks.
        k: K, number of experts of a token.
        capacity_factor: in training an expert takes `ceil(T / E * k * capacity_factor)` rows of
            each rank.
        eval_capacity_factor: the same in evaluation.
        min_capacity: smallest number of rows that an expert takes.
        noisy_gate_policy: None or "None"; "Jitter", which multiplies tokens by noise in 1 +- 0.01
            before the logits; "RSample" (k = 1), which draws the expert by Gumbel noise on logits.
        drop_tokens: drop tokens by a capacity; otherwise experts take all.
        use_rts: for k = 1, a full expert drops random rows instead of the last ones.
        ep_group: must be None; the layer knows its ranks.
        top2_2nd_expert_sampling: for k = 2, draw the second expert by Gumbel noise on the logits.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__(model_dim, num_experts, k)
        noisy_gate_policy = None if noisy_gate_policy == "None" else noisy_gate_policy
        check_option("deepspeed.TopKGate", "ep_group", ep_group, None)
        owner = "deepspeed.MoE"
        check_option(owner, "noisy_gate_policy", noisy_gate_policy, None, "Jitter", "RSample")
        fits = noisy_gate_policy != "RSample" or k == 1
        check_rule(owner, "noisy_gate_policy", noisy_gate_policy, f"None for k={k}", fits)
        factors = {"capacity_factor": capacity_factor, "eval_capacity_factor": eval_capacity_factor}
        for name, factor in factors.items():
            check_rule(owner, name, factor, "positive", 0 < factor < math.inf)
        check_rule(owner, "min_capacity", min_capacity, "at least 0", min_capacity >= 0)
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def reset_parameters(self) -> None:
        """Draw the weight anew, as `nn.Linear` does."""
        self.wg.reset_parameters()

    def capacity(self, num_tokens: int) -> int | None:
        """Return the rows that an expert takes from a rank's tokens; None if it takes all."""
        if not self.drop_tokens:
            return None
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        # The product is in float32, as in DeepSpeed. In float64, a product close to an integer
        # could be rounded up to another capacity.
        rows = torch.tensor(num_tokens / self.num_experts) * torch.tensor(factor * self.k)
        return max(math.ceil(rows.item()), self.min_capacity, 1)

    def logits(self, tokens: Tokens) -> Tensor:
        """Compute the logits in float32, of tokens with jitter in training."""
        x_TD = tokens.x_TD
        if self.noisy_gate_policy == "Jitter" and self.training:
            x_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
            x_TD = x_TD * uniform_noise(x_TD, 1.0 - _JITTER, 1.0 + _JITTER).to(x_TD.dtype)
        return float32_logits(x_TD, self.wg.weight)

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose k experts for every token.

        A token outside the mask chooses no expert, but its scores count in the loss, as in
        DeepSpeed.
        """
        num_tokens, token_mask = logits_TE.shape[0], tokens.mask_T
        weights, idx, counts, score_sum = self._gate(logits_TE)
        if token_mask is not None:
            idx = idx.masked_fill(~token_mask[:, None], -1)
            counts = counts_of(idx, self.num_experts)
        counted = counts_of(idx[:, 0], self.num_experts) if self.k == 2 else counts
        kept = self._kept(logits_TE, weights, idx)
        if self.k > 1:
            used = weights * (kept if token_mask is None else kept & token_mask[:, None])
            total = used.sum(1, keepdim=True).clamp(min=torch.finfo(used.dtype).eps)
            weights = used / total
        if token_mask is not None:
            weights = weights * token_mask[:, None]
        choices = max(num_tokens, 1) * (1 if self.k == 2 else self.k)
        loss = (score_sum / max(num_tokens, 1)) @ (counted.to(score_sum.dtype) / choices)
        self.loss = loss * self.num_experts
        return self.output(logits_TE, weights, idx, kept, (counts, counted), score_sum)

    def _gate(self, logits_TE: Tensor) -> ops.GateOutput:
        """Choose experts, with their softmax scores as weights."""
        drawn_first = self.k == 1 and self.noisy_gate_policy == "RSample" and self.training
        drawn_second = self.k == 2 and self.top2_2nd_expert_sampling
        if not drawn_first and not drawn_second:
            return ops.topk_gate(logits_TE, self.k, renormalize=False)
        noisy_TE = logits_TE.detach() + gumbel_noise(logits_TE)
        if drawn_first:
            idx = noisy_TE.argmax(dim=1, keepdim=True)
        else:
            idx = first_and_drawn(logits_TE, noisy_TE)
        return ops.gate_weights(logits_TE, idx, renormalize=False)

    def _kept(self, logits_TE: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        """Return True for slots whose expert has room."""
        capacity = self.capacity(logits_TE.shape[0])
        options: dict[str, Any] = {"policy": "choice"}
        if self.k == 1 and self.use_rts:
            # As in DeepSpeed, numbers are drawn even if nothing is dropped. Otherwise later draws
            # would differ from DeepSpeed's.
            drawn_TE = uniform_noise(logits_TE, 0.0, 1.0)
            options = {"policy": "random", "priority": drawn_TE.gather(1, idx.clamp(min=0))}
        elif self.k > 2:
            options = {"policy": "score", "topk_weights": weights}
        if capacity is None:
            return idx >= 0
        return slots_with_room(idx, self.num_experts, capacity, **options)


class MoE(RenamedLayer):
    """Mixture of experts with the signature, results and parameter names of `deepspeed.moe.layer`.

    Args:
        hidden_size: D, number of elements of a token.
        expert: module `[n, D] -> [n, D]`; every expert is a deep copy of it.
        num_experts: E, number of experts of all ranks.
        ep_size: number of consecutive ranks that share the experts.
        k: K, number of experts of a token.
        capacity_factor: see `TopKGate`.
        eval_capacity_factor: see `TopKGate`.
        min_capacity: see `TopKGate`.
        use_residual: mix the output with that of a dense expert, by weights of a learned softmax.
        noisy_gate_policy: see `TopKGate`.
        drop_tokens: see `TopKGate`.
        use_rts: see `TopKGate`.
        use_tutel: must be False; there is one implementation.
        enable_expert_tensor_parallelism: must be False.
        top2_2nd_expert_sampling: see `TopKGate`.

    Raises:
        ValueError: an option or a size is not supported; the message names it.
    """

    paths: ClassVar[dict[str, str]] = {
        "router": "deepspeed_moe.gate",
        "experts": "deepspeed_moe.experts.deepspeed_experts",
    }

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        owner = "deepspeed.MoE"
        rule = "False, as there is one implementation"
        check_rule(owner, "use_tutel", use_tutel, rule, not use_tutel)
        name = "enable_expert_tensor_parallelism"
        check_option(owner, name, enable_expert_tensor_parallelism, False)
        fits = ep_size >= 1 and num_experts % ep_size == 0
        check_rule(owner, "num_experts", num_experts, f"a multiple of ep_size={ep_size}", fits)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        group = expert_group(ep_size, owner)
        copies = [copy.deepcopy(expert) for _ in range(num_experts // ep_size)]
        experts = ModuleExperts(copies, ep_group=group)
        super().__init__(hidden_size, gate, experts)
        self.ep_size = ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.use_residual = use_residual
        for module in copies:
            module.register_forward_hook(_first_output)
            for parameter in module.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]
                parameter.group_name = self.expert_group_name  # type: ignore[attr-defined]
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing; the constructor has made the groups, of consecutive ranks."""
        name = "use_data_before_expert_parallel_"
        check_option("deepspeed.MoE", name, use_data_before_expert_parallel_, False)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run every token through its experts.

        Args:
            hidden_states: `[..., D]`.
            used_token: `[...]` or `[T]`; a token with zero reaches no expert. None uses all tokens.

        Returns:
            Output `[..., D]`; l_aux, 0-d, to add to the loss; exp_counts `[E]` int64, the number of
            tokens that chose each expert, before any drop.
        """
        mask = None
        if used_token is not None:
            mask = (used_token != 0).reshape(hidden_states.shape[:-1])
        output = self.run(hidden_states, mask)
        gate: Any = self.router
        l_aux, gate.loss = gate.loss, None
        assert l_aux is not None
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            weight = self.coefficient(hidden_states).softmax(dim=-1)
            output = output * weight[..., 0:1] + dense * weight[..., 1:]
        return output, l_aux, self.metrics["num_tokens_per_expert"]


def _first_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook for an expert that returns `(output, None)`, as Megatron's experts do."""
    if not isinstance(output, tuple):
        return output
    if any(other is not None for other in output[1:]):
        raise ValueError(
            "deepspeed.MoE: expected expert to return a tensor or (tensor, None), got another "
            "output beside it, which would be lost"
        )
    return output[0]


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter belongs to an expert of a `MoE`."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return whether an optimizer group holds expert parameters."""
    return bool(param_group.get("moe", False))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a `MoE`, and the number of experts of the first one."""
    for module in m.modules():
        if isinstance(module, MoE):
            return True, module.num_experts
    return False, 0


def _pieces(parameters: Sequence[nn.Parameter], limit: float | None) -> list[list[nn.Parameter]]:
    """Cut a list into pieces of at most `limit` elements. A larger parameter is its own piece."""
    pieces: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in parameters:
        if not pieces or (limit is not None and size + parameter.numel() > limit):
            pieces.append([])
            size = 0
        pieces[-1].append(parameter)
        size += parameter.numel()
    return pieces


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float | None = _MAX_GROUP_SIZE,
) -> list[dict[str, Any]]:
    """Split the expert parameters of optimizer groups into groups of their own.

    Args:
        param_groups: groups with "params" and "name"; they are not changed.
        max_group_size: most elements of an expert group; None for no limit.

    Returns:
        The groups without expert parameters, then the expert groups. These have "moe": True,
        "name": "ep_size_N", and the other entries of their original group.

    Raises:
        ValueError: param_groups are no groups, or a group has no name.
    """
    if isinstance(param_groups, dict):
        param_groups = [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ValueError(
            "split_params_into_different_moe_groups_for_optimizer: expected param_groups to be a "
            f"dict, list or tuple, got {type(param_groups).__name__}"
        )
    dense: list[dict[str, Any]] = []
    split: list[dict[str, Any]] = []
    for group in param_groups:
        if not isinstance(group, dict) or not {"params", "name"} <= group.keys():
            raise ValueError(
                "split_params_into_different_moe_groups_for_optimizer: expected param_groups to be "
                "dicts with the keys 'params' and 'name', got one without"
            )
        parameters = list(group["params"])
        dense.append({**group, "params": [p for p in parameters if not is_moe_param(p)]})
        experts = [p for p in parameters if is_moe_param(p)]
        for name in sorted({p.group_name for p in experts}):
            own = [p for p in experts if p.group_name == name]
            for piece in _pieces(own, max_group_size):
                split.append({**group, "name": name, "moe": True, "params": piece})
    return dense + split


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Make optimizer groups with separate groups of experts, from parameters or from groups."""
    if model_parameters and isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    group = {"params": model_parameters, "name": "dense-params"}
    return split_params_into_different_moe_groups_for_optimizer(group)
