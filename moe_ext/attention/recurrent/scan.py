"""Scan over ranks for the state before each rank's positions.

The positions of a rank together map a state S to `M S + U`. The maps of several ranks in sequence
are again such a map, so that every rank knows the map of all ranks before it after log2(P) steps.

Shapes: B batch, H heads, K and V dims of a state, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext.comm.groups import group_rank, group_size
from moe_ext.comm.ring_exchange import Exchange


@dataclass(frozen=True)
class StateScan:
    """Computes for every rank the state before its first position, by exchanging maps.

    Attributes:
        group: the ranks, in the order of the positions.
        operation: name for error messages.
        by_element: if True, M is a decay that multiplies elements of a state; else a matrix.
    """

    group: ProcessGroup | None
    operation: str
    by_element: bool

    def __call__(self, maps: Tensor, added: Tensor) -> Tensor:
        """The state before this rank, zeros on the first rank; differentiable.

        Args:
            maps: M of this rank, `[B, H, K, K]`, or `[B, H, K or 1, V or 1]` with `by_element`.
            added: U of this rank, `[B, H, K, V]`.
        """
        state: Tensor = _States.apply(maps, added, self)
        return state

    @staticmethod
    def messages(rank: int, size: int) -> int:
        """Number of messages that a rank sends in one scan."""
        doubled = sum(1 for i in range(size.bit_length()) if rank > 0 and rank + 2**i < size)
        return (rank + 1 < size) + doubled

    def before(self, maps: Tensor, added: Tensor, *, reverse: bool = False) -> Tensor:
        """U of the composed map of all ranks before this one, or with `reverse` after it."""
        size, rank = group_size(self.group), group_rank(self.group)
        if reverse:
            rank = size - 1 - rank
        exchange = Exchange(self.group, self.operation + " backward" * reverse)
        # In the first step a rank gets the map of its neighbour. In the next steps it gets the
        # composed maps of the 1, 2, 4, ... ranks before those that it already has.
        have: tuple[Tensor, Tensor] | None = (maps.contiguous(), added.contiguous())
        found: tuple[Tensor, Tensor] | None = None
        for tag, shift in enumerate([0, *(2**i for i in range(size.bit_length()))]):
            step = max(1, shift)
            sends, room, source = [], None, rank - step
            has = found if shift else have
            target = rank + step
            if target < size and has is not None:
                row = torch.cat([x.reshape(-1) for x in has])
                sends = [(as_bytes(row), _place(target, size, reverse))]
            # Rank 0 has no composed map of ranks before it, so it sends only in the first step.
            if source >= (1 if shift else 0):
                room = added.new_empty(maps.numel() + added.numel())
            if sends or room is not None:
                buffer = None if room is None else as_bytes(room)
                origin = _place(max(source, 0), size, reverse)
                exchange.post(sends, buffer, origin, tag).wait()
            if room is not None:
                m, u = room.split([maps.numel(), added.numel()])
                come = (m.view(maps.shape), u.view(added.shape))
                found = come if found is None else self._after(found, come)
        return torch.zeros_like(added) if found is None else found[1]

    def times(self, maps: Tensor, state: Tensor) -> Tensor:
        """M S, elementwise with `by_element`."""
        return maps * state if self.by_element else maps @ state

    def _after(
        self, later: tuple[Tensor, Tensor], earlier: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compose two maps (M, U), of which `later` is applied second."""
        return self.times(later[0], earlier[0]), self.times(later[0], earlier[1]) + later[1]


def _place(rank: int, size: int, reverse: bool) -> int:
    return size - 1 - rank if reverse else rank


class _States(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor, added: Tensor, scan: StateScan) -> Tensor:
        ctx.scan = scan
        state = scan.before(maps, added)
        ctx.save_for_backward(maps, state)
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        maps, state = ctx.saved_tensors
        scan: StateScan = ctx.scan
        # The gradient of the state after this rank is a scan in reverse, with transposed maps.
        behind = scan.before(maps if scan.by_element else maps.mT, grad, reverse=True)
        if not scan.by_element:
            return behind @ state.mT, behind, None
        of_maps = behind * state
        for dim in (2, 3):
            if maps.shape[dim] == 1:
                of_maps = of_maps.sum(dim, keepdim=True)
        return of_maps, behind, None
