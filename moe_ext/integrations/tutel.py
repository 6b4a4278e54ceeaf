"""Tutel's `moe_layer` on moe_ext.

Shapes: T tokens, D model, F ffn, E experts, L local experts, K top-k, N rows, P projected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_rule
from moe_ext.comm import collectives
from moe_ext.comm.groups import GroupHandle, group_size, resolve_group
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations._base import (
    FacadeExperts,
    Gate,
    LayerWithLoss,
    activate,
    check_known_keys,
    check_option,
    counts_of,
    float32_logits,
    slots_with_room,
)
from moe_ext.nn.routers import RouterOutput, Tokens
from moe_ext.nn.torch_state import without_autocast

_Activation = Callable[[Tensor], Tensor]

_GATE_KEYS = ("type", "k", "capacity_factor", "gate_noise", "fp32_gate")
_COSINE_KEYS = (*_GATE_KEYS, "proj_dim", "init_t")
_EXPERT_KEYS = {
    "ffn": ("activation_fn", "output_dim", "has_fc1_bias", "has_fc2_bias"),
    "llama_ffn": ("activation_fn",),
}
_OWNER = "tutel.moe_layer"
_MAX_TEMPERATURE = math.log(1.0 / 0.01)


class _LinearTopKGate(nn.Module):
    """Computes `logits = x @ wg.T` in float32."""

    def __init__(self, model_dim: int, num_global_experts: int, k: int, fp32_gate: bool) -> None:
        super().__init__()
        dtype = torch.float32 if fp32_gate else None
        self.wg = nn.Linear(model_dim, num_global_experts, bias=False, dtype=dtype)
        self.top_k = min(num_global_experts, k)

    def reset_parameters(self) -> None:
        """Draw the weight anew, as `nn.Linear` does."""
        self.wg.reset_parameters()

    def forward(self, x_TD: Tensor) -> Tensor:
        """`[T, D] -> [T, E]`."""
        return float32_logits(x_TD, self.wg.weight)


class _CosineTopKGate(nn.Module):
    """Logits are cosines of projected tokens and experts' embeddings, times a learned scale."""

    def __init__(
        self, model_dim: int, num_global_experts: int, k: int, proj_dim: int, init_t: float
    ) -> None:
        super().__init__()
        self.top_k = min(num_global_experts, k)
        self.init_t = init_t
        self.temperature = nn.Parameter(torch.empty(1))
        self.cosine_projector = nn.utils.skip_init(nn.Linear, model_dim, proj_dim)
        self.sim_matrix = nn.Parameter(torch.empty(proj_dim, num_global_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection as `nn.Linear` does, and embeddings with standard deviation 0.01."""
        nn.init.constant_(self.temperature, math.log(1.0 / self.init_t))
        self.cosine_projector.reset_parameters()
        nn.init.normal_(self.sim_matrix, 0, 0.01)

    def forward(self, x_TD: Tensor) -> Tensor:
        """`[T, D] -> [T, E]`."""
        projector = self.cosine_projector
        x_TP = float32_logits(x_TD, projector.weight, projector.bias)
        with without_autocast(x_TD.device):
            experts_PE = F.normalize(self.sim_matrix.to(x_TP.dtype), dim=0)
            scale = self.temperature.to(x_TP.dtype).clamp(max=_MAX_TEMPERATURE).exp()
            return F.normalize(x_TP, dim=1) @ experts_PE * scale


def _make_gate(config: dict[str, Any], model_dim: int, num_experts: int) -> nn.Module:
    """Make a gate from Tutel's configuration, which is not changed."""
    kind = config.get("type")
    k = int(config.get("k", 1))
    check_rule(_OWNER, "gate_type['k']", config.get("k"), "at least 1", k >= 1)
    if kind == "top":
        check_known_keys(_OWNER, config, _GATE_KEYS, "a gate of type 'top'")
        gate: nn.Module = _LinearTopKGate(
            model_dim, num_experts, k, bool(config.get("fp32_gate", False))
        )
    elif kind == "cosine_top":
        check_known_keys(_OWNER, config, _COSINE_KEYS, "a gate of type 'cosine_top'")
        proj_dim, init_t = config.get("proj_dim", 256), config.get("init_t", 0.5)
        gate = _CosineTopKGate(model_dim, num_experts, k, proj_dim, init_t)
    elif kind == "custom":
        rest = {name: value for name, value in config.items() if name not in ("type", "module")}
        gate = config["module"](model_dim=model_dim, num_global_experts=num_experts, **rest)
    else:
        check_option(_OWNER, "gate_type['type']", kind, "top", "cosine_top", "custom")
    for name, default in (("gate_noise", 0.0), ("capacity_factor", 1.0)):
        if not hasattr(gate, name):
            setattr(gate, name, float(config.get(name, default)))
    return gate


class _FFNExperts(FacadeExperts):
    """Computes `act(x @ fc1[e].T + b1[e]) @ fc2[e] + b2[e]`; fc1 and fc2 are `[L, F, D]`."""

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_local: int,
        activation_fn: _Activation | None,
        biases: tuple[bool, bool],
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(num_local, group)
        self.activation_fn = F.relu if activation_fn is None else activation_fn
        self.batched_fc1_w = nn.Parameter(torch.empty(num_local, ffn_dim, model_dim))
        self.batched_fc2_w = nn.Parameter(torch.empty(num_local, ffn_dim, model_dim))
        zeros_LF, zeros_LD = torch.zeros(num_local, ffn_dim), torch.zeros(num_local, model_dim)
        self.batched_fc1_bias = nn.Parameter(zeros_LF) if biases[0] else None
        self.batched_fc2_bias = nn.Parameter(zeros_LD) if biases[1] else None
        self._spread()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights uniformly in +-1/sqrt(fan_in), and set biases to zero."""
        for weight, fan_in in (
            (self.batched_fc1_w, self.batched_fc1_w.shape[2]),
            (self.batched_fc2_w, self.batched_fc2_w.shape[1]),
        ):
            bound = 1.0 / math.sqrt(fan_in)
            nn.init.uniform_(local_part(weight), -bound, bound)
        for bias in (self.batched_fc1_bias, self.batched_fc2_bias):
            if bias is not None:
                nn.init.zeros_(local_part(bias))

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        """`[N, D] -> [N, D]`."""
        up = ops.grouped_mm(
            rows_ND, self.batched_fc1_w, expert_offsets, bias_EM=self.batched_fc1_bias
        )
        down_EDF = self.batched_fc2_w.transpose(1, 2)
        hidden = activate(up, self.activation_fn)
        return ops.grouped_mm(hidden, down_EDF, expert_offsets, bias_EM=self.batched_fc2_bias)


class _LlamaExperts(FacadeExperts):
    """Computes `(act(x @ fc1[e]) * (x @ fc2[e])) @ fc3[e]`; parameters are flat, as in Tutel."""

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_local: int,
        activation_fn: _Activation | None,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(num_local, group)
        self.activation_fn = F.silu if activation_fn is None else activation_fn
        self.shape = (num_local, model_dim, ffn_dim)
        self.W_fc1, self.W_fc2, self.W_fc3 = (
            nn.Parameter(torch.empty(math.prod(self.shape))) for _ in range(3)
        )
        self._spread()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from a normal distribution with standard deviation 0.01."""
        for parameter in self.parameters():
            nn.init.normal_(local_part(parameter), 0, 0.01)

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        """`[N, D] -> [N, D]`."""
        num_local, model_dim, ffn_dim = self.shape
        first, second = (
            ops.grouped_mm(rows_ND, weight.view(self.shape).transpose(1, 2), expert_offsets)
            for weight in (self.W_fc1, self.W_fc2)
        )
        down_EDF = self.W_fc3.view(num_local, ffn_dim, model_dim).transpose(1, 2)
        return ops.grouped_mm(
            activate(first, self.activation_fn) * second, down_EDF, expert_offsets
        )


def _make_experts(
    config: dict[str, Any], model_dim: int, num_local: int, group: ProcessGroup | None
) -> FacadeExperts:
    """Make experts from Tutel's configuration, which is not changed."""
    kind = str(config.get("type"))
    check_option(_OWNER, "experts['type']", kind, *_EXPERT_KEYS)
    sizes = ("type", "num_experts_per_device", "count_per_node", "hidden_size_per_expert")
    check_known_keys(_OWNER, config, sizes + _EXPERT_KEYS[kind], f"experts of type {kind!r}")
    ffn_dim = config.get("hidden_size_per_expert")
    fits = isinstance(ffn_dim, Integral) and int(ffn_dim) >= 1
    check_rule(_OWNER, "experts['hidden_size_per_expert']", ffn_dim, "at least 1", fits)
    check_option(_OWNER, "experts['output_dim']", config.get("output_dim"), model_dim, None)
    activation_fn = config.get("activation_fn")
    assert ffn_dim is not None
    if kind == "llama_ffn":
        return _LlamaExperts(model_dim, ffn_dim, num_local, activation_fn, group)
    biases = (bool(config.get("has_fc1_bias", True)), bool(config.get("has_fc2_bias", True)))
    return _FFNExperts(model_dim, ffn_dim, num_local, activation_fn, biases, group)


def _local_count(config: dict[str, Any]) -> int:
    """Return the number of experts of each rank."""
    count = config.get("num_experts_per_device", config.get("count_per_node", 1))
    rule = "at least 1, since an expert is not split over ranks"
    fits = isinstance(count, Integral) and int(count) >= 1
    check_rule(_OWNER, "experts['num_experts_per_device']", count, rule, fits)
    return int(count)


@dataclass
class _Call:
    """Arguments of one forward pass for the gate."""

    gate_index: int = 0
    capacity_factor: float | None = None
    top_k: int | None = None
    inequivalent_tokens: bool = False


class _Gates(Gate):
    """The gates of a layer, registered as "0", "1", ...; each forward pass uses one of them."""

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

    def reset_parameters(self) -> None:
        """Draw the parameters of every gate anew."""
        for gate in self.children():
            gate.reset_parameters()  # type: ignore[operator]

    @property
    def gates(self) -> tuple[dict[str, object], ...]:
        """Options of the gates and of the call, which ranks compare under the name "gates"."""
        names = ("top_k", "capacity_factor", "gate_noise")
        found = [{name: getattr(gate, name) for name in names} for gate in self.children()]
        return (*found, vars(self.call))

    def logits(self, tokens: Tokens) -> Tensor:
        """Return the logits of the gate that this call uses."""
        return self.get_submodule(str(self.call.gate_index))(tokens.x_TD)

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
        weights, idx, counts_E, score_sum = chosen
        first_E = counts_of(idx[:, 0], self.num_experts)
        if self.is_gshard_loss:
            self.loss = ops.load_balance_loss(score_sum, first_E, 1)
        else:
            self.loss = _load_importance_loss(logits_TE, noisy_TE, idx, gate.gate_noise)
        kept = self._kept(gate, chosen)
        if self.normalize_gate and top_k > 1:
            total = weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
            weights = weights / total
        return self.output(logits_TE, weights, idx, kept, (counts_E, first_E), score_sum)

    def _kept(self, gate: Any, chosen: ops.GateOutput) -> Tensor | None:
        """Return True for slots whose expert has room; None if experts take all."""
        factor = self.call.capacity_factor
        factor = gate.capacity_factor if factor is None else factor
        idx = chosen.topk_idx
        num_tokens, top_k = idx.shape
        if self.call.inequivalent_tokens:
            # This collective must run on every rank, even if this rank's factor drops nothing.
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


class MOELayer(LayerWithLoss):
    """Mixture of experts with the signature, results and parameter names of Tutel's `moe_layer`.

    Args:
        gate_type: a dict or a list of dicts: "type" ("top", "cosine_top", or "custom" with
            "module", a class of modules that return logits), "k", "capacity_factor" (positive or
            negative: an expert takes `k * int(|f| * ceil(T / E))` rows of each rank; 0: all rows),
            "gate_noise", "fp32_gate", and for "cosine_top" "proj_dim" and "init_t".
        model_dim: D, number of elements of a token.
        experts: a dict: "type" ("ffn" or "llama_ffn"), "num_experts_per_device",
            "hidden_size_per_expert", "activation_fn", and for "ffn" "has_fc1_bias", "has_fc2_bias".
        scan_expert_func: called with the name and value of every expert parameter.
        result_func: applied to the output.
        group: expert-parallel group; None is the default group, or this process alone if
            torch.distributed is not initialised.
        seeds: seeds for `torch.manual_seed` before the gates, before the experts, and at the end.
        a2a_ffn_overlap_degree: must be 1.
        is_postscore: must be True; weights multiply the outputs of the experts.
        batch_prioritized_routing: a full expert keeps the tokens with the largest scores.
        normalize_gate: for k > 1, divide the weights of a token by their sum.
        is_gshard_loss: use GShard's balance loss; otherwise the mean of importance and load loss.
        parallel_type: "adaptive:1", "data", "model" or "auto"; all the same for unsplit experts.
        use_2dh: must be False.

    Attributes:
        l_aux: balance loss of the last forward pass, 0-d, in the graph.

    Raises:
        ValueError: an option is not supported; the message names it. The dicts are unchanged.
    """

    paths: ClassVar[dict[str, str]] = {"router": "gates"}

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
        check_option(_OWNER, "a2a_ffn_overlap_degree", a2a_ffn_overlap_degree, 1)
        check_option(_OWNER, "is_postscore", is_postscore, True)
        check_option(_OWNER, "use_2dh", use_2dh, False)
        ways = ("adaptive:1", "data", "model", "auto")
        check_option(_OWNER, "parallel_type", parallel_type, *ways)
        group = resolve_group(group, _OWNER)
        group = group if group_size(group) > 1 else None
        num_local = _local_count(experts)
        num_experts = num_local * group_size(group)
        _seed(seeds, 1)
        modules = _make_experts(experts, model_dim, num_local, group)
        configs = [gate_type] if isinstance(gate_type, dict) else list(gate_type)
        fits = bool(configs) and all(isinstance(config, dict) for config in configs)
        check_rule(_OWNER, "gate_type", gate_type, "a dict or a list of dicts", fits)
        gates = []
        for index, config in enumerate(configs):
            _seed(seeds, 0, index)
            gates.append(_make_gate(config, model_dim, num_experts))
        router = _Gates(
            gates,
            model_dim,
            num_experts,
            batch_prioritized_routing=batch_prioritized_routing,
            normalize_gate=normalize_gate,
            is_gshard_loss=is_gshard_loss,
            group=group,
        )
        super().__init__(model_dim, router, modules)
        _seed(seeds, 2)
        self.register_buffer("_num_global_experts", torch.tensor(num_experts))
        self.num_local_experts = num_local
        self.num_global_experts = num_experts
        self.result_func = result_func
        for name, parameter in modules.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)
            parameter._tutel_expert = True  # type: ignore[attr-defined]

    def get_parameter_iterator(self, param_type: str) -> Any:
        """Return named parameters of gates ("gate") or this rank's experts ("local_experts")."""
        modules = {"gate": self.router, "local_experts": self.experts}
        check_option(_OWNER, "param_type", param_type, *modules)
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
            gate_index: index of the gate to use.
            capacity_factor: replaces the gate's factor.
            top_k: replaces the gate's k.
            a2a_ffn_overlap_degree: must be None or 1.
            reserve_dims: must be 1.
            inequivalent_tokens: the capacity follows the largest T of all ranks.
            adaptive_r: must be None or 1.
            megablocks_size: must be 0.

        Returns:
            `[..., D]` with the balance loss as attribute `l_aux`; or the result of `result_func`
            for this tensor.
        """
        degree = 1 if a2a_ffn_overlap_degree is None else a2a_ffn_overlap_degree
        check_option(_OWNER, "a2a_ffn_overlap_degree", degree, 1)
        check_option(_OWNER, "reserve_dims", reserve_dims, 1)
        check_option(_OWNER, "adaptive_r", adaptive_r, None, 1)
        check_option(_OWNER, "megablocks_size", megablocks_size, 0)
        check_rule(_OWNER, "top_k", top_k, "at least 1", top_k is None or top_k >= 1)
        gates: Any = self.router
        known = dict(gates.named_children())
        rule = f"in 0..{len(known) - 1}"
        check_rule(_OWNER, "gate_index", gate_index, rule, str(gate_index) in known)
        gates.call = _Call(gate_index, capacity_factor, top_k, inequivalent_tokens)
        y = self.run(input)
        self.l_aux, gates.loss = gates.loss, None
        y.l_aux = self.l_aux  # type: ignore[attr-defined]
        return y if self.result_func is None else self.result_func(y)


moe_layer = MOELayer


def _seed(seeds: Sequence[int | None] | None, place: int, offset: int = 0) -> None:
    if seeds is not None and len(seeds) > place:
        seed = seeds[place]
        if seed is not None:
            torch.manual_seed(seed + offset)


def _largest(value: int, group: ProcessGroup | None, device: torch.device) -> int:
    """Return the largest value of all ranks. Collective, with a host synchronisation."""
    if group is None:
        return value
    largest = torch.tensor(value, device=device)
    return int(collectives.all_reduce_(largest, group, operation=_OWNER, op="max"))


def _cv_squared(x_E: Tensor) -> Tensor:
    return x_E.var() / (x_E.mean().square() + 1e-10)


def _load_importance_loss(
    logits_TE: Tensor, noisy_TE: Tensor, idx_TK: Tensor, gate_noise: float
) -> Tensor:
    """Return the mean of the squared coefficients of variation of importance and of load.

    The load of an expert is the sum over tokens of a probability: that of its logit with fresh
    noise to reach the K-th largest noisy logit.
    """
    rule = "positive for is_gshard_loss=False"
    check_rule(_OWNER, "gate_noise", gate_noise, rule, gate_noise > 0)
    threshold_T1 = noisy_TE.gather(1, idx_TK[:, -1:])
    width = gate_noise / logits_TE.shape[1]
    load_E = torch.special.ndtr((logits_TE - threshold_T1) / width).sum(0)
    importance_E = logits_TE.softmax(dim=1).sum(0)
    return (_cv_squared(importance_E) + _cv_squared(load_E)) / 2.0
