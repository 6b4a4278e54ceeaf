"""Pyramid-residual mixture of experts.

Shapes: D model, F ffn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_ext._checks import check_numbers, check_rule, check_sizes
from moe_ext.attention.masks import Offsets
from moe_ext.nn.expert_activation import Activation
from moe_ext.nn.feed_forward import FeedForward, without_bad_padding
from moe_ext.nn.moe_layer import MoELayer


class ResidualMoE(nn.Module):
    """Weighted sum of a dense network, which processes every token, and of a `MoELayer`.

    `y = c_0 * moe(x) + c_1 * mlp(x)` with `c = softmax(x @ W + b)`.

    Args:
        model_dim: D, number of elements of a token.
        ffn_dim: F, hidden size of the experts and of the dense network.
        num_experts: E, number of experts.
        top_k: number of experts per token.
        mlp: dense network, `[..., D] -> [..., D]`; None makes a `FeedForward`.
        activation: activation of the experts and of the default dense network.
        bias: give the experts and the default dense network biases.
        device: device of the parameters.
        dtype: dtype of the parameters.
        options: further options of `MoELayer`.

    Attributes:
        moe: the `MoELayer`.
        mlp: the dense network.
        coefficient: `nn.Linear(D, 2)`.

    Raises:
        ValueError: see `MoELayer`.

    Reference: Rajbhandari et al., DeepSpeed-MoE, 2022 (arXiv 2201.05596), section 4.1.
    """

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_experts: int,
        top_k: int = 1,
        *,
        mlp: nn.Module | None = None,
        activation: Activation = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_numbers("ResidualMoE", ResidualMoE.__init__.__annotations__, locals())
        made: dict[str, Any] = {
            "activation": activation,
            "bias": bias,
            "device": device,
            "dtype": dtype,
        }
        self.moe = MoELayer(model_dim, ffn_dim, num_experts, top_k, **made, **options)
        self.mlp = FeedForward(model_dim, ffn_dim, **made) if mlp is None else mlp
        self.coefficient = nn.Linear(model_dim, 2, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw new values for all parameters."""
        for module in (self.moe, self.mlp, self.coefficient):
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        token_idx: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> Tensor:
        """Run every token through the dense network and the layer.

        Args:
            x: `[..., D]`.
            token_mask: as in `MoELayer`. The dense network processes masked tokens too, with zeros
                in place of NaN and infinity.
            token_ids: as in `MoELayer`.
            token_idx: as in `MoELayer`.
            document_ids: as in `MoELayer`.
            cu_seqlens: as in `MoELayer`.

        Returns:
            `[..., D]`.
        """
        # The layer runs first, because it checks the inputs, and reports errors to other ranks.
        y: Tensor = self.moe(
            x,
            token_mask=token_mask,
            token_ids=token_ids,
            token_idx=token_idx,
            document_ids=document_ids,
            cu_seqlens=cu_seqlens,
        )
        x = without_bad_padding(x, token_mask)
        weights = torch.softmax(self.coefficient(x), dim=-1).to(y.dtype)
        return y * weights[..., :1] + self.mlp(x) * weights[..., 1:]


def pyramid(
    num_layers: int, num_experts: int, *, factor: int = 2, wide_layers: int = 2
) -> list[int]:
    """Return the number of experts of each layer of a pyramid, which has more in the last layers.

    Args:
        num_layers: number of MoE layers of the model.
        num_experts: number of experts of each of the first layers.
        factor: factor on the number of experts in the last layers.
        wide_layers: number of last layers with more experts; the paper's models have 2 of 12.

    Returns:
        `num_experts` of each layer, first to last.

    Raises:
        ValueError: a number is out of its range.

    Reference: Rajbhandari et al., DeepSpeed-MoE, 2022 (arXiv 2201.05596), section 4.1.
    """
    check_sizes("pyramid", num_layers=num_layers, num_experts=num_experts, factor=factor)
    rule, fits = f"in 0..num_layers={num_layers}", 0 <= wide_layers <= num_layers
    check_rule("pyramid", "wide_layers", wide_layers, rule, fits)
    return [num_experts] * (num_layers - wide_layers) + [num_experts * factor] * wide_layers
