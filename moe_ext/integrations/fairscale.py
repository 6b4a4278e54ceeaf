"""fairscale's `MOELayer` on moe_ext.

Shapes: T tokens, D model, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_rule
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.integrations._base import (
    Gate,
    LayerWithLoss,
    counts_of,
    first_and_drawn,
    float32_logits,
    gumbel_noise,
    slots_with_room,
)
from moe_ext.nn.module_experts import ModuleExperts
from moe_ext.nn.routers import RouterOutput, Tokens


class Top2Gate(Gate):
    """GShard's gate as in fairscale.

    The second expert is drawn by Gumbel noise on the logits, bit for bit as in fairscale. An expert
    takes `2 * T // E` rows of each rank, first choices before second choices. The weights of a
    token are normalised over the choices whose experts have room.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts of all ranks.
    """

    def __init__(self, model_dim: int, num_experts: int) -> None:
        super().__init__(model_dim, num_experts, 2)
        self.wg = nn.Linear(model_dim, num_experts, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew, as `nn.Linear` does."""
        self.wg.reset_parameters()

    def logits(self, tokens: Tokens) -> Tensor:
        """Compute the logits, in float32."""
        return float32_logits(tokens.x_TD, self.wg.weight)

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose two experts for every token."""
        assert tokens.mask_T is None, "fairscale's layer takes no mask"
        num_tokens = logits_TE.shape[0]
        idx = first_and_drawn(logits_TE, logits_TE.detach() + gumbel_noise(logits_TE))
        gate = ops.gate_weights(logits_TE, idx, renormalize=False)
        capacity = 2 * num_tokens // self.num_experts
        kept = slots_with_room(idx, self.num_experts, capacity, policy="choice")
        weights = gate.topk_weights * kept
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        first_E = counts_of(idx[:, 0], self.num_experts)
        # GShard's loss is E times the sum over experts; fairscale's is the mean over experts.
        self.loss = ops.load_balance_loss(gate.score_sum, first_E, 1) / self.num_experts**2
        counts = (gate.num_tokens_per_expert, first_E)
        return self.output(logits_TE, weights, idx, kept, counts, gate.score_sum)


class MOELayer(LayerWithLoss):
    """Mixture of experts with the signature, results and parameter names of `fairscale.nn.moe`.

    Args:
        gate: a `Top2Gate` of this module.
        experts: the experts of this rank, one module or several, each `[n, D] -> [n, D]`.
        group: expert-parallel group; None is the default group, or this process alone if
            torch.distributed is not initialised.

    Attributes:
        l_aux: balance loss of the last forward pass, 0-d, in the graph. As in fairscale it is the
            mean over experts of `f_e * P_e`, which is `1 / E^2` for an even load.

    Raises:
        TypeError: the gate is not a gate of this module.
        ValueError: the gate's number of experts is not that of all ranks.
    """

    paths: ClassVar[dict[str, str]] = {"router": "gate"}

    def __init__(
        self,
        gate: Gate,
        experts: nn.Module | Iterable[nn.Module],
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(gate, Gate):
            raise TypeError(
                "fairscale.MOELayer: expected gate to be a moe_ext.integrations.fairscale.Top2Gate,"
                f" got {type(gate).__name__}"
            )
        group = resolve_group(group, "fairscale.MOELayer")
        local = [experts] if type(experts) is not nn.ModuleList else list(experts)
        total = len(local) * group_size(group)
        rule = f"for {total} experts ({len(local)} on each of {group_size(group)} ranks)"
        fits = gate.num_experts == total
        check_rule("fairscale.MOELayer", "gate", gate.num_experts, rule, fits)
        ep_group = group if group_size(group) > 1 else None
        modules = ModuleExperts(local, ep_group=ep_group)  # type: ignore[arg-type]
        super().__init__(gate.model_dim, gate, modules)
        for parameter in modules.parameters():
            parameter.expert = True  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        """Run every token through its experts.

        Args:
            input: `[S, T, D]`.

        Returns:
            `[S, T, D]`.

        Raises:
            ValueError: the input does not have three dimensions.
        """
        if input.dim() != 3:
            raise ValueError(
                f"fairscale.MOELayer: expected input to have 3 dimensions, got {input.dim()}"
            )
        output = self.run(input)
        gate: Any = self.router
        # In fairscale the loss has the dtype of the logits, which is that of the input.
        self.l_aux, gate.loss = gate.loss.to(input.dtype), None
        return output
