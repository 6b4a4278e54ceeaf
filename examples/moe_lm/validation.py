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
    """Parts of a job that decide which bytes are held out."""

    args: argparse.Namespace
    runtime: Runtime
    config: ModelConfig
    data: TextData


def sum_over_ranks(values: Tensor, what: str) -> None:
    """Add `values` over all ranks in place; when a rank has died the error names it."""
    with moe_ext.distributed.naming_failed_ranks(dist.group.WORLD, what):
        dist.all_reduce(values)


@torch.no_grad()
def validation_loss(
    job: Job,
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    share: tuple[int, int] | None = None,
) -> float:
    """Return the mean of a loss over the held-out batches, equal on every rank.

    `share` is which part of a batch this rank takes, and of how many: a rank's own by default.
    """
    rank, size = share or (job.runtime.rank, job.runtime.world_size)
    model.eval()
    batches = validation_batches(
        job.data,
        num_batches=job.args.validation_batches,
        batch=job.args.batch,
        seq_len=job.config.seq_len,
        rank=rank,
        world_size=size,
    )
    total = torch.stack([loss(*batch).double() for batch in batches]).sum()
    sum_over_ranks(total, "validation")
    model.train()
    return float(total) / len(batches) / job.runtime.world_size
