"""Token dispatchers: how rows travel to the ranks of their experts and back."""

from moe_ext.dispatch.allgather import AllGatherDispatcher
from moe_ext.dispatch.alltoall import AllToAllDispatcher
from moe_ext.dispatch.auto import AutoDispatcher, DispatchCandidate, DispatchChoice
from moe_ext.dispatch.base import CAPABILITIES, TokenDispatcher, take_part
from moe_ext.dispatch.by_name import (
    DISPATCHERS,
    WrappedDispatcher,
    check_served,
    named_dispatcher,
)
from moe_ext.dispatch.dedup import COMBINES, DedupDispatcher, HierarchicalDispatcher
from moe_ext.dispatch.deep_ep import DeepEpDispatcher
from moe_ext.dispatch.local import LocalDispatcher
from moe_ext.dispatch.nccl_ep import NcclEpDispatcher
from moe_ext.dispatch.parts import (
    WHOLE,
    BatchPlan,
    Choice,
    Cut,
    DispatchMetadata,
    Part,
    PlacedRows,
    Round,
    RowBudget,
    RowCounts,
    RowWeights,
    SharedCounts,
    sum_dtype,
)
from moe_ext.dispatch.symmetric_memory import SymmetricMemoryDispatcher
from moe_ext.dispatch.wire import Wire
