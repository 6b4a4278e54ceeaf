"""Finds the ranks of a group that are on one host, and the memory through which they exchange.

Gloo sends over sockets, with threads that need the cores on which the ranks compute. In a small
layer this takes half of the time. csrc/runtime/shared_memory.cpp instead copies rows through memory
that all ranks of the host map. It serves CPU tensors of Gloo groups, between processes of one host
and one network namespace. Each process must have `moe_ext._runtime`, and must be allowed to open
the files of the others. Gloo carries all other messages. Rows arrive with the same bits either way.
Reductions add in the order of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library
from moe_ext.comm import c10d
from moe_ext.comm.failures import network_identity, process_identity, remember_processes
from moe_ext.comm.groups import backends, group_rank, group_ranks, group_size

# Timeout in seconds for a group whose backend reports none. It equals the default of c10d.
_SECONDS = 1800.0


@dataclass(frozen=True)
class Neighbours:
    """The ranks of a group that share memory with this one.

    Attributes:
        memory: `moe_ext._runtime.SharedMemory` of the ranks `first` to `end - 1`, which are on this
            host. None if Gloo carries everything; the range then holds this rank alone.
        first: first rank of the range, as a rank of the group.
        end: rank after the last of the range.
        are_all: True if the range is the whole group.
        over_network: True if ranks of the group are in different network namespaces.
    """

    memory: Any = None
    first: int = 0
    end: int = 0
    are_all: bool = False
    over_network: bool = False


# For devices other than the CPU, whose collectives do not go through shared memory.
NOBODY = Neighbours()
# Results of `meet`, by group.
known: weakref.WeakKeyDictionary[ProcessGroup, Neighbours] = weakref.WeakKeyDictionary()


def meet(group: ProcessGroup, tell: Callable[[list[int]], list[list[int]]]) -> Neighbours:
    """Find the neighbours of this rank. All ranks of a group call it before their first message.

    Args:
        group: the ranks.
        tell: function that gathers integers of every rank, in group order.
    """
    memory: Any = None
    me, place = group_rank(group), (-1, 0)
    module: Any = _runtime_library.load()
    if hasattr(module, "SharedMemory") and backends(group).get("cpu") == "gloo":
        timeout = c10d.group_timeout(group, torch.device("cpu"))
        seconds = _SECONDS if timeout is None else timeout.total_seconds()
        memory = module.SharedMemory(me, group_size(group), seconds)
        place = memory.place()
    rows = tell([*process_identity(), network_identity(), *place])
    remember_processes(group_ranks(group), [(host, process) for host, process, *_ in rows])
    hosts = [(host, network) for host, _, network, *_ in rows]
    over_network = len({network for _, network in hosts}) > 1
    near = Neighbours(first=me, end=me + 1, over_network=over_network)
    if len(set(hosts)) < len(hosts):
        here = [rank for rank, host in enumerate(hosts) if host == hosts[me]]
        first, end = here[0], here[-1] + 1
        # The ranks of this host must be consecutive, because the rows for them are cut out of a
        # message as one slice.
        can = memory is not None and len(here) == end - first
        for rank in here if can else ():
            _, process, _, fd, token = rows[rank]
            can = can and fd >= 0 and memory.open(rank, process, fd, token)
        told = tell([int(can)])
        if len(here) > 1 and all(each for (each,) in told[first:end]):
            near = Neighbours(memory, first, end, end - first == len(hosts), over_network)
    known[group] = near
    return near
