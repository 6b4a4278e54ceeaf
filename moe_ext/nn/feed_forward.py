"""Dense feed-forward network, used for the shared expert of a layer.

Shapes: D model, F ffn.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext._checks import check_numbers, check_sizes
from moe_ext.comm.groups import group_rank
from moe_ext.dispatch.rows import all_to_all_rows
from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.nn.expert_activation import Activation, resolve_activation, run_activation


def without_bad_padding(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return tokens `[..., D]` in which NaN and infinity of masked tokens are zeros.

    The output gradient of a masked token is zero. Zero times NaN would be NaN in the gradient of
    the weights.
    """
    if token_mask is None:
        return x
    return x.where(token_mask[..., None] | x.isfinite(), 0.0)


class FeedForward(nn.Module):
    """Dense two-layer feed-forward network, the shared expert of a `MoELayer`.

    Args:
        model_dim: D, number of elements of a token.
        ffn_dim: F, hidden size of the network.
        activation: as in `GroupedExperts`. A gated activation has `gate_up_proj`, a plain one
            `up_proj`. Under torch's `ColwiseParallel` and `RowwiseParallel`, ranks exchange columns
            of a gated activation.
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
        check_sizes("FeedForward", model_dim=model_dim, ffn_dim=ffn_dim)
        check_numbers("FeedForward", FeedForward.__init__.__annotations__, locals())
        self.activation, self.gated = resolve_activation(activation, None, "FeedForward")
        self.ffn_dim = ffn_dim
        up_dim = 2 * ffn_dim if self.gated else ffn_dim
        up = nn.Linear(model_dim, up_dim, bias=bias, device=device, dtype=dtype)
        self._up_name = "gate_up_proj" if self.gated else "up_proj"
        self.add_module(self._up_name, up)
        self.down_proj = nn.Linear(ffn_dim, model_dim, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw new parameters, as `nn.Linear` does."""
        self.get_submodule(self._up_name).reset_parameters()  # type: ignore[operator]
        self.down_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Run the network, `[..., D] -> [..., D]`."""
        up = self.get_submodule(self._up_name)(x)
        if self.gated and up.shape[-1] != 2 * self.down_proj.in_features:
            up = self._join_pairs(up)
        hidden = run_activation(up, self.activation, gated=self.gated, layout="concatenated")
        return self.down_proj(hidden)

    def _join_pairs(self, up: Tensor) -> Tensor:
        """Exchange columns between ranks, so that each rank holds gates and their ups.

        `ColwiseParallel` gives the columns of gates to the first ranks, and those of ups to the
        last ones.
        """
        linear: Any = self.get_submodule(self._up_name)
        weight, num_ups = linear.weight, self.down_proj.in_features
        if not is_dtensor(weight) or num_ups % weight.device_mesh.size():
            raise ValueError(
                f"FeedForward: expected {self._up_name} to give {2 * num_ups} columns, or under "
                f"ColwiseParallel an equal part of {num_ups} pairs on each rank, got "
                f"{up.shape[-1]} of {type(weight).__name__}"
            )
        group = weight.device_mesh.get_group()
        order, send, receive = _pairs(num_ups, group.size(), group_rank(group))
        columns = up.view(-1, up.shape[-1]).t()[torch.tensor(order, device=up.device)]
        pairs = all_to_all_rows(columns, group, send, receive, operation="FeedForward")
        return pairs.t().reshape(up.shape)


@functools.cache
def _pairs(num_ups: int, num_ranks: int, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Return the order in which a rank sends its columns, and send and receive sizes by rank."""
    columns = torch.arange(2 * num_ups)
    holder = columns * num_ranks // (2 * num_ups)
    taker = columns % num_ups * num_ranks // num_ups
    takers = taker[holder == rank]
    send, receive = (
        ranks.bincount(minlength=num_ranks).tolist() for ranks in (takers, holder[taker == rank])
    )
    return takers.argsort(stable=True).tolist(), send, receive
