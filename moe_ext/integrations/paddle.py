"""PaddlePaddle's `MoELayer` on moe_ext.

Shapes: B batch, S sequence, T = B*S tokens, D model, E experts, K top-k, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from moe_ext import ops
from moe_ext._checks import check_rule
from moe_ext.comm.groups import check_group, group_size
from moe_ext.integrations._base import (
    LinearGate,
    RenamedLayer,
    check_capacity,
    check_known_keys,
    check_option,
    gshard_output,
    slots_with_room_on_all_ranks,
    switch_output,
)
from moe_ext.nn.module_experts import ModuleExperts
from moe_ext.nn.routers import RouterOutput


class NaiveGate(LinearGate):
    """Chooses the top k logits, which are also the weights; no balance loss.

    Args:
        d_model: D, number of elements of a token.
        num_expert: number of experts of each rank.
        world_size: number of ranks that hold the experts.
        topk: K, number of experts of a token.
    """

    def __init__(self, d_model: int, num_expert: int, world_size: int, topk: int = 2) -> None:
        super().__init__(d_model, num_expert, world_size, topk)

    def decide(self, logits_TE: Tensor) -> RouterOutput:
        """Choose experts from logits."""
        weights, idx, counts_E, score_sum = _weighed_by_logits(logits_TE, self.top_k)
        return self.output(logits_TE, weights, idx, None, (counts_E, counts_E), score_sum)


class GShardGate(NaiveGate):
    """Chooses the top 2 logits as experts and weights, with a capacity and a balance loss.

    Args:
        d_model: D, number of elements of a token.
        num_expert: number of experts of each rank.
        world_size: number of ranks that hold the experts.
        topk: must be 2.
        capacity: rates for training and evaluation: an expert takes `ceil(rate * T)` rows from all
            ranks together, lower ranks first.
        random_routing: drop a second expert of weight w with probability `1 - 2 * w`.
        group: the ranks; the layer sets it.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: tuple[float, float] = (1.2, 2.4),
        random_routing: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        check_option("paddle.GShardGate", "topk", topk, 2)
        super().__init__(d_model, num_expert, world_size, 2)
        self.capacity = check_capacity("paddle.GShardGate", capacity)
        self.random_routing = random_routing
        self.group = group

    def decide(self, logits_TE: Tensor) -> RouterOutput:
        """Choose experts from logits."""
        chosen = _weighed_by_logits(logits_TE, 2)
        rows = math.ceil(self.capacity[0 if self.training else 1] * logits_TE.shape[0])
        kept = slots_with_room_on_all_ranks(chosen.topk_idx, self.tot_expert, rows, self.group)
        return gshard_output(self, logits_TE, chosen, kept, random_routing=self.random_routing)


class SwitchGate(NaiveGate):
    """Chooses one expert, with noise on the logits in training, a capacity and a balance loss.

    Args:
        d_model: D, number of elements of a token.
        num_expert: number of experts of each rank.
        world_size: number of ranks that hold the experts.
        topk: must be 1.
        switch_eps: in training, noise uniform in [1 - eps, 1 + eps) is added to the logits.
        capacity: see `GShardGate`.
        group: the ranks; the layer sets it.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: tuple[float, float] = (1.2, 2.4),
        group: ProcessGroup | None = None,
    ) -> None:
        check_option("paddle.SwitchGate", "topk", topk, 1)
        super().__init__(d_model, num_expert, world_size, 1)
        self.switch_eps = switch_eps
        self.capacity = check_capacity("paddle.SwitchGate", capacity)
        self.group = group

    def decide(self, logits_TE: Tensor) -> RouterOutput:
        """Choose experts from logits."""
        rows = math.ceil(self.capacity[0 if self.training else 1] * logits_TE.shape[0])
        return switch_output(self, logits_TE, self.switch_eps, rows)


def _weighed_by_logits(logits_TE: Tensor, top_k: int) -> ops.GateOutput:
    chosen = ops.topk_gate(logits_TE, top_k)
    return chosen._replace(topk_weights=logits_TE.gather(1, chosen.topk_idx))


_GATES: dict[str | None, type[LinearGate]] = {
    "naive": NaiveGate,
    "gshard": GShardGate,
    "switch": SwitchGate,
    None: NaiveGate,
}


class _RecomputedExperts(ModuleExperts):
    """Experts that are recomputed in the backward pass, which saves the memory of activations."""

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        return checkpoint(super().forward, rows_ND, expert_offsets, use_reentrant=False)


class MoELayer(RenamedLayer):
    """Mixture of experts with the signature and parameter names of PaddlePaddle's `MoELayer`.

    The balance loss of the last forward pass is `layer.gate.get_loss()`.

    Args:
        d_model: D, the elements of a token.
        experts: the experts of this rank, modules `[n, D] -> [n, D]`.
        gate: a dict with "type" ("naive", "gshard", "switch" or None; default "gshard") and "top_k"
            (default 2), or a gate of this module. The dict is not changed.
        moe_group: expert-parallel group; None keeps all experts on this rank.
        mp_group: must be None, or a group of one rank.
        recompute_interval: if positive, the experts are recomputed in the backward pass.
        recompute_ctx: options of the recomputation; "offload" and "partition" must be false.

    Raises:
        ValueError: an option is not supported; the message names it.
        TypeError: the gate is neither a dict nor a gate of this module.
    """

    paths: ClassVar[dict[str, str]] = {"router": "gate"}

    def __init__(
        self,
        d_model: int,
        experts: Iterable[nn.Module],
        gate: dict[str, Any] | LinearGate | None = None,
        moe_group: ProcessGroup | None = None,
        mp_group: ProcessGroup | None = None,
        recompute_interval: int = 0,
        recompute_ctx: dict[str, Any] | None = None,
    ) -> None:
        owner = "paddle.MoELayer"
        check_group(moe_group, owner)
        check_group(mp_group, owner)
        rule = "None or a group of one rank"
        check_rule(owner, "mp_group", mp_group, rule, group_size(mp_group) == 1)
        for name, value in (recompute_ctx or {}).items():
            known = name in ("mp_group", "offload", "partition")
            check_rule(owner, "recompute_ctx", name, "of the known keys", known)
            fits = name == "mp_group" or not value
            check_rule(owner, f"recompute_ctx[{name!r}]", value, "false", fits)
        modules = list(experts)
        ranks = group_size(moe_group)
        ep_group = moe_group if ranks > 1 else None
        router = _make_gate(owner, {} if gate is None else gate, d_model, len(modules), ranks)
        router.group = ep_group
        kind = _RecomputedExperts if recompute_interval > 0 else ModuleExperts
        super().__init__(d_model, router, kind(modules, ep_group=ep_group))
        self.num_expert = len(modules)
        self.world_size = ranks
        self.d_model = d_model
        self.recompute_interval = recompute_interval

    def forward(self, inp: Tensor) -> Tensor:  # type: ignore[override]
        """Run every token through its experts.

        Args:
            inp: `[B, S, D]`.

        Returns:
            `[B, S, D]`.

        Raises:
            ValueError: the input does not have three dimensions.
        """
        if inp.dim() != 3:
            raise ValueError(f"paddle.MoELayer: expected inp to have 3 dimensions, got {inp.dim()}")
        return self.run(inp)


def _make_gate(
    owner: str, gate: dict[str, Any] | LinearGate, d_model: int, num_expert: int, ranks: int
) -> LinearGate:
    if isinstance(gate, dict):
        check_known_keys(owner, gate, ("type", "top_k"), "gate")
        kind = gate.get("type", "gshard")
        check_option(owner, "gate['type']", kind, *_GATES)
        check_rule(owner, "experts", [], "at least one module", num_expert >= 1)
        return _GATES[kind](d_model, num_expert, ranks, gate.get("top_k", 2))
    if not isinstance(gate, NaiveGate):
        raise TypeError(
            f"{owner}: expected gate to be a dict or a gate of moe_ext.integrations.paddle, got "
            f"{type(gate).__name__}"
        )
    for name, found, wanted in (
        ("num_expert", gate.num_expert, num_expert),
        ("world_size", gate.world_size, ranks),
    ):
        rule = f"{wanted}, as the layer has"
        check_rule(owner, f"gate.{name}", found, rule, found == wanted)
    return gate
