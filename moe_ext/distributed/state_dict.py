"""State dicts of whole models, whose parameters lie over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moe_ext.distributed.agreement import meet
from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.placement import placements


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model as one process would hold it, on every rank.

    One rank may write it by `torch.save` or `save_pretrained(dir, state_dict=...)`, and a model of
    any number of ranks takes its part of it by `load_state_dict`.

    Args:
        model: any module; its experts may lie over ranks.

    Returns:
        `model.state_dict()`, detached, with whole tensors, which are copies, instead of DTensors.

    Raises:
        RuntimeError: a rank of the groups did not call it within a minute.
        RankFailureError: a rank died.

    A collective: every rank of the groups that hold parts calls it, and each then holds all.
    """
    return gathered(model, model.state_dict(), operation="full_state_dict")


def gathered(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    operation: str,
    keep: bool = True,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """A state dict with whole tensors in the place of DTensors.

    Args:
        model: whose state it is.
        state: of `model.state_dict()`, or some of it.
        operation: name for error messages.
        keep: False for a rank that takes part and wants nothing.
        device: where to keep them; None leaves each where it is.
    """
    places = placements(model)
    parts = {name: places.get(name) for name, value in state.items() if is_dtensor(value)}
    for group in dict.fromkeys(place.group for place in parts.values() if place is not None):
        meet(operation, group)
    found = {}
    for name, value in state.items():
        if is_dtensor(value):
            place = parts[name]
            with naming_failed_ranks(None if place is None else place.group, operation):
                value = value.full_tensor()
            if place is not None and place.blocks > 1 and place.dim is not None:
                value = value.flatten(place.dim, place.dim + 1)
        if keep:
            kept = value.detach() if isinstance(value, torch.Tensor) else value
            found[name] = kept.to(device) if isinstance(kept, torch.Tensor) and device else kept
    return found
