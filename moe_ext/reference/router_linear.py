"""The router's product written with PyTorch's own functions.

Shape suffixes: T tokens, D model, E experts.
"""

import torch
from torch import Tensor


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Same as `moe_ext.ops.router_logits`, with upcast tokens."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    return x_TD.to(dtype) @ weight_ED.to(dtype).t()
