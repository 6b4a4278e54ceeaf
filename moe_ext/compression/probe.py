"""Measures what a codec takes: once in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ext.compression.codecs import Codec
from moe_ext.distributed.link import quickest

# Elements of the two rehearsals of a codec, of which the larger does not fit in the second-level
# cache, as buckets do not.
FEW, MANY = 2**14, 2**20
REPEATS = 3


MemoryFactory = Callable[[Codec, Tensor], Any]


_rates: dict[tuple[Codec, str, int], tuple[float, float]] = {}


def _rehearsal(codec: Codec, numel: int, memory_of: MemoryFactory, where: tuple[str, int]) -> float:
    """Seconds of one rehearsal, the least of a few."""
    device, world_size = torch.device(where[0]), where[1]
    generator = torch.Generator().manual_seed(0)
    # Random, so that nothing is known of the next step: a constant would compress too well.
    grad_N = torch.randn(numel, generator=generator).to(device)
    memory = memory_of(codec, grad_N)

    def rehearse(x: Tensor) -> None:
        codec.rehearse(x, memory, world_size)

    return quickest(rehearse, grad_N, REPEATS, warm_ups=1)


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
        few, many = (_rehearsal(codec, numel, memory_of, where) for numel in (FEW, MANY))
        slope = max(many - few, 0.0) / (MANY - FEW)
        _rates[key] = (max(0.0, few - slope * FEW), slope)
    return _rates[key]
