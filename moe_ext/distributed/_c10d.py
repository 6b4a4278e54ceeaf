"""The only file that imports private names of torch.distributed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


def default_store() -> c10d.Store:
    """Key-value store of the default process group."""
    return c10d._get_default_store()


def set_ddp_ignored(module: nn.Module, names: list[str]) -> None:
    """Have a later `DistributedDataParallel(module)` leave the named tensors alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def ddp_ignored(ddp: DistributedDataParallel) -> set[str]:
    """Names, relative to `ddp.module`, that the wrapper leaves alone."""
    return set(ddp.parameters_to_ignore)


def group_of_name(name: str) -> ProcessGroup | None:
    """The group with a `group_name`; None for an empty one."""
    if not name:
        return None
    group: ProcessGroup = c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


def group_timeout(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """Timeout of a group, for another one like it; None if its backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def flat_group(mesh: DeviceMesh) -> ProcessGroup:
    """The group of all ranks of a mesh, made once and kept with the mesh."""
    return mesh._flatten().get_group()


# How many groups of these ranks `new_local_group` has made: the same number on each of them.
_num_made: Counter[tuple[int, ...]] = Counter()


def new_local_group(ranks: Sequence[int], timeout: timedelta | None) -> ProcessGroup:
    """A group that only its members make, and no other rank of the job takes part in.

    torch names such a group by its ranks and by the number of groups that the process belongs to.
    Members that belong to unequal numbers of groups would wait for each other under different
    names, for ever; so the name is made here.
    """
    key = tuple(ranks)
    _num_made[key] += 1
    text = f"moe_ext/{'_'.join(map(str, key))}/{_num_made[key]}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    with mock.patch.object(c10d, "_hash_ranks_to_str", lambda _: name):
        return c10d.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
