"""Compressed data parallelism: what ranks send each other instead of dense gradients."""

import importlib
from typing import TYPE_CHECKING, Any

from moe_ext.comm.link import Link
from moe_ext.comm.pending import Pending as Reduction
from moe_ext.compression.codecs import (
    BlockSparse,
    ChunkedTopK,
    Codec,
    Dense,
    Lossless,
    Masked,
    OneBit,
    Outliers,
    PayloadCodec,
    Quantize,
    Threshold,
    TopK,
    TwoOfFour,
    codec_of,
    register_codec,
)
from moe_ext.compression.collectives.exact import (
    block_sparse_all_reduce_,
    masked_all_reduce_,
    row_sparse_all_reduce,
)
from moe_ext.compression.collectives.hierarchical import hierarchical_all_reduce_
from moe_ext.compression.collectives.lossless import (
    lossless_all_gather,
    lossless_all_reduce_,
    lossless_reduce_scatter,
)
from moe_ext.compression.collectives.quantized import (
    quantized_all_gather,
    quantized_all_reduce_,
    quantized_reduce_scatter,
    shard_numel,
)
from moe_ext.compression.collectives.sparse import SplitRegions, sparse_all_reduce
from moe_ext.compression.cost_model import CostModel
from moe_ext.compression.ddp import compress_hook
from moe_ext.compression.feedback import CodecMemory
from moe_ext.compression.gradients import compress_gradients, flush
from moe_ext.compression.options import ResidualMonitor, Warmup
from moe_ext.compression.packed_experts import PackedExperts
from moe_ext.compression.policy import Policy, parameter_roles
from moe_ext.compression.pruning import Pruning, prune
from moe_ext.compression.state import CompressionState

if TYPE_CHECKING:
    from moe_ext.compression.codecs.powersgd import PowerSGD
    from moe_ext.compression.fsdp import (
        CompressedAllGather,
        CompressedAllReduce,
        CompressedReduceScatter,
        pack_fsdp_messages,
    )
    from moe_ext.compression.fsdp.zero_plus_plus import FSDPCompression, zero_plus_plus

__all__ = [
    "BlockSparse",
    "Codec",
    "CodecMemory",
    "CompressedAllGather",
    "CompressedAllReduce",
    "CompressedReduceScatter",
    "CompressionState",
    "CostModel",
    "Dense",
    "FSDPCompression",
    "Link",
    "Lossless",
    "Masked",
    "OneBit",
    "Outliers",
    "PackedExperts",
    "PayloadCodec",
    "Policy",
    "PowerSGD",
    "Pruning",
    "Quantize",
    "Reduction",
    "ResidualMonitor",
    "SplitRegions",
    "Threshold",
    "ChunkedTopK",
    "TopK",
    "TwoOfFour",
    "Warmup",
    "block_sparse_all_reduce_",
    "codec_of",
    "compress_gradients",
    "compress_hook",
    "flush",
    "hierarchical_all_reduce_",
    "lossless_all_gather",
    "lossless_all_reduce_",
    "lossless_reduce_scatter",
    "masked_all_reduce_",
    "pack_fsdp_messages",
    "parameter_roles",
    "prune",
    "quantized_all_gather",
    "quantized_all_reduce_",
    "quantized_reduce_scatter",
    "register_codec",
    "row_sparse_all_reduce",
    "shard_numel",
    "sparse_all_reduce",
    "zero_plus_plus",
]

# Names that are imported on first use: FSDP2 takes a second to import, and PowerSGD needs numpy.
_LATER = {
    "PowerSGD": "codecs.powersgd",
    "CompressedAllGather": "fsdp",
    "CompressedAllReduce": "fsdp",
    "CompressedReduceScatter": "fsdp",
    "FSDPCompression": "fsdp",
    "pack_fsdp_messages": "fsdp",
    "zero_plus_plus": "fsdp",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
