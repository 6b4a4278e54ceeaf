"""The only file that imports private names of torch.distributed."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

# torch 2.13 renamed these functions, and warns about the earlier names.
ALL_GATHER, REDUCE_SCATTER = (
    new if hasattr(c10d, new) else old
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)
# From torch 2.13 on, `new_group` can keep the given order of ranks instead of sorting them.
IN_ORDER: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(c10d.new_group).parameters else {}
)
# Raised inside a recomputation of `torch.utils.checkpoint` as soon as all saved tensors are there.
END_OF_RECOMPUTATION: type[Exception] = torch.utils.checkpoint._StopRecomputationError
# Returns the number of the backward pass that this thread runs, -1 outside of a backward pass.
backward_number: Callable[[], int] = torch._C._current_graph_task_id


def default_store() -> c10d.Store:
    """Key-value store of the default process group."""
    return c10d._get_default_store()


def add_ddp_ignored(module: nn.Module, names: Iterable[str]) -> None:
    """Add names to the tensors that a later `DistributedDataParallel(module)` leaves alone."""
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    # DDP looks up parameters of the root module under a name with a leading dot. torch.compile
    # wraps the module, which adds the prefix `_orig_mod`.
    found = [form for name in names for form in (name, f".{name}", f"_orig_mod.{name}")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, list(dict.fromkeys([*known, *found]))
    )


def ddp_ignored(ddp: DistributedDataParallel) -> set[str]:
    """Names, relative to `ddp.module`, that the wrapper leaves alone."""
    return set(ddp.parameters_to_ignore)


def inner_model(model: nn.Module) -> nn.Module:
    """Return the module inside any nesting of `DistributedDataParallel` and `torch.compile`."""
    while True:
        is_ddp = isinstance(model, DistributedDataParallel)
        inner: Any = model.module if is_ddp else model._modules.get("_orig_mod")
        if inner is None:
            return model
        model = inner


def ddp_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """The communication hooks of a wrapper, with their states."""
    return list(getattr(ddp, "_comm_hooks", ()))


def output_tensors(output: Any) -> list[Tensor]:
    """The tensors that DDP finds in what a module returns."""
    return [found for found in _find_tensors(output) if isinstance(found, Tensor)]


def active_ddp() -> DistributedDataParallel | None:
    """The wrapper whose forward pass runs, `torch.distributed._composable.replicate`'s too."""
    return DistributedDataParallel._get_active_ddp_module()


def ddp_of_replicate(module: nn.Module) -> DistributedDataParallel | None:
    """The wrapper that torch's `replicate(module)` has made in its first forward pass, if any."""
    composable = sys.modules.get("torch.distributed._composable.replicate")
    state = None if composable is None else composable.replicate.state(module)
    return getattr(state, "_ddp", None)


def expects_uneven_inputs(ddp: Any) -> bool:
    """True if a wrapper runs inside a context of uneven inputs, such as `DDP.join()`."""
    return bool(ddp._join_config.enable)


def call_after_backward(function: Callable[[], None], *, num_before: int = 3) -> None:
    """Call a function when the current backward pass has ended.

    With the default the function runs after DDP's own end of the pass, and does not run if a
    communication hook raised there.

    Args:
        function: to be called.
        num_before: number of callbacks before the call, each of which queues the next. A callback
            that is queued by a callback runs after all that were queued before. DDP finishes in the
            first or second callback of such a chain, and hooks raise by the third.
    """
    queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
    for _ in range(num_before):
        function = functools.partial(queue, function)
    queue(function)


def group_of_name(name: str) -> ProcessGroup | None:
    """The group with a `group_name`; None for an empty one."""
    if not name:
        return None
    return c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def group_timeout(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of a group, to make another like it; None if its backend has none."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of a mesh in one dimension, made once and kept with the mesh."""
    return mesh._flatten()


def small_message_device(group: ProcessGroup | None) -> torch.device:
    """The device for a message of a few numbers: the CPU if the group has a backend for it."""
    return torch.device("cpu" if group is None else c10d._get_object_coll_device(group))


def flat_group(mesh: DeviceMesh) -> ProcessGroup:
    """The group of all ranks of a mesh."""
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD  # type: ignore[return-value]
    return mesh.get_group() if mesh.ndim == 1 else flat_mesh(mesh).get_group()


# Counters by default group. A process may end its default group and join another, whose members
# have counted differently before.
_times: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def times() -> Counter[str]:
    """Return counters of joint calls of the default group, which are equal on all of its ranks."""
    return _times.setdefault(c10d._get_default_group(), Counter())


def local_group(ranks: Sequence[int], like: ProcessGroup, device: torch.device) -> ProcessGroup:
    """Make a group of some global ranks, with the backends and the timeout of another group.

    The rank in the group is the place in `ranks`. Only the members make this call, and each member
    makes it equally often.

    torch would name the group by its ranks and by the number of groups that the process belongs to.
    If members belong to different numbers of groups, their names would differ and they would wait
    for each other for ever. The name is therefore made here.
    """
    key = f"moe_ext/{'_'.join(map(str, ranks))}"
    times()[key] += 1
    text = f"{key}/{times()[key]}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    config = dist.get_backend_config(like)
    backend = None if config == dist.get_backend_config() else config
    # If a device is bound to the default group, NCCL would make the new group by a split of the
    # default group, which is a collective of all ranks. `_get_split_source` prevents that.
    with (
        mock.patch.object(c10d, "_hash_ranks_to_str", lambda _: name),
        mock.patch.object(c10d, "_get_split_source", lambda _: None, create=True),
    ):
        return c10d.new_group(
            list(ranks),
            timeout=group_timeout(like, device),
            backend=backend,
            use_local_synchronization=True,
            **IN_ORDER,
        )


def twin_group(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """Make a second group of the same ranks, for messages that are not in order with the first."""
    return local_group(dist.get_process_group_ranks(group), group, device)
