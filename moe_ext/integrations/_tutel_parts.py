"""Gates and experts of Tutel's layer.

Shapes: T tokens, D model, F ffn, E experts, L local experts, K top-k, N rows, P projected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations._base import (
    FacadeExperts,
    activate,
    check_known_keys,
    float32_logits,
    refuse_option,
)
from moe_ext.nn.torch_state import without_autocast

Activation = Callable[[Tensor], Tensor]

_GATE_KEYS = ("type", "k", "capacity_factor", "gate_noise", "fp32_gate")
_COSINE_KEYS = (*_GATE_KEYS, "proj_dim", "init_t")
_EXPERT_KEYS = {
    "ffn": ("activation_fn", "output_dim", "has_fc1_bias", "has_fc2_bias"),
    "llama_ffn": ("activation_fn",),
}
_MAX_TEMPERATURE = math.log(1.0 / 0.01)


class LinearTopKGate(nn.Module):
    """`logits = x @ wg.T`, in float32."""

    def __init__(self, model_dim: int, num_global_experts: int, k: int, fp32_gate: bool) -> None:
        super().__init__()
        dtype = torch.float32 if fp32_gate else None
        self.wg = nn.Linear(model_dim, num_global_experts, bias=False, dtype=dtype)
        self.top_k = min(num_global_experts, k)

    def forward(self, x_TD: Tensor) -> Tensor:
        """`[T, D] -> [T, E]`."""
        return float32_logits(x_TD, self.wg.weight)


class CosineTopKGate(nn.Module):
    """Cosine of the projected token and each expert's embedding, over a learned temperature."""

    def __init__(
        self, model_dim: int, num_global_experts: int, k: int, proj_dim: int, init_t: float
    ) -> None:
        super().__init__()
        self.top_k = min(num_global_experts, k)
        self.temperature = nn.Parameter(torch.log(torch.full([1], 1.0 / init_t)))
        self.cosine_projector = nn.Linear(model_dim, proj_dim)
        self.sim_matrix = nn.Parameter(torch.empty(proj_dim, num_global_experts))
        nn.init.normal_(self.sim_matrix, 0, 0.01)

    def forward(self, x_TD: Tensor) -> Tensor:
        """`[T, D] -> [T, E]`."""
        projector = self.cosine_projector
        x_TP = float32_logits(x_TD, projector.weight, projector.bias)
        with without_autocast(x_TD.device):
            experts_PE = F.normalize(self.sim_matrix.to(x_TP.dtype), dim=0)
            scale = self.temperature.to(x_TP.dtype).clamp(max=_MAX_TEMPERATURE).exp()
            return F.normalize(x_TP, dim=1) @ experts_PE * scale


def make_gate(config: dict[str, Any], model_dim: int, num_experts: int) -> nn.Module:
    """A gate from Tutel's configuration, which is left as it is."""
    owner = "tutel.moe_layer"
    kind = config.get("type")
    k = int(config.get("k", 1))
    if k < 1:
        refuse_option(owner, "gate_type['k']", config["k"], "at least 1")
    if kind == "top":
        check_known_keys(owner, config, _GATE_KEYS, "a gate of type 'top'")
        gate: nn.Module = LinearTopKGate(
            model_dim, num_experts, k, bool(config.get("fp32_gate", False))
        )
    elif kind == "cosine_top":
        check_known_keys(owner, config, _COSINE_KEYS, "a gate of type 'cosine_top'")
        proj_dim, init_t = config.get("proj_dim", 256), config.get("init_t", 0.5)
        gate = CosineTopKGate(model_dim, num_experts, k, proj_dim, init_t)
    elif kind == "custom":
        rest = {name: value for name, value in config.items() if name not in ("type", "module")}
        gate = config["module"](model_dim=model_dim, num_global_experts=num_experts, **rest)
    else:
        refuse_option(owner, "gate_type['type']", kind, "'top', 'cosine_top' or 'custom'")
    for name, default in (("gate_noise", 0.0), ("capacity_factor", 1.0)):
        if not hasattr(gate, name):
            setattr(gate, name, float(config.get(name, default)))
    return gate


class FFNExperts(FacadeExperts):
    """`act(x @ fc1[e].T + b1[e]) @ fc2[e] + b2[e]`; fc1 and fc2 are `[L, F, D]`."""

    batched_fc1_bias: nn.Parameter | None
    batched_fc2_bias: nn.Parameter | None

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_local: int,
        activation_fn: Activation | None,
        biases: tuple[bool, bool],
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(num_local, group)
        self.activation_fn = F.relu if activation_fn is None else activation_fn
        self.batched_fc1_w = nn.Parameter(torch.empty(num_local, ffn_dim, model_dim))
        self.batched_fc2_w = nn.Parameter(torch.empty(num_local, ffn_dim, model_dim))
        for name, dim, wanted in (
            ("batched_fc1_bias", ffn_dim, biases[0]),
            ("batched_fc2_bias", model_dim, biases[1]),
        ):
            zeros = nn.Parameter(torch.zeros(num_local, dim))
            self.register_parameter(name, zeros if wanted else None)
        self._spread()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights uniformly in +-1/sqrt(fan_in); biases zero."""
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


class LlamaExperts(FacadeExperts):
    """`(act(x @ fc1[e]) * (x @ fc2[e])) @ fc3[e]`; each parameter is flat, as in Tutel."""

    W_fc1: nn.Parameter
    W_fc2: nn.Parameter
    W_fc3: nn.Parameter

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_local: int,
        activation_fn: Activation | None,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(num_local, group)
        self.activation_fn = F.silu if activation_fn is None else activation_fn
        self.shape = (num_local, model_dim, ffn_dim)
        for name in ("W_fc1", "W_fc2", "W_fc3"):
            self.register_parameter(name, nn.Parameter(torch.empty(math.prod(self.shape))))
        self._spread()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from a normal distribution of width 0.01."""
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


def make_experts(
    config: dict[str, Any], model_dim: int, num_local: int, group: ProcessGroup | None
) -> nn.Module:
    """Experts from Tutel's configuration, which is left as it is."""
    owner = "tutel.moe_layer"
    kind = str(config.get("type"))
    if kind not in _EXPERT_KEYS:
        refuse_option(owner, "experts['type']", kind, "'ffn' or 'llama_ffn'")
    sizes = ("type", "num_experts_per_device", "count_per_node", "hidden_size_per_expert")
    check_known_keys(owner, config, sizes + _EXPERT_KEYS[kind], f"experts of type {kind!r}")
    ffn_dim = config.get("hidden_size_per_expert")
    if not isinstance(ffn_dim, int) or ffn_dim < 1:
        refuse_option(owner, "experts['hidden_size_per_expert']", ffn_dim, "at least 1")
    if config.get("output_dim") not in (None, model_dim):
        refuse_option(owner, "experts['output_dim']", config["output_dim"], f"{model_dim} or None")
    activation_fn = config.get("activation_fn")
    assert ffn_dim is not None
    if kind == "llama_ffn":
        return LlamaExperts(model_dim, ffn_dim, num_local, activation_fn, group)
    biases = (bool(config.get("has_fc1_bias", True)), bool(config.get("has_fc2_bias", True)))
    return FFNExperts(model_dim, ffn_dim, num_local, activation_fn, biases, group)


def local_count(config: dict[str, Any]) -> int:
    """Experts of each rank."""
    count = config.get("num_experts_per_device", config.get("count_per_node", 1))
    if not isinstance(count, int) or count < 1:
        rule = "at least 1, since an expert is not split over ranks"
        refuse_option("tutel.moe_layer", "experts['num_experts_per_device']", count, rule)
    return count
