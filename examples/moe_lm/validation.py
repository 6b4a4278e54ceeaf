"""The loss on bytes that no rank trains on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_ext

from .data import TextData, validation_batches
from .model import ModelConfig
from .runtime import Runtime


class Job(Protocol):
    """What of a job says which bytes are held out."""

    args: argparse.Namespace
    runtime: Runtime
    config: ModelConfig
    data: TextData


def sum_over_ranks(values: Tensor, what: str) -> None:
    """Add `values` over all ranks in place; when a rank has died the error names it."""
    with moe_ext.distributed.naming_failed_ranks(dist.group.WORLD, what):
        dist.all_reduce(values)


@torch.no_grad()
def validation_loss(job: Job, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the mean of a loss over the held-out batches, equal on every rank."""
    model.eval()
    batches = validation_batches(
        job.data,
        num_batches=job.args.validation_batches,
        batch=job.args.batch,
        seq_len=job.config.seq_len,
        rank=job.runtime.rank,
        world_size=job.runtime.world_size,
    )
    total = torch.stack([loss(*batch).double() for batch in batches]).sum()
    sum_over_ranks(total, "validation")
    model.train()
    return float(total) / len(batches) / job.runtime.world_size
