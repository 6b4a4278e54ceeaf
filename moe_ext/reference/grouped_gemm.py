"""Grouped matrix product written as a loop over experts.

Shape suffixes: E experts, K input features, M output features, N rows.
"""

import torch
from torch import Tensor


def grouped_mm(
    x_NK: Tensor, weight_EMK: Tensor, expert_offsets: Tensor, *, bias_EM: Tensor | None = None
) -> Tensor:
    """Same as `moe_ext.ops.grouped_mm`: one product per expert, zeros for the rows of none."""
    starts = [0] if expert_offsets.dtype == torch.int32 else []
    offsets = [*starts, *expert_offsets.tolist()]
    num_rows, dim = x_NK.shape[0], weight_EMK.shape[1]
    parts = [x_NK.new_zeros((offsets[0], dim))]
    for e, weight_MK in enumerate(weight_EMK):
        y = x_NK[offsets[e] : offsets[e + 1]] @ weight_MK.T
        parts.append(y if bias_EM is None else y + bias_EM[e])
    parts.append(x_NK.new_zeros((num_rows - offsets[-1], dim)))
    return torch.cat(parts)
