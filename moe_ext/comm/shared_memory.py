"""The ranks of a group that are on one host, and the memory through which they exchange.

Gloo sends over sockets, by threads that need the cores on which the ranks compute: half of the time
of a small layer. csrc/runtime/shared_memory.cpp copies rows through memory instead, which all ranks
of the host map. It is used for CPU tensors of groups over Gloo, between processes of one host and
one network, where every one of them has `moe_ext._runtime` and may open the files of the others;
Gloo carries the rest. Rows have the same bits; sums go in the order of ranks.
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

# Timeout of a group that tells none: that of c10d.
_SECONDS = 1800.0


@dataclass(frozen=True)
class Neighbours:
    """The ranks of a group that share memory with this one.

    Attributes:
        memory: `moe_ext._runtime.SharedMemory` of the ranks from `first` up to `end`, which are on
            this host; None where Gloo carries everything, and they are this rank alone.
        first: rank of the group.
        end: rank of the group.
        are_all: they are the whole group.
        over_network: some ranks of the group are in another network than others.
    """

    memory: Any = None
    first: int = 0
    end: int = 0
    are_all: bool = False
    over_network: bool = False


# On devices whose collectives are their own.
NOBODY = Neighbours()
# Neighbours by group, of those whose ranks have met.
known: weakref.WeakKeyDictionary[ProcessGroup, Neighbours] = weakref.WeakKeyDictionary()


def meet(group: ProcessGroup, tell: Callable[[list[int]], list[list[int]]]) -> Neighbours:
    """Find the neighbours of this rank; all ranks of a group do, before their first message.

    Args:
        group: the ranks.
        tell: gathers integers of every rank, in group order.
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
        # Rows for them are cut out of a message as one piece.
        can = memory is not None and len(here) == end - first
        for rank in here if can else ():
            _, process, _, fd, token = rows[rank]
            can = can and fd >= 0 and memory.open(rank, process, fd, token)
        told = tell([int(can)])
        if len(here) > 1 and all(each for (each,) in told[first:end]):
            near = Neighbours(memory, first, end, end - first == len(hosts), over_network)
    known[group] = near
    return near
