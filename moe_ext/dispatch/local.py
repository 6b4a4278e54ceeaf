"""Dispatcher for experts that are all on this rank."""

from __future__ import annotations

from moe_ext.dispatch.base import CAPABILITIES, TokenDispatcher
from moe_ext.ops.routed_experts import routed_experts


class LocalDispatcher(TokenDispatcher):
    """All experts on this rank: a permutation and its inverse.

    Args:
        num_experts: E, experts of a layer.
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
    """

    # These are plain class attributes, since in a small layer properties would take longer than a
    # kernel.
    group = None
    in_graph = True
    serves = frozenset(CAPABILITIES) - {"an ep_group of several ranks"}
    reason = "all experts are on this rank"
    routed_experts = staticmethod(routed_experts)

    def __init__(self, num_experts: int, *, drop_policy: str = "position") -> None:
        super().__init__(num_experts, drop_policy=drop_policy)
