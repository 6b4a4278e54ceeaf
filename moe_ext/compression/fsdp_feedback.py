"""Error feedback of FSDP's messages: residuals that a step which fails leaves as they were.

Shape suffixes: see `fsdp_layout`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.fsdp_layout import ShardLayout
from moe_ext.distributed.failures import naming_failed_ranks

# A gradient above this counts as overflowed: adding the residual must not reach infinity.
LARGEST_GRADIENT = 1e38


def is_finite(flat: Tensor) -> Tensor:
    """Tensor[]: whether every element is finite and small enough; no synchronisation."""
    if flat.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=flat.device)
    largest = torch.linalg.vector_norm(flat, float("inf"), dtype=torch.float32)
    return largest <= LARGEST_GRADIENT  # False for NaN


class Residual:
    """What one message owes: as it was before the step, and as the step has left it."""

    def __init__(self) -> None:
        """Nothing is owed."""
        self.kept: Tensor | None = None
        self._open: Tensor | None = None
        self.layout: ShardLayout | None = None

    def open(self, layout: ShardLayout, num_shards: int, device: torch.device) -> Tensor:
        """The residual of this step ``[P, Q]``, float32, to change in place."""
        if self.kept is not None and self.layout is not layout:
            self.kept = self._moved(layout, num_shards, device)
        self.layout = layout
        if self.kept is not None:
            self.kept = self.kept.to(device)
        shape = (num_shards, layout.packed_numel)
        self._open = torch.zeros(shape, device=device) if self.kept is None else self.kept.clone()
        return self._open

    def _moved(self, layout: ShardLayout, num_shards: int, device: torch.device) -> Tensor:
        """By name into another layout, after a parameter was frozen, or was no longer."""
        assert self.kept is not None and self.layout is not None
        moved_PQ = torch.zeros((num_shards, layout.packed_numel), device=device)
        for name, part_PN in segments_of(self.layout, self.kept).items():
            for segment in layout.compressed:
                if segment.name == name and segment.numel == part_PN.shape[1]:
                    moved_PQ.narrow(1, segment.packed_start, segment.numel).copy_(part_PN)
        return moved_PQ

    def settle(self, finite: Tensor) -> None:
        """Keep what the step has left where it was finite everywhere, else what was before."""
        if self._open is None:
            return
        if self._open.is_cuda and self.kept is not None:
            # Without waiting for the device to know.
            self.kept = torch.where(finite, self._open, self.kept)
        elif bool(finite):
            self.kept = self._open
        self._open = None


def segments_of(layout: ShardLayout, packed_PQ: Tensor) -> dict[str, Tensor]:
    """Name to ``[P, elements of the parameter's shard]``, views."""
    return {
        s.name: packed_PQ.narrow(1, s.packed_start, s.numel) for s in layout.compressed if s.numel
    }


class StepLedger:
    """Knows when one backward pass ends, and whether every message of it was finite.

    A pass ends where a message is sent for the second time, or where `settle` is called.
    """

    def __init__(self) -> None:
        """No message yet."""
        self._finite: list[Tensor] = []
        self._senders: dict[int, str] = {}
        self._residuals: list[Residual] = []
        self._groups: dict[int, ProcessGroup] = {}
        self._bad: dict[tuple[str, ...], Tensor] = {}
        self._since: Tensor | None = None
        self._was_asked = False
        self._failed = False
        # Whether a message that is sent as it is owes something.
        self._left_out = False
        self.flushing = False

    def add_group(self, group: ProcessGroup) -> None:
        """Have the ranks of a group agree on how a step ended."""
        self._groups.setdefault(id(group), group)

    def add_residual(self, residual: Residual) -> None:
        """Settle a residual with the others."""
        self._residuals.append(residual)

    def begin(self, sender: object, name: str) -> None:
        """Note that a message is sent; settles the last pass where it belongs to a new one."""
        if id(sender) in self._senders:
            self.settle()
        if not self._senders and self._was_asked:
            self._bad.clear()
            self._since, self._was_asked = None, False
        self._senders[id(sender)] = name

    def note(self, finite: Tensor) -> None:
        """Note how a message ended, a bool tensor of one element."""
        self._finite.append(finite)

    def look_at(self, name: str, layout: ShardLayout | None, flat: Tensor, num_shards: int) -> None:
        """Note how a module's message ends that is sent as it is, shards one after the other."""
        if layout is None:
            finite = is_finite(flat)
            self.note_bad(finite, [f"module {name!r}"])
        else:
            finite = watch(self, layout, flat, num_shards)
        self.note(finite)

    def leave_out(self, residual: Residual | None) -> None:
        """Note that a message was sent without its residual; a flush goes on with the next pass."""
        self._left_out |= residual is not None and residual.kept is not None

    def note_bad(self, finite: Tensor, names: list[str]) -> None:
        """Note which parameters are not finite on this rank, where the tensor is False."""
        key = tuple(names)
        # Nobody may ever ask: what is noted must not grow with the steps.
        self._bad[key] = finite & self._bad[key] if key in self._bad else finite

    def bad_parameters(self) -> list[str]:
        """Parameters whose gradients were not finite on this rank, in the passes of `finite`."""
        found = (n for names, finite in self._bad.items() if not bool(finite) for n in names)
        return list(dict.fromkeys(found))

    def fail(self) -> None:
        """Count the pass as failed: an exception has stopped it."""
        self._failed = True

    def finite(self) -> bool:
        """Whether all passes since it was asked last were finite on every rank; ends the last one.

        Gradients of several passes add up: a finite one does not make up for another.
        """
        self.settle()
        self._was_asked = True
        return self._since is None or bool(self._since)

    def settle(self) -> None:
        """End the pass: keep its residuals, or put them back on every rank."""
        if not self._senders:
            return
        # After an exception there may be no rank to agree with.
        finite = flushed = torch.zeros((), dtype=torch.bool)
        if not self._failed:
            finite, flushed = self._agree()
        self._since = finite if self._since is None else self._since & finite
        for residual in self._residuals:
            residual.settle(finite)
        self._finite.clear()
        self._senders.clear()
        self._failed = self._left_out = False
        if self.flushing:
            # NOTE: device-to-host sync, after a pass that flushes.
            self.flushing = not bool(finite & flushed)

    def _agree(self) -> tuple[Tensor, Tensor]:
        """Whether all messages were finite, and whether none left out what it owes."""
        finite = torch.stack(self._finite).all()
        flags = torch.stack([finite, torch.full_like(finite, not self._left_out)]).to(torch.int32)
        for group in self._groups.values():
            with naming_failed_ranks(group, "fsdp compression"):
                dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
        return flags[0] == 1, flags[1] == 1


def guard(
    ledger: StepLedger, layout: ShardLayout, flat: Tensor, packed_PQ: Tensor, dense_PD: Tensor
) -> Tensor:
    """Keeps what is not finite from the coders, which refuse it on one rank alone.

    Args:
        ledger (StepLedger): notes the names.
        layout (ShardLayout): of the message.
        flat (Tensor[P * S]): the message.
        packed_PQ (Tensor): as `ShardLayout.pack` returns it.
        dense_PD (Tensor): likewise, with one spare element a shard, that tells all ranks: NaN where
            the message is not finite. Changed in place.

    Returns:
        Tensor[P, Q]: what to code, zeros where the message is not finite.
    """
    finite = watch(ledger, layout, flat, packed_PQ.shape[0])
    if flat.is_cuda:
        # Without waiting for the device.
        dense_PD[:, -1] = torch.where(finite, 0.0, float("nan")).to(dense_PD.dtype)
        return torch.where(finite, packed_PQ, packed_PQ.new_zeros(()))
    if bool(finite):
        return packed_PQ
    dense_PD[:, -1] = float("nan")
    return torch.zeros_like(packed_PQ)


def watch(ledger: StepLedger, layout: ShardLayout, flat: Tensor, num_shards: int) -> Tensor:
    """Tensor[]: whether a message is finite; notes the names of parameters where it is not."""
    finite = is_finite(flat)
    if flat.is_cuda:
        # Without waiting for the device: names of single parameters would need that.
        ledger.note_bad(finite, sorted({segment.name for segment in layout.segments}))
    elif not bool(finite):
        flat_PS = flat.view(num_shards, layout.shard_numel)
        parts = {s.name: flat_PS.narrow(1, s.start, s.numel) for s in layout.segments}
        ledger.note_bad(finite, [n for n, part in parts.items() if not bool(is_finite(part))])
    return finite
