"""Activations, plain and gated, whose backward pass recomputes from the input.

Shape suffixes: F ffn; ``...`` any leading dimensions.
"""

import torch
from torch import Tensor

from moe_ext.ops.autograd import register_derivatives


def gated_activation(x: Tensor, *, kind: str = "swiglu", layout: str = "concatenated") -> Tensor:
    r"""Activates one half of the columns and multiplies it with the other.

    .. math:: y = f(\mathrm{gate}) \cdot \mathrm{up}

    Arithmetic is in float32 (float64 for float64), rounded once. Only x is kept for the backward
    pass.

    Args:
        x (Tensor[..., 2F]): float32, float64, bfloat16 or float16, any strides.
        kind (str): f: ``"swiglu"`` silu, ``"geglu"`` gelu by erf, ``"geglu_tanh"`` gelu by tanh,
            ``"reglu"`` relu.
        layout (str): ``"concatenated"``: columns [0, F) are the gate and [F, 2F) the up projection;
            ``"interleaved"``: even columns are the gate and odd ones the up projection.

    Returns:
        Tensor[..., F]: in the dtype of x. Differentiable once. NaN and infinity propagate as in
        torch's functions in float64.

    Raises:
        RuntimeError: x has another dtype or an odd last dimension, or kind or layout is not one of
        the above.

    Deterministic, with the same bits for any number of threads.

    Reference: Shazeer, GLU Variants Improve Transformer (2020), equations 5 and 6.
    """
    y: Tensor = torch.ops.moe_ext.gated_activation(x, kind, layout)
    return y


def activation(x: Tensor, *, kind: str) -> Tensor:
    """Applies an activation function to each element.

    Arithmetic is in float32 (float64 for float64), rounded once. Only x is kept for the backward
    pass.

    Args:
        x (Tensor[...]): float32, float64, bfloat16 or float16, any strides.
        kind (str): ``"silu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"relu"`` or
            ``"relu_squared"``.

    Returns:
        Tensor[...]: shape and dtype of x. Differentiable once. NaN and infinity propagate as in
        torch's functions in float64.

    Raises:
        RuntimeError: x has another dtype, or kind is not one of the above.

    Deterministic, with the same bits for any number of threads.

    Reference: Hendrycks and Gimpel, Gaussian Error Linear Units (2016); So et al., Primer (2021)
    for relu_squared.
    """
    y: Tensor = torch.ops.moe_ext.activation(x, kind)
    return y


@torch.library.register_fake("moe_ext::gated_activation")
def _(x: Tensor, kind: str = "swiglu", layout: str = "concatenated") -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake("moe_ext::activation")
def _(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("moe_ext::_gated_activation_backward")
def _(grad: Tensor, x: Tensor, kind: str, layout: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("moe_ext::_activation_backward")
def _(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


register_derivatives(
    "gated_activation", {"x": "_gated_activation_backward(grad_result, x, kind, layout)"}
)
register_derivatives("activation", {"x": "_activation_backward(grad_result, x, kind)"})
