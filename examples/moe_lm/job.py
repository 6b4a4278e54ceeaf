"""One training job: model, data, optimizer and the folder they write to.

Shape suffixes: B sequences, S bytes in a sequence, V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import moe_ext

from . import checkpoint as ckpt
from .data import DataError, TextData, load_text
from .model import ModelConfig, MoELanguageModel, count_parameters, init_weights
from .options import check_args
from .parallel import Runner, divide, make_mesh, make_optimizers, stages_of_rank, with_states
from .runtime import (
    FolderLock,
    Runtime,
    UserError,
    agree,
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
    optimizers: list[torch.optim.Optimizer]
    runner: Runner
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

    @property
    def share(self) -> tuple[int, int]:
        """The part of a batch that this rank loads: its number, and how many there are."""
        return self.mesh.data_rank, self.mesh.data_size


def build_model(
    args: argparse.Namespace, config: ModelConfig, mesh: moe_ext.distributed.MoEMesh
) -> MoELanguageModel:
    """Return this rank's part of the model, its weights drawn from --seed."""
    alone = mesh.ep_size * mesh.etp_size == 1  # nothing is sent
    try:
        spread = moe_ext.nn.Dispatch(args.dispatcher, combine=args.combine, wire=args.compress)
        model = MoELanguageModel(
            config,
            ep_group=None if alone else mesh.ep_group,
            balance_loss_coef=args.balance_loss_coef,
            z_loss_coef=args.z_loss_coef,
            capacity_factor=args.capacity_factor,
            **({} if alone else {"dispatcher": spread}),
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    model.keep(stages_of_rank(args, config, mesh))
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
    mesh = make_mesh(args, config, runtime.world_size)
    data = agree(lambda: load_text(args.data, config.seq_len), (DataError, OSError))
    expected = from_main(lambda: data.sha256, ())
    agree(lambda: require_same_data(data, expected, runtime.rank), DataError)
    model = build_model(args, config, mesh).to(runtime.device)
    divide(model, args, mesh)
    runner = Runner(args, runtime, model, mesh)
    optimizers = make_optimizers(args, model, mesh)
    settings = {
        **asdict(config),
        "batch": args.batch,
        "seed": args.seed,
        "data_sha256": data.sha256,
    }
    state = moe_ext.distributed.checkpoint.TrainingState(model, with_states(optimizers))
    return Job(args, runtime, config, data, mesh, model, optimizers, runner, state, settings, lock)


def ranks_by_axis(mesh: moe_ext.distributed.MoEMesh) -> str:
    """The ranks as products: as experts lie over them, and as attention does if that says more."""
    sizes = {"data": mesh.edp_size, "expert": mesh.ep_size, "expert-tensor": mesh.etp_size}
    others = {"data": mesh.data_size, "context": mesh.cp_size, "tensor": mesh.tp_size}
    shown = [
        f"{size} {axis} parallel"
        for axis, size in sizes.items()
        if size > 1 or axis != "expert-tensor"
    ]
    stages = [f"{mesh.pp_size} pipeline stages"] if mesh.pp_size > 1 else []
    text = f"{dist.get_world_size()} = {' x '.join(stages + shown)}"
    if mesh.cp_size * mesh.tp_size > 1:
        dense = [f"{size} {axis} parallel" for axis, size in others.items()]
        text += f", attention {' x '.join(stages + dense)}"
    return text


def describe(job: Job) -> None:
    """Print what will be trained, on what and where."""
    losses = {"balance_loss_coef": 0.0, "z_loss_coef": 0.0, "capacity_factor": None}
    with torch.device("meta"):
        whole = MoELanguageModel(job.config, ep_group=None, **losses)
    total, active = count_parameters(whole)
    job.say(
        f"device      {job.runtime.device_note}\n"
        f"ranks       {ranks_by_axis(job.mesh)}, "
        f"backend {dist.get_backend()}, {torch.get_num_threads()} threads each\n"
        f"data        {job.data.describe()}\n"
        f"model       {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active a byte: "
        f"{job.config.num_layers} layers, {len(whole.moe_layers())} with "
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
