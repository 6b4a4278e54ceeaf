"""LAMB, with a trust ratio per expert and for sharded parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from moe_ext.optim._arguments import Trained, check_betas, check_positive, check_range, options_in
from moe_ext.optim._sliced import SlicedOptimizer, SliceNorms


class LAMB(SlicedOptimizer):
    r"""Adam's direction, scaled to the norm of the weights: layer-wise steps for large batches.

    .. math::
        r = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w,\quad
        c = \mathrm{clamp}(\|w\| / \|r\|, c_{min}, c_{max}),\quad
        w \leftarrow w - \gamma\, c\, r

    m and v are Adam's moments, with its bias correction. c is 1 if a norm is zero. Norms are of
    whole tensors, or of each expert of a stacked parameter `[E, ...]`. With norms per expert, the
    steps of an expert that few tokens reach do not depend on its neighbours' norms.

    Parameters may be DTensors, sharded evenly or not along any dimension (FSDP2, tensor
    parallelism) or replicated: the steps are those of the whole tensors. All norms of a mesh take
    one all-reduce.

    Args:
        params: parameters, or groups of them. `moe_ext.optim.param_groups(model)` makes groups
            that exclude biases and norms and mark stacked experts.
        lr: :math:`\gamma`.
        betas: decay of m and of v.
        eps: :math:`\epsilon`, added outside of the root.
        weight_decay: :math:`\lambda`, decoupled from the moments.
        bias_correction: correct m and v for starting at zero.
        min_coeff: :math:`c_{min}`.
        max_coeff: :math:`c_{max}`.
        adapt: False sets c = 1, which is AdamW; meant for groups of biases and norms.
        per_expert: the first dimension of the group's parameters counts experts, and each expert
            has its own ratio. Expert-parallel parameters need it if the result must not depend on
            the number of ranks that share the experts.
        maximize: step up the gradient.
        float32_state: keep moments of 16-bit parameters in float32, and round a step once, at its
            end; False keeps them, and takes the step, in the type of the parameter.

    Raises:
        ValueError: an option is out of range. In `step`: a gradient is placed unlike its parameter.
        TypeError: in `step`: a gradient is not dense, or a parameter not real floating-point.

    All options may differ between groups. A step does not synchronise with the host.

    Reference: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes,
    2020 (arXiv 1904.00962), algorithm 2, with the bounds on the ratio instead of on the norm.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        adapt: bool = True,
        per_expert: bool = False,
        maximize: bool = False,
        float32_state: bool = True,
    ) -> None:
        super().__init__(params, options_in(locals()))

    def _check_options(self, group: dict[str, Any]) -> None:
        check_positive(self._op, group, "lr", "eps", "weight_decay")
        check_betas(self._op, group["betas"])
        check_range(self._op, group, "min_coeff", "max_coeff")

    def _take_step(self, trained: list[Trained], weights: list[Tensor], slices: SliceNorms) -> None:
        with self._unchanged_if_it_fails(trained, slices):
            updates = self._directions(trained, weights)
            ratio_of = [partial(trust_ratio, entry.group) for entry in trained]
            ratios = slices.rates(ratio_of, weights, updates)
        for weight, update, entry, ratio in zip(weights, updates, trained, ratios, strict=True):
            weight.sub_(update.mul_((ratio * entry.group["lr"]).to(update.dtype)))

    def _directions(self, trained: list[Trained], weights: list[Tensor]) -> list[Tensor]:
        """Update the moments and return r of every parameter."""
        updates: list[Tensor] = []
        for group in self.param_groups:
            members = [entry for entry in trained if entry.group is group]
            found = self._adam_directions(members, group["betas"], group["eps"])
            if found and group["weight_decay"] != 0:
                # `trained` is in the order of groups, so the parameters of a group are adjacent.
                own = weights[len(updates) : len(updates) + len(found)]
                torch._foreach_add_(found, own, alpha=group["weight_decay"])
            updates += found
        return updates


def trust_ratio(group: dict[str, Any], weight_G: Tensor, update_G: Tensor) -> Tensor:
    """Return the factor on the learning rate of each slice, within the group's bounds."""
    if not group["adapt"]:
        return torch.ones_like(weight_G)
    ratio_G = (weight_G / update_G).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((weight_G > 0) & (update_G > 0), ratio_G, 1.0)
