"""Mixture-of-experts layers, routers, balancing and upcycling."""

import importlib
from typing import TYPE_CHECKING, Any

from moe_ext.dispatch import RowBudget
from moe_ext.nn import presets
from moe_ext.nn.balance.counts import count_tokens, reset_token_counts
from moe_ext.nn.balance.losses import Balance, inject_loss
from moe_ext.nn.balance.moved import Rebalance, moving_pays
from moe_ext.nn.balance.replicas import rebalance_experts
from moe_ext.nn.balance.selection_bias import register_bias_update, update_selection_bias
from moe_ext.nn.capacity import Capacity
from moe_ext.nn.checkpointing import checkpoint_chain
from moe_ext.nn.expert_activation import ClampedSwiGLU
from moe_ext.nn.experts import GroupedExperts
from moe_ext.nn.feed_forward import FeedForward
from moe_ext.nn.layer_metrics import LayerMetrics, reduce_metrics
from moe_ext.nn.model_layers import (
    collect_losses,
    log_metrics,
    set_loss_scale,
    update_placement,
)
from moe_ext.nn.module_experts import ModuleExperts
from moe_ext.nn.moe_layer import MoELayer
from moe_ext.nn.options import Dispatch, SharedExpert
from moe_ext.nn.replay import pinned_routing
from moe_ext.nn.residual import ResidualMoE, pyramid
from moe_ext.nn.routers import (
    BalanceTerms,
    BaseRouter,
    CosineRouter,
    ExpertChoiceRouter,
    GShardRouter,
    HashRouter,
    NoisyTopKRouter,
    Router,
    RouterOutput,
    SinkhornRouter,
    SwitchRouter,
    Tokens,
    TopKRouter,
    number_routers,
    set_routing_step,
)
from moe_ext.nn.routing_record import RecordEntry, RecordKey, RoutingRecord
from moe_ext.nn.upcycling import UpcycledFFN, replace_ffn, upcycle

if TYPE_CHECKING:
    from moe_ext.nn.transformer_block import TransformerBlock

__all__ = [
    "Balance",
    "BalanceTerms",
    "BaseRouter",
    "Capacity",
    "ClampedSwiGLU",
    "CosineRouter",
    "Dispatch",
    "ExpertChoiceRouter",
    "FeedForward",
    "GShardRouter",
    "GroupedExperts",
    "HashRouter",
    "LayerMetrics",
    "MoELayer",
    "ModuleExperts",
    "NoisyTopKRouter",
    "RecordEntry",
    "RecordKey",
    "Rebalance",
    "ResidualMoE",
    "Router",
    "RouterOutput",
    "RoutingRecord",
    "RowBudget",
    "SharedExpert",
    "SinkhornRouter",
    "SwitchRouter",
    "Tokens",
    "TopKRouter",
    "TransformerBlock",
    "UpcycledFFN",
    "checkpoint_chain",
    "collect_losses",
    "count_tokens",
    "inject_loss",
    "log_metrics",
    "moving_pays",
    "number_routers",
    "pinned_routing",
    "presets",
    "pyramid",
    "rebalance_experts",
    "reduce_metrics",
    "register_bias_update",
    "replace_ffn",
    "reset_token_counts",
    "set_loss_scale",
    "set_routing_step",
    "upcycle",
    "update_placement",
    "update_selection_bias",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # The block loads all schemes of attention, so it is imported only when it is used.
    if name != "TransformerBlock":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("moe_ext.nn.transformer_block").TransformerBlock
