"""Measures how fast a codec computes on this device, once in a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_ext.compression.probe import synchronize

# The larger does not fit in the second-level cache, as buckets do not.
FEW, MANY = 2**14, 2**20
REPEATS = 3

MemoryFactory = Callable[["Codec", Tensor], Any]


class Codec(Protocol, Hashable):
    """What the cost model needs to know of a codec."""

    @property
    def name(self) -> str:
        """For tables."""

    @property
    def lossy(self) -> bool:
        """Whether its result differs from the dense mean."""

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """Bytes that leave a rank in one reduction."""

    def num_rounds(self, world_size: int) -> int:
        """Messages that follow each other in one reduction."""

    def rehearse(self, grad_N: Tensor, memory: Any, world_size: int) -> None:
        """Compute what one reduction computes on this rank, without sending."""


_rates: dict[tuple[Codec, str, int], tuple[float, float]] = {}


def _quickest(codec: Codec, numel: int, memory_of: MemoryFactory, where: tuple[str, int]) -> float:
    """Seconds of one rehearsal, the least of a few."""
    device, world_size = torch.device(where[0]), where[1]
    generator = torch.Generator().manual_seed(0)
    # Of one size, so that nothing is known of the next step: a constant would compress too well.
    grad_N = torch.randn(numel, generator=generator).to(device)
    memory = memory_of(codec, grad_N)
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        codec.rehearse(grad_N, memory, world_size)
        synchronize(device)
        times.append(time.perf_counter() - start)
    # The first one touches new memory.
    return min(times[1:])


def rate_of(
    codec: Codec, device: torch.device, world_size: int, memory_of: MemoryFactory
) -> tuple[float, float]:
    """(seconds whatever the size, seconds an element) to encode and decode on this rank.

    Args:
        codec: what is rehearsed.
        device: where.
        world_size: P; what comes from P ranks is decoded.
        memory_of: makes what ``codec.rehearse`` takes as memory.

    Local to the rank, measured at the first call and kept for the life of the process.
    """
    key = (codec, str(device), world_size)
    if key not in _rates:
        where = (str(device), world_size)
        few, many = (_quickest(codec, numel, memory_of, where) for numel in (FEW, MANY))
        slope = max(many - few, 0.0) / (MANY - FEW)
        _rates[key] = (max(0.0, few - slope * FEW), slope)
    return _rates[key]
