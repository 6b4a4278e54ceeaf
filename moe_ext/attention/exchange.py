"""Point-to-point hops of a ring, posted early and awaited late.

Shapes: none; messages are flat rows of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.distributed import ring_exchange
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.traffic import record_traffic


@dataclass
class Hop:
    """Messages underway; keeps what is being sent alive until `wait`."""

    group: ProcessGroup | None
    operation: str
    underway: ring_exchange.Hop | None = None

    def wait(self) -> Tensor | None:
        """What arrived, after all that was posted is done; None where nothing was expected."""
        if self.underway is None:
            return None
        with naming_failed_ranks(self.group, self.operation):
            return self.underway.wait()


class Exchange:
    """Posts the messages of one pass around a ring.

    Every rank computes by arithmetic what it sends and receives at each stage, so that posts match
    without any talk; the tag is the stage and the kind of message.

    Args:
        group: the ranks of the ring; None is this process alone.
        operation: name for error messages.
    """

    def __init__(self, group: ProcessGroup | None, operation: str) -> None:
        self.group = group
        self.operation = operation
        self._ring = None if group is None else ring_exchange.ring_exchange(group)

    def post(
        self,
        sends: Sequence[tuple[Tensor, int]],
        buffer: Tensor | None,
        source: int,
        tag: int,
    ) -> Hop:
        """Start to send (message, rank) pairs, and to fill `buffer` from rank `source`.

        Ranks are those of the group. Empty messages are left out on both sides.
        """
        if self._ring is None:
            assert not sends and buffer is None, "one process has nobody to talk to"
            return Hop(self.group, self.operation)
        for message, _ in sends:
            record_traffic("send", message.nbytes)
        with naming_failed_ranks(self.group, self.operation):
            underway = self._ring.post(sends, buffer, source, tag)
        return Hop(self.group, self.operation, underway)


class Buffers:
    """Two byte buffers that take turns: one is read and sent while the other is filled."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = num_bytes
        self._device = device
        self._pair: list[Tensor | None] = [None, None]

    def take(self, turn: int, num_bytes: int) -> Tensor:
        """The buffer of a turn, cut to a length."""
        found = self._pair[turn & 1]
        if found is None:
            found = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
            self._pair[turn & 1] = found
        return found[:num_bytes]
