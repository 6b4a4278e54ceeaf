"""Finds the product over all experts that `grouped_mm` uses on CUDA, as the user chose it.

The environment variable `MOE_EXT_GROUPED_MM` names one of `CHOICES`; the default is "auto".

Shape suffixes: E experts, K input features, M output features, N rows.
"""

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ext.ops.autograd import refuse_second_derivative

# The C++ operator reads the variable, too, and decides between torch's product and ours.
CHOICES = {
    "auto": "torch's product for bfloat16 on capability 9 and 10, ours for all else",
    "own": "ours",
    "quack": "that of quack-kernels for 16 bits on capability 9 to 12, which gathers the tokens of "
    "gated experts on one rank, else as auto",
}
CHOSEN = os.environ.get("MOE_EXT_GROUPED_MM", "auto")

Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def chosen_product(x_NK: Tensor, weight_EMK: Tensor) -> Product | None:
    """Return the product that the user chose for these tensors, None if the operator decides.

    Raises:
        ValueError: the choice is unknown.
        RuntimeError: the chosen library is not installed, or could not be loaded.
    """
    if CHOSEN not in CHOICES:
        raise ValueError(
            f"grouped_mm: expected MOE_EXT_GROUPED_MM to be one of {', '.join(CHOICES)}, got "
            f"{CHOSEN!r}"
        )
    if CHOSEN != "quack":
        return None
    if isinstance(quack(), str):
        raise RuntimeError(
            f"grouped_mm: expected quack-kernels for MOE_EXT_GROUPED_MM=quack, got {quack()}; "
            "`pip install quack-kernels`, or choose another"
        )
    return _quack_product if _quack_serves(x_NK, weight_EMK) else None


def state() -> str:
    """Return a text on the choice, for `info`; loads nothing."""
    if CHOSEN not in CHOICES:
        return f"{CHOSEN!r}, which is none of {', '.join(CHOICES)}"
    found = ""
    if CHOSEN == "quack":
        try:
            found = f" (quack-kernels {importlib.metadata.version('quack-kernels')})"
        except importlib.metadata.PackageNotFoundError:
            found = " (quack-kernels is not installed)"
    passed = "".join(sorted({f"; gather passed over: {why}" for why in faults.values() if why}))
    return f"{CHOSEN}: {CHOICES[CHOSEN]}{found}{passed}; MOE_EXT_GROUPED_MM chooses"


# Maps device and dtype to the mistake in a trial of the products with gather; empty if right.
faults: dict[tuple[torch.device, torch.dtype], str] = {}


@functools.cache
def quack() -> Any:
    """Return the module of quack's products, or a text that says why it does not load."""
    try:
        return importlib.import_module("quack.gemm_interface")
    except Exception as error:
        # The import compiles code and asks for a device, so that any error may come.
        return f"{type(error).__name__}: {error}"


def _quack_serves(x_NK: Tensor, weight_EMK: Tensor) -> bool:
    halves = (torch.bfloat16, torch.float16)
    whole = x_NK.shape[1] % 8 == 0 and weight_EMK.shape[1] % 8 == 0
    filled = 0 not in (*x_NK.shape, *weight_EMK.shape)
    return filled and whole and x_NK.dtype in halves and 9 <= _capability(x_NK.device) <= 12


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _quack_product(
    x_NK: Tensor, weight_EMK: Tensor, expert_offsets: Tensor, bias_EM: Tensor | None
) -> Tensor:
    return _Quack.apply(x_NK, weight_EMK, expert_offsets, bias_EM)


class _Quack(torch.autograd.Function):
    """Results are zeroed first: quack may leave out rows of no expert, and experts without rows."""

    @staticmethod
    def forward(
        ctx: Any, x_NK: Tensor, weight_EMK: Tensor, expert_offsets: Tensor, bias_EM: Tensor | None
    ) -> Tensor:
        ends = expert_offsets.int()
        if expert_offsets.dtype == torch.int32:
            ends = torch.nn.functional.pad(ends, (1, 0))
        ctx.save_for_backward(x_NK, weight_EMK, expert_offsets, ends)
        y_NM = x_NK.new_zeros((x_NK.shape[0], weight_EMK.shape[1]))
        return _call(x_NK, weight_EMK.transpose(1, 2), y_NM, bias=bias_EM, cu_seqlens_m=ends)

    @staticmethod
    @refuse_second_derivative("grouped_mm")
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight_EMK, expert_offsets, ends = ctx.saved_tensors
        grad_NM = grad_NM.contiguous()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _call(grad_NM, weight_EMK, torch.zeros_like(x_NK), cu_seqlens_m=ends)
        if ctx.needs_input_grad[1]:
            rows = x_NK.contiguous()
            grad_weight = rows.new_zeros(weight_EMK.shape)
            _call(grad_NM.t(), rows, grad_weight, cu_seqlens_k=ends)
        if ctx.needs_input_grad[3]:
            grad_bias = torch.ops.moe_ext._grouped_mm_backward_bias(grad_NM, expert_offsets)
        return grad_x, grad_weight, None, grad_bias


def _call(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> Tensor:
    # Tuning would time kernels at the first use of a shape, and counts of rows change with every
    # batch.
    quack().gemm(a, b, out=out, tuned=False, **options)
    return out
