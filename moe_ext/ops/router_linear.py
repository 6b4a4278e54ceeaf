"""The router's product: logits in float32 from tokens of any dtype.

Shape suffixes: T tokens, D model, E experts.
"""

import torch
from torch import Tensor

from moe_ext.ops.autograd import register_derivatives
from moe_ext.ops.fakes import acc_dtype


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    r"""Computes :math:`x W^\top`, summed and returned in float32 whatever the dtype of the model.

    The products of bfloat16 and float16 numbers are exact in float32, so that the logits are those
    of upcast tokens. The tokens are not copied; on CPU, tiles of rows are converted in the cache.
    Logits rounded to bfloat16 would flip the choice between close experts. Autocast does not change
    the result.

    Args:
        x_TD (Tensor[T, D]): float32, float64, bfloat16 or float16, any strides.
        weight_ED (Tensor[E, D]): any of these dtypes; converted to that of the result.

    Returns:
        Tensor[T, E]: float32, or float64 for float64 tokens. Differentiable once: the gradients are
        summed in the dtype of the result, and come back in the dtypes of x and weight. x and weight
        are saved as they are.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape.

    Deterministic, on CUDA as far as the library's product is. On CPU a token's logits have the same
    bits in any batch and for any number of threads.
    """
    return torch.ops.moe_ext.router_logits(x_TD, weight_ED)


@torch.library.register_fake("moe_ext::router_logits")
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=acc_dtype(x.dtype))


register_derivatives(
    "router_logits",
    {
        "x": "_router_logits_backward_x(grad_result, weight, dtype(x))",
        "weight": "_router_logits_backward_weight(grad_result, x, dtype(weight))",
    },
)


@torch.library.register_fake("moe_ext::_router_logits_backward_x")
def _(grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[1]), dtype=dtype)


@torch.library.register_fake("moe_ext::_router_logits_backward_weight")
def _(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((grad.shape[1], x.shape[1]), dtype=dtype)
