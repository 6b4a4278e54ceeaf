"""Fake kernels of operators whose results are shaped like their arguments."""

from typing import Any

import torch
from torch import Tensor


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which operators compute and return sums, for tensors of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def register_fake_like(name: str, *places: int, laid_out: int = 0) -> None:
    """Registers a fake kernel with one result for each place, like the argument at that place.

    If the argument is None, its result is empty, and otherwise like the first result.

    Args:
        name: name of the operator, with its namespace.
        places: numbers of arguments; without any, the operator returns nothing.
        laid_out: number of results, from the first on, that have the strides of their arguments.
            Other results are contiguous.
    """

    def fake(*args: Any, **_options: Any) -> Any:
        likes = [args[place] for place in places]
        found = [torch.empty_like(like) for like in likes[:laid_out]]
        for like in likes[laid_out:]:
            found.append(likes[0].new_empty(0) if like is None else like.new_empty(like.shape))
        return tuple(found) if len(found) > 1 else found[0] if found else None

    torch.library.register_fake(name, fake)


def fake_gate(operator: str, logits: Tensor, top_k: int) -> tuple[Tensor, ...]:
    """Return the results that gates share: weights, experts, counts and sums of each expert."""
    torch._check(
        logits.dim() == 2,
        lambda: f"{operator}: expected logits to be a 2-D tensor [T, E], got {logits.dim()}-D",
    )
    num_tokens, num_experts = logits.shape
    acc = acc_dtype(logits.dtype)
    return (
        logits.new_empty((num_tokens, top_k), dtype=acc),
        logits.new_empty((num_tokens, top_k), dtype=torch.int64),
        logits.new_empty((num_experts,), dtype=torch.int64),
        logits.new_empty((num_experts,), dtype=acc),
    )


def keep_out_of_cuda_graphs(*names: str) -> None:
    """Tells torch's compiler that CUDA kernels of these operators wait for the device."""
    for name in names:
        namespace, _, operator = name.partition("::")
        tags = getattr(getattr(torch.ops, namespace), operator).default.tags
        tags.append(torch.Tag.cudagraph_unsafe)
