"""Activations, plain and gated, whose backward pass recomputes from the input.

Shape suffixes: F ffn; ``...`` any leading dimensions.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ext.ops.autograd import register_derivatives
from moe_ext.ops.fakes import register_fake_like


def gated_activation(
    x: Tensor,
    *,
    kind: str = "swiglu",
    layout: str = "concatenated",
    slot_weights: Tensor | None = None,
    slot_of_row: Tensor | None = None,
) -> Tensor:
    r"""Activates one half of the columns, and multiplies it by the other half and by a weight.

    .. math:: y_r = w_{s(r)} \, f(\mathrm{gate}_r) \cdot \mathrm{up}_r

    Without weights, w = 1. With weights, a linear map of y needs no weighted sum after it. The
    gradient of a weight comes from x and the gradient of y alone, so that nothing after y has to be
    kept. Arithmetic is in float32 (float64 for float64), rounded once. Only x and the weights are
    kept for the backward pass.

    Args:
        x (Tensor[..., 2F]): float32, float64, bfloat16 or float16, any strides; `[N, 2F]` with
            weights.
        kind (str): the function f: silu for ``"swiglu"``, gelu by erf for ``"geglu"``, gelu by tanh
            for ``"geglu_tanh"``, relu for ``"reglu"``.
        layout (str): ``"concatenated"``: columns [0, F) are the gate and [F, 2F) the up projection;
            ``"interleaved"``: even columns are the gate and odd ones the up projection.
        slot_weights (Tensor): weight of each slot, any shape and floating dtype, such as the
            `topk_weights` of a gate.
        slot_of_row (Tensor[N]): int64, slot of each row, as in `Permutation`; at most one row for
            each slot. A row of slot -1 becomes zero.

    Returns:
        Tensor[..., F]: in the dtype of x. Differentiable once, in x and in the weights. NaN and
        infinity propagate as in torch's functions in float64.

    Raises:
        RuntimeError: an argument has another dtype, device or shape, kind or layout is not one of
        the above, or, on CPU, a slot is out of range.

    Deterministic, with the same bits for any number of threads.

    Reference: Shazeer, GLU Variants Improve Transformer (2020), equations 5 and 6.
    """
    if slot_weights is not None:
        slot_weights = slot_weights.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return torch.ops.moe_ext.gated_activation(x, kind, layout, slot_weights, slot_of_row)


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
    return torch.ops.moe_ext.activation(x, kind)


@torch.library.register_fake("moe_ext::gated_activation")
def _(x: Tensor, *_rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


register_fake_like("moe_ext::activation", 0)
register_fake_like("moe_ext::_gated_activation_backward", 1)
register_fake_like("moe_ext::_gated_activation_backward_weighted", 1, 4)
register_fake_like("moe_ext::_activation_backward", 1)
register_derivatives(
    "gated_activation",
    {"x": "_gated_activation_backward(grad_result, x, kind, layout)"},
    given=(
        "slot_weights",
        {
            "x, slot_weights": "_gated_activation_backward_weighted(grad_result, x, kind, layout, "
            "slot_weights, slot_of_row, owned(x))"
        },
    ),
)
register_derivatives("activation", {"x": "_activation_backward(grad_result, x, kind)"})
