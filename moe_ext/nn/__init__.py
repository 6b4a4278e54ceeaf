"""Layers."""

from moe_ext.nn import presets
from moe_ext.nn._record_entries import RecordEntry, RecordKey
from moe_ext.nn._replay import pinned_routing
from moe_ext.nn.balance import Balance
from moe_ext.nn.capacity import Capacity, RowBudget
from moe_ext.nn.expert_activation import ClampedSwiGLU
from moe_ext.nn.experts import GroupedExperts
from moe_ext.nn.feed_forward import FeedForward
from moe_ext.nn.losses import inject_loss
from moe_ext.nn.metrics import LayerMetrics, log_metrics, reduce_metrics
from moe_ext.nn.module_experts import ModuleExperts
from moe_ext.nn.moe_layer import MoELayer, collect_losses, set_loss_scale
from moe_ext.nn.routers import (
    BalanceTerms,
    CosineRouter,
    GShardRouter,
    NoisyTopKRouter,
    Router,
    RouterOutput,
    SwitchRouter,
    TopKRouter,
    number_routers,
    set_routing_step,
)
from moe_ext.nn.routing_record import RoutingRecord
from moe_ext.nn.upcycling import UpcycledFFN, replace_ffn, upcycle

__all__ = [
    "Balance",
    "BalanceTerms",
    "ClampedSwiGLU",
    "Capacity",
    "CosineRouter",
    "FeedForward",
    "GShardRouter",
    "GroupedExperts",
    "LayerMetrics",
    "MoELayer",
    "ModuleExperts",
    "RecordEntry",
    "RecordKey",
    "Router",
    "RouterOutput",
    "RoutingRecord",
    "RowBudget",
    "NoisyTopKRouter",
    "Router",
    "RouterOutput",
    "SwitchRouter",
    "TopKRouter",
    "collect_losses",
    "UpcycledFFN",
    "inject_loss",
    "log_metrics",
    "number_routers",
    "replace_ffn",
    "pinned_routing",
    "presets",
    "reduce_metrics",
    "set_routing_step",
    "set_loss_scale",
    "upcycle",
]
