"""Attention over sequences that the ranks of a group hold in parts."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ext.attention.auto import Candidate, SchemeChoice, choose_scheme
    from moe_ext.attention.context import sequence_parallel
    from moe_ext.attention.functional import (
        explain_scheme,
        latent_ring_attention,
        ring_attention,
        ring_attention_varlen,
    )
    from moe_ext.attention.huggingface.packing import group_sampler
    from moe_ext.attention.huggingface.prepare import prepare_model
    from moe_ext.attention.layouts import LAYOUTS, Layout, make_layout
    from moe_ext.attention.masks import Mask
    from moe_ext.attention.module import RingAttention
    from moe_ext.attention.packing import PackedDocuments, pack_documents
    from moe_ext.attention.recurrent.functional import (
        causal_conv1d,
        gated_delta_rule,
        selective_scan,
    )
    from moe_ext.attention.rsa import RingSelfAttention, ring_self_attention
    from moe_ext.attention.sequence_parallel_mlp import SequenceParallelMLP
    from moe_ext.attention.sharding import (
        document_ids,
        gather_from_sequence,
        position_ids,
        reduce_scatter_to_sequence,
        scatter_to_sequence,
        shard_sequence,
        shift_labels,
        token_mean_loss,
        unshard_sequence,
    )

# The names of each module, which is loaded when one of them is asked for.
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
__all__ = [
    "LAYOUTS",
    "Candidate",
    "Layout",
    "Mask",
    "PackedDocuments",
    "RingAttention",
    "RingSelfAttention",
    "SchemeChoice",
    "SequenceParallelMLP",
    "causal_conv1d",
    "choose_scheme",
    "document_ids",
    "explain_scheme",
    "gated_delta_rule",
    "gather_from_sequence",
    "group_sampler",
    "latent_ring_attention",
    "make_layout",
    "pack_documents",
    "position_ids",
    "prepare_model",
    "reduce_scatter_to_sequence",
    "ring_attention",
    "ring_attention_varlen",
    "ring_self_attention",
    "scatter_to_sequence",
    "selective_scan",
    "sequence_parallel",
    "shard_sequence",
    "shift_labels",
    "token_mean_loss",
    "unshard_sequence",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
