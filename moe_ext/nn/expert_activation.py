"""Activation functions of experts: fused kinds by name, and any other function.

Shapes: N rows, F ffn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._checks import check_numbers
from moe_ext.dispatch import RowWeights
from moe_ext.ops.autograd import refuse_second_derivative

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu")
PLAIN_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
LAYOUTS = ("concatenated", "interleaved")

# Gated kinds by the plain kind that is applied to the gate.
GATED_KIND_OF = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}

# Names of functions of `torch.nn.functional` that have no kernel in `ops`.
_TORCH_ACTIVATIONS = (
    *("celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "identity", "leaky_relu"),
    *("logsigmoid", "mish", "relu6", "selu", "sigmoid", "softplus", "softsign", "tanh"),
)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The gate of GPT-OSS: `(clamp(up) + 1) * g * sigmoid(alpha * g)`, `g = min(gate, limit)`.

    Attributes:
        alpha: factor inside the sigmoid.
        limit: upper bound of the gate, and bound of the magnitude of up.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_numbers("ClampedSwiGLU", ClampedSwiGLU.__annotations__, vars(self))

    def __call__(self, x: Tensor, layout: str) -> Tensor:
        """Map `[N, 2F]` to `[N, F]`. Only x is saved for the backward pass."""
        return _ClampedSwiGLU.apply(x, self.alpha, self.limit, layout)


class _ClampedSwiGLU(torch.autograd.Function):
    """Runs the fused SwiGLU kernel, by `g sigmoid(a g) (u + 1) = silu(a g) ((u + 1) / a)`.

    The input of the kernel is one clamp and one affine map of all columns. Both are contiguous
    passes over x in either layout.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float, limit: float, layout: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = (alpha, limit, layout)
        prepared, _, _ = _ClampedSwiGLU.prepare(x, alpha, limit, layout)
        return ops.gated_activation(prepared, kind="swiglu", layout=layout)

    @staticmethod
    @refuse_second_derivative("ClampedSwiGLU")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        alpha, limit, layout = ctx.options
        prepared, clamped, scale = _ClampedSwiGLU.prepare(x, alpha, limit, layout)
        grad_x: Tensor = torch.ops.moe_ext._gated_activation_backward(
            grad.contiguous(), prepared, "swiglu", layout
        )
        return grad_x.mul_(scale).masked_fill_(clamped != x, 0.0), None, None, None

    @staticmethod
    def prepare(
        x: Tensor, alpha: float, limit: float, layout: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kernel's input, the clamped columns and the factor of each column."""
        low, scale, shift = x.new_empty((3, x.shape[-1]))
        values = ((-math.inf, -limit), (alpha, 1 / alpha), (0.0, 1 / alpha))
        for column, (of_gate, of_up) in zip((low, scale, shift), values, strict=True):
            gate, up = split_gate(column, layout)
            # `fill_` takes a number. A copy of a host tensor would wait for the device.
            gate.fill_(of_gate)
            up.fill_(of_up)
        clamped = torch.maximum(x.clamp(max=limit), low)
        return torch.addcmul(shift, clamped, scale), clamped, scale


# Plain kind that an activation module computes, by the name of its exact class.
_KIND_OF_CLASS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu_squared",
}

Activation = str | ClampedSwiGLU | Callable[[Tensor], Tensor]


def resolve_activation(
    activation: Activation, gated: bool | None, owner: str
) -> tuple[Activation, bool]:
    """Return the activation to run, a fused kind if there is one, and whether it is gated.

    Args:
        activation: a name, a `ClampedSwiGLU`, or a function of one tensor.
        gated: whether a gate half is activated and multiplied with an up half. None follows the
            name, and takes a function as plain.
        owner: name for error messages.

    Raises:
        ValueError: the name is unknown, or `gated` contradicts it.
        TypeError: activation is neither a name nor callable.
    """
    if isinstance(activation, str):
        if activation in GATED_ACTIVATIONS:
            if gated is False:
                raise ValueError(
                    f"{owner}: expected gated to be True or None for activation={activation!r}, "
                    "got False"
                )
            return activation, True
        if gated and activation in GATED_KIND_OF:
            return GATED_KIND_OF[activation], True
        if activation in PLAIN_ACTIVATIONS or activation in _TORCH_ACTIVATIONS:
            return activation, bool(gated)
        names = GATED_ACTIVATIONS + PLAIN_ACTIVATIONS + _TORCH_ACTIVATIONS
        raise ValueError(
            f"{owner}: expected activation to be one of {', '.join(names)}, or callable, got "
            f"{activation!r}"
        )
    if isinstance(activation, ClampedSwiGLU):
        if gated is False:
            raise ValueError(f"{owner}: expected gated to be True or None for {activation}")
        return activation, True
    if not callable(activation):
        raise TypeError(
            f"{owner}: expected activation to be a name or callable, got {activation!r}"
        )
    return activation, bool(gated)


def plain_kind(function: object) -> str | None:
    """Return the plain kind of `F.silu`, or of a module of torch or transformers, or None."""
    if function is F.silu:
        return "silu"
    cls = type(function)
    if cls.__module__.partition(".")[0] not in ("torch", "transformers"):
        return None
    if isinstance(function, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(function.approximate)
    return _KIND_OF_CLASS.get(cls.__name__)


def split_gate(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the gate and up halves of `[N, 2F]`, as views."""
    if layout == "interleaved":
        return x[..., ::2], x[..., 1::2]
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def run_activation(
    x: Tensor, activation: Any, *, gated: bool, layout: str, weights: RowWeights | None = None
) -> Tensor:
    """Apply a result of `resolve_activation` to `[N, 2F]` (gated) or `[N, F]`.

    Weights are only for fused gated kinds, which multiply each row by its weight.
    """
    if isinstance(activation, str) and activation in GATED_ACTIVATIONS:
        slots = (None, None) if weights is None else (weights.slot_weights, weights.slot_of_row)
        return ops.gated_activation(
            x, kind=activation, layout=layout, slot_weights=slots[0], slot_of_row=slots[1]
        )
    assert weights is None
    if isinstance(activation, ClampedSwiGLU):
        return activation(x, layout)
    if not gated:
        return _run_plain(x, activation)
    gate, up = split_gate(x, layout)
    return _run_plain(gate, activation) * up


def _run_plain(x: Tensor, activation: Any) -> Tensor:
    if isinstance(activation, str):
        if activation in PLAIN_ACTIVATIONS:
            return ops.activation(x, kind=activation)
        if activation == "identity":
            return x
        activation = getattr(F, activation)
    return activation(x)
