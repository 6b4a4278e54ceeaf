"""Dispatcher over torch's symmetric memory, written against torch 2.13, whose API may change.

Shapes: N rows sent, R rows received, D model, P ranks, B bytes of a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext._checks import check_sizes
from moe_ext.comm.agreement import share
from moe_ext.comm.groups import check_group, group_ranks, group_size
from moe_ext.dispatch import gpu_libraries
from moe_ext.dispatch.alltoall import AllToAllDispatcher
from moe_ext.dispatch.parts import Choice, Round, RowBudget, RowCounts
from moe_ext.dispatch.wire import Wire

_SCHEMA = (
    "symm_mem::all_to_all_vdev(Tensor input, Tensor(a!) out, Tensor in_splits, "
    "Tensor(a!) out_splits_offsets, str group_name) -> ()"
)
# NOTE: The kernel cuts what comes from a rank into equal parts, 64 or 16 of all ranks together once
# the memory is this large, and refuses bytes that they do not divide.
_ROW_ALIGNMENT = 64
_LEAST_BYTES = 8 * 2**20
# Memories of a group, by device, rows and bytes of a row; all layers share them.
_memories: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, _Memory]]
_memories = weakref.WeakKeyDictionary()


def state() -> str:
    """Text of `moe_ext.info`."""
    found = problem()
    return "available" if found is None else f"not used: {found}"


def problem() -> str | None:
    """Why it cannot be used here."""
    operation = getattr(torch.ops.symm_mem, "all_to_all_vdev", None)
    schema = None if operation is None else str(operation.default._schema)
    if schema != _SCHEMA:
        return f"expected torch to have {_SCHEMA}, got {schema} in torch {torch.__version__}"
    if not gpu_libraries.has_device():
        return "expected a GPU for symmetric memory, got none"
    if not symmetric_memory.is_nvshmem_available():
        return "expected NVSHMEM for symmetric memory, got a torch that does not find it"
    return None


class _Memory:
    """Memory of equal size on all ranks, which make it together.

    Ranks read what others have in `rows`, and write into `offsets` of others. A rank that is ahead
    may do so while this one is at the call before, but not two calls ahead, since every call has a
    barrier: so calls take turns with two of each.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, rows: int, row_bytes: int):
        rows = max(rows, -(-_LEAST_BYTES // row_bytes))
        num_ranks = group_size(group)

        def make(*size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            made = symmetric_memory.empty(*size, dtype=dtype, device=device)
            symmetric_memory.rendezvous(made, group)
            return made

        self.out = make(rows, row_bytes)
        self.turns = [
            (
                make(rows, row_bytes),
                make(num_ranks, dtype=torch.int64),
                make(2, num_ranks, dtype=torch.int64),
            )
            for _ in range(2)
        ]


class SymmetricMemoryDispatcher(AllToAllDispatcher):
    """Experts spread over a group of GPUs; rows travel by NVSHMEM through torch's symmetric memory.

    Written against `torch.ops.symm_mem.all_to_all_vdev` of torch 2.13 and tested with a stand-in
    for its kernel; it has never run on a GPU. The bits are those of `AllToAllDispatcher`. The
    memory has one size on all ranks: rows beyond `max_rows` are refused on all of them, by one
    message more for each dispatch; under a `RowBudget` of at most `max_rows` they go in further
    rounds.

    All ranks of the group make it together.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group, of a power of two of ranks.
        max_rows: rows that a rank sends, or receives, at once at most, the same on every rank.
        drop_policy: which slots of an expert beyond its capacity go, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`.

    Raises:
        RuntimeError: on every rank, where one has no GPU, no NVSHMEM, or another signature.
        ValueError: sizes out of range, or as for `AllToAllDispatcher`.
    """

    serves = AllToAllDispatcher.serves - {"overlap", "rebalance"}

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        *,
        max_rows: int,
        drop_policy: str = "position",
        average: bool = True,
        wire: Wire | str | None = None,
    ) -> None:
        name = type(self).__name__
        check_sizes(name, max_rows=max_rows)
        check_group(group, name, name="group")
        size = group_size(group)
        if size & (size - 1):
            raise ValueError(f"{name}: expected group to be of 2, 4, 8, ... ranks, got {size}")
        gpu_libraries.require(name, f"torch {torch.__version__}", problem(), group)
        super().__init__(num_experts, group, drop_policy=drop_policy, average=average, wire=wire)
        symmetric_memory.set_backend("NVSHMEM")
        self.max_rows = max_rows
        self._calls.facts["max_rows"] = max_rows

    def _exchange(
        self,
        out: Tensor,
        sent: Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        *,
        group: ProcessGroup,
    ) -> None:
        """All-to-all of rows, as `all_to_all_single`."""
        if max(out.shape[0], sent.shape[0]) > self.max_rows:
            raise self._no_room(max(out.shape[0], sent.shape[0]), "here")
        num_bytes = sent.shape[1] * sent.element_size()
        sent_NB, out_RB = (as_bytes(rows).view(len(rows), num_bytes) for rows in (sent, out))
        row_bytes = -(-num_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        known, key = _memories.setdefault(group, {}), (sent.device, self.max_rows, row_bytes)
        if key not in known:
            known[key] = _Memory(group, sent.device, self.max_rows, row_bytes)
        memory = known[key]
        rows, splits, offsets = memory.turns[0]
        memory.turns.reverse()
        rows[: sent.shape[0], :num_bytes] = sent_NB
        if len(set(send)) == 1:
            # Equal splits, as in static mode, copy nothing from the host: a graph can hold it.
            splits.fill_(send[0])
        else:
            splits.copy_(torch.tensor(send, dtype=torch.int64), non_blocking=True)
        torch.ops.symm_mem.all_to_all_vdev(rows, memory.out, splits, offsets, group.group_name)
        out_RB.copy_(memory.out[: out.shape[0], :num_bytes])

    def _group_and_count(
        self, x_TD: Tensor, choice: Choice, num_parts: int = 1, *, with_rows: bool = True
    ) -> tuple[list[tuple[Tensor, ops.Permutation]], list[RowCounts]]:
        grouped, told = super()._group_and_count(x_TD, choice, num_parts, with_rows=with_rows)
        # Rounds, which have no rows yet, are cut to their bound.
        if with_rows:
            (counts,) = told
            most = max(sum(counts.sent), sum(counts.received))
            shared = share([most], self.group, x_TD.device, operation=self.operation)
            largest, rank = max(
                (most, -rank) for (most,), rank in zip(shared, group_ranks(self.group), strict=True)
            )
            if largest > self.max_rows:
                raise self._no_room(largest, f"on rank {-rank}")
        return grouped, told

    def _no_room(self, num_rows: int, where: str) -> ValueError:
        return ValueError(
            f"{self.operation}: expected a rank to send or receive at most max_rows="
            f"{self.max_rows} rows at once, got {num_rows} {where}; with "
            f"MoELayer(row_budget=RowBudget({self.max_rows})) the others go in further rounds"
        )

    def _plan_rounds(self, x_TD: Tensor, choice: Choice, budget: RowBudget) -> list[Round]:
        if budget.rows > self.max_rows:
            raise ValueError(
                f"{self.operation}: expected the rows of a RowBudget to be at most max_rows="
                f"{self.max_rows}, got {budget.rows}"
            )
        return super()._plan_rounds(x_TD, choice, budget)
