"""Routers: choose the experts of every token."""

from moe_ext.nn.routers.base import (
    BalanceTerms,
    Router,
    RouterOutput,
    Tokens,
    number_routers,
    set_routing_step,
)
from moe_ext.nn.routers.base_assignment import BaseRouter
from moe_ext.nn.routers.cosine import CosineRouter
from moe_ext.nn.routers.expert_choice import ExpertChoiceRouter
from moe_ext.nn.routers.gshard import GShardRouter
from moe_ext.nn.routers.hash import HashRouter
from moe_ext.nn.routers.noisy_topk import NoisyTopKRouter
from moe_ext.nn.routers.sinkhorn import SinkhornRouter
from moe_ext.nn.routers.switch import SwitchRouter
from moe_ext.nn.routers.topk import TopKRouter

__all__ = [
    "BalanceTerms",
    "BaseRouter",
    "CosineRouter",
    "ExpertChoiceRouter",
    "GShardRouter",
    "HashRouter",
    "NoisyTopKRouter",
    "Router",
    "RouterOutput",
    "SinkhornRouter",
    "SwitchRouter",
    "Tokens",
    "TopKRouter",
    "number_routers",
    "set_routing_step",
]


def __dir__() -> list[str]:
    return __all__
