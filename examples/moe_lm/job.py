"""One training job: model, data, optimizer and the folder they write to.

Shape suffixes: B sequences, S bytes in a sequence, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import moe_ext

from . import checkpoint as ckpt
from .data import DataError, TextData, load_text
from .model import ModelConfig, MoELanguageModel, count_parameters, init_weights
from .options import check_args
from .runtime import (
    FolderLock,
    Runtime,
    UserError,
    agree,
    choose_expert_parallel_size,
    from_main,
)


@dataclass
class Job:
    """All that the training loop works on."""

    args: argparse.Namespace
    runtime: Runtime
    config: ModelConfig
    data: TextData
    mesh: moe_ext.distributed.MoEMesh
    model: MoELanguageModel
    optimizer: torch.optim.Optimizer
    state: moe_ext.distributed.checkpoint.TrainingState
    settings: dict[str, Any]
    lock: FolderLock

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.args.out / "checkpoints"

    def say(self, text: str) -> None:
        """Print on rank 0, above the progress bar."""
        if self.runtime.is_main:
            tqdm.write(text)
            sys.stdout.flush()

    def loss(self, inputs_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of this rank's sequences, in nats a byte."""
        device = self.runtime.device
        bf16 = self.args.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            logits_BSV = self.model(inputs_BS.to(device))
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.to(device).flatten())


def build_model(
    args: argparse.Namespace, config: ModelConfig, mesh: moe_ext.distributed.MoEMesh
) -> MoELanguageModel:
    """Return the model with the experts of this rank, its weights drawn from --seed."""
    try:
        model = MoELanguageModel(
            config,
            ep_group=mesh.ep_group if mesh.ep_size > 1 else None,
            balance_loss_coef=args.balance_loss_coef,
            z_loss_coef=args.z_loss_coef,
            capacity_factor=args.capacity_factor,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    init_weights(model, args.seed)
    return model


def require_same_data(data: TextData, expected: str, rank: int) -> None:
    """Refuse text that differs between machines: ranks would hold out different files."""
    if data.sha256 != expected:
        raise DataError(
            f"expected --data to be the same on every rank, got other text on rank {rank} than on "
            f"rank 0: {data.describe()}"
        )


def build_job(args: argparse.Namespace, runtime: Runtime, lock: FolderLock) -> Job:
    """Read the data and build the model; writes nothing."""
    config = check_args(args, runtime.world_size)
    ep_size = choose_expert_parallel_size(args.ep, runtime.world_size, config.num_experts)
    data = agree(lambda: load_text(args.data, config.seq_len), (DataError, OSError))
    expected = from_main(lambda: data.sha256, ())
    agree(lambda: require_same_data(data, expected, runtime.rank), DataError)
    mesh = moe_ext.distributed.MoEMesh(dp=runtime.world_size // ep_size, ep=ep_size)
    model = build_model(args, config, mesh).to(runtime.device)
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "embedding" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim <= 1 or "embedding" in n]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": args.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(0.9, 0.95),
    )
    settings = {
        **asdict(config),
        "batch": args.batch,
        "seed": args.seed,
        "data_sha256": data.sha256,
    }
    state = moe_ext.distributed.checkpoint.TrainingState(model, optimizer)
    return Job(args, runtime, config, data, mesh, model, optimizer, state, settings, lock)


def describe(job: Job) -> None:
    """Print what will be trained, on what and where."""
    total, active = count_parameters(job.model)
    ranks = job.runtime.world_size
    ep_size = job.mesh.ep_size
    job.say(
        f"device      {job.runtime.device_note}\n"
        f"ranks       {ranks} = {ranks // ep_size} data parallel x {ep_size} expert parallel, "
        f"backend {dist.get_backend()}, {torch.get_num_threads()} threads each\n"
        f"data        {job.data.describe()}\n"
        f"model       {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active a byte: "
        f"{job.config.num_layers} layers, {len(job.model.moe_layers())} with "
        f"{job.config.num_experts} experts, top {job.config.top_k}\n"
        f"training    {job.args.steps} steps of {job.args.batch} x {job.config.seq_len} bytes\n"
        f"out         {job.args.out}"
    )


def lock_existing_out(job: Job) -> None:
    """Keep other jobs out, if there is a folder to keep them out of."""
    if job.args.out.exists():
        if not job.args.out.is_dir():
            raise UserError(f"expected --out to be a folder, got a file: {job.args.out}")
        job.lock.acquire(job.args.out)


def prepare_out(job: Job) -> None:
    """Create --out, or clear what a killed job left half-written in it."""
    job.args.out.mkdir(parents=True, exist_ok=True)
    job.lock.acquire(job.args.out)
    if job.checkpoints.exists():
        ckpt.remove_leftovers(job.checkpoints)
