"""1-bit LAMB: compressed momentum, with trust ratios that follow a second, unfrozen variance.

Shapes: G slices of a parameter with one ratio each: its experts, or the whole parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from moe_ext._checks import check_numbers, check_rule
from moe_ext.distributed.dtensor import local_part
from moe_ext.optim._arguments import check_positive, check_range, deepspeed_options, is_own_part
from moe_ext.optim._compressed import CompressedOptimizer
from moe_ext.optim._entries import Entry
from moe_ext.optim._sliced import SliceNorms, groups_of_slices
from moe_ext.optim._variance import roots
from moe_ext.optim.lamb import trust_ratio
from moe_ext.optim.one_bit_adam import OneBitAdam


class OneBitLamb(OneBitAdam):
    r"""LAMB that averages over ranks itself, with one bit per element after ``freeze_step``.

    The first ``freeze_step`` steps are `LAMB`, and keep a running mean of the trust ratios c.
    Afterwards momentum is sent as in `OneBitAdam`, and the variance v of the direction r is frozen.
    The ratio is the running mean times a factor f. This factor follows a second variance, which is
    not frozen and is computed from the change of the averaged momentum:

    .. math::
        \hat g = \frac{\bar m_t - \beta_1 \bar m_{t-1}}{1 - \beta_1},\quad
        \tilde v \leftarrow \beta_2 \tilde v + (1 - \beta_2) \hat g^2,\quad
        f = \max \frac{\sqrt{v} + \epsilon}{\sqrt{\tilde v} + \epsilon},\quad
        w \leftarrow w - \gamma\, f\, \bar c\, r

    With weight decay, f applies only to the share of the update's norm that the direction without
    decay has. Ratios and factors are per tensor, or per expert in groups with ``per_expert``.
    Unlike in the paper, momenta are not scaled to one size before compression: no block holds
    elements of two tensors, and signs do not depend on the scale.

    Args:
        params: as `OneBitAdam`; a group may also have ``adapt=False``, which is `OneBitAdam` for
            biases and norms, and ``per_expert=True``.
        lr: :math:`\gamma`.
        freeze_step: as `OneBitAdam`.
        bias_correction: as `OneBitAdam`.
        betas: as `OneBitAdam`.
        eps: as `OneBitAdam`.
        eps_inside_sqrt: as `OneBitAdam`.
        weight_decay: decay, a part of r.
        max_grad_norm: as `OneBitAdam`.
        max_coeff: upper bound on c.
        min_coeff: lower bound on c.
        amsgrad: must be False.
        cuda_aware: ignored.
        comm_backend_name: ignored.
        coeff_beta: decay of the running mean of c; 1 / (1 - coeff_beta) should be at most
            freeze_step.
        factor_max: upper bound on f.
        factor_min: lower bound on f.
        factor_threshold: bound on the relative change of f in a step.
        deepspeed: ignored.
        group: as `OneBitAdam`.
        block: as `OneBitAdam`.
        communication_data_type: as `OneBitAdam`.

    Raises:
        ValueError: an option is out of range.

    Reference: Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with
    LAMB's Convergence Speed, 2021 (arXiv 2104.06069), algorithm 1.
    """

    _settings = (
        *OneBitAdam._settings,
        *("_coeff_beta", "_factor_min", "_factor_max", "_factor_threshold"),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        *,
        deepspeed: object = None,
        group: ProcessGroup | None = None,
        block: int = 256,
        communication_data_type: torch.dtype | None = None,
    ) -> None:
        check_numbers(self._op, OneBitLamb.__init__.__annotations__, locals(), ["freeze_step"])
        check_rule(self._op, "coeff_beta", coeff_beta, "in [0, 1)", 0 <= coeff_beta < 1)
        check_range(self._op, locals(), "min_coeff", "max_coeff")
        check_range(self._op, locals(), "factor_min", "factor_max")
        check_positive(self._op, locals(), "factor_threshold")
        self.freeze_step, self.variance_interval = freeze_step, 0
        self._coeff_beta, self._factor_threshold = coeff_beta, factor_threshold
        self._factor_min, self._factor_max = factor_min, factor_max
        self._coefficients: list[Tensor] = []
        self._eps_inside_sqrt = eps_inside_sqrt
        options = {"max_coeff": max_coeff, "min_coeff": min_coeff, "adapt": True}
        # The constructor of `OneBitAdam` is skipped, because it takes other arguments.
        CompressedOptimizer.__init__(
            self,
            params,
            deepspeed_options(self._op, locals()) | options,
            group=group,
            block=block,
            communication_data_type=communication_data_type,
        )

    def _problem_of(self, parameter: Tensor, group: dict[str, Any], name: str) -> str | None:
        cut = groups_of_slices(parameter, group["per_expert"])
        if cut and group["adapt"] and is_own_part(parameter):
            return (
                "expected tensors, or experts of a group with per_expert=True, that a rank holds "
                f"whole, since their norms would take messages, got parts in {name}; take "
                "OneBitAdam or ZeroOneAdam for them"
            )
        return super()._problem_of(parameter, group, name)

    def get_lamb_coeffs(self) -> list[float | list[float]]:
        """Return each parameter's factor on the learning rate in the last step.

        Stacked experts have a list of factors.
        """
        return [c.item() if len(c) == 1 else c.tolist() for c in self._coefficients]

    def _freeze_variance(self, entry: Entry) -> None:
        super()._freeze_variance(entry)
        entry.state["exp_avg_sq_fresh"] = entry.state["exp_avg_sq"].clone()

    def _take_step(self, entries: list[Entry]) -> None:
        self._coefficients = []
        super()._take_step(entries)

    def _take_momentum(self, entry: Entry, momentum: Tensor) -> None:
        state = entry.state
        if "exp_avg_sq_fresh" in state:
            beta1, beta2 = entry.group["betas"]
            grad = momentum.sub(state["exp_avg"], alpha=beta1).div_(1 - beta1)
            state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        super()._take_momentum(entry, momentum)

    def _with_all_entries(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        found = super()._with_all_entries(group, parameter, state)
        num_slices = local_part(parameter).shape[0] if group["per_expert"] else 1
        ones_G = torch.ones(num_slices, dtype=torch.float64, device=parameter.device)
        _slice_state(found, "lamb_coeff_freeze", 0.0, ones_G)
        _slice_state(found, "last_factor", 1.0, ones_G)
        found.setdefault("exp_avg_sq_fresh", torch.zeros_like(found["exp_avg_sq"]))
        return found

    def _load_shared(self, state_dict: dict[str, Any], *, copy: bool = True) -> None:
        # A fresh variance of zeros means that the state was saved before the freeze, because the
        # freeze replaces zeros.
        shared = {
            number: {k: v for k, v in state.items() if k != "exp_avg_sq_fresh" or bool(v.any())}
            for number, state in state_dict["state"].items()
        }
        super()._load_shared({**state_dict, "state": shared}, copy=copy)

    def _apply(self, group: dict[str, Any], entries: list[Entry]) -> None:
        entries = [entry for entry in entries if entry.part.numel()]
        if not entries:
            return
        parameters, states = [e.part for e in entries], [e.state for e in entries]
        denominators = self._denominators(group, entries)
        exp_avgs = [state["exp_avg"] for state in states]
        directions = list(torch._foreach_div(exp_avgs, denominators))
        if group["bias_correction"]:
            beta1 = group["betas"][0]
            steps = [state["step"] for state in states]
            torch._foreach_div_(directions, [1 - beta1**step for step in steps])
        slices = SliceNorms(parameters, [group["per_expert"]] * len(parameters))
        updates = directions
        if group["weight_decay"] != 0:
            updates = list(torch._foreach_add(directions, parameters, alpha=group["weight_decay"]))
        norms = slices.norms(parameters, updates, directions)
        coefficients = []
        for position, entry in enumerate(entries):
            weight_G, update_G, direction_G = (family[position] for family in norms)
            state = entry.state
            if not group["adapt"]:
                coefficient_G = torch.ones_like(weight_G)
            elif "exp_avg_sq_fresh" in state:
                share_G = torch.where(update_G > 0, direction_G / update_G, 1.0).clamp(max=1.0)
                coefficient_G = self._frozen_ratio(group, entry, denominators[position], share_G)
            else:
                coefficient_G = trust_ratio(group, weight_G, update_G)
                self._remember(state, coefficient_G)
            coefficients.append(coefficient_G)
        self._coefficients += coefficients
        lr = float(group["lr"])
        for parameter, update, factor in zip(
            parameters, updates, slices.factors(coefficients), strict=True
        ):
            parameter.sub_(update.mul_((factor * lr).to(update.dtype)))

    def _remember(self, state: dict[str, Any], ratio_G: Tensor) -> None:
        """Update the running mean of the ratios; a ratio of exactly 1 is a default and skipped."""
        mean_G = _slice_state(state, "lamb_coeff_freeze", 0.0, ratio_G)
        moved_G = mean_G * self._coeff_beta + (1 - self._coeff_beta) * ratio_G
        mean_G.copy_(torch.where(ratio_G == 1.0, mean_G, moved_G))

    def _frozen_ratio(
        self, group: dict[str, Any], entry: Entry, denominator: Tensor, share_G: Tensor
    ) -> Tensor:
        """Return the mean ratio of the warm-up times f."""
        state = entry.state
        steps = [max(state["var_steps"], state["step"])]
        real = roots(group, [state["exp_avg_sq_fresh"]], steps, inside=self._eps_inside_sqrt)[0]
        quotient = (denominator / real).reshape(len(share_G), -1)
        factor_G = quotient.amax(dim=1).to(share_G)
        if group["weight_decay"] != 0:
            factor_G = factor_G * share_G + (1 - share_G)
        last_G = _slice_state(state, "last_factor", 1.0, share_G)
        factor_G = factor_G.clamp(self._factor_min, self._factor_max)
        threshold = self._factor_threshold
        factor_G = factor_G.clamp(last_G * (1 - threshold), last_G * (1 + threshold))
        last_G.copy_(factor_G)
        mean_G = _slice_state(state, "lamb_coeff_freeze", 0.0, share_G)
        # The mean is 0 if every ratio was 1: the parameter was zero, or had no gradient so far.
        return torch.where(mean_G > 0, mean_G, 1.0) * factor_G


def _slice_state(state: dict[str, Any], name: str, start: float, like_G: Tensor) -> Tensor:
    """Return a state of one number per slice; DeepSpeed saves a plain number for all slices."""
    value = state.get(name, start)
    if not isinstance(value, Tensor):
        state[name] = torch.full_like(like_G, float(value))
    return state[name]
