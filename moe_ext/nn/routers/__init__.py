"""Routers: choose the experts of every token."""

from moe_ext.nn.routers.base import (
    BalanceTerms,
    Router,
    RouterOutput,
    number_routers,
    set_routing_step,
)
from moe_ext.nn.routers.topk import TopKRouter

__all__ = [
    "BalanceTerms",
    "Router",
    "RouterOutput",
    "TopKRouter",
    "number_routers",
    "set_routing_step",
]
