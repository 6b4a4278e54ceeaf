"""Base classes of codecs: the interface for collectives, training steps and cost models.

A codec is a frozen dataclass, hashable and equal on all ranks. `PayloadCodec` encodes a gradient as
a row of bytes, which any collective of `moe_ext.compression` can send. A codec whose messages
depend on each other, such as PowerSGD, derives from `Codec` and implements `start` itself.

Shape suffixes: N elements of a flat gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.comm.groups import group_rank, group_size, resolve_group
from moe_ext.comm.pending import Pending
from moe_ext.compression.collectives.coding import Coding, aligned
from moe_ext.compression.collectives.quantized import States, shard_numel, start_all_reduce
from moe_ext.compression.collectives.sparse import start_gather_sum
from moe_ext.compression.feedback import CodecMemory, committing

# Callback for a gradient (with its residual added) that holds, or may hold, NaN or infinity. Codecs
# that find them in their own pass over the gradient call it, on CPU. Quantisers call it at the end,
# when all ranks have received NaN; other codecs call it before they send.
OnNonfinite = Callable[[Tensor], None]
# Two functions: the first encodes a gradient, the second decodes the result.
Calls = tuple[Callable[[], object], Callable[[], object]]


class StartOptions(NamedTuple):
    """Options of `Codec.start`, with the default group in place of None."""

    group: ProcessGroup | None
    average: bool
    step: int
    on_nonfinite: OnNonfinite | None


class Codec(ABC):
    """A way to reduce a gradient over ranks.

    Attributes:
        density: share of the elements that a sparse codec sends; None for other codecs.
    """

    density: float | None = None

    # -- flags: a step treats a codec according to its flags, never according to its type -------

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for tables and policies."""

    @property
    def lossy(self) -> bool:
        """True if the result differs from the dense mean."""
        return True

    @property
    def feeds_back(self) -> bool:
        """True if the residual keeps everything that is not sent."""
        return True

    @property
    def shardable(self) -> bool:
        """True if it may reduce any part of the flat parameters, even a part of one parameter."""
        return True

    @property
    def plain(self) -> bool:
        """True if it is one all-reduce of all elements, in some dtype."""
        return False

    @property
    def skips_zeros(self) -> bool:
        """True if blocks that are zero on all ranks are left out of a plain all-reduce."""
        return False

    @property
    def linear(self) -> bool:
        """True if gradients are summed unchanged, so that NaN and infinity reach the result."""
        return self.plain or self.skips_zeros

    @property
    def finds_nonfinite(self) -> bool:
        """True if it calls `OnNonfinite` on CPU, so that the caller need not search the gradient.

        If the codec is also `plain`, NaN or infinity on any rank makes the first element of the
        result NaN on every rank.
        """
        return False

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """The sent dtype, if finite float32 numbers can overflow in it; otherwise None."""
        return None

    # -- costs -----------------------------------------------------------------------------------

    @abstractmethod
    def sent_bytes(self, numel: int, world_size: int) -> int:
        """Return the bytes that each rank sends in one reduction."""

    @abstractmethod
    def num_rounds(self, world_size: int) -> int:
        """Return the number of messages of one reduction that must follow each other."""

    @abstractmethod
    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """Return functions that encode and decode a gradient for timing, without sending it."""

    def passes(self, world_size: int) -> tuple[float, float]:
        """Return how often a rank encodes, and decodes, N elements in one reduction."""
        return 1.0, 1.0

    def new_memory(self, grad_N: Tensor) -> CodecMemory:
        """Make an empty memory for one flat gradient."""
        return CodecMemory([grad_N.shape], grad_N.device)

    # -- reduction -------------------------------------------------------------------------------

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
        on_nonfinite: OnNonfinite | None = None,
    ) -> Pending[Tensor]:
        """Begin to reduce a gradient, which may be overwritten; the result has N elements.

        Args:
            grad_N: float32, bfloat16 or float16.
            memory: residuals and other state; the caller commits the changes.
            group: the ranks. None is the default group, or this process alone if torch.distributed
                is not initialised.
            average: take the mean; if False, the sum.
            step: number of the step, equal on all ranks, for random numbers.
            on_nonfinite: used by codecs with `finds_nonfinite` only; None does not look.
        """
        ranks = resolve_group(group, type(self).__name__)
        return self._start(grad_N, memory, StartOptions(ranks, average, step, on_nonfinite))

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """Implement `start`. A codec may override `start` instead."""
        raise NotImplementedError(f"{type(self).__name__} has no start")

    def find_zeros(
        self, grad_N: Tensor, memory: CodecMemory, reached: Callable[[], Tensor | None]
    ) -> float:
        """Note in the memory which blocks may be non-zero. Called before `start`.

        Args:
            grad_N: the gradient.
            memory: memory of the codec.
            reached: returns the bitmap of the rows that may be non-zero, in the format of
                `nonzero_blocks`, or None if these are not known.

        Returns:
            Share of the blocks that may be non-zero; 0 for codecs without `skips_zeros`.
        """
        return 0.0

    # -- substitutes for a codec -----------------------------------------------------------------

    def with_density(self, density: float) -> Codec:
        """Return a sparse codec with another density; other codecs return themselves."""
        return self

    def skipping_zeros(self) -> Codec:
        """Return a codec that skips rows of zeros, if no bit of the result changes by that."""
        return self

    def keeping_zeros(self) -> Codec:
        """Return the codec that sends all rows."""
        return self

    def alone(self) -> Codec:
        """Return the codec to use if no other rank holds the parameters."""
        return Unsent()


@dataclass(frozen=True)
class Unsent(Codec):
    """Sends nothing: the result is the gradient plus the residual, whatever the group.

    For parameters that no other rank holds.

    Args:
        momentum: momentum of the codec that it replaces.
    """

    name: ClassVar[str] = "unsent"
    lossy: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False

    momentum: float | None = None

    @property
    def linear(self) -> bool:
        """See `Codec`."""
        return self.momentum is None

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        return 0

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 0

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `Codec`."""
        x_N = with_velocity(grad_N, memory, self.momentum)
        memory.take_owed(x_N)
        return Pending.done(x_N)

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""
        return nothing_to_do()


def nothing_to_do() -> Calls:
    """Return the rehearsal of a codec that sends gradients unchanged."""
    return lambda: None, lambda: None


def with_velocity(grad_N: Tensor, memory: CodecMemory, momentum: float | None) -> Tensor:
    """Apply momentum as an optimizer would, in a step in which a sparse codec sends everything."""
    if momentum is None:
        return grad_N
    velocity_N = memory.tensor("velocity")
    return velocity_N.mul_(momentum).add_(grad_N).clone()


class PayloadCodec(Codec):
    """A codec that encodes a gradient as one row of bytes.

    A subclass needs a `name` and the three abstract methods. If it is `shardable`, each rank adds
    up one shard of the gradient and encodes the sum again. Otherwise all ranks receive all
    payloads.
    """

    @property
    def align(self) -> int:
        """Divisor of the number of elements of a part that is encoded on its own."""
        return 1

    @property
    def stochastic(self) -> bool:
        """True if it rounds at random, so that `encode` needs an `rng_state`."""
        return False

    @property
    def needs_feedback(self) -> bool:
        """True if training needs the residual, because payloads leave out too much."""
        return False

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Return the length of the payload of `numel` elements, which must not depend on data."""

    @abstractmethod
    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        """Encode a tensor plus a residual as uint8 of `payload_bytes` elements.

        Args:
            x_N: float32, bfloat16 or float16; not changed.
            residual_N: float32, added to x, then overwritten with what the payload leaves out.
            rng_state: int64 [4], only for codecs that are `stochastic`.
        """

    @abstractmethod
    def decode_add_(self, out_N: Tensor, payload: Tensor) -> None:
        """Decode a payload and add it to float32 numbers."""

    def coding(self) -> Coding:
        """Return the codec as a `Coding` for collectives: itself, or wrapped if it is none."""
        return self if isinstance(self, Coding) else _PayloadCoding(self)

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        coded_bytes = self.coding().payload_bytes
        if not self.shardable:
            return (world_size - 1) * coded_bytes(numel)
        return 2 * (world_size - 1) * coded_bytes(shard_numel(numel, world_size, self.align))

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return 0 if world_size == 1 else 1 + self.shardable

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `Codec`."""
        operation, (group, average, step, on_nonfinite) = type(self).__name__, how
        size, rank = group_size(group), group_rank(group)
        rng_state = memory.rng_state(step, rank) if self.stochastic else None
        if not self.feeds_back:
            memory.take_owed(grad_N)
        if not self.shardable and size > 1:
            residual_N, coding = memory.whole_residual() if self.feeds_back else None, self.coding()
            payload = coding.encode(grad_N, residual_N, rng_state=rng_state)
            out_N = torch.empty_like(grad_N, dtype=torch.float32)
            return start_gather_sum(payload, out_N, coding, group, average, operation=operation)
        # `restores=False` is safe, because the memory rolls back after an error: its kept tensors
        # are only read.
        return start_all_reduce(
            grad_N,
            self.coding(),
            self._states(memory, size, rank)._replace(rng_state=rng_state),
            group,
            average,
            operation=operation,
            restores=False,
            on_nonfinite=on_nonfinite,
        )

    def _states(self, memory: CodecMemory, size: int, rank: int) -> States:
        """Return the residuals of this rank and of its shard of the sum.

        The kept tensors are read in place if possible, and copied otherwise.
        """
        if not self.feeds_back:
            return States()
        shard = shard_numel(memory.numel, size, self.align)
        kinds = ("residual", "server") if size > 1 else ("residual",)
        fits = size == 1 or memory.keeps_shard(rank * shard, shard)
        # A residual in other units must be multiplied by a factor, which collectives cannot do.
        found = memory.read_write(*kinds) if fits and memory.factor("residual") == 1.0 else None
        if found is not None:
            names = {"server": "server_residual", "server_in": "server_residual_in"}
            return States(**{names.get(kind, kind): x for kind, x in found.items()})
        residual_N = memory.tensor("residual")
        return States(residual_N, memory.shard(rank * shard, shard) if size > 1 else None)

    def passes(self, world_size: int) -> tuple[float, float]:
        """See `Codec`.

        A shardable codec encodes N elements and a sum of N / P, and decodes P shards and P sums.
        Another codec encodes N elements and decodes P payloads.
        """
        return (1.0 + 1.0 / world_size, 2.0) if self.shardable else (1.0, float(world_size))

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""
        coding, sum_N = self.coding(), torch.zeros_like(grad_N, dtype=torch.float32)

        def encode() -> Tensor:
            with committing(memory):
                owed_N = memory.tensor("residual") if self.feeds_back else None
                return coding.encode(grad_N, owed_N)

        payload = encode()
        return encode, lambda: coding.decode_add_(sum_N, payload)


@dataclass(frozen=True)
class _PayloadCoding(Coding):
    """A `PayloadCodec` as a `Coding`, with payloads padded to a multiple of 16 bytes."""

    codec: PayloadCodec

    @property
    def align(self) -> int:
        """See `Coding`."""
        return self.codec.align

    def payload_bytes(self, numel: int) -> int:
        """See `Coding`."""
        return aligned(self.codec.payload_bytes(numel))

    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        residual_in: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """See `Coding`."""
        if residual_N is not None and residual_in is not None:
            residual_N.copy_(residual_in)
        if rng_state is not None:
            # The codec counts random numbers from 0 in each piece, so `first` changes the key, and
            # pieces of one tensor do not round alike.
            rng_state = rng_state + torch.tensor([0, first, 0, 0], device=rng_state.device)
        payload = self.codec.encode(x_N, residual_N, rng_state=rng_state)
        length = self.codec.payload_bytes(x_N.numel())
        if payload.dtype != torch.uint8 or payload.shape != (length,):
            raise ValueError(
                f"{type(self.codec).__name__}: expected encode to give uint8 of shape ({length},), "
                f"as payload_bytes says, got {payload.dtype} of shape {tuple(payload.shape)}"
            )
        return nn.functional.pad(payload, (0, -payload.numel() % 16))

    def decode_add_(
        self, out_N: Tensor, payload: Tensor, *, divisor: int = 1, overwrite: bool = False
    ) -> None:
        """See `Coding`."""
        found_N = torch.zeros_like(out_N, dtype=torch.float32)
        self.codec.decode_add_(found_N, payload[: self.codec.payload_bytes(out_N.numel())])
        if divisor != 1:
            found_N /= divisor
        out_N.copy_(found_N) if overwrite else out_N.add_(found_N)
