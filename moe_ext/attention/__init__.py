"""Attention over sequences that the ranks of a group hold in parts."""

from moe_ext.attention.api import ring_attention
from moe_ext.attention.context import sequence_parallel
from moe_ext.attention.layouts import LAYOUTS, Layout, make_layout
from moe_ext.attention.masks import Mask
from moe_ext.attention.module import RingAttention
from moe_ext.attention.self_attention import RingSelfAttention
from moe_ext.attention.self_attention_ring import ring_self_attention
from moe_ext.attention.sequence_collectives import (
    gather_from_sequence,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)
from moe_ext.attention.sequence_parallel_mlp import SequenceParallelMLP
from moe_ext.attention.sharding import (
    position_ids,
    shard_sequence,
    shift_labels,
    token_mean_loss,
    unshard_sequence,
)

__all__ = [
    "LAYOUTS",
    "Layout",
    "Mask",
    "RingAttention",
    "make_layout",
    "position_ids",
    "ring_attention",
    "sequence_parallel",
    "RingSelfAttention",
    "SequenceParallelMLP",
    "gather_from_sequence",
    "make_layout",
    "position_ids",
    "ring_attention",
    "ring_self_attention",
    "reduce_scatter_to_sequence",
    "scatter_to_sequence",
    "shard_sequence",
    "shift_labels",
    "token_mean_loss",
    "unshard_sequence",
]
