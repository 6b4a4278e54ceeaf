"""Layers."""

from moe_ext.nn.experts import GroupedExperts
from moe_ext.nn.losses import inject_loss
from moe_ext.nn.moe_layer import FeedForward, MoELayer, set_loss_scale
from moe_ext.nn.routers import RouterOutput, TopKRouter

__all__ = [
    "FeedForward",
    "GroupedExperts",
    "MoELayer",
    "RouterOutput",
    "TopKRouter",
    "inject_loss",
    "set_loss_scale",
]
