"""Counts of tokens that are summed over forward passes, each token once.

Shapes: E experts, C counters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.nn._recompute import in_backward

# An operator takes numbers, not groups: a group travels as its id, 0 for none.
_groups: weakref.WeakValueDictionary[int, ProcessGroup] = weakref.WeakValueDictionary()


def group_id(group: ProcessGroup | None) -> int:
    """The number under which `tally_once` knows a group."""
    if group is None:
        return 0
    _groups[id(group)] = group
    return id(group)


# An operator, so that a compiled layer asks at run time whether it is being recomputed.
@torch.library.custom_op("moe_ext::_tally_once", mutates_args={"total_C"})
def tally_once(total_C: Tensor, counts_C: Tensor, group: int) -> None:
    """Add counts, summed over a group, to a running total, unless a backward pass is running.

    Args:
        total_C: running total, `[C]` int64, in place.
        counts_C: `[C]` int64 of this forward pass.
        group: of `group_id`.
    """
    if in_backward():
        return
    if group:
        counts_C = counts_C.clone()
        with naming_failed_ranks(_groups[group], "Balance"):
            dist.all_reduce(counts_C, group=_groups[group])
    total_C += counts_C


@tally_once.register_fake
def _(total_C: Tensor, counts_C: Tensor, group: int) -> None:
    return None


def moved(counts_C: Tensor, fn: Callable[..., Any]) -> Tensor:
    """Counts on the device to which `fn` of `nn.Module._apply` moves a tensor."""
    device = fn(counts_C).device
    if device == counts_C.device:
        return counts_C
    if counts_C.is_meta or device.type == "meta":
        return torch.zeros_like(counts_C, device=device)
    return counts_C.to(device)
