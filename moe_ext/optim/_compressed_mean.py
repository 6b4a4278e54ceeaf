"""The mean over ranks of a list of tensors, one bit an element, with what is owed kept.

Shapes: N elements of all tensors, each padded to whole blocks; M elements of a rank's shard; R rows
of a tensor (its last dimension).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import group_rank, group_size
from moe_ext.compression import CodecMemory, shard_numel
from moe_ext.compression.collectives.coding import QuantizedCoding
from moe_ext.compression.collectives.padding import PartialBlocks, padded_all_reduce_
from moe_ext.compression.collectives.quantized import States, start_all_reduce
from moe_ext.compression.feedback import Packing


def mean_over_ranks(
    parts: list[Tensor],
    group: ProcessGroup | None,
    operation: str,
    *,
    dtype: torch.dtype = torch.float32,
    halvings: int = 0,
) -> list[Tensor]:
    """Means of float32 tensors, which travel in one all-reduce as a type, halved so many times."""
    size = group_size(group)
    if size == 1:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts]).div_(size * 2.0**halvings).to(dtype)
    all_reduce_(flat, group, operation=operation)
    pieces = (flat.float() * 2.0**halvings).split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


class BlockPacking(Packing):
    """Tensors one after the other, each from a new block on: scales differ between tensors."""

    def __init__(self, shapes: Sequence[torch.Size], block: int) -> None:
        super().__init__(shapes)
        self.offsets = [0]
        for numel in self.sizes:
            self.offsets.append(self.offsets[-1] + -(-numel // block) * block)
        self.numel = self.offsets[-1]

    def pieces(self, flat_N: Tensor) -> list[Tensor]:
        """See `Packing`."""
        parts = zip(self.offsets, self.shapes, strict=False)
        return [flat_N[start : start + shape.numel()].view(shape) for start, shape in parts]


class CompressedMean:
    """Flat copy of tensors, and a memory of the errors of its compression.

    A block of zeros on all ranks stays zero. Rows that share a block with others (of a
    length that is no multiple of it) are kept zero as long as no rank had anything in them.
    """

    def __init__(self, tensors: Sequence[Tensor], group: ProcessGroup | None, block: int) -> None:
        self.group, self.block = group, block
        self.size, self.rank = group_size(group), group_rank(group)
        packing = BlockPacking([t.shape for t in tensors], block)
        device, self.parts_of = tensors[0].device, packing.pieces
        self._offsets = packing.offsets
        self._is_padded = packing.numel != sum(packing.sizes)
        self.flat_N = torch.zeros(packing.numel, device=device)
        self.views = self.parts_of(self.flat_N)
        shard = shard_numel(packing.numel, self.size, block)
        start = min(self.rank * shard, packing.numel)
        self._own = slice(start, min(start + shard, packing.numel))
        self.memory = CodecMemory(packing.shapes, device, packing=packing)
        self.memory.server_start = self.rank * shard
        self.memory.put("residual", torch.zeros_like(self.flat_N))
        self.memory.put("server", self.flat_N.new_zeros(shard))
        # Whether it is known, on all ranks alike, that none owes anything.
        self.settled = True
        self._masks: dict[int, Tensor] = {}
        # Elements that stay zero, padding among them, and the blocks that they share with others.
        self._zeros_N: Tensor | None = None
        self._partial: PartialBlocks | None = None
        self._watched: list[int] = []  # tensors with rows that were zero on all ranks so far
        # Rows in which any rank had something, of tensors whose rows share blocks.
        self.touched: dict[int, Tensor] = {
            index: torch.zeros(t.numel() // t.shape[-1], dtype=torch.bool, device=t.device)
            for index, t in enumerate(tensors)
            if t.dim() > 1 and t.shape[-1] % block and t.numel() > t.shape[-1]
        }
        self.refresh()

    def reduce(self, operation: str, idle: Sequence[int] = ()) -> None:
        """Replace what is in `views` by the mean over ranks, as far as a bit each tells it.

        What is owed afterwards is open in the memory, which the caller commits or rolls back.

        Args:
            operation: for messages.
            idle: tensors whose mean will not be used: what is owed of them stays as it is.

        Raises:
            RankFailureError: a rank died or did not answer.
        """
        if self.size == 1:
            if not self.settled:
                # Nothing is lost on the way: what was owed on other ranks arrives at once.
                for index, (view, error) in enumerate(
                    zip(self.views, self.parts_of(self.worker_N), strict=True)
                ):
                    if index not in idle:
                        view.add_(error)
                        error.zero_()
            return
        self.settled = False
        self.memory.begin()
        owed = self.memory.read_write("residual", "server")
        assert owed is not None
        worker_N, server_M = owed["residual"], owed["server"]
        states = States(worker_N, server_M, None, owed["residual_in"], owed["server_in"])
        coding, flat_N = QuantizedCoding("sign", self.block), self.flat_N
        how: dict[str, Any] = {"group": self.group, "average": True, "operation": operation}
        if self._partial is None:
            start_all_reduce(flat_N, coding, states, async_op=False, **how).wait()
        else:
            padded_all_reduce_(flat_N, coding, states, self._partial, **how)
        if self._zeros_N is not None:
            # A sign cannot say zero.
            self.flat_N.masked_fill_(self._zeros_N, 0)
            worker_N.masked_fill_(self._zeros_N, 0)
            own = self._zeros_N[self._own]
            server_M[: len(own)].masked_fill_(own, 0)
        for index in idle:
            first, last = self._offsets[index : index + 2]
            worker_N[first:last] = owed["residual_in"][first:last]
            own_first, own_last = (
                min(max(place, self._own.start), self._own.stop) - self._own.start
                for place in (first, last)
            )
            server_M[own_first:own_last] = owed["server_in"][own_first:own_last]

    @property
    def worker_N(self) -> Tensor:
        """The error of this rank's own tensors, [N], in units of the sum over ranks."""
        return self.memory.kept_tensor("residual")

    @property
    def server_M(self) -> Tensor:
        """The error of the sum in this rank's shard, [M]."""
        return self.memory.kept_tensor("server")

    def errors(self) -> Tensor:
        """All that this rank owes, [N], a copy."""
        owed_N = self.memory.whole("residual")
        assert owed_N is not None
        return owed_N

    def clear_errors(self) -> None:
        """Owe nothing."""
        self.worker_N.zero_()
        self.server_M.zero_()
        self.settled = True

    def start_anew(self) -> None:
        """As when it was made, but for the error of this rank's tensors, which the caller sets."""
        self.flat_N.zero_()
        self.server_M.zero_()
        self.settled = False
        for touched_R in self.touched.values():
            touched_R.fill_(False)

    def note_rows(self, values: Sequence[Tensor | None]) -> None:
        """Mark rows that are not zero in tensors that all ranks hold alike; None is of zeros."""
        for index, touched_R in self.touched.items():
            if (value := values[index]) is not None:
                touched_R |= _nonzero_rows(value)
        self.refresh()

    def note_local_rows(self, operation: str) -> None:
        """Mark rows in which any rank has something in `views`: a byte for each unmarked row."""
        if not self._watched:
            return
        found = [
            _nonzero_rows(self.views[index])[~self.touched[index]].to(torch.uint8)
            for index in self._watched
        ]
        message = all_reduce_(torch.cat(found), self.group, operation=operation, op="max")
        pieces = message.split([len(piece) for piece in found])
        for index, piece in zip(self._watched, pieces, strict=True):
            self.touched[index][~self.touched[index]] = piece.bool()
        if bool(message.any()):
            self.refresh()

    def set_masks(self, masks: dict[int, Tensor]) -> None:
        """Keep elements zero where a mask is zero: of as many elements, or one that broadcasts."""
        same = masks.keys() == self._masks.keys()
        if not same or any(masks[index] is not self._masks[index] for index in masks):
            self._masks = dict(masks)
            self.refresh()

    def refresh(self) -> None:
        """Find out again what stays zero, after `touched` or the masks have changed."""
        self._watched = [i for i, touched_R in self.touched.items() if not bool(touched_R.all())]
        self._zeros_N = self._partial = None
        if not (self._watched or self._masks or self._is_padded):
            return
        zeros_N = torch.ones_like(self.flat_N, dtype=torch.bool)
        parts = self.parts_of(zeros_N)
        for part in parts:
            part.fill_(False)
        for index in self._watched:
            untouched_R = ~self.touched[index]
            parts[index].view(len(untouched_R), -1).logical_or_(untouched_R.unsqueeze(1))
        for index, mask in self._masks.items():
            if mask.numel() == parts[index].numel():
                mask = mask.reshape(parts[index].shape)
            parts[index].logical_or_(mask.to(zeros_N.device) == 0)
        if bool(zeros_N.any()):
            self._zeros_N = zeros_N
            partial = PartialBlocks.of(zeros_N, self.block)
            self._partial = partial if len(partial.numbers_K) else None


def _nonzero_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).ne(0).any(dim=1)
