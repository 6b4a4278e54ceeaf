"""Messages of FSDP2 without pruned elements and unused experts, which all ranks know to be zero.

Shape suffixes: P ranks of the group, S elements of a rank's shard, E experts of this rank's module.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule

from moe_ext import ops
from moe_ext._checks import check_rule
from moe_ext._compile import outside_graphs
from moe_ext.comm import collectives
from moe_ext.comm.groups import group_rank, small_message_device
from moe_ext.comm.pending import Pending, PendingWork
from moe_ext.compression.masks import mask_of, masks_of, unpacked_bits
from moe_ext.distributed.fsdp_state import (
    AllGather,
    ManagedParameter,
    ReduceScatter,
    fsdp_modules,
    managed_parameters,
    messages_of,
    resharded_over,
    shard_group,
)
from moe_ext.nn import GroupedExperts
from moe_ext.nn.torch_state import in_backward

_OP = "pack_fsdp_messages"


@dataclass(frozen=True)
class _Segment:
    """One parameter in the shard of one rank.

    Attributes:
        start: offset of the parameter in the shard.
        numel: elements of the parameter in the shard, padding included.
        bitmap: marks the elements that are sent; None if all elements, or whole rows, are sent.
        rows: numbers of the rows that are sent; None if rows are not left out.
        count: number of elements that are sent.
    """

    start: int
    numel: int
    bitmap: Tensor | None
    rows: Tensor | None
    count: int

    def pack(self, shard_S: Tensor, packed: Tensor) -> None:
        """Copy the elements that are sent into `packed`."""
        part = shard_S.narrow(0, self.start, self.numel)
        if self.bitmap is not None:
            ops.pack_masked_(packed, part, self.bitmap)
        elif self.rows is None:
            packed.copy_(part)
        elif self.count:
            width = self.count // len(self.rows)
            torch.index_select(part.view(-1, width), 0, self.rows, out=packed.view(-1, width))

    def unpack(self, shard_S: Tensor, packed: Tensor) -> None:
        """Copy `packed` back into the shard, and zero the elements that were not sent."""
        part = shard_S.narrow(0, self.start, self.numel)
        if self.bitmap is not None:
            ops.unpack_masked_(part, packed, self.bitmap)
        elif self.rows is None:
            part.copy_(packed)
        else:
            part.zero_()
            if self.count:
                width = self.count // len(self.rows)
                part.view(-1, width).index_copy_(0, self.rows, packed.view(-1, width))


def _count(segments: Sequence[_Segment]) -> int:
    return sum(segment.count for segment in segments)


def _copy(segments: Sequence[_Segment], shard_S: Tensor, packed: Tensor, *, back: bool) -> None:
    """Pack the segments of one rank's shard, or unpack them if `back`."""
    parts = packed.narrow(0, 0, _count(segments)).split([s.count for s in segments])
    for segment, part in zip(segments, parts, strict=True):
        (segment.unpack if back else segment.pack)(shard_S, part)


def _segments_of(
    entry: ManagedParameter, start: int, size: int, experts_E: Tensor | None
) -> list[_Segment]:
    """Return the segment of one parameter in the shard of each rank."""
    numel, dim, shape = entry.shard_numel, entry.dim, entry.shape
    mask = mask_of(entry.owner, entry.name)
    row_numel = shape[1:].numel() if dim == 0 else numel // max(shape[0], 1)
    chosen = None
    if experts_E is not None:
        chosen = _rows_of(experts_E, size, dim, numel // row_numel)
    if mask is None:
        if chosen is None:
            return [_Segment(start, numel, None, None, numel)] * size
        found = [rows_R.nonzero().view(-1).to(entry.param.device) for rows_R in chosen]
        return [_Segment(start, numel, None, rows, len(rows) * row_numel) for rows in found]
    known = mask.once(
        ("shards", size, dim, numel),
        lambda: _bitmaps_of(mask.marks, size, dim, numel, row_numel),
    )
    if chosen is None:
        return [
            _Segment(start, numel, bitmap, None, int(counts_R.sum())) for bitmap, counts_R in known
        ]
    return [
        _Segment(start, numel, _only(bitmap, rows_R, numel), None, int(counts_R[rows_R].sum()))
        for (bitmap, counts_R), rows_R in zip(known, chosen, strict=True)
    ]


def _rows_of(experts_E: Tensor, size: int, dim: int, num_rows: int) -> list[Tensor]:
    """For each rank's shard, mark the rows of chosen experts: bool `[R]`."""
    if dim != 0:
        return [experts_E] * size
    parts = [*experts_E.chunk(size), *[experts_E[:0]] * size][:size]
    return [nn.functional.pad(part, (0, num_rows - part.shape[0])) for part in parts]


def _only(bitmap: Tensor, rows_R: Tensor, numel: int) -> Tensor:
    """Clear the bits of a bitmap in rows that are not marked in `rows_R`."""
    rows_R1 = rows_R.to(bitmap.device)[:, None]
    if numel // rows_R.shape[0] % 8 == 0:
        return (bitmap.view(rows_R.shape[0], -1) * rows_R1).view(-1)
    marks = unpacked_bits(bitmap, numel).view(rows_R.shape[0], -1)
    return ops.pack_bits(marks & rows_R1)


def _bitmaps_of(
    marks: Tensor, size: int, dim: int, numel: int, row_numel: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the bitmap of each rank's shard, with FSDP's padding, and the marks in each row."""
    parts = [part.reshape(-1) for part in marks.chunk(size, dim)]
    parts += [marks.new_zeros(0)] * (size - len(parts))
    padded = [nn.functional.pad(part, (0, numel - part.numel())).contiguous() for part in parts]
    return [(ops.pack_bits(p), p.view(-1, row_numel).sum(dim=1).cpu()) for p in padded]


class _LivePass:
    """Chosen experts of a forward pass. A hook on its output keeps this alive with the graph."""

    def __init__(self, flags_E: Tensor) -> None:
        self.flags_E = flags_E


class _ChosenExperts:
    """Finds the experts that routers of a group's ranks have chosen, by the offsets of their rows.

    Attributes:
        now_E: experts of the forward pass that is about to gather.
        since_E: experts of all passes since the last reduction.
        held_E: experts that the last gather has brought, equal on all ranks.
    """

    def __init__(self, experts: GroupedExperts) -> None:
        self.num_experts = experts.num_local_experts
        self.now_E: Tensor | None = None
        self.since_E: Tensor | None = None
        self.held_E: Tensor | None = None
        self._open: weakref.WeakSet[_LivePass] = weakref.WeakSet()
        experts.register_forward_pre_hook(self._before_gather, prepend=True)
        experts.register_forward_pre_hook(self._after_gather)
        experts.register_forward_hook(self._after, prepend=True)

    @outside_graphs
    def _before_gather(self, experts: nn.Module, args: Sequence[Any]) -> None:
        offsets = args[1]
        if offsets.shape[0] == self.num_experts:
            offsets = nn.functional.pad(offsets, (1, 0))
        self.now_E = (offsets.diff() > 0).cpu()
        self.since_E = self.now_E if self.since_E is None else self.since_E | self.now_E

    @outside_graphs
    def _after_gather(self, experts: nn.Module, args: Sequence[Any]) -> None:
        assert self.now_E is not None
        if self.held_E is None or bool((self.now_E & ~self.held_E).any()):
            raise RuntimeError(
                f"{_OP}: expected the experts to be gathered for each forward pass, got one with "
                "those of an earlier pass; leave resharding on (set_reshard_after_forward, "
                "set_reshard_after_backward), or pack with chosen_experts=False"
            )

    @outside_graphs
    def _after(self, experts: nn.Module, args: object, output: Tensor) -> None:
        now_E, self.now_E = self.now_E, None
        if output.requires_grad and now_E is not None:
            passed = _LivePass(now_E)
            output.register_hook(functools.partial(self._begin_backward, passed))
            self._open.add(passed)

    def _begin_backward(self, passed: _LivePass, grad: Tensor) -> None:
        flags_E = passed.flags_E
        self.since_E = flags_E if self.since_E is None else self.since_E | flags_E

    def agreed(self, group: ProcessGroup, gradients: bool) -> Tensor:
        """Return the experts that any rank needs in a message. One message of E bytes is sent."""
        known = [self.now_E]
        if gradients or in_backward():
            known += [self.since_E, *(p.flags_E for p in self._open)]
        wanted = [flags_E for flags_E in known if flags_E is not None]
        # A gather ahead of its forward pass cannot know the experts of that pass, so it brings all.
        wanted = wanted or [torch.ones(self.num_experts, dtype=torch.bool)]
        flags_E = torch.stack(wanted).any(0)
        device = small_message_device(group)
        sent_E = flags_E.to(device, torch.uint8)
        collectives.all_reduce_(sent_E, group, operation=_OP, op="max", counted=False)
        found_E = sent_E.cpu().bool()
        if gradients:
            self.since_E = None
        else:
            self.held_E = found_E
        return found_E


class _PackedMessage:
    """Base of `_PackedAllGather` and `_PackedReduceScatter`.

    Args:
        module: module that FSDP has wrapped.
        chosen: finds the experts that passes need; None to send all experts.
    """

    def __init__(self, module: FSDPModule, chosen: _ChosenExperts | None) -> None:
        self.module, self.chosen = module, chosen

    def _segments(
        self, shard_numel: int, group: ProcessGroup, gradients: bool
    ) -> list[list[_Segment]] | None:
        """Return the segments of each rank; None if the message must be sent whole.

        A message is sent whole if it does not hold all parameters, or if its group is not the group
        over which the module is sharded.
        """
        entries = [
            e for e in managed_parameters(self.module) if e.param.requires_grad or not gradients
        ]
        size = group.size()
        if sum(e.shard_numel for e in entries) != shard_numel:
            return None
        if size != shard_group(self.module).size():
            return None
        experts_E = None if self.chosen is None else self.chosen.agreed(group, gradients)
        found: list[list[_Segment]] = [[] for _ in range(size)]
        start = 0
        for entry in entries:
            for rank, segment in enumerate(_segments_of(entry, start, size, experts_E)):
                found[rank].append(segment)
            start += entry.shard_numel
        return found

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate a buffer that FSDP sends from or receives into."""
        return torch.empty(*size, dtype=dtype, device=device)


class _PackedAllGather(_PackedMessage, AllGather):
    """Gathers the packed shards, padded to the longest; elements that are not sent become zero."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather `[S]` of every rank into `[P * S]`. The input may be a view of the output."""
        kept = self._segments(input_tensor.numel(), group, gradients=False)
        pending = self._start(output_tensor, input_tensor, group, kept)
        if async_op:
            return PendingWork(pending.wait)
        pending.wait()
        return None

    def _start(
        self, out: Tensor, shard_S: Tensor, group: ProcessGroup, kept: list[list[_Segment]] | None
    ) -> Pending[Tensor]:
        if kept is None:
            return collectives.start_all_gather(shard_S, group, operation=_OP, out=out)
        packed = shard_S.new_zeros(max(map(_count, kept)))
        _copy(kept[group_rank(group)], shard_S, packed, back=False)

        def finish(found: Tensor) -> Tensor:
            pairs = zip(kept, found.view(group.size(), -1), out.view(group.size(), -1), strict=True)
            for of_rank, row, shard in pairs:
                _copy(of_rank, shard, row, back=True)
            return out

        return collectives.start_all_gather(packed, group, operation=_OP).then(finish)


class _PackedReduceScatter(_PackedMessage, ReduceScatter):
    """Reduces the packed shards, padded to the longest; elements that are not sent become zero."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `[P * S]` of every rank to this rank's `[S]`."""
        kept = self._segments(output_tensor.numel(), group, gradients=True)
        if kept is None:
            collectives.reduce_scatter(input_tensor, group, operation=_OP, op=op, out=output_tensor)
        else:
            packed = input_tensor.new_zeros((group.size(), max(map(_count, kept))))
            for of_rank, row, shard in zip(
                kept, packed, input_tensor.view(group.size(), -1), strict=True
            ):
                _copy(of_rank, shard, row, back=False)
            found = collectives.reduce_scatter(packed.view(-1), group, operation=_OP, op=op)
            _copy(kept[group_rank(group)], output_tensor, found, back=True)
        return PendingWork(lambda: None) if async_op else None


def pack_fsdp_messages(model: nn.Module, *, chosen_experts: bool = False) -> list[str]:
    """Leave zeros that all ranks know out of the messages of FSDP2; exact.

    For parameters that `prune` has pruned, messages hold the kept elements, without indices:
    weights in the all-gathers, gradients in the reduce-scatters. With ``chosen_experts`` the gather
    of experts waits for the gate. It brings the experts that the router of any rank of the group
    has chosen, and only their gradients are reduced. Other experts are zero in both messages,
    because no row needs them.

    A message is as long as its longest shard. If experts are sharded along their second dimension
    (`Shard(1)`), all shards are equally long, and a message takes chosen / E of the bytes.
    `fully_shard` of moe_ext.distributed shards so if this pads less.

    Call this on all ranks after the last `fully_shard`. Results have the bits of whole messages if
    the backend adds the ranks in the same order, which is always so with two ranks.

    Args:
        model: holds FSDP modules, or is one.
        chosen_experts: gather only chosen experts, of each `GroupedExperts` that is an FSDP module
            of its own.

    Returns:
        Names of the modules whose messages are packed.

    Raises:
        ValueError: nothing is pruned and ``chosen_experts`` is off, or there are no such experts; a
            module's messages are compressed already; experts are not resharded after the forward
            pass. Nothing is changed.
        RuntimeError: raised by a forward pass that needs experts which the last gather has not
            brought.

    On CUDA a gather of chosen experts waits for their counts. NOTE: device-to-host sync.
    """
    pruned = {mask.module for _, mask in masks_of(model)}
    found: list[tuple[str, FSDPModule, bool]] = []
    for name, module in fsdp_modules(model):
        is_experts = chosen_experts and isinstance(module, GroupedExperts)
        if is_experts or not pruned.isdisjoint(e.owner for e in managed_parameters(module)):
            found.append((name, module, is_experts))
            _check(name, module, is_experts)
    if not found or (chosen_experts and not any(is_experts for *_, is_experts in found)):
        wanted = "GroupedExperts that are FSDP modules" if chosen_experts else "pruned parameters"
        raise ValueError(f"{_OP}: expected model to hold {wanted}, got none")
    for _, module, is_experts in found:
        chosen = None
        if is_experts:
            assert isinstance(module, GroupedExperts)
            chosen = _ChosenExperts(module)
        module.set_custom_all_gather(_PackedAllGather(module, chosen))
        module.set_custom_reduce_scatter(_PackedReduceScatter(module, chosen))
    return [name for name, *_ in found]


def _check(name: str, module: FSDPModule, is_experts: bool) -> None:
    default = ("DefaultAllGather", "DefaultReduceScatter", "NoneType")
    for kind, message in messages_of(module).items():
        own = kind == "all-reduce" or type(message).__name__ in default
        check_rule(_OP, f"the {kind} of {name}", message, "FSDP's own", own)
    if is_experts and resharded_over(module) != shard_group(module).size():
        raise ValueError(
            f"{_OP}: expected {name} to be resharded over all of its ranks after the forward pass, "
            f"got reshard_after_forward over {resharded_over(module)}"
        )
    for entry in managed_parameters(module):
        mask = mask_of(entry.owner, entry.name)
        if mask is not None and mask.shape != entry.shape:
            raise ValueError(
                f"{_OP}: expected {entry.name} to be pruned as its messages hold it, of shape "
                f"{tuple(entry.shape)}, got a mask of shape {tuple(mask.shape)}"
            )
