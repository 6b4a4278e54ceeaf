"""Messages between two ranks, over process groups of their own.

A backend serves the messages of a group in order. In the group of the layers, an all-to-all could
queue behind a tensor for another pipeline stage; point-to-point messages therefore use groups of
their own. Gloo matches messages by tag: threads wait for them, and a wait also looks for reported
errors of other ranks, as waits for collectives do. NCCL matches messages by their order alone:
there a CUDA stream waits, and the host goes on.
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
    """Return True if messages of a device need `OrderedMessages`, because NCCL has no tags."""
    return streams.has_streams(device)


class PointToPoint:
    """Sends tensors to ranks of a group, and receives tensors from them, matched by tag.

    All ranks of the group construct it together.

    Args:
        group: the ranks, with a backend that has tags (Gloo).
        device: device of the tensors.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = c10d.twin_group(group, device)
        # Threads that wait, one for each peer and direction. In a single thread the wait for a slow
        # rank would delay the messages of the others.
        self._threads: dict[tuple[int, bool], Tasks] = {}

    def send(self, x: Tensor, rank: int, tag: int, *, operation: str) -> PeerMessage:
        """Begin to send a contiguous tensor, which must not change until the message has ended.

        Args:
            x: tensor to send.
            rank: receiver, as a rank of the group.
            tag: tag of the message; the receiver passes the same.
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
    """Point-to-point messages over NCCL, with a communicator for each pair of sender and receiver.

    Messages of a pair are matched by the order of the calls, which must be the same on both ranks.
    Messages of different pairs do not wait for each other. A message is sent when the current
    stream reaches the call. `wait` makes the stream that is current then wait for the message.

    Args:
        group: the ranks, with NCCL for the device.
        device: device of the tensors.
        pairs: (sender, receiver) of all messages, as ranks of the group. Both ranks of a pair must
            name it.
    """

    # NOTE: ProcessGroupNCCL has a stream for each communicator. At a call, that stream waits for
    # the current stream. `Work.wait` makes the current stream wait for that stream.

    def __init__(
        self, group: ProcessGroup, device: torch.device, pairs: Iterable[tuple[int, int]]
    ) -> None:
        self._group, self._rank, self._ranks = group, group_rank(group), group_ranks(group)
        self._of_pair: dict[tuple[int, int], ProcessGroup] = {}
        first = torch.zeros(1, device=device)
        # All ranks go through the pairs in the same order. Otherwise ranks could wait for each
        # other in a circle.
        for pair in sorted(set(pairs)):
            if self._rank in pair:
                members = sorted(self._ranks[rank] for rank in pair)
                self._of_pair[pair] = c10d.local_group(members, group, device)
                # The first message makes NCCL connect, for which the host waits. It is sent here
                # so that no training step has to wait for it.
                self._post(pair, first, 0, "OrderedMessages").wait()

    def send(self, x: Tensor, rank: int, tag: int, *, operation: str) -> Pending[Tensor]:
        """Begin to send, as `PointToPoint.send` does. The tag is not sent; traces show it."""
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
        # The lambda holds a reference to the tensor, which must outlive the message.
        return Pending.of_works([work], lambda: x, self._group, operation)


class PeerMessage:
    """A message underway."""

    def __init__(self, work: Any, x: Tensor, group: ProcessGroup, operation: str) -> None:
        self._work, self._x, self._group, self._operation = work, x, group, operation
        self._ended = threading.Event()
        self._error: Exception | None = None

    def watch(self) -> None:
        """Wait for the message; runs in a thread of `Tasks`.

        The thread waits without a short timeout, because Gloo closes its connections when a wait
        times out.
        """
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        """Return True if `wait` would return at once."""
        return self._ended.is_set() and self._error is None

    def wait(self) -> Tensor:
        """Wait until the tensor has been sent or received, and return it.

        Raises:
            RankFailureError: a rank died, did not answer, or raised an error; the message names
                the rank. Later messages of the group are lost.
        """
        with naming_failed_ranks(self._group, self._operation):
            try:
                wait_for_message(self._ended, self._group)
            except RankFailureError as error:
                # The text names the operation of the other rank. That of this rank is added.
                raise RankFailureError(f"{self._operation}: {error}", error.ranks) from None
            if self._error is not None:
                raise self._error
        return self._x
