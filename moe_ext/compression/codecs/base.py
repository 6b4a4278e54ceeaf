"""The base of all codecs: what patterns, steps and cost models ask of one.

A codec is a frozen dataclass, hashable and equal on all ranks. `PayloadCodec` turns a gradient into
a row of bytes and back; any pattern of `moe_ext.compression` can send that. A codec whose messages
depend on each other, as those of PowerSGD, is a `Codec` with a `start` of its own.

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

# Called with a gradient, and what was owed in it, that holds NaN or infinity, or may hold it. On
# CPU, by codecs that find these in their own pass over the gradient: by quantisers at the end, when
# all ranks have got NaN, by others before anything is sent.
OnNonfinite = Callable[[Tensor], None]
# Encodes, and decodes what was encoded.
Calls = tuple[Callable[[], object], Callable[[], object]]


class StartOptions(NamedTuple):
    """The arguments of `Codec.start` beside the gradient, with the default group found."""

    group: ProcessGroup | None
    average: bool
    step: int
    on_nonfinite: OnNonfinite | None


class Codec(ABC):
    """A way to reduce a gradient over ranks.

    Attributes:
        density: share of the elements that a sparse codec sends; None for others.
    """

    density: float | None = None

    # -- flags: what a step does about a codec follows from these, never from its type ----------

    @property
    @abstractmethod
    def name(self) -> str:
        """For tables and policies."""

    @property
    def lossy(self) -> bool:
        """True if the result differs from the dense mean."""
        return True

    @property
    def feeds_back(self) -> bool:
        """True if the residual keeps all that is not sent."""
        return True

    @property
    def shardable(self) -> bool:
        """True if it may reduce any part of the parameters, cut anywhere."""
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
        """True if it adds gradients up as they are: NaN and infinity reach the result unaided."""
        return self.plain or self.skips_zeros

    @property
    def finds_nonfinite(self) -> bool:
        """True if it calls `OnNonfinite` on CPU, so that nobody has to search the gradient.

        Where it is `plain`, too, NaN or infinity on any rank makes the first element of the result
        NaN on every rank.
        """
        return False

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """The dtype of what is sent, where finite numbers of float32 overflow in it."""
        return None

    # -- what it costs ---------------------------------------------------------------------------

    @abstractmethod
    def sent_bytes(self, numel: int, world_size: int) -> int:
        """Bytes that leave a rank in one reduction."""

    @abstractmethod
    def num_rounds(self, world_size: int) -> int:
        """Messages that follow each other in one reduction."""

    @abstractmethod
    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """Calls that encode and decode a gradient; neither changes it, and nothing is sent."""

    def passes(self, world_size: int) -> tuple[float, float]:
        """Passes over a gradient that a rank encodes and decodes to reduce it."""
        return 1.0, 1.0

    def new_memory(self, grad_N: Tensor) -> CodecMemory:
        """An empty memory for one flat gradient."""
        return CodecMemory([grad_N.shape], grad_N.device)

    # -- what it does ----------------------------------------------------------------------------

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
            memory: what is owed; what changes in it is kept by its `commit`.
            group: the ranks. None is the default group, and this process alone where there is no
                torch.distributed.
            average: the mean, or the sum.
            step: its number, equal on all ranks, for random numbers.
            on_nonfinite: only for codecs that say `finds_nonfinite`; None does not look.
        """
        ranks = resolve_group(group, type(self).__name__)
        return self._start(grad_N, memory, StartOptions(ranks, average, step, on_nonfinite))

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `start`, which a codec may also have of its own."""
        raise NotImplementedError(f"{type(self).__name__} has no start")

    def find_zeros(
        self, grad_N: Tensor, memory: CodecMemory, reached: Callable[[], Tensor | None]
    ) -> float:
        """Note in the memory which blocks may not be zero, before `start`.

        Args:
            grad_N: the gradient.
            memory: of the codec.
            reached: gives the rows that are known not to be zero, as `nonzero_blocks`, or None.

        Returns:
            Share of the blocks that may not be zero; 0 for codecs that do not `skips_zeros`.
        """
        return 0.0

    # -- codecs in its place ---------------------------------------------------------------------

    def with_density(self, density: float) -> Codec:
        """The same codec that sends another share of the elements; others as they are."""
        return self

    def skipping_zeros(self) -> Codec:
        """The same with rows that are zero everywhere left out, where that changes no bit."""
        return self

    def keeping_zeros(self) -> Codec:
        """The same with all rows."""
        return self

    def alone(self) -> Codec:
        """In its place where no other rank holds the parameters."""
        return Unsent()


@dataclass(frozen=True)
class Unsent(Codec):
    """All of the gradient and of what is owed, for what no other rank has; whatever the group.

    Args:
        momentum: of the codec in whose place it stands.
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
    """The rehearsal of what is sent as it is."""
    return lambda: None, lambda: None


def with_velocity(grad_N: Tensor, memory: CodecMemory, momentum: float | None) -> Tensor:
    """For a step that leaves nothing out: momentum as the optimizer would have it."""
    if momentum is None:
        return grad_N
    velocity_N = memory.tensor("velocity")
    return velocity_N.mul_(momentum).add_(grad_N).clone()


class PayloadCodec(Codec):
    """A codec that turns a gradient into one row of bytes, and back.

    A subclass needs a `name` and the three abstract methods; everything else follows. Where it is
    `shardable`, each rank adds up one shard of the gradient and codes the sum again; otherwise all
    ranks get all payloads.
    """

    @property
    def align(self) -> int:
        """A part of a gradient that is coded alone is a whole number of so many elements."""
        return 1

    @property
    def stochastic(self) -> bool:
        """True if it rounds at random, and `encode` wants an `rng_state`."""
        return False

    @property
    def needs_feedback(self) -> bool:
        """True if what payloads leave out must be kept: the rest alone is too little."""
        return False

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Length of the payload of so many elements, which depends on nothing else."""

    @abstractmethod
    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        """uint8, of `payload_bytes` elements.

        Args:
            x_N: float32, bfloat16 or float16; not changed.
            residual_N: float32, added to x before; overwritten with what the payload leaves out.
            rng_state: int64 [4], only for codecs that are `stochastic`.
        """

    @abstractmethod
    def decode_add_(self, out_N: Tensor, payload: Tensor) -> None:
        """Add what a payload stands for to float32 numbers."""

    def coding(self) -> Coding:
        """The codec as collectives take it: as it is, where it is a `Coding` itself."""
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
        # The kept tensors are only read, so that nothing has to be restored.
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
        """Residuals of this rank and of its shard of the sum; read where they lie, if possible."""
        if not self.feeds_back:
            return States()
        shard = shard_numel(memory.numel, size, self.align)
        kinds = ("residual", "server") if size > 1 else ("residual",)
        fits = size == 1 or memory.keeps_shard(rank * shard, shard)
        # The operator has no factor.
        found = memory.read_write(*kinds) if fits and memory.factor("residual") == 1.0 else None
        if found is not None:
            names = {"server": "server_residual", "server_in": "server_residual_in"}
            return States(**{names.get(kind, kind): x for kind, x in found.items()})
        residual_N = memory.tensor("residual")
        return States(residual_N, memory.shard(rank * shard, shard) if size > 1 else None)

    def passes(self, world_size: int) -> tuple[float, float]:
        """See `Codec`: P shards of N / P elements come in, and their sums go out, or P payloads."""
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
    """A `PayloadCodec` as `Coding`, with payloads that begin where any number may lie."""

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
            # Pieces of one tensor round differently.
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
