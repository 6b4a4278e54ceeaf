"""Queries about process groups. A group of None stands for this process alone."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_ext.comm.c10d import flat_group as flat_group
from moe_ext.comm.c10d import group_of_name as group_of_name
from moe_ext.comm.c10d import small_message_device as small_message_device


class GroupHandle:
    """Holds a process group inside a module; `copy.deepcopy` of the module shares the group."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupHandle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is None:
            return GroupHandle, (None,)
        raise TypeError(
            "pickle: expected a module without a process group, got one of the ranks "
            f"{list(group_ranks(self.group))}; save its state by "
            "moe_ext.distributed.checkpoint.save, or what moe_ext.distributed.full_state_dict "
            "returns, and build the module anew"
        )


def check_group(group: object, owner: str, *, name: str = "ep_group") -> None:
    """Raise TypeError for `owner` unless its argument is None or a group of this rank."""
    # On ranks outside the group, `new_group` returns an integer instead of a ProcessGroup.
    if group is not None and not isinstance(group, ProcessGroup):
        # A mesh was given: the message names the attribute or method that returns its group.
        held = [each for each in (name, "get_group") if hasattr(group, each)]
        call = "()" * (held == ["get_group"])
        raise TypeError(
            f"{owner}: expected {name} to be None or a ProcessGroup that this rank belongs to, "
            f"got {group!r}" + (f"; its {held[0]}{call} is one" if held else "")
        )


def backends(group: ProcessGroup) -> dict[str, str]:
    """Names of a group's backends by type of device: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    return {device: name for device, name in pairs}


def resolve_group(group: ProcessGroup | None, owner: str) -> ProcessGroup | None:
    """Return the group, the default group for None, or None without torch.distributed.

    Raises:
        TypeError: group is no group of this rank.
        RuntimeError: a launcher started several processes, and this one has joined no group.
    """
    check_group(group, owner, name="group")
    if group is None and _has_joined(owner):
        return dist.group.WORLD
    return group


def shares_communicator(group: ProcessGroup | None) -> bool:
    """Return True for the default group over NCCL, in whose queue all other users' messages are."""
    if group_size(group) == 1 or group is not dist.group.WORLD:
        return False
    return "nccl" in dist.get_backend_config(group)


def _has_joined(owner: str) -> bool:
    """Return True if there is a default group.

    RuntimeError if there is none but a launcher started several processes. Each of them would
    otherwise train alone and write the same files.
    """
    if is_initialized():
        return True
    started = os.environ.get("WORLD_SIZE", "")
    if started.isdecimal() and int(started) > 1:
        raise RuntimeError(
            f"{owner}: expected torch.distributed.init_process_group() to have run, since "
            f"WORLD_SIZE says that {started} processes were started, got no process group; for a "
            "process that works alone, unset WORLD_SIZE"
        )
    return False


def is_initialized() -> bool:
    """True if there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def join_processes(backend: str) -> None:
    """Make the default process group of the processes that torchrun started."""
    dist.init_process_group(backend)


def leave_processes() -> None:
    """End the default process group."""
    dist.destroy_process_group()


def global_rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if _has_joined("torch.distributed") else 0


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in the group; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def group_ranks(group: ProcessGroup) -> tuple[int, ...]:
    """Global ranks of the members, in group order."""
    return tuple(dist.get_process_group_ranks(group))


def world_size() -> int:
    """Number of ranks of the default group; 1 when torch.distributed is not initialised."""
    return dist.get_world_size() if _has_joined("torch.distributed") else 1
