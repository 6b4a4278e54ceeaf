"""LARS, with a learning rate per expert and for sharded parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from moe_ext.optim._arguments import Trained, check_positive, options_in
from moe_ext.optim._sliced import (
    SlicedOptimizer,
    SliceNorms,
    local_grad,
)


class LARS(SlicedOptimizer):
    r"""Momentum with a learning rate for each tensor, by the ratio of its weights to its gradient.

    .. math::
        c = \eta \frac{\|w\|}{\|g\| + \lambda \|w\| + \epsilon},\quad
        u \leftarrow \mu u + \gamma c (g + \lambda w),\quad w \leftarrow w - u

    c is 1 if a norm is zero. As in `LAMB`, norms are of whole tensors or of each expert of a
    stacked parameter `[E, ...]`. Parameters may be DTensors, and all norms of a mesh take one
    all-reduce.

    Args:
        params: parameters, or groups of them; see `moe_ext.optim.param_groups`.
        lr: :math:`\gamma`.
        momentum: :math:`\mu`.
        weight_decay: :math:`\lambda`.
        trust_coefficient: :math:`\eta`.
        eps: :math:`\epsilon`.
        nesterov: look ahead: w moves by :math:`\mu u + \gamma c (g + \lambda w)`.
        adapt: False sets c = 1, for groups of biases and norms.
        per_expert: the first dimension of the group's parameters counts experts.
        maximize: step up the gradient.
        float32_state: keep moments of 16-bit parameters in float32, and round a step once, at its
            end; False keeps them, and takes the step, in the type of the parameter.

    Raises:
        ValueError: an option is out of range. In `step`: a gradient is placed unlike its parameter.
        TypeError: in `step`: a gradient is not dense, or a parameter not real floating-point.

    All options may differ between groups. A step does not synchronise with the host.

    Reference: You et al., Large Batch Training of Convolutional Networks, 2017 (arXiv 1708.03888),
    algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        eps: float = 1e-8,
        nesterov: bool = False,
        adapt: bool = True,
        per_expert: bool = False,
        maximize: bool = False,
        float32_state: bool = True,
    ) -> None:
        super().__init__(params, options_in(locals()))

    def _check_options(self, group: dict[str, Any]) -> None:
        check_positive(self._op, group, "lr", "weight_decay", "trust_coefficient", "eps")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"LARS: expected momentum to be in [0, 1), got {group['momentum']}")
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("LARS: expected momentum to be positive with nesterov, got 0")

    def _take_step(self, trained: list[Trained], weights: list[Tensor], slices: SliceNorms) -> None:
        grads = [local_grad(entry) for entry in trained]
        rates = slices.rates([partial(_rate, entry.group) for entry in trained], weights, grads)
        for weight, grad, entry, rate in zip(weights, grads, trained, rates, strict=True):
            group, update = entry.group, grad
            if group["weight_decay"] != 0:
                update = update.add(weight, alpha=group["weight_decay"])
            update = update * rate.to(update.dtype)
            momentum = group["momentum"]
            if momentum != 0:
                buffer = self._buffer(entry, "momentum_buffer").mul_(momentum).add_(update)
                update = update.add_(buffer, alpha=momentum) if group["nesterov"] else buffer
            weight.sub_(update)


def _rate(group: dict[str, Any], weight_G: Tensor, grad_G: Tensor) -> Tensor:
    """Return the learning rate of each slice."""
    if not group["adapt"]:
        return torch.ones_like(weight_G) * group["lr"]
    ratio_G = weight_G / (grad_G + group["weight_decay"] * weight_G + group["eps"])
    ratio_G = ratio_G * group["trust_coefficient"]
    return torch.where((weight_G > 0) & (grad_G > 0), ratio_G, 1.0) * group["lr"]
