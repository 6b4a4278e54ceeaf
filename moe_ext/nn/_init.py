"""Initialisation that does not depend on how the experts are spread over ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# 2**64 / golden ratio, odd: neighbouring experts get seeds that differ in about half of their bits.
_SEED_STRIDE = 0x9E3779B97F4A7C15


def init_stacked_experts_(stacked: list[Tensor], fan_in: list[int], first_expert: int) -> None:
    """Fill stacked expert tensors `[E_local, ...]` uniformly in +-1/sqrt(fan_in), in place.

    Expert e is drawn from a generator of its own, seeded by one draw from torch's default CPU
    generator and by e, so that the values depend on `torch.manual_seed` and on the global expert
    only: every expert-parallel size gives the same experts, and no rank draws the experts of
        another.

    Args:
        stacked: tensors whose first dimension is the local expert.
        fan_in: number of inputs that each tensor's outputs sum over.
        first_expert: global index of local expert 0.
    """
    base = int(torch.randint(0, 2**62, (1,), device="cpu"))
    device = stacked[0].device
    if device.type == "meta":
        return
    generator = torch.Generator(device)
    with torch.no_grad():
        for local in range(stacked[0].shape[0]):
            generator.manual_seed((base + (first_expert + local) * _SEED_STRIDE) % 2**63)
            for tensor, inputs in zip(stacked, fan_in, strict=True):
                bound = 1.0 / math.sqrt(inputs)
                tensor[local].uniform_(-bound, bound, generator=generator)
