"""Token dispatchers: how rows travel to the ranks of their experts and back."""

from moe_ext.dispatch.allgather import AllGatherDispatcher
from moe_ext.dispatch.alltoall import AllToAllDispatcher
from moe_ext.dispatch.auto import AutoDispatcher, DispatchCandidate, DispatchChoice
from moe_ext.dispatch.base import (
    DispatchMetadata,
    Part,
    RowWeights,
    SharedCounts,
    TokenDispatcher,
    WrappedDispatcher,
    sum_dtype,
    take_part,
)
from moe_ext.dispatch.by_name import DISPATCHERS, named_dispatcher
from moe_ext.dispatch.chunks import Chunk, RowCounts
from moe_ext.dispatch.dedup import COMBINES, DedupDispatcher, HierarchicalDispatcher
from moe_ext.dispatch.deep_ep import DeepEpDispatcher
from moe_ext.dispatch.local import LocalDispatcher
from moe_ext.dispatch.nccl_ep import NcclEpDispatcher
from moe_ext.dispatch.static_sizes import check_static, static_chunks, telling_in_agreement
from moe_ext.dispatch.symmetric_memory import SymmetricMemoryDispatcher
from moe_ext.dispatch.wire import Wire

__all__ = [
    "COMBINES",
    "DISPATCHERS",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "AutoDispatcher",
    "Chunk",
    "DedupDispatcher",
    "DeepEpDispatcher",
    "DispatchCandidate",
    "DispatchChoice",
    "DispatchMetadata",
    "HierarchicalDispatcher",
    "LocalDispatcher",
    "NcclEpDispatcher",
    "Part",
    "RowCounts",
    "RowWeights",
    "SharedCounts",
    "SymmetricMemoryDispatcher",
    "TokenDispatcher",
    "Wire",
    "WrappedDispatcher",
    "check_static",
    "named_dispatcher",
    "static_chunks",
    "sum_dtype",
    "take_part",
    "telling_in_agreement",
]
