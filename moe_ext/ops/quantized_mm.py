"""Products with weights of 8 or 4 bits, for few tokens.

Shape suffixes: T tokens, K columns, M rows of a weight, B blocks of a row, n outliers.
"""

import torch
from torch import Tensor

from moe_ext.ops.grouped_gemm import num_experts_of


def quantized_mm(
    x_TK: Tensor,
    codes: Tensor,
    scales_MB: Tensor,
    outliers_n: Tensor,
    outlier_columns_n: Tensor,
    outlier_offsets: Tensor,
    *,
    bits: int = 8,
    expert_offsets: Tensor | None = None,
) -> Tensor:
    r"""Computes ``x @ weight.T`` with a weight of codes, and of outliers that are exact.

    .. math::
        y_{tm} = \sum_k x_{tk} (s_{m,k/block} q_{mk} + o_{mk})

    If reading the weight takes the time, the product takes a half or a quarter of that in bfloat16.

    Args:
        x_TK (Tensor[T, K]): float32 or bfloat16.
        codes (Tensor[M, K bits / 8]): uint8, of `quantize_blockwise`.
        scales_MB (Tensor[M, B]): float32; a block is a multiple of 32 columns.
        outliers_n (Tensor[n]): in the dtype of x; codes are zero in their places.
        outlier_columns_n (Tensor[n]): int32 in [0, K).
        outlier_offsets (Tensor[M + 1]): int64; row m has outliers [offsets[m], offsets[m + 1]).
        bits (int): 8 or 4.
        expert_offsets (Tensor[E + 1]): offsets of the tokens, as in `grouped_mm`. The weight is
            then `[E M, K]`, with E experts one after the other, and a token is multiplied by that
            of its expert. On CUDA that is one launch, the host need not know the offsets, and
            offsets that leave the tokens are not refused.

    Returns:
        Tensor[T, M]: in the dtype of x; summed in float32. Tokens of no expert get zeros.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or, on CPU alone, value.

    Deterministic, with the same bits on every instruction set and on CUDA. Outliers out of range
    are left out on CUDA. No gradient.

    Reference: Dettmers et al., SpQR, 2023 (arXiv 2306.03078), section 4, for outliers kept apart.
    """
    return torch.ops.moe_ext.quantized_mm(
        x_TK, codes, scales_MB, outliers_n, outlier_columns_n, outlier_offsets, bits, expert_offsets
    )


@torch.library.register_fake("moe_ext::quantized_mm")
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    outliers: Tensor,
    outlier_columns: Tensor,
    outlier_offsets: Tensor,
    bits: int,
    expert_offsets: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[0] // num_experts_of(expert_offsets)))
