"""Checks that all ranks call a collective alike, in one small message."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.distributed.collectives import share
from moe_ext.distributed.groups import check_group, group_ranks

# Fixed, so that ranks that call different operations understand each other.
_TEXT_BYTES = 1024


def resolve(group: ProcessGroup | None, operation: str) -> ProcessGroup | None:
    """The group to use: the default one for None; None where there is no torch.distributed."""
    check_group(group, operation, name="group")
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def check_call(
    operation: str,
    facts: Mapping[str, object],
    problem: str | None,
    group: ProcessGroup | None,
    device: torch.device,
    *,
    validate: bool,
) -> None:
    """Raise what is wrong with the arguments of this rank, or of any rank where `validate` is set.

    Args:
        operation: name for messages, compared like a fact.
        facts: what must be equal on every rank, by the name to use in the message.
        problem: "expected <arg> to be <rule>, got <value>", None if nothing is wrong here.
        group: ranks to compare with.
        device: where messages of the group live.
        validate: compare with the others. A problem of this rank is raised in any case.

    Raises:
        ValueError: on every rank of the group alike with `validate`.
    """
    if not validate or group is None or dist.get_world_size(group) == 1:
        if problem is not None:
            raise ValueError(f"{operation}: {problem}")
        return
    told = {"the operation": operation, **{name: str(value) for name, value in facts.items()}}
    ranks = group_ranks(group)
    calls = _exchange({"told": told, "problem": problem}, group, device, operation)
    for rank, call in zip(ranks, calls, strict=True):
        if call["problem"] is not None:
            raise ValueError(f"{operation}: {call['problem']} on rank {rank}")
    for name in told:
        values = [call["told"].get(name, "nothing") for call in calls]
        if any(value != values[0] for value in values):
            found = ", ".join(f"{v} on rank {r}" for r, v in zip(ranks, values, strict=True))
            raise ValueError(f"{operation}: expected {name} to be equal on every rank, got {found}")


def _exchange(
    call: dict[str, object], group: ProcessGroup, device: torch.device, operation: str
) -> list[dict[str, dict[str, str]]]:
    """What every rank says, in group order."""
    text = json.dumps(call).encode()
    if len(text) > _TEXT_BYTES:
        problem = f"expected arguments that can be told in {_TEXT_BYTES} bytes"
        problem = str(call["problem"] or problem)
        # Up to six bytes a character.
        text = json.dumps({"told": {}, "problem": problem[:128]}).encode()
    words = struct.unpack(f"<{_TEXT_BYTES // 8}q", text.ljust(_TEXT_BYTES))
    rows = share(words, group, device, operation=operation)
    return [json.loads(struct.pack(f"<{len(row)}q", *row)) for row in rows]


def non_finite(x: Tensor) -> bool:
    """Whether an element is NaN or infinite; one pass. NOTE: device-to-host sync."""
    if x.numel() == 0:
        return False
    low, high = torch.aminmax(x.detach())
    return not bool(torch.isfinite(low) & torch.isfinite(high))
