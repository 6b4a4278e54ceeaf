"""Messages between two ranks: over connections of their own, with threads that wait for them.

A backend serves the messages of a group in turn, so that an all-to-all of the layers could stand
behind a tensor of another stage: these go over a group of their own. A wait for one looks for
errors of other ranks, as those of collectives do.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import collectives
from moe_ext.comm.failures import RankFailureError, naming_failed_ranks
from moe_ext.comm.reports import wait_for_message
from moe_ext.comm.traffic import record_traffic
from moe_ext.comm.workers import Tasks


class PointToPoint:
    """Sends tensors to ranks of a group, and receives theirs; all ranks make it alike.

    Args:
        group: the ranks, with a backend that knows tags (Gloo).
        device: where tensors live.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = collectives.twin_group(group, device)
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
