"""Losses that enter the backward pass without passing through the caller's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOSS_MODES = ("inject", "return", "both")


class _InjectLosses(torch.autograd.Function):
    """Identity on y; in the backward pass each loss gets the gradient `coefficient * scale`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, scale: float | Tensor, coefs: tuple[float, ...], *losses: Tensor
    ) -> Tensor:
        ctx.scale, ctx.coefs = scale, coefs
        ctx.like = [(loss.dtype, loss.device) for loss in losses]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            torch.full((), coef, dtype=dtype, device=device) * ctx.scale
            for coef, (dtype, device) in zip(ctx.coefs, ctx.like, strict=True)
        ]
        return grad_y, None, None, *gradients


def inject_losses(
    y: Tensor, losses: dict[str, tuple[float, Tensor]], scale: float | Tensor
) -> Tensor:
    """`inject_loss` of several `(coefficient, loss)` terms at once; no operator runs forward."""
    coefs = tuple(coef for coef, _ in losses.values())
    terms = [loss for _, loss in losses.values()]
    injected: Tensor = _InjectLosses.apply(y, scale, coefs, *terms)
    return injected


def inject_loss(y: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return y unchanged; a backward pass through it adds `scale * loss` to the objective.

    Args:
        y: any tensor on the path to the caller's loss.
        loss: 0-d tensor in the graph.
        scale: factor on the loss, a number or a 0-d tensor; read in the forward pass.

    Returns:
        y, same values and shape.
    """
    return inject_losses(y, {"loss": (1.0, loss)}, scale)
