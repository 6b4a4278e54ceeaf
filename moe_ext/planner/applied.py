"""A transformers model in the placement of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_ext.distributed import MoEMesh, fully_shard, sync_gradients
from moe_ext.distributed.gradients import gradient_buckets
from moe_ext.distributed.placement import sharded_parameters
from moe_ext.planner.cost import exchange_bytes, gradient_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_ext.planner.plan import Plan


@dataclass(frozen=True)
class Applied:
    """A model in the placement of a plan.

    Attributes:
        model: the one given.
        mesh: of the job.
        plan: that was applied.
    """

    model: nn.Module
    mesh: MoEMesh
    plan: Plan

    def sent_bytes(self, routing: Sequence[Sequence[Tensor]]) -> dict[str, int]:
        """Bytes that this rank sends in a step of training, as `count_traffic` counts them.

        Rows to experts and back, their gradients, and the means of gradients; not FSDP2's own
        messages, which nothing counts.

        Args:
            routing: for each layer with experts of each micro-batch, the experts `[T, K]` that the
                tokens of every rank of the expert-parallel group choose.

        Returns:
            Bytes of "rows" and "gradients".

        Raises:
            ValueError: the plan's dispatcher is "hierarchical", whose hops are not foretold.
        """
        choice = self.plan.choice
        ep = int(choice["ep"] or 1)
        options: dict[str, Any] = {
            "num_experts": self.plan.model.num_experts,
            "model_dim": self.plan.model.model_dim,
            "dispatcher": choice["dispatcher"],
            "wire": choice["wire"],
            "combine": choice["combine"],
            "dtype": getattr(torch, self.plan.job.dtype),
            "weighed": False,
        }
        here = self.mesh.ep_rank
        rows = 0
        for each in routing if ep > 1 else ():
            forward = exchange_bytes(each, here, **options)
            rows += forward * (2 if choice["recompute"] else 1)
            rows += exchange_bytes(each, here, backward=True, **options)
        return {"rows": rows, "gradients": 0 if _is_fsdp(self.plan) else self._gradient_bytes()}

    def optimizers(self, cls: type[Optimizer], **options: Any) -> list[Optimizer]:
        """Optimizers of the model, to be stepped one after another.

        With ZeRO 1 the first is a `ZeroRedundancyOptimizer` of the dense parameters, each of which
        has its state on one rank; experts have theirs where they are.

        Args:
            cls: of the optimizer, such as ``torch.optim.AdamW``.
            options: of it.
        """
        if self.plan.choice["zero"] != 1 or self.plan.job.num_ranks == 1:
            return [cls([p for p in self.model.parameters() if p.requires_grad], **options)]
        from torch.distributed.optim import ZeroRedundancyOptimizer

        dense, experts = (
            [p for p in held if p.requires_grad] for held in (self._dense(), self._sharded())
        )
        found: list[Optimizer] = [ZeroRedundancyOptimizer(dense, cls, **options)]
        return [*found, cls(experts, **options)] if experts else found

    def _sharded(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in sharded_parameters(self.model).values()]

    def _dense(self) -> list[nn.Parameter]:
        experts = {id(parameter) for parameter in self._sharded()}
        return [p for p in self.model.parameters() if id(p) not in experts]

    def _gradient_bytes(self) -> int:
        both = (self._dense(), self.plan.job.num_ranks), (self._sharded(), self.mesh.edp_size)
        total = 0
        for held, copies in both:
            buckets = gradient_buckets([p for p in held if p.requires_grad])
            total += gradient_bytes([sum(p.nbytes for p in each) for each in buckets], copies)
        return total

    def sync_gradients(self) -> None:
        """Average gradients after the last backward pass of a step; FSDP2 has done it before."""
        if not _is_fsdp(self.plan):
            sync_gradients(self.model)


def apply_plan(plan: Plan, model: nn.Module) -> Applied:
    """See `Plan.apply`."""
    from moe_ext.integrations.huggingface import replace
    from moe_ext.integrations.huggingface.stages import decoder_of

    choice = plan.choice
    for name in ("pp", "tp", "cp"):
        if choice[name] != 1:
            raise ValueError(
                f"Plan.apply: expected {name} to be 1, got {choice[name]}: plan with "
                f"fixed={{'{name}': 1}}, or build it by MoEMesh, moe_ext.pipeline and "
                "moe_ext.attention.prepare_model"
            )
    layers = decoder_of(model, "Plan.apply").layers if _is_fsdp(plan) else ()
    ep = int(choice["ep"] or 1)
    mesh = MoEMesh(ep=ep, dp=plan.job.num_ranks // ep)
    if plan.model.num_experts:
        replace(
            model,
            ep_group=mesh.ep_group if ep > 1 else None,
            dispatcher=str(choice["dispatcher"]),
            combine=str(choice["combine"]),
            wire=choice["wire"],  # type: ignore[arg-type]
        )
    if choice["recompute"]:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if _is_fsdp(plan):
        for layer in layers:
            fully_shard(layer, mesh, reshard_after_forward=choice["zero"] == 3)
        fully_shard(model, mesh)
    return Applied(model, mesh, plan)


def _is_fsdp(plan: Plan) -> bool:
    return plan.choice["zero"] in (2, 3)
