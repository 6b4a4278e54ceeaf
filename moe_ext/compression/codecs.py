"""What a gradient is sent as, one frozen dataclass each.

Shape suffixes: N elements of a flat gradient, B blocks that are not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.compression import rates
from moe_ext.compression.agreement import resolve
from moe_ext.compression.exact_reduce import bitmap_bytes, block_sparse_all_reduce_
from moe_ext.compression.feedback import CodecMemory
from moe_ext.compression.quantized_reduce import (
    FORMATS,
    States,
    quantized_all_reduce_bytes,
    shard_numel,
    start_all_reduce,
)
from moe_ext.compression.reduction import Reduction
from moe_ext.distributed.comm import Pending
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_rank, group_size
from moe_ext.distributed.traffic import record_traffic

# Called with what holds NaN or infinity, or may hold it: the gradient, with what was owed in it. On
# CPU, by codecs that look in their own pass over the gradient: by quantisers at the end, when all
# ranks have got NaN, by others before anything is sent.
OnNonfinite = Callable[[Tensor], None]

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@runtime_checkable
class Codec(rates.Codec, Protocol):
    """What the hooks want of a codec besides; a hashable value, equal on all ranks."""

    @property
    def feeds_back(self) -> bool:
        """Whether what is not sent stays in the residual."""

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
    ) -> Reduction:
        """Begin to reduce a gradient, which may be overwritten; the result has N elements.

        What changes in the memory is kept by its `commit`. As for the collectives, no group is the
        default group, and this process alone where there is no torch.distributed.
        """


def check_choice(owner: str, argument: str, value: object, allowed: Sequence[object]) -> None:
    """ValueError unless the value is one of those that are allowed."""
    if value not in allowed:
        raise ValueError(
            f"{owner}: expected {argument} to be one of {tuple(allowed)}, got {value!r}"
        )


class WithMemory:
    """What all codecs have."""

    def new_memory(self, grad_N: Tensor) -> CodecMemory:
        """An empty memory for one flat gradient."""
        return CodecMemory([grad_N.shape], grad_N.device)


def _to_send(
    x_N: Tensor, dtype: torch.dtype, factor: float, on_nonfinite: OnNonfinite | None
) -> Tensor:
    """A gradient times a factor as it travels; in place where it has that dtype."""
    if on_nonfinite is None:
        # Rounded before it is scaled, as the hooks of torch do: what they overflow, this does.
        sent_N = x_N.to(dtype)
        return sent_N if factor == 1.0 else sent_N.mul_(factor)
    sent_N = x_N if x_N.dtype == dtype else torch.empty_like(x_N, dtype=dtype)
    if bool(ops.scale_into_(sent_N, x_N, scale=factor)):
        on_nonfinite(sent_N)
        # So that every rank finds it without a search.
        sent_N[0] = math.nan
    return sent_N


def dense_reduction(
    x_N: Tensor,
    group: ProcessGroup | None,
    average: bool,
    dtype: str = "fp32",
    on_nonfinite: OnNonfinite | None = None,
) -> Reduction:
    """All-reduce; a mean is scaled first, as DDP does. The result is in `x_N`.

    Args:
        x_N: overwritten.
        group: the ranks.
        average: the mean, or the sum.
        dtype: as of `Dense`.
        on_nonfinite: see `OnNonfinite`; the first element of the result is NaN on every rank then.
            None does not look.
    """
    operation = f"all-reduce in {dtype}"
    group = resolve(group, operation)
    size = group_size(group)
    sent = _DTYPES[dtype] or x_N.dtype
    # Half precision may hold all numbers, and not their sum: that travels as a mean.
    back = size if sent == torch.float16 and x_N.dtype != sent and not average else 1
    factor = 1.0 / size if average or back > 1 else 1.0
    sent_N = _to_send(x_N, sent, factor, on_nonfinite)

    def finish(found: list[Tensor]) -> Tensor:
        if sent_N is not x_N:
            ops.scale_into_(x_N, found[0], scale=back)
        return x_N

    if size == 1 or x_N.numel() == 0:
        return Reduction.done(finish([sent_N]))
    record_traffic("all_reduce", 2 * (size - 1) * sent_N.nbytes // size)
    with naming_failed_ranks(group, operation):
        work = dist.all_reduce(sent_N, group=group, async_op=True)
    assert work is not None
    return Reduction(work.get_future(), finish, group, operation)


@dataclass(frozen=True)
class Dense(WithMemory):
    """A plain all-reduce.

    Args:
        dtype: "fp32" sends a gradient as it is, "bf16" and "fp16" round it on the way.
    """

    feeds_back: ClassVar[bool] = False

    dtype: str = "fp32"

    def __post_init__(self) -> None:
        check_choice("Dense", "dtype", self.dtype, tuple(_DTYPES))

    @property
    def name(self) -> str:
        """See `Codec`."""
        return "none" if self.dtype == "fp32" else self.dtype

    @property
    def lossy(self) -> bool:
        """See `Codec`."""
        return self.dtype != "fp32"

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        size = 4 if self.dtype == "fp32" else 2
        return 2 * (world_size - 1) * numel * size // world_size

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 2 * (world_size - 1)

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
        """See `Codec` and `OnNonfinite`."""
        memory.take_owed(grad_N)
        return dense_reduction(grad_N, group, average, self.dtype, on_nonfinite)

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""
        dtype = _DTYPES[self.dtype]
        if dtype is not None:
            looks = grad_N.device.type == "cpu" and self.dtype == "bf16"
            how = (lambda _: None) if looks else None
            sent_N = _to_send(grad_N, dtype, 1.0 / world_size, how)
            ops.scale_into_(grad_N, sent_N, scale=1.0)


def feed_velocity(grad_N: Tensor, memory: CodecMemory, momentum: float | None) -> Tensor:
    """For a step that leaves nothing out: momentum as the optimizer would have it."""
    if momentum is None:
        return grad_N
    velocity_N = memory.tensor("velocity")
    return velocity_N.mul_(momentum).add_(grad_N).clone()


@dataclass(frozen=True)
class Unsent(WithMemory):
    """All of the gradient and of what is owed, for what no other rank has; whatever the group.

    Args:
        momentum: of the codec in whose place it stands.
    """

    name: ClassVar[str] = "unsent"
    lossy: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False

    momentum: float | None = None

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        return 0

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 0

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
    ) -> Reduction:
        """See `Codec`."""
        x_N = feed_velocity(grad_N, memory, self.momentum)
        memory.take_owed(x_N)
        return Reduction.done(x_N)

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""


@dataclass(frozen=True)
class Quantize(WithMemory):
    """Blocks of few bits with a scale each, summed in float32 by the owner of a shard.

    Args:
        format: "int8", "int4", "fp8" (e4m3) or "sign".
        block: elements that share a scale, a power of two from 64 to 1024.
        stochastic: round up or down at random, which is right in expectation, instead of to the
            nearest.
        feedback: keep what rounding lost, on the ranks and on the owners, and send it with the
            next gradient. Without it nothing has to be stored, and what is lost is lost.
    """

    lossy: ClassVar[bool] = True

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
        """See `Codec` and `OnNonfinite`, which only has a chance with feedback."""
        group = resolve(group, "Quantize")
        size, rank = group_size(group), group_rank(group)
        if not self.feedback:
            memory.take_owed(grad_N)
        rng_state = memory.rng_state(step, rank) if self.stochastic else None
        # What is kept is only read, so that nothing has to be restored.
        states = self._states(memory, size, rank)._replace(rng_state=rng_state)
        return start_all_reduce(
            grad_N,
            states,
            self.format,
            self.block,
            group,
            average,
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
class OneBit(WithMemory):
    """Signs with the mean magnitude of each block, and error feedback.

    For momentum rather than for gradients of Adam (see `moe_ext.optim.OneBitAdam`).

    Args:
        block: elements that share a magnitude.
    """

    name: ClassVar[str] = "onebit"
    lossy: ClassVar[bool] = True
    feeds_back: ClassVar[bool] = True

    block: int = 256

    def __post_init__(self) -> None:
        self._quantize()

    def _quantize(self) -> Quantize:
        return Quantize("sign", self.block)

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        return self._quantize().sent_bytes(numel, world_size)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return self._quantize().num_rounds(world_size)

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
        """See `Codec` and `OnNonfinite`."""
        return self._quantize().start(
            grad_N, memory, group=group, average=average, step=step, on_nonfinite=on_nonfinite
        )

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""
        self._quantize().rehearse(grad_N, memory, world_size)


@dataclass(frozen=True)
class BlockSparse(WithMemory):
    """Only blocks that are not zero on some rank; exact.

    Args:
        block: elements of a block; "row" takes those of one index of the first dimension of a
            parameter, which is a row of an embedding or one expert of several.
    """

    name: ClassVar[str] = "block_sparse"
    lossy: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False

    block: int | str = 256

    def __post_init__(self) -> None:
        if self.block != "row" and not (isinstance(self.block, int) and self.block >= 1):
            raise ValueError(
                f"BlockSparse: expected block to be 'row' or at least 1, got {self.block!r}"
            )

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`; the most it can be, since the rest depends on the gradient."""
        block = self.block if isinstance(self.block, int) else 256
        bitmap = (world_size - 1) * bitmap_bytes(numel, block)
        return Dense().sent_bytes(numel, world_size) + bitmap

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 3 * (world_size - 1)

    def block_of(self, memory: CodecMemory) -> int:
        """Elements of a block."""
        if isinstance(self.block, int):
            return self.block
        shape = memory.shapes[0]
        return max(1, memory.sizes[0] // max(1, shape[0])) if len(shape) else 1

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
    ) -> Reduction:
        """See `Codec`."""
        # What was owed may lie in blocks that nothing was added to.
        bitmap = None if memory.take_owed(grad_N) else memory.bitmap
        found = block_sparse_all_reduce_(
            grad_N,
            block=self.block_of(memory),
            bitmap=bitmap,
            group=group,
            average=average,
            validate=False,
            async_op=True,
        )
        assert isinstance(found, Pending)
        return found

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""
        block = self.block_of(memory)
        block_idx_B = ops.block_indices(ops.nonzero_blocks(grad_N, block=block))
        packed = ops.gather_blocks(grad_N, block_idx_B, block=block)
        ops.scatter_blocks_(grad_N, packed, block_idx_B, block=block)
