"""Adafactor for whole and sharded parameters, with clipping per expert.

Shapes: a parameter is `[..., N, M]` with N rows and M columns; E experts of a stacked parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from moe_ext._checks import check_rule
from moe_ext.distributed.dtensor import dtensor_of, is_dtensor, local_part, sharding_groups
from moe_ext.optim._arguments import Trained, check_positive, options_in
from moe_ext.optim._sliced import (
    SlicedOptimizer,
    SliceNorms,
    local_grad,
    logical,
    state_dtype,
    sum_over_groups,
)


class Adafactor(SlicedOptimizer):
    r"""`torch.optim.Adafactor`, for sharded parameters and stacked experts too.

    .. math::
        R \leftarrow \beta R + (1 - \beta)\, \mathrm{mean}_M(g^2),\quad
        C \leftarrow \beta C + (1 - \beta)\, \mathrm{mean}_N(g^2),\quad
        \hat v = \frac{R\, C}{\max(\mathrm{mean}_N(R), \epsilon_1)}

    .. math::
        u = \frac{g}{\max(\sqrt{\hat v}, \epsilon_1)},\quad
        w \leftarrow (1 - \gamma \lambda) w - \max(\epsilon_2, \mathrm{rms}(w))
        \min(\gamma, t^{-1/2}) \frac{u}{\max(1, \mathrm{rms}(u) / d)}

    with :math:`1 - \beta = t^{\tau}`. For a vector, v is kept whole. Names and defaults are those
    of torch, and so are the results of one process for float32 and float64 parameters. Parameters
    of 16 bits take the steps of float32 (``float32_state``), while torch keeps 16-bit factors.

    Parameters may be DTensors sharded along any dimension, evenly or not: row and column means
    are summed over the ranks that share them, so that the steps are those of the whole tensors.
    The factors R and C are then DTensors, sharded along the dimensions that were not averaged. A
    step sends column sums, row sums if columns are sharded, and all norms. Each of the three takes
    one all-reduce per mesh.

    Args:
        params: parameters, or groups of them; see `moe_ext.optim.param_groups`.
        lr: :math:`\gamma`, the bound on the relative step and the rate of the weight decay.
        beta2_decay: :math:`\tau`.
        eps: :math:`\epsilon_1` (None: that of the dtype of the factors) and :math:`\epsilon_2`.
        d: bound on the root mean square of u.
        weight_decay: :math:`\lambda`.
        per_expert: the first dimension of the group's parameters counts experts: both root mean
            squares are those of each expert, and a stacked bias `[E, M]` is E vectors.
        foreach: ignored; an argument of torch's optimizer.
        maximize: step up the gradient.
        float32_state: keep moments of 16-bit parameters in float32, and round a step once, at its
            end; False keeps them, and takes the step, in the type of the parameter.

    Raises:
        ValueError: an option is out of range. In `step`: a gradient is placed unlike its parameter.
        TypeError: in `step`: a gradient is not dense, or a parameter not real floating-point.

    A step does not synchronise with the host.

    Reference: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost,
    2018 (arXiv 1804.04235), algorithms 4 and 5, with torch's use of :math:`\epsilon_1`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        per_expert: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        float32_state: bool = True,
    ) -> None:
        super().__init__(params, options_in(locals()))

    def _check_options(self, group: dict[str, Any]) -> None:
        check_positive(self._op, group, "lr", "weight_decay")
        eps = dict(zip(("eps[0]", "eps[1]"), group["eps"], strict=True))
        check_positive(self._op, eps, *(name for name in eps if eps[name] is not None))
        decay, d = group["beta2_decay"], group["d"]
        check_rule(self._op, "beta2_decay", decay, "at most 0", decay <= 0)
        check_rule(self._op, "d", d, "at least 1", d >= 1)

    def _take_step(self, trained: list[Trained], weights: list[Tensor], slices: SliceNorms) -> None:
        with self._unchanged_if_it_fails(trained, slices):
            moments = [self._moment(entry) for entry in trained]
            absent = [_NoMoment.of(entry) for _, entry in slices.absent]
            _update_factors([m for m in slices.in_order(moments, absent) if m.factored])
            updates = [moment.update() for moment in moments]
            scales = slices.rates([moment.step_size for moment in moments], weights, updates)
        for weight, update, moment, scale in zip(weights, updates, moments, scales, strict=True):
            group = moment.entry.group
            if group["weight_decay"] != 0:
                weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
            weight.sub_(update.mul_(scale.to(update.dtype)))

    def _moment(self, entry: Trained) -> _Moment:
        """Count a step of a parameter, and return its second moment, made at its first step."""
        parameter, state = logical(entry.parameter), self.state[entry.parameter]
        grad = local_grad(entry)
        factored = _is_factored(parameter, entry)
        step = self._advance(entry)
        if not factored:
            self._buffer(entry, "variance")
        elif "row_var" not in state:
            shape = list(grad.shape)
            rows, columns = [*shape[:-1], 1], [*shape[:-2], 1, shape[-1]]
            state["row_var"] = _like_placed(parameter, grad.new_zeros(rows), -1)
            state["col_var"] = _like_placed(parameter, grad.new_zeros(columns), -2)
        return _Moment(entry, parameter, state, grad, step, factored)


@dataclass
class _Moment:
    """One parameter within a step."""

    entry: Trained
    parameter: Tensor  # see `logical`
    state: dict[str, Any]
    grad: Tensor
    step: int
    factored: bool
    row_mean: Tensor = field(init=False)  # mean of R over the rows, [..., 1, 1]

    @property
    def weight_of_new(self) -> float:
        """The weight of this step in the running means: 1 - beta."""
        return float(self.step ** self.entry.group["beta2_decay"])

    @property
    def eps1(self) -> float:
        eps1 = self.entry.group["eps"][0]
        return torch.finfo(self.grad.dtype).eps if eps1 is None else eps1

    def groups(self, dim: int) -> list[ProcessGroup]:
        """Return the groups over which local sums along a dimension are summed."""
        return sharding_groups(self.parameter, [dim % self.parameter.dim()])

    def sum_of_squares(self, dim: int) -> Tensor:
        """Sum squares of the local gradient along a dimension, which is kept with length 1."""
        return torch.linalg.vector_norm(self.grad, dim=dim, keepdim=True).square_()

    def follow(self, name: str, dim: int, total: Tensor) -> None:
        """Update a factor by sums of squares along `dim`."""
        mean = total.div(max(1, self.parameter.shape[dim]))
        local_part(self.state[name]).lerp_(mean, self.weight_of_new)

    def sum_of_rows(self) -> Tensor:
        """Sum R over the local rows."""
        return local_part(self.state["row_var"]).sum(dim=-2, keepdim=True)

    def update(self) -> Tensor:
        """Return u, in a new tensor; updates the second moment if it is not factored."""
        if self.factored:
            estimate = local_part(self.state["row_var"]) @ local_part(self.state["col_var"])
            estimate.div_(self.row_mean.clamp(min=self.eps1))
        else:
            variance = local_part(self.state["variance"])
            variance.lerp_(self.grad.square(), self.weight_of_new)
            estimate = variance.clone()
        return estimate.clamp_(min=self.eps1 * self.eps1).rsqrt_().mul_(self.grad)

    def step_size(self, weight_norm_G: Tensor, update_norm_G: Tensor) -> Tensor:
        """Return the factor on u for each slice."""
        group, parameter = self.entry.group, self.parameter
        num_slices = parameter.shape[0] if group["per_expert"] else 1
        root = max(1, parameter.numel() // max(1, num_slices)) ** 0.5
        rho = min(float(group["lr"]), self.step**-0.5)
        clip_G = (update_norm_G / (root * group["d"])).clamp(min=1.0)
        return (weight_norm_G / root).clamp(min=group["eps"][1]) * rho / clip_G


class _NoMoment(_Moment):
    """A parameter without a gradient on this rank, which takes part in the sums as zeros."""

    @classmethod
    def of(cls, entry: Trained) -> _NoMoment:
        parameter = logical(entry.parameter)
        # Zeros of the local shape, expanded from one element to take no memory.
        grad = local_part(parameter).new_zeros((), dtype=state_dtype(entry.parameter, entry.group))
        grad = grad.expand(local_part(parameter).shape)
        return cls(entry, parameter, {}, grad, 1, _is_factored(parameter, entry))

    def follow(self, name: str, dim: int, total: Tensor) -> None:
        """Do nothing, because there is no state."""

    def sum_of_rows(self) -> Tensor:
        """Return zeros in the shape of the sum."""
        return self.grad.new_zeros((*self.grad.shape[:-2], 1, 1))


def _like_placed(parameter: Tensor, local: Tensor, summed_dim: int) -> Tensor:
    """Make a DTensor of local parts, placed like a parameter that was summed along a dimension.

    The summed dimension has length 1. Without a DTensor parameter `local` is returned.
    """
    if not is_dtensor(parameter):
        return local
    # The module takes a second to import, so the import is local. It has been imported if the
    # parameter is a DTensor.
    from torch.distributed.tensor import Replicate

    summed_dim %= parameter.dim()
    shape = [1 if dim == summed_dim else n for dim, n in enumerate(parameter.shape)]
    placements = [
        Replicate() if getattr(placement, "dim", None) == summed_dim else placement
        for placement in parameter.placements
    ]
    return dtensor_of(local, parameter.device_mesh, placements, torch.Size(shape))


def _is_factored(parameter: Tensor, entry: Trained) -> bool:
    """Return True if the second moment is a product of rows and columns."""
    return parameter.dim() - int(entry.group["per_expert"]) > 1


def _update_factors(moments: list[_Moment]) -> None:
    """Update R and C by one all-reduce per mesh, or two if rows and columns are both sharded."""
    parts: list[Tensor] = []
    over: list[list[ProcessGroup]] = []
    late = [bool(moment.groups(-1)) for moment in moments]
    for moment, rows_later in zip(moments, late, strict=True):
        if not rows_later:
            moment.follow("row_var", -1, moment.sum_of_squares(-1))
        parts += [
            moment.sum_of_squares(-1) if rows_later else moment.sum_of_rows(),
            moment.sum_of_squares(-2),
        ]
        over += [moment.groups(-1 if rows_later else -2), moment.groups(-2)]
    sums = sum_over_groups(parts, over)
    waiting = []
    for moment, rows_later, rows, columns in zip(moments, late, sums[::2], sums[1::2], strict=True):
        moment.follow("col_var", -2, columns)
        if rows_later:
            moment.follow("row_var", -1, rows)
            waiting.append(moment)
        else:
            moment.row_mean = rows / max(1, moment.parameter.shape[-2])
    totals = sum_over_groups([m.sum_of_rows() for m in waiting], [m.groups(-2) for m in waiting])
    for moment, total in zip(waiting, totals, strict=True):
        moment.row_mean = total / max(1, moment.parameter.shape[-2])
