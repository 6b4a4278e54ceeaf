"""Losses that enter the backward pass without passing through the caller's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _InjectLoss(torch.autograd.Function):
    """Identity on y; in the backward pass `loss` gets the gradient `scale`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grad_y, torch.ones((), dtype=dtype, device=device) * ctx.scale, None


def inject_loss(y: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return y unchanged; a backward pass through it adds `scale * loss` to the objective.

    Args:
        y: any tensor on the path to the caller's loss.
        loss: 0-d tensor in the graph.
        scale: factor on the loss, a number or a 0-d tensor; read in the forward pass.

    Returns:
        y, same values and shape.
    """
    injected: Tensor = _InjectLoss.apply(y, loss, scale)
    return injected
