"""The ledger of one model's messages: their residuals, and whether a backward pass was finite.

Shape suffixes: see `layout`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm.collectives import all_reduce_
from moe_ext.compression.feedback import FeedbackStore, Packing
from moe_ext.compression.fsdp.layout import ShardLayout

# Largest magnitude of a gradient that counts as finite. Gradient plus residual must not overflow.
LARGEST_GRADIENT = 1e38


def is_finite(flat: Tensor) -> Tensor:
    """Return a 0-d bool tensor: no magnitude is above `LARGEST_GRADIENT`. No host sync."""
    if flat.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=flat.device)
    largest = torch.linalg.vector_norm(flat, float("inf"), dtype=torch.float32)
    return largest <= LARGEST_GRADIENT  # False for NaN


class ShardPacking(Packing):
    """Packing of the compressed parameters of a layout into P shards, ``[P, Q]``."""

    def __init__(self, layout: ShardLayout, num_shards: int) -> None:
        self._segments = [segment for segment in layout.compressed if segment.numel]
        super().__init__([torch.Size([num_shards, s.numel]) for s in self._segments])
        self.shape = torch.Size([num_shards, layout.packed_numel])
        self.numel = self.shape.numel()

    def by_parameter(self, flat_N: Tensor) -> list[Tensor]:
        """Return views of each parameter, ``[P, elements of the parameter's shard]``."""
        packed_PQ = flat_N.view(self.shape)
        return [packed_PQ.narrow(1, s.packed_start, s.numel) for s in self._segments]

    def packed(self, whole: Tensor) -> Tensor:
        """See `Packing`."""
        flat_N = whole.new_zeros(self.numel)
        for view, piece in zip(self.by_parameter(flat_N), whole.split(self.sizes), strict=True):
            view.copy_(piece.view(view.shape))
        return flat_N


class Residual:
    """The residual of one message, by parameter, in the store of a ledger."""

    def __init__(self, store: FeedbackStore, key: int) -> None:
        """Start without a residual."""
        self._store, self._key = store, key
        self.layout: ShardLayout | None = None
        self._names: tuple[str, ...] = ()

    def open(self, layout: ShardLayout, num_shards: int, device: torch.device) -> Tensor:
        """Return the residual of this step ``[P, Q]``, float32, to change in place."""
        if layout is not self.layout:
            # The layout changes when a parameter is frozen or unfrozen. The store then moves the
            # residuals by name.
            names = (segment.name for segment in layout.compressed if segment.numel)
            self.layout, self._names = layout, tuple(f"{self._key}.{name}" for name in names)
        packing = ShardPacking(layout, num_shards)
        memory = self._store.group(self._names, packing.shapes, device, packing=packing)
        return memory.tensor("residual").view(packing.shape)

    @property
    def kept(self) -> Tensor | None:
        """The residual after the last step, ``[P * Q]``; None if there is none."""
        memory = self._store.memories.get(self._names)
        return None if memory is None else memory.kept("residual")

    def by_name(self) -> dict[str, Tensor]:
        """Map each name to its residual after the last step, a view [P, elements of its shard]."""
        kept = self.kept
        if kept is None:
            return {}
        pieces = self._store.memories[self._names].packing.by_parameter(kept)
        names = (name.partition(".")[2] for name in self._names)
        return dict(zip(names, pieces, strict=True))

    def put(self, layout: ShardLayout, packed_PQ: Tensor | None) -> None:
        """Replace the residual of the last step; None clears it."""
        if packed_PQ is None and self.kept is None:
            return
        if packed_PQ is not None:
            self.open(layout, packed_PQ.shape[0], packed_PQ.device)
        memory = self._store.memories[self._names]
        memory.rollback()
        memory.put("residual", None if packed_PQ is None else packed_PQ.reshape(-1))


class StepLedger:
    """Finds the end of each backward pass, and whether all of its messages were finite.

    A pass ends when a module sends its message for the second time, or when `settle` is called.
    Changes of residuals are committed if the pass was finite, and rolled back otherwise.
    """

    def __init__(self) -> None:
        """Start without messages."""
        self._store = FeedbackStore()
        self._num_residuals = 0
        self._finite: list[Tensor] = []
        self._senders: dict[int, str] = {}
        self._groups: dict[int, ProcessGroup] = {}
        self._bad: dict[tuple[str, ...], Tensor] = {}
        self._since: Tensor | None = None
        self._was_asked = False
        self._failed = False
        # True if a message of this pass was sent uncompressed while its residual was kept back.
        self._left_out = False
        self.flushing = False

    def new_residual(self) -> Residual:
        """Make the residual of another message."""
        self._num_residuals += 1
        return Residual(self._store, self._num_residuals)

    def add_group(self, group: ProcessGroup) -> None:
        """Have the ranks of a group agree on how a step ended."""
        self._groups.setdefault(id(group), group)

    def begin(self, sender: object, name: str) -> None:
        """Note that a message is sent, and settle the last pass if the message begins a new one."""
        if id(sender) in self._senders:
            self.settle()
        if not self._senders and self._was_asked:
            self._bad.clear()
            self._since, self._was_asked = None, False
        self._senders[id(sender)] = name

    def note(self, finite: Tensor) -> None:
        """Note whether a message was finite, as a bool tensor of one element."""
        self._finite.append(finite)

    def leave_out(self, residual: Residual | None) -> None:
        """Note that a message is sent without its residual, so that a flush must be repeated."""
        self._left_out |= residual is not None and residual.kept is not None

    def watch_whole(
        self, name: str, layout: ShardLayout | None, flat: Tensor, num_shards: int
    ) -> None:
        """Note whether a message that is sent uncompressed, as consecutive shards, is finite."""
        if layout is None:
            finite = is_finite(flat)
            self._note_bad(finite, [f"module {name!r}"])
        else:
            finite = self._watch(layout, flat, num_shards)
        self.note(finite)

    def watch_gradients(
        self, sender: object, name: str, gradients: Mapping[str, Tensor], group: ProcessGroup
    ) -> None:
        """Note whether gradients are finite that no gradient message has checked."""
        self.begin(sender, name)
        self.add_group(group)
        for parameter, grad in gradients.items():
            finite = is_finite(grad)
            self._note_bad(finite, [parameter])
            self.note(finite)

    def guard(
        self, layout: ShardLayout, flat: Tensor, packed_PQ: Tensor, dense_PD: Tensor
    ) -> Tensor:
        """Replace a message that is not finite by zeros, and mark it for all ranks.

        Otherwise the encoder would raise on this rank alone, and the other ranks would wait.

        Args:
            layout (ShardLayout): layout of the message.
            flat (Tensor[P * S]): the message.
            packed_PQ (Tensor): packed part, from `ShardLayout.pack`.
            dense_PD (Tensor): dense part, from `ShardLayout.pack`; changed in place. The last
                element of each row becomes NaN if the message is not finite.

        Returns:
            Tensor[P, Q]: the packed part to encode; zeros if the message is not finite.
        """
        finite = self._watch(layout, flat, packed_PQ.shape[0])
        if flat.is_cuda:
            # `torch.where` avoids a host synchronisation.
            dense_PD[:, -1] = torch.where(finite, 0.0, float("nan")).to(dense_PD.dtype)
            return torch.where(finite, packed_PQ, packed_PQ.new_zeros(()))
        if bool(finite):
            return packed_PQ
        dense_PD[:, -1] = float("nan")
        return torch.zeros_like(packed_PQ)

    def _watch(self, layout: ShardLayout, flat: Tensor, num_shards: int) -> Tensor:
        """Return whether a message is finite, and note the names of parameters that are not."""
        finite = is_finite(flat)
        if flat.is_cuda:
            # All names are noted, because a search for the bad parameters would need a host
            # synchronisation.
            self._note_bad(finite, sorted({segment.name for segment in layout.segments}))
        elif not bool(finite):
            flat_PS = flat.view(num_shards, layout.shard_numel)
            parts = {s.name: flat_PS.narrow(1, s.start, s.numel) for s in layout.segments}
            self._note_bad(finite, [n for n, part in parts.items() if not bool(is_finite(part))])
        return finite

    def _note_bad(self, finite: Tensor, names: list[str]) -> None:
        """Note that some parameters of this rank are not finite if the tensor is False."""
        key = tuple(names)
        # Each set of names has one tensor. The caller may never ask for the names, so notes must
        # not pile up over the steps.
        self._bad[key] = finite & self._bad[key] if key in self._bad else finite

    def bad_parameters(self) -> list[str]:
        """Return parameters with non-finite gradients on this rank, in the passes of `finite`."""
        found = (n for names, finite in self._bad.items() if not bool(finite) for n in names)
        return list(dict.fromkeys(found))

    def fail(self) -> None:
        """Count the pass as failed, because an exception has stopped it."""
        self._failed = True

    def finite(self) -> bool:
        """End the pass; return True if all passes since the last call were finite on every rank.

        Gradients of several passes add up, so a single pass that was not finite spoils the sum.
        """
        self.settle()
        self._was_asked = True
        return self._since is None or bool(self._since)

    def settle(self) -> None:
        """End the pass: commit the residuals, or roll them back on every rank."""
        if not self._senders:
            return
        # After an exception other ranks may never reach this point. The pass then counts as not
        # finite without an agreement.
        finite = flushed = torch.zeros((), dtype=torch.bool)
        if not self._failed:
            finite, flushed = self._agree()
        self._since = finite if self._since is None else self._since & finite
        self._store.commit(finite=finite)
        for memory in self._store.memories.values():
            memory.keep_no_spare()
        self._finite.clear()
        self._senders.clear()
        self._failed = self._left_out = False
        if self.flushing:
            # NOTE: device-to-host sync, only after a pass that flushes.
            self.flushing = not bool(finite & flushed)

    def _agree(self) -> tuple[Tensor, Tensor]:
        """Agree over ranks on two flags: all messages were finite; none left its residual out."""
        finite = torch.stack(self._finite).all()
        flags = torch.stack([finite, torch.full_like(finite, not self._left_out)]).to(torch.int32)
        for group in self._groups.values():
            all_reduce_(flags, group, operation="fsdp compression", op="min", counted=False)
        return flags[0] == 1, flags[1] == 1
