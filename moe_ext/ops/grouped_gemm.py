"""Grouped matrix product: each expert's rows times that expert's weight.

Shape suffixes: E experts, K input features, M output features, N rows.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ext.ops import grouped_providers
from moe_ext.ops.autograd import register_autograd, register_derivatives
from moe_ext.ops.fakes import register_fake_like


def grouped_mm(
    x_NK: Tensor, weight_EMK: Tensor, expert_offsets: Tensor, *, bias_EM: Tensor | None = None
) -> Tensor:
    r"""Multiplies the rows of each expert by that expert's weight.

    .. math:: y_r = W_e x_r + b_e \quad\text{for the rows } r \text{ of expert } e

    One library product per expert, written straight into its rows of the result; the backward pass
    writes each expert's weight gradient straight into the stacked one. Under autocast, float32,
    bfloat16 and float16 arguments are cast to the autocast dtype and gradients come back in the
    dtype of the arguments.

    Args:
        x_NK (Tensor[N, K]): rows sorted by expert; float32, float64, bfloat16 or float16, any
            strides.
        weight_EMK (Tensor[E, M, K]): one matrix per expert, in the dtype of the rows, any strides.
        expert_offsets (Tensor[E + 1]): int64, non-decreasing, in [0, N]; expert ``e`` owns the rows
            from ``expert_offsets[e]`` to ``expert_offsets[e + 1]``. If every row has an expert,
            they may also be the int32 ends ``[E]`` of each expert's rows, as in torch's
            `grouped_mm`. On CUDA that spares two launches for each product, and rows after the last
            end have any values.
        bias_EM (Tensor[E, M]): added to each expert's rows, in the dtype of the rows; None adds
            nothing.

    Returns:
        Tensor[N, M]: rows of no expert are zero. Differentiable, any number of times, in rows,
        weight and bias; rows of no expert get zero gradients.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape, or the offsets decrease or
        leave the rows.

    On CUDA nothing synchronises with the host. On devices of compute capability 9 and 10, bfloat16
    with rows and matrices at multiples of 16 bytes is one library product over all experts. The
    bias is added after that product was rounded. All other products are one launch of ours. Offsets
    that decrease or leave the rows are not refused on CUDA. A float32 product is the sum of six
    products of three bfloat16 parts, as exact as products of float32. Infinities among its operands
    give NaN. The environment variable ``MOE_EXT_GROUPED_MM``, read when moe_ext is imported,
    chooses "own" for our product alone, or "quack" for quack-kernels, whose product is
    differentiable once.

    Deterministic, on CUDA as far as the library's product is. On CPU the bits are the same for any
    number of threads: tiles of a fixed size go to the library's product, each on one thread.
    """
    device_type = x_NK.device.type
    # The meta device has no autocast, and torch 2.11 cannot trace a check for devices without it.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x_NK, weight_EMK = _autocast(x_NK, dtype), _autocast(weight_EMK, dtype)
        bias_EM = None if bias_EM is None else _autocast(bias_EM, dtype)
    product = None
    if device_type != "cpu":
        product = grouped_providers.chosen_product(x_NK, weight_EMK)
    if product is None:
        product = torch.ops.moe_ext.grouped_mm
    return product(x_NK, weight_EMK, expert_offsets, bias_EM)


def row_alignment(rows: Tensor, num_rows: int, num_experts: int) -> int:
    """Return the `align` of `permute_tokens` that suits the products of these rows.

    For 16-bit rows on CPU, the library makes a plan for each new number of rows. A plan takes up to
    ten times as long as the product, and counts change with every batch. Multiples of 8 leave few
    numbers to plan. If experts have 16 rows on average, the padding is at most half of that.
    """
    ragged = rows.device.type == "cpu" and rows.dtype in (torch.bfloat16, torch.float16)
    return 8 if ragged and num_rows >= 16 * num_experts else 1


def wants_ends(rows: Tensor) -> bool:
    """Return True if `grouped_mm` takes less time with int32 ends, if every row has an expert."""
    return rows.is_cuda


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Autocast leaves float64 as it is, as it does for torch's own products.
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def num_experts_of(expert_offsets: Tensor | None) -> int:
    """Return the number of experts that offsets or ends have; 1 for None."""
    if expert_offsets is None:
        return 1
    return expert_offsets.shape[0] - int(expert_offsets.dtype == torch.int64)


@torch.library.register_fake("moe_ext::grouped_mm")
def _(x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


register_derivatives(
    "grouped_mm",
    {
        "x": "grouped_mm(contiguous(grad_result), transpose(weight), expert_offsets)",
        "weight": "_grouped_mm_backward_weight(contiguous(grad_result), x, expert_offsets, "
        "is_transposed(weight), owned(grad_result), owned(x))",
        "bias": "_grouped_mm_backward_bias(contiguous(grad_result), expert_offsets)",
    },
)


@torch.library.register_fake("moe_ext::_grouped_mm_backward_weight")
def _(
    grad: Tensor, x: Tensor, expert_offsets: Tensor, transposed: bool = False, *_rest: Any
) -> Tensor:
    if transposed:
        grad, x = x, grad
    gradient = grad.new_empty((num_experts_of(expert_offsets), grad.shape[1], x.shape[1]))
    return gradient.transpose(1, 2) if transposed else gradient


register_derivatives(
    "_grouped_mm_backward_weight",
    {
        "grad": "grouped_mm(x, grad_result, expert_offsets)",
        "x": "grouped_mm(grad, transpose(grad_result), expert_offsets)",
    },
)


register_fake_like("moe_ext::_grouped_mm_backward_weight_add_")


@torch.library.register_fake("moe_ext::_grouped_mm_backward_bias")
def _(grad: Tensor, expert_offsets: Tensor) -> Tensor:
    return grad.new_empty((num_experts_of(expert_offsets), grad.shape[1]))


def _bias_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    grad, expert_offsets = inputs
    ctx.num_rows = grad.shape[0]
    ctx.save_for_backward(expert_offsets)


def _bias_backward(ctx: Any, gradient_EM: Tensor) -> tuple[Tensor, None]:
    (expert_offsets,) = ctx.saved_tensors
    # Each row gets the gradient of its expert, which is the product of a column of ones with that
    # gradient.
    ones_N1 = gradient_EM.new_ones((ctx.num_rows, 1))
    return torch.ops.moe_ext.grouped_mm(ones_N1, gradient_EM[:, :, None], expert_offsets), None


register_autograd(
    "moe_ext::_grouped_mm_backward_bias", _bias_backward, setup_context=_bias_setup_context
)
