"""The three interfaces of GRACE, and its communicators; see `grace`.

Shape suffixes: N elements of a tensor.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.agreement import resolve
from moe_ext.distributed.collectives import check_equal_over_ranks, share, sum_over_ranks_
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_size
from moe_ext.distributed.traffic import record_traffic

_OP = "grace"


class Compressor(ABC):
    """Codes a tensor as a list of tensors, and back.

    Args:
        average: communicators divide the sum over ranks by their number.
        tensors_size_are_same: what is sent has the same sizes on every rank.

    Attributes:
        is_linear: a sum of codes decodes to the sum of the tensors, so that `Allreduce` can add
            them up.
    """

    is_linear = False

    def __init__(self, average: bool = True, tensors_size_are_same: bool = True) -> None:
        """Keep what communicators look at."""
        self.average = average
        self.tensors_size_are_same = tensors_size_are_same

    @abstractmethod
    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        """Tensors to send, and what this rank needs to decode those of any rank."""

    @abstractmethod
    def decompress(self, tensors: Sequence[Tensor], ctx: Any) -> Tensor:
        """A tensor of the shape that was compressed."""

    def undo(self, name: str) -> None:  # noqa: B027
        """The step has failed: forget what the last `compress` of a name left for the next one."""

    def aggregate(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum of what was decoded of each rank, in rank order."""
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` returned."""


class Memory(ABC):
    """Adds to a gradient what is owed, and remembers what compression leaves out.

    The residual of a step counts once the step has ended on all ranks: `Communicator.step` calls
    `commit` then, and `rollback` where it fails.
    """

    @abstractmethod
    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """What to compress instead of a gradient; a new tensor."""

    def update(  # noqa: B027  (a memory may keep nothing)
        self,
        tensor: Tensor,
        name: str,
        compressor: Compressor,
        tensor_compressed: Sequence[Tensor],
        ctx: Any,
    ) -> None:
        """Note what is left; `tensor` is what `compensate` returned."""

    def commit(self) -> None:  # noqa: B027
        """The step has ended well."""

    def rollback(self) -> None:  # noqa: B027
        """The step has failed: everything is as before it."""

    def state_dict(self) -> dict[str, Any]:
        """What is owed, by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` returned."""


class Communicator(ABC):
    """Sends what a compressor made to all ranks.

    Args:
        compressor: codes tensors.
        memory: error feedback.
        world_size: ranks of the group; None takes them from it.
        group: the ranks, None for the default group.

    Raises:
        ValueError: ``world_size`` is not that of the group.
    """

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory,
        world_size: int | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        """Check the number of ranks."""
        group = resolve(group, type(self).__name__)
        ranks = group_size(group)
        if world_size is not None and world_size != ranks:
            raise ValueError(
                f"{type(self).__name__}: expected world_size to be the group's {ranks}, got "
                f"{world_size}"
            )
        self.compressor = compressor
        self.memory = memory
        self.group = group
        self.world_size = ranks

    @abstractmethod
    def send_receive(self, tensors: Sequence[Tensor], name: str, ctx: Any) -> Tensor:
        """The mean (or sum) over ranks of what the tensors stand for."""

    def step(self, tensor: Tensor, name: str) -> Tensor:
        """One gradient of one step, the whole way.

        Args:
            tensor (Tensor): float32, bfloat16 or float16, of any shape; not changed.
            name (str): of the parameter, by which its residual is kept.

        Returns:
            Tensor: of the same shape and dtype, a new one, with the same bits on all ranks.

        Raises:
            ValueError: on every rank: an element is NaN or infinite on some rank, or ranks gave
                other tensors, naming them. Nothing is sent; memory and compressor are as before.
            RankFailureError: a rank died or did not answer; memory and compressor are as before.
        """
        with naming_failed_ranks(self.group, f"{_OP}: {name}"):
            self._check(tensor, name)
            try:
                compensated = self.memory.compensate(tensor, name)
                tensors, ctx = self.compressor.compress(compensated, name)
                try:
                    self.memory.update(compensated, name, self.compressor, tensors, ctx)
                    found = self.send_receive(tensors, name, ctx)
                except BaseException:
                    self.compressor.undo(name)
                    raise
            except BaseException:
                self.memory.rollback()
                raise
        self.memory.commit()
        return found.to(tensor.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Residuals, momenta and factors by name: of this rank, for its own file."""
        return {
            "version": 1,
            "world_size": self.world_size,
            "compressor": self.compressor.state_dict(),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned on the same rank.

        Raises:
            ValueError: another version or number of ranks.
        """
        for key, want in (("version", 1), ("world_size", self.world_size)):
            if state.get(key) != want:
                raise ValueError(
                    f"{type(self).__name__}: expected the state's {key} to be {want}, got "
                    f"{state.get(key)!r}"
                )
        self.compressor.load_state_dict(state["compressor"])
        self.memory.load_state_dict(state["memory"])

    def _check(self, tensor: Tensor, name: str) -> None:
        """ValueError on every rank where a rank holds NaN or infinity, or another tensor.

        The former would poison residuals; of the latter codes have other sizes, or mean others.

        NOTE: device-to-host sync.
        """
        largest = tensor.detach().abs().max().float() if tensor.numel() else torch.zeros(())
        what = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        facts = [int(largest.isfinite()), tensor.numel(), zlib.crc32(what.encode())]
        found = [facts]
        if self.group is not None and self.world_size > 1:
            found = share(facts, self.group, tensor.device, operation=_OP)
            for fact, column in zip(
                (f"the numel of {name}", f"the checksum of name, shape and dtype of {name}"),
                list(zip(*found, strict=True))[1:],
                strict=True,
            ):
                check_equal_over_ranks(fact, column, self.group, _OP)
        bad = [rank for rank, row in enumerate(found) if not row[0]]
        if bad:
            raise ValueError(
                f"{_OP}: expected the gradient of {name} to be finite, got NaN or infinity on "
                f"rank {', '.join(map(str, bad))} of the group"
            )


class Allreduce(Communicator):
    """Adds up what compressors make, element by element; for those that are linear.

    A sum of half-precision numbers that passes 65504 is sent again in float32, on all ranks.

    Raises:
        ValueError: the compressor is not linear: a sum of its codes means nothing.
    """

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory,
        world_size: int | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        """Refuse codes that cannot be added."""
        super().__init__(compressor, memory, world_size, group=group)
        if not compressor.is_linear:
            raise ValueError(
                "Allreduce: expected compressor to be linear (none, fp16, randomk, powersgd), got "
                f"{type(compressor).__name__}; its codes are sent by Allgather"
            )

    def send_receive(self, tensors: Sequence[Tensor], name: str, ctx: Any) -> Tensor:
        """See `Communicator`."""
        sums = [self._sum(tensor) for tensor in tensors]
        found = self.compressor.decompress(sums, ctx)
        # A compressor that sends nothing has reduced on its own.
        divides = self.compressor.average and len(sums) > 0
        return found / self.world_size if divides else found

    def _sum(self, tensor: Tensor) -> Tensor:
        total = sum_over_ranks_(tensor.clone(), self.group, operation=_OP)
        # NOTE: device-to-host sync. Every rank has the same sum, and decides alike.
        if tensor.dtype == torch.float16 and not bool(total.isfinite().all()):
            return sum_over_ranks_(tensor.float(), self.group, operation=_OP)
        return total


class Allgather(Communicator):
    """Sends codes to all ranks, as one message of bytes; each decodes them in rank order."""

    def send_receive(self, tensors: Sequence[Tensor], name: str, ctx: Any) -> Tensor:
        """See `Communicator`."""
        if self.world_size == 1 or not tensors:
            return self.compressor.aggregate([self.compressor.decompress(list(tensors), ctx)])
        # Wider types first, so that every part is aligned where it starts.
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        parts = [tensors[i].contiguous().view(-1) for i in order]
        counts = [[part.numel() for part in parts]] * self.world_size
        if not self.compressor.tensors_size_are_same:
            counts = self._share(counts[0], parts[0].device)
        sizes = [
            sum(n * part.element_size() for n, part in zip(row, parts, strict=True))
            for row in counts
        ]
        room = max(sizes)
        sent = torch.zeros(room, dtype=torch.uint8, device=parts[0].device)
        mine = torch.cat([part.view(torch.uint8) for part in parts])
        sent[: mine.numel()] = mine
        gathered = sent.new_empty((self.world_size, room))
        record_traffic("all_gather", (self.world_size - 1) * room)
        dist.all_gather(list(gathered.unbind(0)), sent, group=self.group)
        decoded = []
        for row, numels in zip(gathered, counts, strict=True):
            found: list[Tensor] = [sent] * len(parts)
            start = 0
            for at, part, numel in zip(order, parts, numels, strict=True):
                stop = start + numel * part.element_size()
                found[at] = row[start:stop].clone().view(part.dtype)
                start = stop
            decoded.append(self.compressor.decompress(found, ctx))
        total = self.compressor.aggregate(decoded)
        return total / self.world_size if self.compressor.average else total

    def _share(self, mine: list[int], device: torch.device) -> list[list[int]]:
        local = torch.tensor(mine, device=device)
        found = [torch.empty_like(local) for _ in range(self.world_size)]
        record_traffic("all_gather", (self.world_size - 1) * local.nbytes)
        dist.all_gather(found, local, group=self.group)
        # NOTE: device-to-host sync, since messages are cut by these sizes.
        return [row.tolist() for row in found]
