"""One run: the model under DistributedDataParallel, its gradients compressed, every step measured.

Shape suffixes: B sequences, S bytes in a sequence, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from moe_lm.data import TextData, train_batch
from moe_lm.model import ModelConfig, MoELanguageModel, init_weights
from moe_lm.options import learning_rate
from moe_lm.runtime import Runtime, UserError
from moe_lm.validation import validation_loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_ext.compression import CompressionState, Warmup, compress_hook
from moe_ext.distributed import count_traffic
from moe_ext.optim import OneBitAdam

from .report import Point, Run
from .settings import Setting

BETAS = (0.9, 0.99)
IO = Path("/proc/self/io")


@dataclass
class Job:
    """All that is the same for every setting."""

    args: argparse.Namespace
    runtime: Runtime
    config: ModelConfig
    data: TextData

    def build_model(self) -> MoELanguageModel:
        """The same weights on every rank and for every setting, drawn from --seed."""
        model = MoELanguageModel(
            self.config,
            ep_group=None,
            balance_loss_coef=self.args.balance_loss_coef,
            z_loss_coef=0.0,
            capacity_factor=None,
        )
        init_weights(model, self.args.seed)
        return model


@dataclass
class Trained:
    """A model with what makes its ranks agree: the hook, or the optimizer itself."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    state: CompressionState | None


def data_parallel(model: nn.Module) -> DistributedDataParallel:
    """The model under DistributedDataParallel; its buffers are constants, and are not sent."""
    # torch 2.13 warns of the name that earlier versions have.
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(model, **{name: False})


def prepare(job: Job, setting: Setting) -> Trained:
    """Model, hook and optimizer of a setting."""
    model = job.build_model()
    if setting.name == "onebit":
        # OneBitAdam averages by itself: gradients in the warm-up, then bits of the momentum.
        optimizer = OneBitAdam(
            model.parameters(), lr=job.args.lr, betas=BETAS, freeze_step=job.args.dense_steps
        )
        return Trained(model, optimizer, None)
    wrapped = data_parallel(model)
    state = CompressionState(
        model=wrapped,
        codec=setting.name,
        density=setting.density,
        warmup=Warmup(dense_steps=job.args.dense_steps if setting.begins_dense else 0),
    )
    wrapped.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.args.lr, betas=BETAS)
    return Trained(wrapped, optimizer, state)


def mean_loss(model: nn.Module, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean loss of this rank's sequences, in nats a byte."""
    logits_BSV = model(inputs_BS)
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def written() -> int:
    """Bytes that this process has written so far: Gloo's to its sockets, in a training step."""
    with contextlib.suppress(OSError):
        for line in IO.read_text().splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0


def train_step(job: Job, trained: Trained, step: int, run: Run) -> None:
    """One optimizer step; what it took and sent goes to `run`."""
    for options in trained.optimizer.param_groups:
        options["lr"] = learning_rate(job.args, step)
    batch = train_batch(
        job.data,
        step=step,
        seed=job.args.seed,
        batch=job.args.batch,
        seq_len=job.config.seq_len,
        rank=job.runtime.rank,
        world_size=job.runtime.world_size,
    )
    started, before = time.perf_counter(), written()
    with count_traffic() as traffic:
        loss = mean_loss(trained.forward, *batch)
        try:
            loss.backward()
            trained.optimizer.step()
        except ValueError as error:  # on every rank: a gradient that is not finite, say
            raise UserError(f"step {step + 1}: {error}; try a lower --lr") from error
    run.seconds.append(time.perf_counter() - started)
    run.written_bytes.append(written() - before)
    run.sent_bytes.append(traffic.total_bytes)
    run.losses.append(loss.item())
    trained.optimizer.zero_grad(set_to_none=True)


def train(job: Job, setting: Setting, progress: Callable[[Run], None]) -> tuple[Run, str]:
    """Train from the first step to the last; what was found, and what the cost model says.

    Args:
        job: what to train.
        setting: what is done to the gradients.
        progress: called after every step.
    """
    args = job.args
    trained = prepare(job, setting)
    run = Run(setting.label, args.dense_steps if setting.begins_dense else 0)
    for step in range(args.steps):
        train_step(job, trained, step, run)
        if (step + 1) % args.validate_every == 0 or step + 1 == args.steps:
            model = trained.forward
            loss = validation_loss(job, model, functools.partial(mean_loss, model))
            if not math.isfinite(loss):
                raise UserError(f"the loss of step {step + 1} is {loss}: try a lower --lr")
            run.validation.append(Point(step + 1, loss, run.total_bytes, sum(run.seconds)))
        progress(run)
    return run, "" if trained.state is None else trained.state.explain()
