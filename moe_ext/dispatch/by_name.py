"""The dispatchers that have a name."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from moe_ext._checks import check_choice
from moe_ext.comm.groups import group_size
from moe_ext.dispatch.allgather import AllGatherDispatcher
from moe_ext.dispatch.alltoall import AllToAllDispatcher
from moe_ext.dispatch.auto import AutoDispatcher
from moe_ext.dispatch.base import TokenDispatcher
from moe_ext.dispatch.dedup import COMBINES, DedupDispatcher, HierarchicalDispatcher
from moe_ext.dispatch.deep_ep import DeepEpDispatcher
from moe_ext.dispatch.local import LocalDispatcher
from moe_ext.dispatch.nccl_ep import NcclEpDispatcher
from moe_ext.dispatch.symmetric_memory import SymmetricMemoryDispatcher
from moe_ext.dispatch.wire import Wire

# Dispatchers that send a token once to each rank or node that has experts of it.
_SENT_ONCE = {
    "dedup": DedupDispatcher,
    "hierarchical": HierarchicalDispatcher,
    "allgather": AllGatherDispatcher,
}
# Dispatchers over a library, which codes no rows.
_LIBRARIES = {"nccl_ep": NcclEpDispatcher, "deep_ep": DeepEpDispatcher}
DISPATCHERS = ("auto", "local", "alltoall", *_SENT_ONCE, *_LIBRARIES, "symm_mem")


def named_dispatcher(
    owner: str,
    name: str,
    num_experts: int,
    group: ProcessGroup | None,
    *,
    combine: str = "exact",
    wire: Wire | str | None = None,
    max_rows: int | None = None,
) -> TokenDispatcher:
    """The dispatcher that a name stands for.

    Args:
        owner: name for error messages.
        name: one of `DISPATCHERS`; each is "local" on one rank.
        num_experts: E, a multiple of the size of the group.
        group: process group; None or one rank keeps all rows on this rank.
        combine: "exact" or "reduced", see `DedupDispatcher`.
        wire: see `TokenDispatcher`.
        max_rows: rows of the `RowBudget` that it is to serve.

    Raises:
        RuntimeError: a library is missing, on every rank.
        ValueError: no such name, or one that does not go with the group or the options.
    """
    wire = Wire.of(owner, wire)
    check_choice(owner, "combine", combine, COMBINES)
    check_choice(owner, "dispatcher", name, DISPATCHERS)
    alone = group_size(group) == 1
    if name == "local" and not alone:
        raise ValueError(
            f"{owner}: expected dispatcher to be one that sends for an ep_group of "
            f"{group_size(group)} ranks, got 'local'"
        )
    if name in ("alltoall", "symm_mem") and combine != "exact":
        raise ValueError(
            f"{owner}: expected dispatcher to be one of {(*_SENT_ONCE, *_LIBRARIES)} for "
            f"combine={combine!r}, got {name!r}"
        )
    if group is None or alone:
        # A configuration for many ranks runs on one, too.
        return LocalDispatcher(num_experts)
    if name == "auto":
        return AutoDispatcher(num_experts, group, combine=combine, wire=wire)
    if name in _LIBRARIES:
        if wire != Wire():
            raise ValueError(
                f"{owner}: expected wire to be None with dispatcher={name!r}, which codes no rows, "
                f"got {wire}"
            )
        return _LIBRARIES[name](num_experts, group, combine=combine)
    if name == "alltoall":
        return AllToAllDispatcher(num_experts, group, wire=wire)
    if name == "symm_mem":
        if max_rows is None:
            raise ValueError(
                f"{owner}: expected row_budget with dispatcher='symm_mem', whose memory has one "
                "size on all ranks, or a SymmetricMemoryDispatcher with max_rows, got None"
            )
        return SymmetricMemoryDispatcher(num_experts, group, max_rows=max_rows, wire=wire)
    if max_rows is not None and name == "allgather":
        raise ValueError(
            f"{owner}: expected dispatcher to be one that sends rows in rounds ('alltoall', "
            "'dedup', 'hierarchical') with a row_budget, got 'allgather'"
        )
    return _SENT_ONCE[name](num_experts, group, combine=combine, wire=wire)
