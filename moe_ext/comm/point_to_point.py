"""Messages between two ranks: over connections of their own, by number or in order.

A backend serves the messages of a group in turn, so that an all-to-all of the layers could stand
behind a tensor of another stage: these go over groups of their own. Gloo knows messages by number;
threads wait for them, and a wait for one looks for errors of other ranks, as those of collectives
do. NCCL knows their order alone; there streams wait, and the host goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import c10d, streams
from moe_ext.comm.failures import RankFailureError, naming_failed_ranks
from moe_ext.comm.groups import group_rank, group_ranks
from moe_ext.comm.pending import Pending
from moe_ext.comm.reports import wait_for_message
from moe_ext.comm.traffic import record_traffic
from moe_ext.comm.workers import Tasks


def goes_in_order(device: torch.device) -> bool:
    """True if messages of a device are `OrderedMessages`: its backend, NCCL, knows no tags."""
    return streams.has_streams(device)


class PointToPoint:
    """Sends tensors to ranks of a group, and receives theirs; all ranks make it alike.

    Args:
        group: the ranks, with a backend that knows tags (Gloo).
        device: where tensors live.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = c10d.twin_group(group, device)
        # By peer, sends and receives apart: none is waited for behind one of another rank.
        self._threads: dict[tuple[int, bool], Tasks] = {}

    def send(self, x: Tensor, rank: int, tag: int, *, operation: str) -> PeerMessage:
        """Begin to send a contiguous tensor, which must not change until the message has ended.

        Args:
            x: what to send.
            rank: of the group.
            tag: number of the message, which its receive has, too.
            operation: name for error messages.
        """
        record_traffic("send", x.nbytes)
        with naming_failed_ranks(self._group, operation):
            work = dist.isend(x, None, self._group, tag, group_dst=rank)
        return self._watch(work, x, (rank, True), operation)

    def receive(self, out: Tensor, rank: int, tag: int, *, operation: str) -> PeerMessage:
        """Begin to receive into a contiguous tensor; see `send`."""
        with naming_failed_ranks(self._group, operation):
            work = dist.irecv(out, None, self._group, tag, group_src=rank)
        return self._watch(work, out, (rank, False), operation)

    def _watch(self, work: Any, x: Tensor, way: tuple[int, bool], operation: str) -> PeerMessage:
        message = PeerMessage(work, x, self._group, operation)
        if way not in self._threads:
            self._threads[way] = Tasks("moe_ext.point_to_point")
        self._threads[way].start(message.watch)
        return message


class OrderedMessages:
    """The same over NCCL: a communicator of two ranks, with a stream, for each ordered pair.

    The messages of a pair come in the order of the calls, which have to be alike on both ranks, and
    stand behind none of another pair. One leaves when the current stream has come to its call, and
    `wait` lets the stream that is current then wait for it.

    Args:
        group: the ranks, with NCCL for the device.
        device: where tensors live.
        pairs: (sender, receiver) of all messages, ranks of the group; both ranks of a pair name it.
    """

    # NOTE: ProcessGroupNCCL has a stream for each communicator. It waits for the current stream at
    # a call, and `Work.wait` lets the current stream wait for it.

    def __init__(
        self, group: ProcessGroup, device: torch.device, pairs: Iterable[tuple[int, int]]
    ) -> None:
        self._group, self._rank, self._ranks = group, group_rank(group), group_ranks(group)
        self._of_pair: dict[tuple[int, int], ProcessGroup] = {}
        first = torch.zeros(1, device=device)
        # In one order on all ranks: nobody waits in a ring.
        for pair in sorted(set(pairs)):
            if self._rank in pair:
                members = sorted(self._ranks[rank] for rank in pair)
                self._of_pair[pair] = c10d.local_group(members, group, device)
                # The host waits for the other rank while NCCL connects, and not in a step.
                self._post(pair, first, 0, "OrderedMessages").wait()

    def send(self, x: Tensor, rank: int, tag: int, *, operation: str) -> Pending[Tensor]:
        """As `PointToPoint.send`; the number is for those who look at the messages."""
        record_traffic("send", x.nbytes)
        return self._post((self._rank, rank), x, tag, operation)

    def receive(self, out: Tensor, rank: int, tag: int, *, operation: str) -> Pending[Tensor]:
        """Begin to receive into a contiguous tensor; see `send`."""
        return self._post((rank, self._rank), out, tag, operation)

    def _post(self, pair: tuple[int, int], x: Tensor, tag: int, operation: str) -> Pending[Tensor]:
        if x.numel() == 0:
            return Pending.done(x)
        source, target = (self._ranks[rank] for rank in pair)
        with naming_failed_ranks(self._group, operation):
            if pair[0] == self._rank:
                work = dist.isend(x, target, self._of_pair[pair], tag)
            else:
                work = dist.irecv(x, source, self._of_pair[pair], tag)
        assert work is not None
        # It holds the tensor.
        return Pending.of_works([work], lambda: x, self._group, operation)


class PeerMessage:
    """A message underway."""

    def __init__(self, work: Any, x: Tensor, group: ProcessGroup, operation: str) -> None:
        self._work, self._x, self._group, self._operation = work, x, group, operation
        self._ended = threading.Event()
        self._error: Exception | None = None

    def watch(self) -> None:
        """Wait in a thread: a wait of Gloo that runs out of time closes the connections."""
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        """True if `wait` returns at once."""
        return self._ended.is_set() and self._error is None

    def wait(self) -> Tensor:
        """The tensor, once it has been sent or received.

        Raises:
            RankFailureError: a rank died, did not answer, or raised an error of its own; the
                message names it, and the messages after it are lost.
        """
        with naming_failed_ranks(self._group, self._operation):
            try:
                wait_for_message(self._ended, self._group)
            except RankFailureError as error:
                # It says what the other rank was at.
                raise RankFailureError(f"{self._operation}: {error}", error.ranks) from None
            if self._error is not None:
                raise self._error
        return self._x
