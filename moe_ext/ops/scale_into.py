"""A scaled copy in some dtype, and whether all of it is finite."""

import torch
from torch import Tensor


def scale_into_(out: Tensor, x: Tensor, *, scale: float) -> Tensor:
    r"""Writes a tensor times a factor into another one, and checks the result, in one pass.

    .. math:: out_i = round(x_i \cdot scale)

    The product is taken in float32 and rounded to the nearest, ties to even. For float64 it is
    taken in float64, and goes to shorter dtypes through float32, as `torch.Tensor.to` does.

    Args:
        out (Tensor): float32, float64, bfloat16 or float16, contiguous, of any shape; overwritten.
            It is ``x`` itself, or in memory of its own.
        x (Tensor): of the same dtypes, contiguous, with as many elements.
        scale (float): rounded to float32, unless x is float64.

    Returns:
        Tensor[]: bool; True if some element of ``out`` is NaN or infinite. A finite product may
        become infinite when it is rounded.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or memory; nothing has changed
            then.

    Deterministic; never synchronises.
    """
    nonfinite: Tensor = torch.ops.moe_ext.scale_into_(out, x, scale)
    torch.autograd.graph.increment_version(out)
    return nonfinite


@torch.library.register_fake("moe_ext::scale_into_")
def _(out: Tensor, x: Tensor, scale: float) -> Tensor:
    return x.new_empty((), dtype=torch.bool)
