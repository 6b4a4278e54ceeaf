"""Fake kernels of operators whose results are shaped like their arguments."""

from typing import Any

import torch


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operators on tensors of a dtype compute, and in which sums come."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def register_fake_like(name: str, *places: int) -> None:
    """Registers a fake kernel: one result for each place, like the argument that stands there.

    Args:
        name: of the operator, with its namespace.
        places: numbers of arguments; without any, the operator returns nothing.
    """

    def fake(*args: Any, **_options: Any) -> Any:
        found = tuple(args[place].new_empty(args[place].shape) for place in places)
        return found if len(found) > 1 else found[0] if found else None

    torch.library.register_fake(name, fake)


def keep_out_of_cuda_graphs(*names: str) -> None:
    """Tells torch's compiler that CUDA kernels of these operators wait for the device."""
    for name in names:
        namespace, _, operator = name.partition("::")
        tags = getattr(getattr(torch.ops, namespace), operator).default.tags
        tags.append(torch.Tag.cudagraph_unsafe)
