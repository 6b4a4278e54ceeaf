"""Counts what sequence-parallel layers and compressed reductions send, call by call."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Messages and bytes that this rank sent while `count_traffic` was open.

    Bytes are those that this rank sends if each collective runs the algorithm that sends least. An
    all-gather sends (P - 1) times the rank's shard, a reduce-scatter all shards but its own, and
    an all-reduce 2 (P - 1) / P times the tensor.

    Attributes:
        calls: kind ("send", "all_gather", "reduce_scatter", "all_reduce", "all_to_all") to number
            of calls. Empty messages do not count.
        sent_bytes: kind to bytes.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Sum of the bytes of all kinds."""
        return sum(self.sent_bytes.values())


# Open counts. The list is changed in place, because modules that send have imported its name.
open_counts: list[Traffic] = []
# The lock is needed because the backward pass of an accelerator runs in another thread.
_lock = threading.Lock()


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the messages that this process sends inside the context.

    Counted are, in forward and backward passes, the rows that layers send to experts and back, and
    the tensors of `moe_ext.attention`: hops of a ring, all-gathers, reduce-scatters, all-to-alls,
    and all-reduces of gradients. The messages of `moe_ext.compression` are counted too, with
    ``async_op=True`` for calls made inside the context. Messages of fixed size by which ranks
    compare their arguments are not counted.

    Yields:
        Traffic: the counts, which grow until the context ends.
    """
    traffic = Traffic()
    with _lock:
        open_counts.append(traffic)
    try:
        yield traffic
    finally:
        with _lock:
            # Counts are compared by identity, since two of them may hold equal numbers.
            open_counts[:] = [other for other in open_counts if other is not traffic]


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Exclude the messages that this process sends inside from all open counts."""
    with _lock:
        held, open_counts[:] = open_counts[:], []
    try:
        yield
    finally:
        with _lock:
            open_counts.extend(held)


def record_traffic(kind: str, num_bytes: int) -> None:
    """Add one call to every open count."""
    if num_bytes == 0 or not open_counts:
        return
    with _lock:
        for traffic in open_counts:
            traffic.calls[kind] += 1
            traffic.sent_bytes[kind] += num_bytes
