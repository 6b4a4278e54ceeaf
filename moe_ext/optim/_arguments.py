"""Checks that the optimizers share, and the names of parameters in their messages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ext.distributed.placement import is_expert_shard

_KNOWN_BACKENDS = ("nccl", "gloo", "mpi", "hccl", "compressed")


@dataclass(frozen=True)
class Trained:
    """A parameter with a gradient, and where it stands."""

    parameter: Tensor
    grad: Tensor
    group: dict[str, Any]
    label: str


def label(group: dict[str, Any], group_index: int, index: int) -> str:
    """The parameter's name where the optimizer was given names, else its place."""
    names = group.get("param_names")
    return repr(names[index]) if names else f"parameter {index} of group {group_index}"


def check_positive(op: str, name: str, value: float, *, zero: bool = True) -> None:
    """ValueError unless a number is finite and positive (or zero, where that is allowed)."""
    rule = "at least 0" if zero else "positive"
    number = float(value)
    if not (number >= 0 if zero else number > 0) or number == float("inf"):
        raise ValueError(f"{op}: expected {name} to be {rule} and finite, got {value}")


def check_betas(op: str, betas: Sequence[float]) -> None:
    """ValueError unless there are two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{op}: expected betas to be two numbers in [0, 1), got {betas}")


def check_expert_axis(op: str, group: dict[str, Any], group_index: int) -> None:
    """ValueError unless every tensor of a group with per_expert has a dimension of experts."""
    for index, parameter in enumerate(group["params"]):
        if group["per_expert"] and parameter.dim() < 1:
            raise ValueError(
                f"{op}: expected parameters of a group with per_expert=True to have a first "
                f"dimension of experts, got shape {tuple(parameter.shape)} for "
                f"{label(group, group_index, index)}"
            )


def check_whole_experts(op: str, group: dict[str, Any], group_index: int) -> None:
    """ValueError for a shard of an expert, whose norms and rows are on other ranks in part."""
    for index, parameter in enumerate(group["params"]):
        if is_expert_shard(parameter):
            raise ValueError(
                f"{op}: expected experts of a mesh with etp=1, whose norms are those of whole "
                f"experts, got shards in {label(group, group_index, index)}; take AdamW, "
                "OneBitAdam or ZeroOneAdam for them"
            )


def trained_parameters(op: str, param_groups: list[dict[str, Any]]) -> list[Trained]:
    """The parameters that have a gradient, in order.

    Raises:
        TypeError: a gradient is not dense, or a parameter is not of a real floating-point type.
    """
    found = []
    for group_index, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            grad = parameter.grad
            if grad is None:
                continue
            name = label(group, group_index, index)
            if grad.layout != torch.strided:
                raise TypeError(
                    f"{op}: expected gradients to be dense, got {grad.layout} for {name}"
                )
            if not parameter.is_floating_point():
                raise TypeError(
                    f"{op}: expected parameters to be real floating-point tensors, got "
                    f"{parameter.dtype} for {name}"
                )
            found.append(Trained(parameter, grad, group, name))
    return found


def check_count(op: str, name: str, value: int, *, least: int = 0) -> None:
    """ValueError unless a number of steps is a whole one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{op}: expected {name} to be an integer of at least {least}, got {value}")


def check_deepspeed(
    op: str, amsgrad: bool, cuda_aware: bool, backend: str, deepspeed: object
) -> None:
    """Warn of DeepSpeed's arguments that are ignored; the process group tells it all here.

    Raises:
        ValueError: amsgrad, which has no compressed form.
    """
    if amsgrad:
        raise ValueError(f"{op}: expected amsgrad to be False, got {amsgrad}")
    if deepspeed is not None:
        warnings.warn(f"{op}: deepspeed is ignored", stacklevel=3)
    if cuda_aware:
        warnings.warn(f"{op}: cuda_aware is ignored: the group moves the data", stacklevel=3)
    if backend not in _KNOWN_BACKENDS:
        warnings.warn(f"{op}: comm_backend_name={backend!r} is ignored", stacklevel=3)
