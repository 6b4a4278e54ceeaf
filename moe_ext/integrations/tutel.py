"""Tutel's `moe_layer` on moe_ext.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.comm import collectives
from moe_ext.comm.groups import GroupHandle, check_group, group_size
from moe_ext.integrations._base import (
    Gate,
    RenamedLayer,
    counts_of,
    refuse_option,
    slots_with_room,
    world_group,
)
from moe_ext.integrations._tutel_parts import local_count, make_experts, make_gate
from moe_ext.nn.routers import RouterOutput, Tokens


@dataclass
class _Call:
    """Arguments of one forward pass that concern the gate."""

    gate_index: int = 0
    capacity_factor: float | None = None
    top_k: int | None = None
    inequivalent_tokens: bool = False


class _Gates(Gate):
    """The gates of a layer, registered as "0", "1", ...; each call goes through one of them."""

    def __init__(
        self,
        gates: Sequence[nn.Module],
        model_dim: int,
        num_experts: int,
        *,
        batch_prioritized_routing: bool,
        normalize_gate: bool,
        is_gshard_loss: bool,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(model_dim, num_experts, gates[0].top_k)  # type: ignore[arg-type]
        for index, gate in enumerate(gates):
            self.add_module(str(index), gate)
        self.batch_prioritized_routing = batch_prioritized_routing
        self.normalize_gate = normalize_gate
        self.is_gshard_loss = is_gshard_loss
        self._group = GroupHandle(group)
        self.call = _Call()

    @property
    def gates(self) -> tuple[dict[str, object], ...]:
        """Options of the gates and of the call, which ranks compare under the argument's name."""
        names = ("top_k", "capacity_factor", "gate_noise")
        found = [{name: getattr(gate, name) for name in names} for gate in self.children()]
        return (*found, vars(self.call))

    def logits(self, tokens: Tokens) -> Tensor:
        """Logits of the gate that this call goes through."""
        logits_TE: Tensor = self.get_submodule(str(self.call.gate_index))(tokens.x_TD)
        return logits_TE

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose K experts for every token."""
        assert tokens.mask_T is None, "Tutel's layer takes no mask"
        gate: Any = self.get_submodule(str(self.call.gate_index))
        top_k = min(self.call.top_k or gate.top_k, self.num_experts)
        noisy_TE = logits_TE
        if self.training and gate.gate_noise > 0:
            noise = torch.randn_like(logits_TE) / self.num_experts
            noisy_TE = logits_TE + gate.gate_noise * noise
        chosen = ops.topk_gate(noisy_TE, top_k, renormalize=False)
        idx, weights = chosen.topk_idx, chosen.topk_weights
        first_E = counts_of(idx[:, 0], self.num_experts)
        if self.is_gshard_loss:
            self.loss = ops.load_balance_loss(chosen.score_sum, first_E, 1)
        else:
            self.loss = _load_importance_loss(logits_TE, noisy_TE, idx, gate.gate_noise)
        kept = self._kept(gate, chosen)
        if self.normalize_gate and top_k > 1:
            total = weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
            weights = weights / total
        counts = (chosen.num_tokens_per_expert, first_E)
        return self.output(logits_TE, weights, idx, kept, counts, chosen.score_sum)

    def _kept(self, gate: Any, chosen: ops.GateOutput) -> Tensor | None:
        """Slots with room at their expert; None for all."""
        factor = self.call.capacity_factor
        factor = gate.capacity_factor if factor is None else factor
        idx = chosen.topk_idx
        num_tokens, top_k = idx.shape
        if self.call.inequivalent_tokens:
            # On every rank alike, also where this one's factor drops nothing.
            num_tokens = _largest(num_tokens, self._group.group, idx.device)
        if factor == 0:
            return None
        capacity = top_k * int(abs(factor) * -(-num_tokens // self.num_experts))
        return slots_with_room(
            idx,
            self.num_experts,
            capacity,
            policy="batch_prioritized" if self.batch_prioritized_routing else "choice",
            topk_weights=chosen.topk_weights,
        )


class MOELayer(RenamedLayer):
    """Mixture of experts with the signature, results and parameter names of Tutel's `moe_layer`.

    Args:
        gate_type: a dict or a list of them: "type" ("top", "cosine_top", or "custom" with "module",
            a class of modules that return logits), "k", "capacity_factor" (positive or negative:
            an expert takes `k * int(|f| * ceil(T / E))` rows of each rank; 0: all), "gate_noise",
            "fp32_gate", and for "cosine_top" "proj_dim" and "init_t".
        model_dim: D, the elements of a token.
        experts: a dict: "type" ("ffn" or "llama_ffn"), "num_experts_per_device",
            "hidden_size_per_expert", "activation_fn", and for "ffn" "has_fc1_bias", "has_fc2_bias".
        scan_expert_func: called with the name and value of every expert parameter.
        result_func: applied to the output.
        group: expert-parallel group; None is the default group, or this process alone where
            torch.distributed is not initialised.
        seeds: for `torch.manual_seed` before the gates, before the experts, and at the end.
        a2a_ffn_overlap_degree: 1.
        is_postscore: True, weights act on the outputs of the experts.
        batch_prioritized_routing: where an expert is full, tokens with the largest score stay.
        normalize_gate: for k > 1, divide the weights of a token by their sum.
        is_gshard_loss: GShard's balance loss; False for the mean of importance and load loss.
        parallel_type: "adaptive:1", "data", "model" or "auto", the same for unsplit experts.
        use_2dh: False.

    Attributes:
        l_aux: balance loss of the last forward pass, 0-d, in the graph.

    Raises:
        ValueError: an option has no meaning here; the message names it. The dicts are unchanged.
    """

    paths: ClassVar[dict[str, str]] = {"router": "gates"}
    l_aux: Tensor | None

    def __init__(
        self,
        gate_type: dict[str, Any] | Sequence[dict[str, Any]],
        model_dim: int,
        experts: dict[str, Any],
        scan_expert_func: Callable[[str, nn.Parameter], object] | None = None,
        result_func: Callable[[Tensor], Any] | None = None,
        group: ProcessGroup | None = None,
        seeds: Sequence[int | None] | None = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
    ) -> None:
        owner = "tutel.moe_layer"
        _check_overlap(owner, a2a_ffn_overlap_degree)
        _check_ways(owner, is_postscore, parallel_type, use_2dh)
        group = world_group() if group is None else group
        check_group(group, owner)
        group = group if group_size(group) > 1 else None
        num_local = local_count(experts)
        num_experts = num_local * group_size(group)
        _seed(seeds, 1)
        modules = make_experts(experts, model_dim, num_local, group)
        configs = [gate_type] if isinstance(gate_type, dict) else list(gate_type)
        if not configs or not all(isinstance(config, dict) for config in configs):
            refuse_option(owner, "gate_type", gate_type, "a dict or a list of dicts")
        gates = []
        for index, config in enumerate(configs):
            _seed(seeds, 0, index)
            gates.append(make_gate(config, model_dim, num_experts))
        router = _Gates(
            gates,
            model_dim,
            num_experts,
            batch_prioritized_routing=batch_prioritized_routing,
            normalize_gate=normalize_gate,
            is_gshard_loss=is_gshard_loss,
            group=group,
        )
        super().__init__(model_dim, num_experts, gate=router, experts=modules, ep_group=group)
        _seed(seeds, 2)
        self.register_buffer("_num_global_experts", torch.tensor(num_experts))
        self.num_local_experts = num_local
        self.num_global_experts = num_experts
        self.result_func = result_func
        self.l_aux = None
        for name, parameter in modules.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)
            parameter._tutel_expert = True  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "l_aux": None}

    def get_parameter_iterator(self, param_type: str) -> Any:
        """Named parameters of the gates ("gate") or of this rank's experts ("local_experts")."""
        modules = {"gate": self.router, "local_experts": self.experts}
        if param_type not in modules:
            rule = "'gate' or 'local_experts'"
            refuse_option("tutel.moe_layer", "param_type", param_type, rule)
        return modules[param_type].named_parameters()

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: int | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Any:
        """Run every token through its experts.

        Args:
            input: `[..., D]`.
            gate_index: which gate.
            capacity_factor: instead of the gate's.
            top_k: instead of the gate's.
            a2a_ffn_overlap_degree: None or 1.
            reserve_dims: 1.
            inequivalent_tokens: the capacity follows the largest T of all ranks.
            adaptive_r: None or 1.
            megablocks_size: 0.

        Returns:
            `[..., D]` with the balance loss as attribute `l_aux`; or what `result_func` makes of
            it.
        """
        owner = "tutel.moe_layer"
        _check_overlap(owner, 1 if a2a_ffn_overlap_degree is None else a2a_ffn_overlap_degree)
        if reserve_dims != 1:
            refuse_option(owner, "reserve_dims", reserve_dims, "1")
        if adaptive_r not in (None, 1):
            refuse_option(owner, "adaptive_r", adaptive_r, "None or 1")
        if megablocks_size != 0:
            refuse_option(owner, "megablocks_size", megablocks_size, "0")
        if top_k is not None and top_k < 1:
            refuse_option(owner, "top_k", top_k, "at least 1")
        gates: Any = self.router
        if str(gate_index) not in dict(gates.named_children()):
            rule = f"in 0..{len(list(gates.children())) - 1}"
            refuse_option(owner, "gate_index", gate_index, rule)
        gates.call = _Call(gate_index, capacity_factor, top_k, inequivalent_tokens)
        y = self.run(input)
        self.l_aux, gates.loss = gates.loss, None
        y.l_aux = self.l_aux  # type: ignore[attr-defined]
        return y if self.result_func is None else self.result_func(y)


moe_layer = MOELayer


def _check_overlap(owner: str, degree: int) -> None:
    if degree != 1:
        refuse_option(owner, "a2a_ffn_overlap_degree", degree, "1")


def _check_ways(owner: str, is_postscore: bool, parallel_type: str, use_2dh: bool) -> None:
    if not is_postscore:
        refuse_option(owner, "is_postscore", is_postscore, "True")
    if use_2dh:
        refuse_option(owner, "use_2dh", use_2dh, "False")
    if parallel_type not in ("adaptive:1", "data", "model", "auto"):
        rule = "'adaptive:1', 'data', 'model' or 'auto'"
        refuse_option(owner, "parallel_type", parallel_type, rule)


def _seed(seeds: Sequence[int | None] | None, place: int, offset: int = 0) -> None:
    if seeds is not None and len(seeds) > place:
        seed = seeds[place]
        if seed is not None:
            torch.manual_seed(seed + offset)


def _largest(value: int, group: ProcessGroup | None, device: torch.device) -> int:
    """Largest value of all ranks; a collective and a synchronisation."""
    if group is None:
        return value
    largest = torch.tensor(value, device=device)
    return int(collectives.all_reduce_(largest, group, operation="tutel.moe_layer", op="max"))


def _cv_squared(x_E: Tensor) -> Tensor:
    return x_E.var() / (x_E.mean().square() + 1e-10)


def _load_importance_loss(
    logits_TE: Tensor, noisy_TE: Tensor, idx_TK: Tensor, gate_noise: float
) -> Tensor:
    """Mean of the squared coefficients of variation of importance and of load.

    The load of an expert is the sum over tokens of the probability that fresh noise would lift it
    to the K-th of the noisy logits.
    """
    if not gate_noise > 0:
        rule = "positive for is_gshard_loss=False"
        refuse_option("tutel.moe_layer", "gate_noise", gate_noise, rule)
    threshold_T1 = noisy_TE.gather(1, idx_TK[:, -1:])
    width = gate_noise / logits_TE.shape[1]
    load_E = torch.special.ndtr((logits_TE - threshold_T1) / width).sum(0)
    importance_E = logits_TE.softmax(dim=1).sum(0)
    return (_cv_squared(importance_E) + _cv_squared(load_E)) / 2.0
