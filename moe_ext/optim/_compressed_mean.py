"""The mean over ranks of a list of tensors, one bit an element, with what is owed kept.

Shapes: N elements of all tensors, each padded to whole blocks; M elements of a rank's shard; R rows
of a tensor (its last dimension).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression import quantized_all_reduce_, shard_numel
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_rank, group_size
from moe_ext.distributed.traffic import record_traffic

Ranks = ProcessGroup | Literal["self"] | None


def ranks_in(group: Ranks) -> int:
    """Number of ranks; 1 for "self" and where there is no group."""
    return 1 if group == "self" or isinstance(group, str) else group_size(group)


def sum_in_place(x: Tensor, group: Ranks, operation: str, *, maximum: bool = False) -> None:
    """A counted all-reduce of a contiguous tensor, which leaves it alone with one rank."""
    size = ranks_in(group)
    if size == 1 or x.numel() == 0:
        return
    assert isinstance(group, ProcessGroup)
    how = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    with naming_failed_ranks(group, operation):
        dist.all_reduce(x, how, group=group)
    record_traffic("all_reduce", 2 * (size - 1) * x.nbytes // size)


def mean_over_ranks(
    parts: list[Tensor], group: Ranks, operation: str, *, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Means of float32 tensors, which travel in one counted all-reduce as a type."""
    size = ranks_in(group)
    if size == 1:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts]).div_(size).to(dtype)
    sum_in_place(flat, group, operation)
    pieces = flat.float().split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def offsets_of(numels: Sequence[int], block: int) -> list[int]:
    """Where each tensor begins in the flat one, and at the end the length of that."""
    offsets = [0]
    for numel in numels:
        # A block holds elements of one tensor only: scales differ between tensors.
        offsets.append(offsets[-1] + -(-numel // block) * block)
    return offsets


class CompressedMean:
    """Flat copy of tensors, and the errors of its compression.

    A block of zeros on all ranks stays zero. Rows that share a block with others (of a
    length that is no multiple of it) are kept zero as long as no rank had anything in them.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Ranks, block: int) -> None:
        self.group, self.block = group, block
        self.size = ranks_in(group)
        self.rank = group_rank(group) if isinstance(group, ProcessGroup) else 0
        self._offsets = offsets_of([t.numel() for t in tensors], block)
        self._shapes = [t.shape for t in tensors]
        self.flat_N = torch.zeros(self._offsets[-1], device=tensors[0].device)
        self.worker_N = torch.zeros_like(self.flat_N)
        self.server_M = self.flat_N.new_zeros(shard_numel(self._offsets[-1], self.size, block))
        self.views = self.parts_of(self.flat_N)
        self.worker_views = self.parts_of(self.worker_N)
        self._padding = _Padding(
            [t.numel() for t in tensors], self._offsets, block, self.flat_N.device
        )
        own, places = self._own_shard(), self._padding.places
        self._server_padding = places[(places >= own.start) & (places < own.stop)] - own.start
        self._masks: dict[int, Tensor] = {}
        self._dead_N: Tensor | None = None
        self._waiting: list[int] = []
        self.touched: dict[int, Tensor] = {
            index: torch.zeros(t.numel() // t.shape[-1], dtype=torch.bool, device=t.device)
            for index, t in enumerate(tensors)
            if t.dim() > 1 and t.shape[-1] % block and t.numel() > t.shape[-1]
        }
        self.refresh()

    def parts_of(self, flat_N: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the shapes of the tensors."""
        return [
            flat_N[start : start + shape.numel()].view(shape)
            for start, shape in zip(self._offsets, self._shapes, strict=False)
        ]

    def reduce(self, idle: Sequence[int] = ()) -> None:
        """Replace what is in `views` by the mean over ranks, as far as a bit each tells it.

        Args:
            idle: tensors whose mean will not be used: what is owed of them stays as it is.

        Raises:
            RankFailureError: a rank died or did not answer; what is owed is as it was.
        """
        if self.size == 1:
            return
        assert isinstance(self.group, ProcessGroup)
        kept = [(owed, owed.clone()) for index in idle for owed in self._owed_of(index)]
        self._padding.fill(self.flat_N, self.worker_N)
        quantized_all_reduce_(
            self.flat_N,
            format="sign",
            block=self.block,
            residual=self.worker_N,
            server_residual=self.server_M,
            group=self.group,
            validate=False,
        )
        for x, places in (
            (self.flat_N, self._padding.places),
            (self.worker_N, self._padding.places),
            (self.server_M, self._server_padding),
        ):
            x[places] = 0
        if self._dead_N is not None:
            # A sign cannot say zero: in a block with others these came as plus the scale.
            self.flat_N.masked_fill_(self._dead_N, 0)
            self.worker_N.masked_fill_(self._dead_N, 0)
            own = self._dead_N[self._own_shard()]
            self.server_M[: len(own)].masked_fill_(own, 0)
        for owed, before in kept:
            owed.copy_(before)

    def _owed_of(self, index: int) -> tuple[Tensor, Tensor]:
        """Views of both errors of one tensor; that of the shard may be empty."""
        own = self._own_shard()
        start, stop = (
            min(max(place, own.start), own.stop) - own.start
            for place in self._offsets[index : index + 2]
        )
        return self.worker_views[index], self.server_M[start:stop]

    def errors(self) -> Tensor:
        """All that this rank owes, [N], in units of the sum over ranks."""
        owed_N = self.worker_N.clone()
        own = owed_N[self._own_shard()]
        own.add_(self.server_M[: len(own)])
        return owed_N

    def mean_error(self, operation: str) -> list[Tensor]:
        """What all ranks owe, as it would add to the mean; one dense all-reduce."""
        owed_N = self.errors()
        sum_in_place(owed_N, self.group, operation)
        return self.parts_of(owed_N.div_(self.size))

    def clear_errors(self) -> None:
        """Owe nothing."""
        self.worker_N.zero_()
        self.server_M.zero_()

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """The errors, for `restore`."""
        return self.worker_N.clone(), self.server_M.clone()

    def restore(self, saved: tuple[Tensor, Tensor]) -> None:
        """Put errors back."""
        self.worker_N.copy_(saved[0])
        self.server_M.copy_(saved[1])

    def note_rows(self, values: Sequence[Tensor]) -> None:
        """Mark rows that are not zero in tensors that all ranks hold alike."""
        for index, touched_R in self.touched.items():
            touched_R |= _nonzero_rows(values[index])
        self.refresh()

    def note_local_rows(self, values: Sequence[Tensor], operation: str) -> None:
        """Mark rows that any rank has something in: a byte for each row not yet marked."""
        if not self._waiting:
            return
        found = []
        for index in self._waiting:
            unseen_R = ~self.touched[index]
            found.append(_nonzero_rows(values[index])[unseen_R].to(torch.uint8))
        message = torch.cat(found)
        sum_in_place(message, self.group, operation, maximum=True)
        pieces = message.split([len(piece) for piece in found])
        for index, piece in zip(self._waiting, pieces, strict=True):
            self.touched[index][~self.touched[index]] = piece.bool()
        if bool(message.any()):
            self.refresh()

    def set_masks(self, masks: dict[int, Tensor]) -> None:
        """Keep elements zero where a mask is zero; tensors by index, shapes that broadcast."""
        same = masks.keys() == self._masks.keys()
        if same and all(masks[index] is self._masks[index] for index in masks):
            return
        self._masks = dict(masks)
        self.refresh()

    def _own_shard(self) -> slice:
        start = min(self.rank * len(self.server_M), len(self.flat_N))
        return slice(start, min(start + len(self.server_M), len(self.flat_N)))

    def refresh(self) -> None:
        """Find out again what stays zero, after `touched` or the masks have changed."""
        dead_N = torch.zeros_like(self.flat_N, dtype=torch.bool)
        parts = self.parts_of(dead_N)
        self._waiting = [i for i, touched_R in self.touched.items() if not bool(touched_R.all())]
        for index in self._waiting:
            untouched_R = ~self.touched[index]
            parts[index].view(len(untouched_R), -1).logical_or_(untouched_R.unsqueeze(1))
        for index, mask in self._masks.items():
            parts[index].logical_or_(mask.to(dead_N.device) == 0)
        self._dead_N = dead_N if bool(dead_N.any()) else None


class _Padding:
    """What fills the last block of each tensor, T of them with B elements.

    A scale is the mean magnitude of a block: zeros would make it as many times too small as the
    tensor is shorter than the block, and its error would take as many steps to be sent.
    """

    def __init__(
        self, numels: Sequence[int], offsets: Sequence[int], block: int, device: torch.device
    ) -> None:
        tails = [(o + n - n % block, n % block) for n, o in zip(numels, offsets, strict=False)]
        tails = [(start, length) for start, length in tails if length]
        table_2T = torch.tensor(tails, dtype=torch.int64, device=device).view(-1, 2).t()
        starts_T, self._lengths_T = table_2T[0], table_2T[1]
        columns_B = torch.arange(block, device=device)
        self._places_TB = starts_T.view(-1, 1) + columns_B
        self._real_TB = columns_B < self._lengths_T.view(-1, 1)
        self.places = self._places_TB[~self._real_TB]
        self._tails = (~self._real_TB).nonzero()[:, 0]

    def fill(self, flat_N: Tensor, worker_N: Tensor) -> None:
        """The mean magnitude of what the block is about to send."""
        if len(self.places):
            sent_TB = (flat_N[self._places_TB] + worker_N[self._places_TB]).abs_()
            means_T = sent_TB.mul_(self._real_TB).sum(dim=1) / self._lengths_T
            flat_N[self.places] = means_T[self._tails]


def _nonzero_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).ne(0).any(dim=1)


def owes(state_dict: dict[str, Any], server: dict[str, Any]) -> bool:
    """Whether a saved state owes anything, for one of its groups of ranks."""
    workers = [state_dict["state"][index]["worker_error"] for index in server["parameters"]]
    return any(bool(error.any()) for error in (server["server_error"], *workers))


def all_owed(state_dict: dict[str, Any], servers: Sequence[dict[str, Any]]) -> dict[int, Tensor]:
    """What the rank of a saved state owes, by number of the parameter."""
    found: dict[int, Tensor] = {}
    block = state_dict["compression"]["block"]
    for server in servers:
        ids = server["parameters"]
        workers = [state_dict["state"][index]["worker_error"] for index in ids]
        offsets = offsets_of([error.numel() for error in workers], block)
        flat_N = workers[0].new_zeros(offsets[-1])
        start = server["rank"] * shard_numel(len(flat_N), server["world_size"], block)
        own = flat_N[start : start + len(server["server_error"])]
        own.copy_(server["server_error"][: len(own)])
        for index, error, offset in zip(ids, workers, offsets, strict=False):
            found[index] = error + flat_N[offset : offset + error.numel()].view(error.shape)
    return found
