"""Compressed data parallelism: what ranks send each other instead of dense gradients."""

from moe_ext.compression.cost_model import CostModel
from moe_ext.compression.exact_reduce import (
    block_sparse_all_reduce_,
    masked_all_reduce_,
    row_sparse_all_reduce,
)
from moe_ext.compression.hierarchical import hierarchical_all_reduce_
from moe_ext.compression.probe import Link
from moe_ext.compression.quantized_reduce import (
    quantized_all_gather,
    quantized_all_reduce_,
    quantized_reduce_scatter,
    shard_numel,
)
from moe_ext.compression.reduction import Reduction
from moe_ext.compression.regions import SplitRegions
from moe_ext.compression.sparse_reduce import sparse_all_reduce

__all__ = [
    "CostModel",
    "Link",
    "Reduction",
    "SplitRegions",
    "block_sparse_all_reduce_",
    "hierarchical_all_reduce_",
    "masked_all_reduce_",
    "quantized_all_gather",
    "quantized_all_reduce_",
    "quantized_reduce_scatter",
    "row_sparse_all_reduce",
    "shard_numel",
    "sparse_all_reduce",
]
