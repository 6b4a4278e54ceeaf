"""Rates of codecs on this device, as a cost table has them: measured once in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ext.comm.rates import SIZES, CodecRate, Rehearsal, measure_codec
from moe_ext.compression.codecs import Codec, codec_names, codec_of

REPEATS = 2

MemoryFactory = Callable[[Codec, Tensor], Any]


def new_memory(codec: Codec, grad_N: Tensor) -> Any:
    """The memory of a codec's own making."""
    return codec.new_memory(grad_N)


_rates: dict[tuple[str, str], tuple[CodecRate, ...]] = {}


def rate_name(codec: Codec) -> str:
    """Name of a codec in a `CostTable`; its repr if its options are not those of the name."""
    named = codec.name in codec_names()[:-1] and codec_of(codec.name) == codec
    return codec.name if named else repr(codec)


def rehearsal_of(
    codec: Codec,
    device: torch.device | str = "cpu",
    memory_of: MemoryFactory = new_memory,
) -> Rehearsal:
    """Encode and decode calls for `CostTable.measure`, of float32 gradients and a residual.

    Args:
        codec: the codec to rehearse.
        device: of the gradients.
        memory_of: makes what ``codec.rehearsal`` takes as memory.
    """

    def rehearse(numel: int) -> tuple[int, int, Callable[[], object], Callable[[], object]]:
        generator = torch.Generator().manual_seed(0)
        # Random, so that nothing is known of the next step: a constant would compress too well.
        grad_N = torch.randn(numel, generator=generator).to(device)
        calls = codec.rehearsal(grad_N, memory_of(codec, grad_N))
        return grad_N.nbytes, codec.sent_bytes(numel, 2), *calls

    return rehearse


def measured(codec: Codec, device: torch.device, memory_of: MemoryFactory) -> tuple[CodecRate, ...]:
    """Rates at the smaller sizes of a cost table, local to the rank.

    Measured at the first call, and kept for the life of the process.
    """
    key = (rate_name(codec), str(device))
    if key not in _rates:
        rehearsal = rehearsal_of(codec, device, memory_of)
        _rates[key] = measure_codec(rehearsal, SIZES[:2], repeats=REPEATS, device=device)
    return _rates[key]
