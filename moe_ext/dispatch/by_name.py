"""Dispatchers by name, and a wrapper of objects that only have `dispatch` and `combine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
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
from moe_ext.dispatch.parts import DispatchMetadata
from moe_ext.dispatch.symmetric_memory import SymmetricMemoryDispatcher
from moe_ext.dispatch.wire import LOSSLESS, Wire

_CLASSES: dict[str, type[TokenDispatcher]] = {
    "auto": AutoDispatcher,
    "local": LocalDispatcher,
    "alltoall": AllToAllDispatcher,
    "dedup": DedupDispatcher,
    "hierarchical": HierarchicalDispatcher,
    "allgather": AllGatherDispatcher,
    "nccl_ep": NcclEpDispatcher,
    "deep_ep": DeepEpDispatcher,
    "symm_mem": SymmetricMemoryDispatcher,
}
DISPATCHERS = tuple(_CLASSES)


class WrappedDispatcher(TokenDispatcher):
    """Adds the other methods of a dispatcher to an object that has `dispatch` and `combine`.

    Args:
        inner: the object, whose `combine` takes rows and metadata.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        """Name of the class of the wrapped object."""
        return type(self.inner).__name__

    def dispatch(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Call `dispatch` of the wrapped object."""
        return self.inner.dispatch(*args, **options)

    def combine(
        self,
        rows: Tensor,
        metadata: DispatchMetadata,
        *,
        meanwhile: Callable[[], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Call `combine` of the wrapped object, and then `meanwhile`."""
        y_TD: Tensor = self.inner.combine(rows, metadata)
        if meanwhile is not None:
            meanwhile()
        return y_TD


def check_served(owner: str, dispatcher: object, wanted: Mapping[str, str]) -> None:
    """Refuse a dispatcher that does not serve all features of a layer.

    Args:
        owner: name for error messages.
        dispatcher: a name of `DISPATCHERS`, or a dispatcher.
        wanted: features of the layer among `CAPABILITIES`, with their text for messages.

    Raises:
        ValueError: a feature is not served. The message lists the names that serve all features.
    """
    named = isinstance(dispatcher, str)
    kind = _CLASSES[dispatcher] if isinstance(dispatcher, str) else type(dispatcher)
    # An object without `serves` is used through a `WrappedDispatcher`.
    serves = getattr(kind, "serves", WrappedDispatcher.serves)
    for capability, shown in wanted.items():
        if capability not in serves:
            names = tuple(name for name, one in _CLASSES.items() if set(wanted) <= one.serves)
            got = repr(dispatcher) if named else getattr(dispatcher, "name", kind.__name__)
            raise ValueError(
                f"{owner}: expected dispatcher to be one of {names} with {shown}, got {got}"
            )


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
    """Make the dispatcher for a name.

    Args:
        owner: name for error messages.
        name: one of `DISPATCHERS`. On one rank each name means "local".
        num_experts: E, a multiple of the size of the group.
        group: process group; None or one rank keeps all rows on this rank.
        combine: "exact" or "reduced", see `DedupDispatcher`.
        wire: see `TokenDispatcher`.
        max_rows: rows of the layer's `RowBudget`; None without one.

    Raises:
        RuntimeError: on every rank, if one of them lacks the library of the dispatcher.
        ValueError: the name is unknown, or cannot be combined with the group or the options.
    """
    wire = Wire.of(owner, wire)
    check_choice(owner, "combine", combine, COMBINES)
    check_choice(owner, "dispatcher", name, DISPATCHERS)
    alone = group_size(group) == 1
    wanted = {
        "an ep_group of several ranks": not alone,
        "combine='reduced'": combine == "reduced",
        "wire": wire != Wire(),
        "wire.dispatch='lossless'": wire.dispatch == LOSSLESS,
        "row_budget": max_rows is not None,
    }
    check_served(owner, name, {each: each for each, is_wanted in wanted.items() if is_wanted})
    if group is None or alone:
        # A configuration for many ranks must run on one rank, too.
        return LocalDispatcher(num_experts)
    if name == "symm_mem":
        if max_rows is None:
            raise ValueError(
                f"{owner}: expected row_budget with dispatcher='symm_mem', whose memory has one "
                "size on all ranks, or a SymmetricMemoryDispatcher with max_rows, got None"
            )
        return SymmetricMemoryDispatcher(num_experts, group, max_rows=max_rows, wire=wire)
    kind = _CLASSES[name]
    # A class takes an option only if it serves the feature.
    options: dict[str, Any] = {}
    if "combine='reduced'" in kind.serves:
        options["combine"] = combine
    if "wire" in kind.serves:
        options["wire"] = wire
    return kind(num_experts, group, **options)
