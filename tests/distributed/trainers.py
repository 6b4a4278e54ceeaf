"""How users' tools train a model: one function each, which `composition.py` combines with the rest.

A new one is a function here under `@trainer(...)`, nothing else. It takes a `Job`, builds what the
tool wants around `job.model`, and ends with that model trained on `job.batches`.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import distributed as md
from moe_ext.integrations.huggingface import SavesExperts
from moe_ext.integrations.lightning import ExpertParallel, FabricExpertParallel

MAX_NORM, LEARNING_RATE = 0.05, 1e-2
TRAINERS: dict[str, Callable[["Job"], None]] = {}


def trainer(name, *, has_files=False):
    """Register a function as a way to train, under the name that docs/parallelism.md gives it.

    `has_files`: it is another way, too, that saves and loads by the tool, with `own_files`.
    """

    def register(function):
        TRAINERS[name] = function
        if has_files:
            TRAINERS[f"{name}, its files"] = functools.partial(function, own_files=True)
        return function

    return register


class Model(nn.Module):
    """Two MoE layers, or one, between dense ones; float64; returns what each of the tools wants."""

    def __init__(self, ep_group=None, *, recompute=False, bias=True, num_layers=2):
        super().__init__()
        torch.manual_seed(7)
        self.recompute = recompute
        self.inp = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            moe_ext.MoELayer(
                8,
                6,
                8,
                2,
                ep_group=ep_group,
                balance=moe_ext.nn.Balance(coef=0.0, z_coef=0.1),
                **options,
            )
            for options in ({"shared_expert": 4, "bias": bias}, {"activation": "gelu"})[:num_layers]
        )
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)
        self.double()

    def block(self, layer, h):
        """The layer between its neighbours."""
        normed = self.norm(h)
        if self.recompute:
            return h + checkpoint(layer, normed, use_reentrant=False)
        return h + layer(normed)

    def forward(self, x, labels):
        """Mean squared error; x [rows, 6], labels [rows, 3]."""
        # No loop: torch.compile leaves one alone in which a graph has to end.
        h = self.block(self.layers[0], self.inp(x))
        if len(self.layers) > 1:
            h = self.block(self.layers[1], h)
        y = self.out(h)
        return {"loss": (y - labels).square().mean(), "logits": y}


@dataclass
class Job:
    """What a way of training is given.

    Attributes:
        model: in this process alone, its experts spread over ranks if they are to be.
        mesh: ranks, and those that share the experts.
        batches: arguments of the model, of this rank, one step each.
        compiled: whether the model is to run under `torch.compile(backend="eager")`.
        restore: call it with the model and the optimizer before the first step.
        save: call it with the same two after the last one.
        folder: for the tool's own checkpoints, in the place of the two.
        resumed: whether there is such a checkpoint.
    """

    model: Model
    mesh: md.MoEMesh
    batches: list[dict[str, torch.Tensor]]
    compiled: bool
    restore: Callable[[nn.Module, torch.optim.Optimizer], None]
    save: Callable[[nn.Module, torch.optim.Optimizer], None]
    folder: str
    resumed: bool

    def optimizer(self, model: nn.Module, *, restored: bool = True) -> torch.optim.Optimizer:
        """The optimizer of all ways of training, with the checkpoint that the job begins with."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        if restored:
            self.restore(model, optimizer)
        return optimizer

    def compile(self, model: Any) -> Any:
        """The model, compiled if it is to be."""
        return torch.compile(model, backend="eager") if self.compiled else model


def take_steps(job, wrapped, after_backward=lambda model: None):
    """Steps that clip by `clip_grad_norm_` of the library, and the job's checkpoints."""
    optimizer, model = job.optimizer(job.model), job.compile(wrapped)
    for batch in job.batches:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        after_backward(job.model)
        md.clip_grad_norm_(job.model, MAX_NORM)
        optimizer.step()
    job.save(job.model, optimizer)


@trainer("plain loop")
def plain_loop(job):
    """`sync_gradients` of the library."""
    take_steps(job, job.model, md.sync_gradients)


@trainer("DDP")
def data_parallel(job):
    """torch's own around a model that `parallelize` has prepared."""
    take_steps(job, DistributedDataParallel(moe_ext.parallelize(job.model)))


def as_torchrun():
    """The environment that tools read ranks from."""
    size, rank = str(dist.get_world_size()), str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


@trainer("Accelerate", has_files=True)
def accelerate(job, own_files=False):
    """`prepare`, `backward` and `clip_grad_norm_` of an Accelerator; `save_state`, `load_state`."""
    as_torchrun()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin
    from safetensors.torch import load_file

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = TorchDynamoPlugin(backend="eager") if job.compiled else None
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    optimizer = job.optimizer(job.model, restored=not own_files)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    whole = moe_ext.parallelize(job.model)
    model, prepared, schedule = accelerator.prepare(whole, optimizer, schedule)
    if own_files and job.resumed:
        with md.whole_state_dicts(prepared):
            accelerator.load_state(job.folder)
    for batch in job.batches:
        prepared.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        prepared.step()
        schedule.step()
    if own_files:
        if md.placement.sharded_parameters(job.model):
            with pytest.raises(TypeError, match="inside `with moe_ext.distributed.whole_state_dic"):
                accelerator.save_state(f"{job.folder}/refused")
        with md.whole_state_dicts(prepared):
            accelerator.save_state(job.folder)
            accelerator.save_model(model, f"{job.folder}/model")
        accelerator.wait_for_everyone()
        found = load_file(f"{job.folder}/model/model.safetensors")
        # Accelerate leaves the prefix of torch.compile there.
        Model().load_state_dict({n.removeprefix("_orig_mod."): t for n, t in found.items()})
    else:
        job.save(job.model, optimizer)


@trainer("Trainer", has_files=True)
def transformers_trainer(job, own_files=False):
    """The Trainer of transformers, which clips by default; `save_strategy="steps"`, resumed."""
    as_torchrun()
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)

    class OwnBatches(SavesExperts, Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(job.batches, batch_size=None)

    options = {"torch_compile": True, "torch_compile_backend": "eager"} if job.compiled else {}
    steps = len(job.batches)
    arguments = TrainingArguments(
        job.folder,
        use_cpu=True,
        max_steps=2 * steps if own_files and job.resumed else steps,
        ignore_data_skip=True,
        max_grad_norm=MAX_NORM,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="steps" if own_files else "no",
        save_steps=steps,
        logging_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **options,
    )
    optimizer = job.optimizer(job.model, restored=not own_files)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    tool = OwnBatches(
        job.model, arguments, train_dataset=job.batches, optimizers=(optimizer, schedule)
    )
    from_file = own_files and job.resumed
    tool.train(resume_from_checkpoint=f"{job.folder}/checkpoint-{steps}" if from_file else None)
    if own_files:
        assert schedule.last_epoch == arguments.max_steps
    else:
        job.save(job.model, optimizer)


@trainer("Lightning", has_files=True)
def lightning(job, own_files=False):
    """`ExpertParallel` around its `DDPStrategy`; `gradient_clip_val`; `ModelCheckpoint`."""
    as_torchrun()
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Strategy(ExpertParallel, DDPStrategy):
        pass

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = job.model

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

        def on_train_start(self):
            if not own_files:
                job.restore(self.model, self.optimizers().optimizer)

        def on_train_end(self):
            if not own_files:
                job.save(self.model, self.optimizers().optimizer)

    steps, from_file = len(job.batches), own_files and job.resumed
    files = pl.callbacks.ModelCheckpoint(job.folder, "state", every_n_train_steps=steps)
    tool = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=Strategy(process_group_backend="gloo"),
        plugins=[LightningEnvironment()],
        max_steps=2 * steps if from_file else steps,
        gradient_clip_val=MAX_NORM,
        use_distributed_sampler=False,
        enable_checkpointing=own_files,
        callbacks=[files] if own_files else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = torch.utils.data.DataLoader(job.batches, batch_size=None)
    state = f"{job.folder}/state.ckpt" if from_file else None
    tool.fit(job.compile(Module()), data, ckpt_path=state)
    if own_files:
        # All ranks take part, and rank 0 writes what one process would.
        tool.save_checkpoint(f"{job.folder}/after.ckpt", weights_only=True)
        found = torch.load(f"{job.folder}/after.ckpt", weights_only=True)["state_dict"]
        Model().load_state_dict({n.removeprefix("model."): t for n, t in found.items()})


@trainer("Fabric", has_files=True)
def lightning_fabric(job, own_files=False):
    """`FabricExpertParallel` around its `DDPStrategy`; `clip_gradients`; `save` and `load`."""
    as_torchrun()
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    class Strategy(FabricExpertParallel, DDPStrategy):
        pass

    world = TorchElasticEnvironment()
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=Strategy(cluster_environment=world, process_group_backend="gloo"),
    )
    fabric.launch()
    given = job.optimizer(job.model, restored=not own_files)
    model, optimizer = fabric.setup(job.compile(job.model), given)
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    path = f"{job.folder}/state.ckpt"
    if own_files and job.resumed:
        assert fabric.load(path, dict(state)) == {}
    for batch in job.batches:
        optimizer.zero_grad()
        fabric.backward(model(**batch)["loss"])
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
    if own_files:
        fabric.save(path, state)
        found = torch.load(path, weights_only=True)
        assert found["epoch"] == 3
        Model().load_state_dict(found["model"])
    else:
        job.save(job.model, given)


@trainer("FSDP2")
def fully_sharded(job):
    """`fully_shard` of the library."""
    for module in (*job.model.layers, job.model):
        md.fully_shard(module, job.mesh)
    take_steps(job, job.model)
