"""Codecs of few bits an element.

Shape suffixes: N elements of a flat gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.compression.codecs.base import Codec, OnNonfinite, check_choice
from moe_ext.compression.collectives.coding import FORMATS, QuantizedCoding
from moe_ext.compression.collectives.quantized import (
    States,
    quantized_all_reduce_bytes,
    shard_numel,
    start_all_reduce,
)
from moe_ext.compression.feedback import CodecMemory
from moe_ext.compression.reduction import Reduction
from moe_ext.distributed.groups import group_rank, group_size, resolve_group


@dataclass(frozen=True)
class Quantize(Codec):
    """Blocks of few bits with a scale each, summed in float32 by the owner of a shard.

    Args:
        format: "int8", "int4", "fp8" (e4m3) or "sign".
        block: elements that share a scale, a power of two from 64 to 1024.
        stochastic: round up or down at random, which is right in expectation, instead of to the
            nearest.
        feedback: keep what rounding lost, on the ranks and on the owners, and send it with the
            next gradient. Without it nothing has to be stored, and what is lost is lost.
    """

    format: str = "int8"
    block: int = 256
    stochastic: bool = False
    feedback: bool = True

    def __post_init__(self) -> None:
        check_choice("Quantize", "format", self.format, FORMATS)
        check_choice("Quantize", "block", self.block, (64, 128, 256, 512, 1024))
        if self.format == "sign" and self.stochastic:
            raise ValueError(
                "Quantize: expected stochastic to be False for signs, which have no neighbours to "
                "choose from, got True"
            )

    @property
    def name(self) -> str:
        """See `Codec`."""
        return "onebit" if self.format == "sign" else self.format

    @property
    def feeds_back(self) -> bool:
        """See `Codec`."""
        return self.feedback

    @property
    def finds_nonfinite(self) -> bool:
        """See `Codec`; it shows in the residuals."""
        return self.feedback

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        return quantized_all_reduce_bytes(numel, world_size, self.format, self.block)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 2 if world_size > 1 else 0

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
        on_nonfinite: OnNonfinite | None = None,
    ) -> Reduction:
        """See `Codec`."""
        group = resolve_group(group, "Quantize")
        size, rank = group_size(group), group_rank(group)
        if not self.feedback:
            memory.take_owed(grad_N)
        rng_state = memory.rng_state(step, rank) if self.stochastic else None
        # What is kept is only read, so that nothing has to be restored.
        states = self._states(memory, size, rank)._replace(rng_state=rng_state)
        return start_all_reduce(
            grad_N,
            QuantizedCoding(self.format, self.block),
            states,
            group,
            average,
            operation="quantized_all_reduce_",
            restores=False,
            on_nonfinite=on_nonfinite,
        )

    def _states(self, memory: CodecMemory, size: int, rank: int) -> States:
        """What is owed, here and for the shard of the sum; read where it is kept if it can be."""
        if not self.feedback:
            return States()
        shard = shard_numel(memory.numel, size, self.block)
        kinds = ("residual", "server") if size > 1 else ("residual",)
        fits = size == 1 or memory.keeps_shard(rank * shard, shard)
        # The operator has no factor.
        found = memory.read_write(*kinds) if fits and memory.factor("residual") == 1.0 else None
        if found is not None:
            names = {"server": "server_residual", "server_in": "server_residual_in"}
            return States(**{names.get(kind, kind): x for kind, x in found.items()})
        residual_N = memory.tensor("residual")
        return States(residual_N, memory.shard(rank * shard, shard) if size > 1 else None)

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""
        memory.begin()
        residual_N = memory.tensor("residual") if self.feedback else None
        kwargs: dict[str, Any] = {"block": self.block, "format": self.format}
        coded = ops.quantize_blockwise(grad_N, residual=residual_N, check_finite=False, **kwargs)
        # P shards of N / P elements come in, and as many go out.
        sum_N = torch.zeros_like(grad_N)
        ops.dequantize_add_(sum_N, *coded, **kwargs)
        shard = min(shard_numel(grad_N.numel(), world_size, self.block), grad_N.numel())
        ops.quantize_blockwise(sum_N[:shard], check_finite=False, **kwargs)
        ops.dequantize_blockwise(*coded, grad_N.numel(), **kwargs)
        memory.commit()


@dataclass(frozen=True)
class OneBit(Quantize):
    """Signs with the mean magnitude of each block, and error feedback.

    For momentum rather than for gradients of Adam (see `moe_ext.optim.OneBitAdam`).

    Args:
        block: elements that share a magnitude.
    """

    format: str = field(default="sign", init=False, repr=False)
    block: int = 256
    stochastic: bool = field(default=False, init=False, repr=False)
    feedback: bool = field(default=True, init=False, repr=False)
