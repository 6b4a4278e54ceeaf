"""Attention over sequences that the ranks of a group hold in parts."""

import importlib
from typing import TYPE_CHECKING, Any

# Public names of each module. A module is loaded when one of its names is first accessed.
_NAMES = {
    "auto": "Candidate choose_scheme SchemeChoice",
    "context": "sequence_parallel",
    "functional": "explain_scheme latent_ring_attention ring_attention ring_attention_varlen",
    "huggingface.packing": "group_sampler",
    "huggingface.prepare": "prepare_model",
    "layouts": "Layout LAYOUTS make_layout",
    "masks": "Mask",
    "module": "RingAttention",
    "packing": "pack_documents PackedDocuments",
    "recurrent.functional": "causal_conv1d gated_delta_rule selective_scan",
    "rsa": "ring_self_attention RingSelfAttention",
    "sequence_parallel_mlp": "SequenceParallelMLP",
    "sharding": "document_ids gather_from_sequence position_ids reduce_scatter_to_sequence "
    "scatter_to_sequence shard_sequence shift_labels token_mean_loss unshard_sequence",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    # Type checkers treat a name as re-exported only in the form `import X as X`.
    from moe_ext.attention.auto import Candidate as Candidate
    from moe_ext.attention.auto import SchemeChoice as SchemeChoice
    from moe_ext.attention.auto import choose_scheme as choose_scheme
    from moe_ext.attention.context import sequence_parallel as sequence_parallel
    from moe_ext.attention.functional import explain_scheme as explain_scheme
    from moe_ext.attention.functional import latent_ring_attention as latent_ring_attention
    from moe_ext.attention.functional import ring_attention as ring_attention
    from moe_ext.attention.functional import ring_attention_varlen as ring_attention_varlen
    from moe_ext.attention.huggingface.packing import group_sampler as group_sampler
    from moe_ext.attention.huggingface.prepare import prepare_model as prepare_model
    from moe_ext.attention.layouts import LAYOUTS as LAYOUTS
    from moe_ext.attention.layouts import Layout as Layout
    from moe_ext.attention.layouts import make_layout as make_layout
    from moe_ext.attention.masks import Mask as Mask
    from moe_ext.attention.module import RingAttention as RingAttention
    from moe_ext.attention.packing import PackedDocuments as PackedDocuments
    from moe_ext.attention.packing import pack_documents as pack_documents
    from moe_ext.attention.recurrent.functional import causal_conv1d as causal_conv1d
    from moe_ext.attention.recurrent.functional import gated_delta_rule as gated_delta_rule
    from moe_ext.attention.recurrent.functional import selective_scan as selective_scan
    from moe_ext.attention.rsa import RingSelfAttention as RingSelfAttention
    from moe_ext.attention.rsa import ring_self_attention as ring_self_attention
    from moe_ext.attention.sequence_parallel_mlp import SequenceParallelMLP as SequenceParallelMLP
    from moe_ext.attention.sharding import document_ids as document_ids
    from moe_ext.attention.sharding import gather_from_sequence as gather_from_sequence
    from moe_ext.attention.sharding import position_ids as position_ids
    from moe_ext.attention.sharding import reduce_scatter_to_sequence as reduce_scatter_to_sequence
    from moe_ext.attention.sharding import scatter_to_sequence as scatter_to_sequence
    from moe_ext.attention.sharding import shard_sequence as shard_sequence
    from moe_ext.attention.sharding import shift_labels as shift_labels
    from moe_ext.attention.sharding import token_mean_loss as token_mean_loss
    from moe_ext.attention.sharding import unshard_sequence as unshard_sequence
else:
    __all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
