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

    Bytes are those that leave this rank where each collective is done by the algorithm that sends
    least: (P - 1) times its shard for an all-gather, all shards but its own for a reduce-scatter,
    2 (P - 1) / P times the tensor for an all-reduce.

    Attributes:
        calls: kind ("send", "all_gather", "reduce_scatter", "all_reduce", "all_to_all") to number
            of calls; an empty message is not one.
        sent_bytes: kind to bytes.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sent_bytes.values())


# Mutated in place: what sends looks at it.
open_counts: list[Traffic] = []
# A backward pass on an accelerator runs in a thread of its own.
_lock = threading.Lock()


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this process sends inside.

    Counted are the rows that layers send to experts and back; the tensors of `moe_ext.attention`:
    hops of a ring, all-gathers, reduce-scatters, all-to-alls, and all-reduces of gradients; all of
    these forward and backward; and the messages of `moe_ext.compression`, with ``async_op=True``
    those of calls made inside. Not counted are the messages of fixed size by which ranks compare
    their arguments.

    Yields:
        The counts, which grow until the context ends.
    """
    traffic = Traffic()
    with _lock:
        open_counts.append(traffic)
    try:
        yield traffic
    finally:
        with _lock:
            # By identity: two counts may be equal.
            open_counts[:] = [other for other in open_counts if other is not traffic]


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Leave what this process sends inside out of all counts that are open."""
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
