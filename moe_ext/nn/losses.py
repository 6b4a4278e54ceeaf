"""Losses that enter the backward pass without passing through the caller's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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


def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Set `loss_scale` of every `MoELayer` in a model.

    The injected losses do not see what the caller does to the loss: a loss that is divided by the
    number of accumulation steps, or multiplied by a `GradScaler`, needs the same factor here before
    the forward pass.

    Args:
        model: any module.
        scale: the factor, a number or a 0-d tensor on the model's device.
    """
    from moe_ext.nn.moe_layer import MoELayer

    for module in model.modules():
        if isinstance(module, MoELayer):
            module.loss_scale = scale
