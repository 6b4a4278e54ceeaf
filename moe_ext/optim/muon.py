"""Muon for dense matrices, stacked experts and shards.

Shapes: a parameter is a matrix `[M, N]`, or the matrices of E experts `[E, M, N]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from moe_ext._checks import check_choice, check_rule
from moe_ext.distributed.dtensor import local_part, map_gathered, sharding_groups
from moe_ext.optim._arguments import (
    Trained,
    check_betas,
    check_positive,
    options_in,
)
from moe_ext.optim._sliced import (
    SlicedOptimizer,
    SliceNorms,
    local_grad,
    logical,
    sum_with_options,
)

_SCALES = ("original", "match_rms_adamw")


class Muon(SlicedOptimizer):
    r"""`torch.optim.Muon`, for stacked experts and sharded parameters too.

    .. math::
        m \leftarrow \mu m + (1 - \mu) g,\quad
        o = \mathrm{NS}\big((1 - \mu) g + \mu m\big),\quad
        w \leftarrow (1 - \gamma \lambda) w - \gamma\, s\, o

    NS brings a matrix close to the nearest orthogonal matrix, by iterations of Newton-Schulz. Each
    expert of a stack is a matrix of its own, and all experts iterate at once. Names, defaults and
    states are those of torch, and so are the results for each matrix.

    Muon does not suit vectors, embeddings and the output head. Parameters of groups with
    ``use_muon=False`` take steps of AdamW. `moe_ext.optim.param_groups(model, muon=True)` makes
    such groups, and separates gate and up in experts that store them as one tensor.

    Parameters may be DTensors (FSDP2, tensor parallelism, experts over ranks). Matrices that are
    cut are gathered, in ``ns_dtype``. Whole experts on a rank need no message.

    Args:
        params: parameters, or groups of them.
        lr: :math:`\gamma`.
        weight_decay: :math:`\lambda`, decoupled.
        momentum: :math:`\mu`.
        nesterov: False orthogonalises m itself.
        ns_coefficients: coefficients of the polynomial of a Newton-Schulz iteration.
        eps: lower bound on the norm by which a matrix is divided before the iterations.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: s: "original" (None), :math:`\sqrt{\max(1, M/N)}`, or "match_rms_adamw",
            :math:`0.2\sqrt{\max(M, N)}`, with which learning rate and decay of AdamW can be used.
        ns_dtype: dtype of the Newton-Schulz iterations, or its name.
        use_muon: False takes steps of AdamW.
        adamw_betas: `betas` of the steps of AdamW.
        adamw_eps: `eps` of the steps of AdamW.
        fused: number of matrices that a parameter holds side by side, each orthogonalised by
            itself; 2 if gate and up are one tensor. `param_groups` sets it, other groups have 1.
        interleaved: the rows of fused matrices alternate, instead of one matrix after the other.
        transposed: matrices are stored as [in, out]. Fused matrices then lie side by side along
            columns, and M and N change places in s.
        per_expert: for groups of `param_groups`; all parameters with ``use_muon`` must be stacks.
        maximize: step up the gradient.
        float32_state: keep moments of 16-bit parameters in float32, and round a step once, at its
            end; False keeps them, and takes the step, in the type of the parameter.

    Raises:
        ValueError: an option is out of range, or a parameter is no matrix and no stack of them. In
            `step`: a gradient is placed unlike its parameter.
        TypeError: in `step`: a gradient is not dense, or a parameter not real floating-point.

    All options may differ between groups. A step does not synchronise with the host.

    Reference: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et
    al., Muon is Scalable for LLM Training, 2025 (arXiv 2502.16982), equation 4 for s.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str | torch.dtype = "bfloat16",
        use_muon: bool = True,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        fused: int = 1,
        interleaved: bool = False,
        transposed: bool = False,
        per_expert: bool = False,
        maximize: bool = False,
        float32_state: bool = True,
    ) -> None:
        super().__init__(params, options_in(locals()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which may have its own options."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # The group keeps the dtype's name, because torch's full optimizer state dicts refuse a
        # `torch.dtype` among options.
        group["ns_dtype"] = str(group["ns_dtype"]).removeprefix("torch.")

    def _problem_of(self, parameter: Tensor, group: dict[str, Any], name: str) -> str | None:
        problem = _problem(group, logical(parameter).shape) if group["use_muon"] else ""
        if problem:
            return f"{problem}, got shape {tuple(parameter.shape)} for {name}"
        return super()._problem_of(parameter, group, name)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_positive(self._op, group, "lr", "weight_decay", "eps", "adamw_eps")
        check_betas(self._op, group["adamw_betas"], "adamw_betas")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"Muon: expected momentum to be in [0, 1), got {group['momentum']}")
        coefficients = group["ns_coefficients"]
        is_three = len(coefficients) == 3
        check_rule(self._op, "ns_coefficients", coefficients, "three numbers", is_three)
        fused = group["fused"]
        check_rule(self._op, "fused", fused, "an integer of at least 1", fused >= 1)
        if group["adjust_lr_fn"] is not None:
            check_choice(self._op, "adjust_lr_fn", group["adjust_lr_fn"], _SCALES)
        dtype = getattr(torch, str(group["ns_dtype"]).removeprefix("torch."), None)
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"Muon: expected ns_dtype to be a floating-point type, got {group['ns_dtype']}"
            )

    def _exchanges_over(self, entry: Trained) -> Sequence[ProcessGroup]:
        # Steps of AdamW send nothing. Their groups are included so that a rank that alone has
        # use_muon=False is found by the comparison of options.
        matrices = logical(entry.parameter)
        return sharding_groups(matrices, range(max(0, matrices.dim() - 2), matrices.dim()))

    def _take_step(self, trained: list[Trained], weights: list[Tensor], slices: SliceNorms) -> None:
        # torch gathers the matrices, and its messages have no room for the options to compare.
        assert self._options is not None
        over = [self._exchanges_over(entry) for entry in trained]
        absent = [self._exchanges_over(entry) for _, entry in slices.absent]
        sum_with_options([], [], self._options, slices.in_order(over, absent))
        matrices = [i for i, entry in enumerate(trained) if entry.group["use_muon"]]
        # Matrices that need messages come first, so that a failed message changes nothing.
        found = {i: self._direction(trained[i]) for i in matrices if over[i]}
        for group in self.param_groups:
            members = [i for i, entry in enumerate(trained) if entry.group is group]
            rate, decay = float(group["lr"]), 1 - float(group["lr"]) * group["weight_decay"]
            if not group["use_muon"]:
                own = [trained[i] for i in members]
                directions = self._adam_directions(own, group["adamw_betas"], group["adamw_eps"])
                for i, direction in zip(members, directions, strict=True):
                    weights[i].mul_(decay).sub_(direction, alpha=rate)
                continue
            for i in members:
                momentum, direction = found.pop(i) if i in found else self._direction(trained[i])
                self._buffer(trained[i], "momentum_buffer").copy_(momentum)
                scale = _scale(group, logical(trained[i].parameter).shape)
                weights[i].mul_(decay).add_(direction, alpha=-rate * scale)

    def _direction(self, entry: Trained) -> tuple[Tensor, Tensor]:
        """Return this rank's parts of the new momentum and of the direction of the weights."""
        group, grad = entry.group, local_grad(entry)
        kept = self.state.get(entry.parameter, {}).get("momentum_buffer")
        before = torch.zeros_like(grad) if kept is None else local_part(kept)
        momentum = before.lerp(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = update.to(getattr(torch, group["ns_dtype"]))
        return momentum, map_gathered(
            lambda x: _of_each(group, x), update, like=logical(entry.parameter), num_dims=2
        )


def _problem(group: dict[str, Any], shape: torch.Size) -> str:
    """Return the reason why a shape is not for Muon, as text; "" if it is."""
    stacks = "stacks of matrices [E, M, N]"
    if len(shape) != 3 and (len(shape) != 2 or group["per_expert"]):
        rule = f"{stacks} with per_expert=True" if group["per_expert"] else f"matrices or {stacks}"
        return (
            f"expected parameters to be {rule}; give others to AdamW, in a group with "
            "use_muon=False, as moe_ext.optim.param_groups(model, muon=True) does"
        )
    if shape[-1 if group["transposed"] else -2] % group["fused"] != 0:
        return f"expected fused={group['fused']} matrices of equal size in a parameter"
    return ""


def _scale(group: dict[str, Any], shape: torch.Size) -> float:
    """Return s, the factor on the learning rate, for the shape of a parameter."""
    num_out, num_in = shape[-2:][::-1] if group["transposed"] else shape[-2:]
    num_out //= group["fused"]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(num_out, num_in))
    return math.sqrt(max(1, num_out / max(1, num_in)))


def _of_each(group: dict[str, Any], x: Tensor) -> Tensor:
    """Orthogonalise each of the fused matrices of a parameter that is whole."""
    dim, fused = -1 if group["transposed"] else -2, group["fused"]
    if fused == 1:
        return _newton_schulz(group, x)
    if group["interleaved"]:
        in_turn = x.unflatten(dim, (-1, fused)).unbind(dim)
        return torch.stack([_newton_schulz(group, p) for p in in_turn], dim).flatten(dim - 1, dim)
    return torch.cat([_newton_schulz(group, p) for p in x.chunk(fused, dim)], dim)


def _newton_schulz(group: dict[str, Any], x: Tensor) -> Tensor:
    """Return the orthogonalised matrix, or stack of matrices."""
    if x.numel() == 0:
        return x
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    # For a matrix these are the operators of torch's Muon, which give the same bits.
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
