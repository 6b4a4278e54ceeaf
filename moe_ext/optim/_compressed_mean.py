"""Mean over ranks of one tensor per parameter, sent as one bit per element with error feedback.

Shapes: N elements of all tensors, each padded to whole blocks; M elements of a rank's shard; R rows
of a tensor (along its last dimension).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import group_rank, group_size
from moe_ext.compression import CodecMemory, shard_numel
from moe_ext.compression.collectives.coding import QuantizedCoding
from moe_ext.compression.collectives.padding import PartialBlocks, padded_all_reduce_
from moe_ext.compression.collectives.quantized import States, start_all_reduce
from moe_ext.compression.feedback import Packing, committing
from moe_ext.distributed.dtensor import local_part, sharding_groups
from moe_ext.optim._entries import Entry


class BlockPacking(Packing):
    """Tensors one after the other, each starting a new block, so that none share a scale."""

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
    """Flat buffer with one tensor per parameter, and the errors of compressing this buffer.

    A block of zeros on all ranks stays zero. Rows whose length is no multiple of the block share
    blocks with other rows. Such a row is kept zero until a rank has a nonzero element in it.

    Args:
        entries: parameters on one device, of which the same ranks hold copies.
        block: elements that share a scale.
    """

    def __init__(self, entries: Sequence[Entry], block: int) -> None:
        self.entries, self.block, self.group = entries, block, entries[0].ranks
        self.size, self.rank = group_size(self.group), group_rank(self.group)
        tensors = [entry.part for entry in entries]
        packing = BlockPacking([t.shape for t in tensors], block)
        device, self.parts_of = tensors[0].device, packing.pieces
        self._offsets = packing.offsets
        self._is_padded = packing.numel != sum(packing.sizes)
        self.flat_N = torch.zeros(packing.numel, device=device, dtype=torch.float32)
        self.views = self.parts_of(self.flat_N)
        shard = shard_numel(packing.numel, self.size, block)
        start = min(self.rank * shard, packing.numel)
        self._own = slice(start, min(start + shard, packing.numel))
        self.memory = CodecMemory(packing.shapes, device, packing=packing)
        self.memory.server_start = self.rank * shard
        self.memory.put("residual", torch.zeros_like(self.flat_N))
        self.memory.put("server", self.flat_N.new_zeros(shard))
        # True if all ranks know that the errors of every rank are zero.
        self.settled = True
        self._masks: dict[int, Tensor] = {}
        # Identity and version counter of each mask, to notice another mask or a write in place.
        self._versions: dict[int, tuple[int, int]] = {}
        # Elements that stay zero, including padding; and the blocks that also hold other elements.
        self._zeros_N: Tensor | None = None
        self._partial: PartialBlocks | None = None
        # Tensors with rows that were zero on all ranks so far.
        self._watched: list[int] = []
        # For tensors whose rows share blocks: rows in which any rank had a nonzero element.
        self.touched: dict[int, Tensor] = {
            index: torch.zeros(t.numel() // t.shape[-1], dtype=torch.bool, device=t.device)
            for index, t in enumerate(tensors)
            if t.dim() > 1 and t.shape[-1] % block and t.numel() > t.shape[-1]
        }
        self._refresh()

    def by_entry(self, flat_N: Tensor | None = None) -> Iterator[tuple[Entry, Tensor]]:
        """Yield entries with their views of a flat tensor, by default `flat_N`."""
        views = self.views if flat_N is None else self.parts_of(flat_N)
        return zip(self.entries, views, strict=True)

    def reduce(self, operation: str) -> None:
        """Replace the values of `views` by their compressed mean over ranks.

        The caller has begun a step of `memory` and commits the new errors. The mean of idle
        parameters is not used, so their errors do not change.

        Args:
            operation: name for error messages.

        Raises:
            RankFailureError: a rank died or did not answer.
        """
        self._set_masks()
        self._note_local_rows(operation)
        if self.size == 1:
            if not self.settled:
                # A single rank sends nothing and loses nothing. Errors that it loaded from a run
                # with more ranks are added in full.
                errors = self.parts_of(self.memory.tensor("residual"))
                for entry, view, error in zip(self.entries, self.views, errors, strict=True):
                    if not entry.is_idle:
                        view.add_(error)
                        error.zero_()
            return
        self.settled = False
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
            # A decoded sign is never zero, so zeros are restored, in the mean and in the errors.
            self.flat_N.masked_fill_(self._zeros_N, 0)
            worker_N.masked_fill_(self._zeros_N, 0)
            own = self._zeros_N[self._own]
            server_M[: len(own)].masked_fill_(own, 0)
        for index, entry in enumerate(self.entries):
            if not entry.is_idle:
                continue
            first, last = self._offsets[index : index + 2]
            worker_N[first:last] = owed["residual_in"][first:last]
            own_first, own_last = (
                min(max(place, self._own.start), self._own.stop) - self._own.start
                for place in (first, last)
            )
            server_M[own_first:own_last] = owed["server_in"][own_first:own_last]

    @property
    def worker_N(self) -> Tensor:
        """Error of this rank's own tensors, [N], in units of the sum over ranks."""
        return self.memory.kept_tensor("residual")

    @property
    def server_M(self) -> Tensor:
        """Error of the sum in this rank's shard, [M]."""
        return self.memory.kept_tensor("server")

    def errors(self) -> Tensor:
        """Return a copy of this rank's errors, [N], with the error of its shard added."""
        owed_N = self.memory.whole("residual")
        assert owed_N is not None
        return owed_N

    def clear_errors(self) -> None:
        """Set all errors of this rank to zero."""
        self.worker_N.zero_()
        self.server_M.zero_()
        self.settled = True

    def note_rows(self, *names: str) -> None:
        """Mark rows that are not zero in states of these names, which are equal on all ranks."""
        for name in names:
            self._note_rows([entry.state.get(name) for entry in self.entries])

    def _note_rows(self, values: Sequence[Tensor | None]) -> None:
        for index, touched_R in self.touched.items():
            if (value := values[index]) is not None:
                touched_R |= _nonzero_rows(value)
        self._refresh()

    def _note_local_rows(self, operation: str) -> None:
        """Mark nonzero rows of `views` on any rank, by a message of one byte per unmarked row."""
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
            self._refresh()

    def _set_masks(self) -> None:
        """Keep elements zero where an `exp_avg_mask`, of equal size or broadcast, is zero."""
        found = {i: entry.group.get("exp_avg_mask") for i, entry in enumerate(self.entries)}
        masks = {index: mask for index, mask in found.items() if mask is not None}
        versions = {i: (id(m), 0 if m.is_inference() else m._version) for i, m in masks.items()}
        if versions != self._versions:
            self._masks, self._versions = masks, versions
            self._refresh()

    def _refresh(self) -> None:
        """Recompute which elements stay zero, after `touched` or the masks have changed."""
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

    # -- saved states, by number of the parameter

    def save(self, states: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Put this rank's errors into states, and return the error of its shard."""
        for position, (entry, error) in enumerate(self.by_entry(self.worker_N)):
            state = states.setdefault(entry.number, {})
            state["worker_error"] = error.clone()
            if position in self.touched:
                state["touched_rows"] = self.touched[position].clone()
        return {
            "rank": self.rank,
            "world_size": self.size,
            "parameters": [entry.number for entry in self.entries],
            "server_error": self.server_M.clone(),
        }

    def load(
        self, op: str, states: Mapping[int, Any], server: Mapping[str, Any], block: int
    ) -> None:
        """Load errors that `save` returned with this block size; ValueError if they do not fit."""
        numbers = [entry.number for entry in self.entries]
        if (server["rank"], server["world_size"]) != (self.rank, self.size):
            raise ValueError(
                f"{op}: expected the state of rank {self.rank} of {self.size}, got that of rank "
                f"{server['rank']} of {server['world_size']}; call flush before saving, or "
                "load_rank_states with the states of all ranks"
            )
        if server["parameters"] != numbers or block != self.block:
            raise ValueError(
                f"{op}: expected a state of blocks of {self.block} of parameters {numbers}, got "
                f"blocks of {block} of {server['parameters']}; what is owed goes to another order "
                "by load_rank_states"
            )
        self.settled = False
        self.server_M.copy_(server["server_error"])
        for entry, error in self.by_entry(self.worker_N):
            error.copy_(states[entry.number]["worker_error"])

    def load_rows(self, states: Mapping[int, Any]) -> None:
        """Mark the rows that `save` has put into states."""
        for position, touched_R in self.touched.items():
            # A parameter that was frozen when the state was saved has no state.
            state = states.get(self.entries[position].number, {})
            if "touched_rows" in state:
                touched_R.copy_(state["touched_rows"])
        self._refresh()

    def take_over(self, owed: Sequence[Mapping[int, Tensor]], num_holders: int) -> None:
        """Add errors of some ranks of another run, scaled so that the mean over ranks is kept.

        Args:
            owed: errors of each of these ranks, by number of the parameter.
            num_holders: ranks of the other run that held copies of the parameters.
        """
        self.settled = False
        for of_rank in owed:
            for entry, error in self.by_entry(self.worker_N):
                error.add_(of_rank[entry.number].to(error), alpha=self.size / num_holders)

    def save_mean(self, states: Mapping[nn.Parameter, dict[str, Any]], op: str) -> None:
        """Put the mean over ranks of their errors into states, by one all-reduce."""
        owed_N = self.errors()
        if not self.settled:
            all_reduce_(owed_N, self.group, operation=op).div_(self.size)
        for position, (entry, owed) in enumerate(self.by_entry(owed_N)):
            state = states[entry.parameter]
            # NOTE: a clone, because a DTensor of a view with a storage offset cannot be copied.
            state["owed"] = owed.clone()
            # Rows of a sharded expert are not saved. Ranks mark its nonzero rows again after a
            # load.
            others = range(1, entry.parameter.dim())
            if position in self.touched and not sharding_groups(entry.parameter, others):
                state["touched_rows"] = self.touched[position].view(entry.part.shape[:-1])

    def load_mean(self, states: Mapping[int, Any]) -> None:
        """Load the errors that `save_mean` has put into states, by number of the parameter."""
        self.flat_N.zero_()
        self.server_M.zero_()
        self.settled = False
        for position, (entry, error) in enumerate(self.by_entry(self.worker_N)):
            state = states.get(entry.number, {})
            error.copy_(local_part(state.get("owed", error.new_zeros(()))))
            if position in self.touched:
                touched_R = self.touched[position].fill_(False)
                if "touched_rows" in state:
                    touched_R |= local_part(state["touched_rows"]).reshape(-1)
        # A parameter that was frozen when the state was saved has no `touched_rows` there.
        self.note_rows("exp_avg_sq", "exp_avg")
        self._note_rows(self.parts_of(self.worker_N))


def reduce_all(means: Sequence[CompressedMean], operation: str) -> None:
    """Reduce all means. If one raises, the compression errors of all stay unchanged."""
    with committing(*(mean.memory for mean in means)):
        for mean in means:
            mean.reduce(operation)


def _nonzero_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).ne(0).any(dim=1)
