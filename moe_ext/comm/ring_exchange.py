"""Messages of ring attention, posted early and awaited late.

The compiled `moe_ext._runtime.RingExchange` posts them over c10d. Without it,
`PythonRingExchange` does the same. Messages are flat rows of bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library
from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.pending import Pending
from moe_ext.comm.traffic import record_traffic


class Exchange:
    """Posts the messages of one pass around a ring, counts them, and names ranks that fail.

    Every rank computes from its position what it sends and receives at each stage, so sends and
    receives match without an exchange of sizes. The tag encodes the stage and the kind of message.

    Args:
        group: the ranks of the ring; None is this process alone.
        operation: name for error messages.
    """

    def __init__(self, group: ProcessGroup | None, operation: str) -> None:
        self._group, self._operation = group, operation
        self._ring = None if group is None else ring_exchange(group)

    def post(
        self, sends: Sequence[tuple[Tensor, int]], buffer: Tensor | None, source: int, tag: int
    ) -> Pending[Tensor | None]:
        """Post messages as `PythonRingExchange.post` does."""
        if self._ring is None:
            assert not sends and buffer is None, "one process has nobody to talk to"
            return Pending.done(None)
        for message, _ in sends:
            record_traffic("send", message.nbytes)
        with naming_failed_ranks(self._group, self._operation):
            hop: Any = self._ring.post(sends, buffer, source, tag)
        return Pending.of_works([hop], lambda: buffer, self._group, self._operation)


class Buffers:
    """Two byte buffers used alternately: one is read and sent while the other is filled."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = num_bytes
        self._device = device
        self._pair: list[Tensor | None] = [None, None]

    def take(self, turn: int, num_bytes: int) -> Tensor:
        """Return the first `num_bytes` bytes of the buffer for a turn."""
        found = self._pair[turn & 1]
        if found is None:
            found = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
            self._pair[turn & 1] = found
        return found[:num_bytes]


def ring_exchange(group: ProcessGroup) -> PythonRingExchange:
    """Return the compiled exchange, or the one in Python if it is not built for this torch."""
    module = _runtime_library.load()
    return PythonRingExchange(group) if module is None else module.RingExchange(group)


def _require(condition: bool, argument: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"RingExchange: expected {argument} to be {rule}, got {value}")


def _overlap(a: Tensor, b: Tensor) -> bool:
    begin_a, begin_b = a.data_ptr(), b.data_ptr()
    return begin_a < begin_b + b.nbytes and begin_b < begin_a + a.nbytes


class PythonHop:
    """Messages that `PythonRingExchange.post` posted."""

    def __init__(self, sent: list[Tensor], received: Tensor | None) -> None:
        self.sent = sent
        self.received = received
        self.works: list[dist.Work] = []

    def wait(self) -> Tensor | None:
        """Wait for all messages of the hop, and return the filled buffer, if there is one."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], []
        return self.received

    def sends(self, memory: Tensor) -> bool:
        """Return True if part of `memory` is being sent."""
        return any(_overlap(message, memory) for message in self.sent)

    def fills(self, memory: Tensor) -> bool:
        """Return True if part of `memory` is being received into."""
        return self.received is not None and _overlap(self.received, memory)


class PythonRingExchange:
    """Posts the messages of one pass around a ring; for one thread at a time.

    This is the Python version of `csrc/runtime/ring_exchange.cpp`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._underway: list[weakref.ref[PythonHop]] = []

    def post(
        self, sends: Sequence[tuple[Tensor, int]], buffer: Tensor | None, source: int, tag: int
    ) -> PythonHop:
        """Start to send (message, rank) pairs and to fill `buffer` from rank `source`.

        Ranks are numbered as in the group. Empty messages are left out by sender and receiver. The
        returned hop holds references to its tensors. Memory of a hop that is underway cannot be
        filled by another hop.

        Raises:
            ValueError: a message is not a row of bytes or is in use, or a rank is not in the group.
            RuntimeError: the backend failed.
        """
        for message, rank in sends:
            self._check(message, "a message", rank, "a destination")
        if buffer is not None:
            self._check(buffer, "the buffer", source, "the source")
        messages = [(message, rank) for message, rank in sends if message.numel()]
        filled = buffer if buffer is not None and buffer.numel() else None
        hop = PythonHop([message for message, _ in messages], buffer)
        if not messages and filled is None:
            return hop
        self._check_free(messages, filled, tag)
        group = self._group
        posts = [dist.P2POp(dist.isend, x, None, group, tag, rank) for x, rank in messages]
        if filled is not None:
            receive = dist.P2POp(dist.irecv, filled, None, group, tag, source)
            # Odd ranks receive before they send, so that a backend whose sends wait for the
            # receiver cannot deadlock in a ring.
            posts.insert(0 if self._rank % 2 else len(posts), receive)
        hop.works = dist.batch_isend_irecv(posts)
        self._underway.append(weakref.ref(hop))
        return hop

    def _check(self, row: Tensor, name: str, rank: int, rank_name: str) -> None:
        is_bytes = row.dtype == torch.uint8 and row.dim() == 1 and row.is_contiguous()
        found = f"{row.dtype} {list(row.shape)}"
        _require(is_bytes, name, "a contiguous row of bytes (uint8)", found)
        _require(0 <= rank < self._size, rank_name, f"in [0, {self._size})", rank)

    def _check_free(
        self, sends: Sequence[tuple[Tensor, int]], buffer: Tensor | None, tag: int
    ) -> None:
        hops = [hop for entry in self._underway if (hop := entry()) is not None and hop.works]
        self._underway = [weakref.ref(hop) for hop in hops]
        value = f"one that a hop underway {{}} at tag {tag}"
        for hop in hops:
            filled = any(hop.fills(message) for message, _ in sends)
            _require(not filled, "a message", "free", value.format("fills"))
            if buffer is not None:
                _require(not hop.fills(buffer), "the buffer", "free", value.format("fills"))
                _require(not hop.sends(buffer), "the buffer", "free", value.format("sends"))
