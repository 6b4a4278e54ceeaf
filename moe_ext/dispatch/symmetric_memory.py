"""Dispatcher over torch's symmetric memory, for torch 2.13; the API of torch may change.

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
# NOTE: The kernel cuts the bytes from a rank into equal parts, and refuses bytes that the number of
# parts does not divide. From _LEAST_BYTES of memory on, all ranks together have 64 or 16 parts.
_ROW_ALIGNMENT = 64
_LEAST_BYTES = 8 * 2**20
# Memories of a process group, by device, rows and bytes of a row. All layers share them.
_memories: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, _Memory]]
_memories = weakref.WeakKeyDictionary()


def state() -> str:
    """Return the text for `moe_ext.info`."""
    found = problem()
    return "available" if found is None else f"not used: {found}"


def problem() -> str | None:
    """Return the reason why symmetric memory cannot be used here, or None."""
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

    In a call, ranks read the rows of other ranks, and write into their offsets. A rank may be one
    call ahead of another, but not two, since every call has a barrier. Calls therefore alternate
    between two sets of these tensors, `turns`.
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
    """Sends rows between GPUs by NVSHMEM, through torch's symmetric memory.

    Written for `torch.ops.symm_mem.all_to_all_vdev` of torch 2.13 and tested with a stand-in for
    its kernel; it has never run on a GPU. The bits are those of `AllToAllDispatcher`. The memory
    has the same size on all ranks. If a rank has more than `max_rows` rows, all ranks raise an
    error, which takes one more message for each dispatch. With a `RowBudget` of at most `max_rows`
    these rows go in further rounds.

    All ranks of the group construct it together.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group, whose number of ranks is a power of two.
        max_rows: most rows that a rank sends or receives at once; the same on every rank.
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
        average: see `TokenDispatcher`.
        wire: see `TokenDispatcher`.

    Raises:
        RuntimeError: on every rank, if one has no GPU, no NVSHMEM, or another signature.
        ValueError: sizes are out of range; or see `AllToAllDispatcher`.
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
        """Exchange rows, with the arguments of `all_to_all_single`."""
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
            # Equal splits, as with a static row budget, need no copy from the host, so that a CUDA
            # graph can capture the call.
            splits.fill_(send[0])
        else:
            splits.copy_(torch.tensor(send, dtype=torch.int64), non_blocking=True)
        torch.ops.symm_mem.all_to_all_vdev(rows, memory.out, splits, offsets, group.group_name)
        out_RB.copy_(memory.out[: out.shape[0], :num_bytes])

    def _group_and_count(
        self, x_TD: Tensor, choice: Choice, num_parts: int = 1, *, with_rows: bool = True
    ) -> tuple[list[tuple[Tensor, ops.Permutation]], list[RowCounts]]:
        grouped, told = super()._group_and_count(x_TD, choice, num_parts, with_rows=with_rows)
        # Without rows, the counts are for rounds, which are cut to at most `max_rows` anyway.
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
