"""Expert feed-forward networks, stacked and run as grouped matrix products.

Shapes: N rows, D model, F ffn, E experts, L local experts = E / size of the expert-parallel group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.distributed.groups import GroupHandle, check_group, group_rank, group_size
from moe_ext.nn._init import init_stacked_experts_

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu")
PLAIN_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")


def is_gated(activation: str, owner: str) -> bool:
    """Whether `activation` takes a gate half; ValueError naming `owner` when it is unknown."""
    if activation not in GATED_ACTIVATIONS + PLAIN_ACTIVATIONS:
        known = ", ".join(GATED_ACTIVATIONS + PLAIN_ACTIVATIONS)
        raise ValueError(f"{owner}: expected activation to be one of {known}, got {activation!r}")
    return activation in GATED_ACTIVATIONS


class GroupedExperts(nn.Module):
    """E two-layer feed-forward networks over rows that are grouped by expert.

    Gated activations: `y = act(x @ gate.T) * (x @ up.T) @ down.T` with `gate_up_proj [L, 2F, D]`
    (gate rows first) and `down_proj [L, D, F]`, the layout of Hugging Face transformers 5. Plain
    activations have `up_proj [L, F, D]` in place of `gate_up_proj`. Biases are `gate_up_proj_bias
    [L, 2F]` (or `up_proj_bias [L, F]`) and `down_proj_bias [L, D]`.

    Args:
        num_experts: E, over all ranks.
        model_dim: D.
        ffn_dim: F.
        activation: "swiglu", "geglu", "geglu_tanh", "reglu", or plain "silu", "gelu", "gelu_tanh",
            "relu", "relu_squared".
        bias: add biases.
        ep_group: expert-parallel process group; rank r of P holds experts [r*E/P, (r+1)*E/P).
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: a size is not positive, the activation is unknown, or P does not divide E.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        ffn_dim: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        ep_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "model_dim": model_dim, "ffn_dim": ffn_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"GroupedExperts: expected {name} to be at least 1, got {size}")
        check_group(ep_group, "GroupedExperts")
        self.gated = is_gated(activation, "GroupedExperts")
        ep_size = group_size(ep_group)
        if num_experts % ep_size != 0:
            raise ValueError(
                "GroupedExperts: expected num_experts to be a multiple of the size of ep_group "
                f"({ep_size}), got {num_experts}"
            )
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self.model_dim = model_dim
        self.ffn_dim = ffn_dim
        self.activation = activation
        self._ep_group = GroupHandle(ep_group)
        self._up_name = "gate_up_proj" if self.gated else "up_proj"
        up_dim = 2 * ffn_dim if self.gated else ffn_dim
        for name, out_dim, in_dim in (
            (self._up_name, up_dim, model_dim),
            ("down_proj", model_dim, ffn_dim),
        ):
            shape = (self.num_local_experts, out_dim, in_dim)
            weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, weight)
            stacked_bias = nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype))
            self.register_parameter(f"{name}_bias", stacked_bias if bias else None)
        self.reset_parameters()

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The expert-parallel group, None when every expert is local."""
        return self._ep_group.group

    @property
    def first_expert(self) -> int:
        """Global index of local expert 0."""
        return group_rank(self.ep_group) * self.num_local_experts

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly in +-1/sqrt(fan_in), alike for any group size."""
        stacked: list[Tensor] = []
        fan_in: list[int] = []
        for name, inputs in ((self._up_name, self.model_dim), ("down_proj", self.ffn_dim)):
            for tensor in (getattr(self, name), getattr(self, f"{name}_bias")):
                if tensor is not None:
                    stacked.append(tensor)
                    fan_in.append(inputs)
        init_stacked_experts_(stacked, fan_in, self.first_expert)

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        bias = self.down_proj_bias is not None
        text = (
            f"num_experts={self.num_experts}, model_dim={self.model_dim}, ffn_dim={self.ffn_dim}, "
            f"activation={self.activation!r}, bias={bias}"
        )
        if self.num_local_experts != self.num_experts:
            last = self.first_expert + self.num_local_experts - 1
            text += f", local_experts={self.first_expert}..{last}"
        return text

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        """Run every row through its expert.

        Args:
            rows_ND: rows grouped by local expert, `[N, D]`.
            expert_offsets: `[L + 1]` int64; local expert l owns rows [offsets[l], offsets[l + 1]).

        Returns:
            `[N, D]`; rows past the last offset are zero.
        """
        up = ops.grouped_mm(
            rows_ND,
            getattr(self, self._up_name),
            expert_offsets,
            bias_EM=getattr(self, f"{self._up_name}_bias"),
        )
        if self.gated:
            hidden = ops.gated_activation(up, kind=self.activation)
        else:
            hidden = ops.activation(up, kind=self.activation)
        return ops.grouped_mm(hidden, self.down_proj, expert_offsets, bias_EM=self.down_proj_bias)
