"""Compressed messages for models that `fully_shard` has wrapped."""

from moe_ext.compression.fsdp.layout import keep_small_dense
from moe_ext.compression.fsdp.messages import (
    CompressedAllGather,
    CompressedAllReduce,
    CompressedReduceScatter,
)
from moe_ext.compression.fsdp.packed import pack_fsdp_messages
from moe_ext.compression.fsdp.zero_plus_plus import FSDPCompression, zero_plus_plus
