"""Dense feed-forward network, the shared expert of a layer.

Shapes: D model, F ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ext.nn.expert_activation import Activation, resolve_activation, run_activation


class FeedForward(nn.Module):
    """Dense two-layer feed-forward network, the shared expert of a `MoELayer`.

    Args:
        model_dim: D.
        ffn_dim: F.
        activation: as in `GroupedExperts`; gated ones have `gate_up_proj`, plain ones `up_proj`.
        bias: add biases.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.gated = resolve_activation(activation, None, "FeedForward")
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
        if self.gated and up.shape[-1] != 2 * self.down_proj.in_features:
            raise ValueError(
                f"FeedForward: expected {self._up_name} to give {2 * self.down_proj.in_features} "
                f"columns, got {up.shape[-1]}: a gate and its up lie half the columns apart, so "
                "that ranks with some columns each lack one of them; take an activation without a "
                "gate, or ColwiseParallel(output_layouts=Replicate())"
            )
        hidden = run_activation(up, self.activation, gated=self.gated, layout="concatenated")
        return self.down_proj(hidden)
