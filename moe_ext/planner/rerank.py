"""The best plans, run: steps of training timed on the ranks that they are for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from moe_ext.comm.groups import group_size
from moe_ext.comm.link import max_over_ranks, seconds_of
from moe_ext.planner.apply import Applied, rounds_of

if TYPE_CHECKING:
    from moe_ext.planner.plan import Plan


def time_plan(
    plan: Plan,
    make_model: Callable[[], nn.Module],
    *,
    group: ProcessGroup | None = None,
    steps: int = 3,
) -> float:
    """See `Plan.time`."""
    if group_size(group) != plan.job.num_ranks:
        raise ValueError(
            f"Plan.time: expected group to have the {plan.job.num_ranks} ranks of the plan, got "
            f"{group_size(group)}"
        )
    applied = plan.apply(make_model())
    device = next(applied.model.parameters()).device
    optimizers = applied.optimizers(torch.optim.AdamW, lr=1e-4)
    batches = _batches(applied, device)

    def median() -> float:
        times = []
        for _ in range(1 + steps):
            # All ranks begin together.
            _slowest([0.0], group, device)
            times.append(seconds_of(lambda: _step(applied, batches, optimizers), device))
        return statistics.median(_slowest(times[1:], group, device))

    # First, since rounds begin from weights that are equal on all ranks.
    with_round = 0.0
    if plan.job.local_steps > 1:
        with rounds_of(applied, optimizers[0], 1, torch.optim.SGD, lr=1.0):
            with_round = median()
    found = median()
    if plan.job.local_steps > 1:
        found += (with_round - found) / plan.job.local_steps
    return found


def _slowest(seconds: list[float], group: ProcessGroup | None, device: torch.device) -> list[float]:
    return seconds if group is None else max_over_ranks(seconds, group, device)


def rerank(
    plan: Plan,
    make_model: Callable[[], nn.Module],
    *,
    group: ProcessGroup | None = None,
    steps: int = 3,
) -> tuple[Plan, tuple[float, ...]]:
    """See `Plan.rerank`."""
    others = [
        replace(plan, **{name: getattr(each, name) for name in _OWN}) for each in plan.runners_up
    ]
    plans, seconds, problem = [plan, *others], [], None
    for each in plans:
        try:
            seconds.append(time_plan(each, make_model, group=group, steps=steps))
        except ValueError as error:
            # `apply` changes nothing where it refuses a model, on all ranks.
            seconds.append(math.inf)
            problem = error
    if problem is not None and min(seconds) == math.inf:
        raise problem
    return plans[min(range(len(plans)), key=seconds.__getitem__)], tuple(seconds)


_OWN = ("choice", "seconds", "memory", "stages")


def _batches(applied: Applied, device: torch.device) -> list[Tensor]:
    """Micro-batches of this rank's data, which ranks of a tp or cp group share."""
    plan, mesh = applied.plan, applied.mesh
    micro = int(plan.choice["micro_batch"] or 1)
    count = plan.job.global_batch // (mesh.data_size * micro)
    generator = torch.Generator().manual_seed(mesh.data_rank)
    size = count * micro, plan.job.seq_len
    tokens = torch.randint(plan.model.vocab_size, size, generator=generator)
    return list(tokens.to(device).split(micro))


def _step(applied: Applied, batches: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
    if applied.pipeline is None:
        for batch in batches:
            loss = applied.model(input_ids=batch, labels=batch).loss
            (loss / len(batches)).backward()
    else:
        stages, last = applied.pipeline.stages, applied.pipeline.table.num_stages - 1
        ends = (batches if end in stages else () for end in (0, last))
        applied.pipeline.step(*ends)
    applied.sync_gradients()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
