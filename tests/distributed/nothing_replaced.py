"""Trains by every tool on two ranks, and says what of torch and the tools is another thing then.

    python tests/distributed/nothing_replaced.py

A process that has not imported the library first trains plain models by the tools, which replace
and look up things of their own when they are first used. Then it takes the fingerprint. Prints
the name of a file of JSON: what was done, to what had changed by then; and what was seen of seeded
changes.
"""

import atexit
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import SUPPORTED_NODES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fingerprint import Fingerprint

PACKAGES = ("torch", "accelerate", "transformers", "lightning", "peft", "safetensors")
# Ways of training of trainers.py to what has to be installed.
NEEDS = {
    "Accelerate": "accelerate",
    "Trainer": "transformers",
    "Lightning": "lightning",
    "Fabric": "lightning",
}
RANKS = 2
# Patterns of what may change, to the reason.
ALLOWED = {
    r"torch\.ops\.moe_ext was added": "the namespace of our operators",
    r"torch\._library\..*\[moe_ext::\w+\] was added": "register_fake, register_autograd, custom_op",
    r".*\.flop_registry\.\[moe_ext\.\w+\] was added": "register_flop_formula",
    r".*\.cls_to_fsdp_cls\.\[moe_ext\..*\] was added": "FSDP2 makes a class for each that it wraps",
}
# And in a process that has sent something to others: threads of a backend may need the interpreter
# until they have ended.
ALLOWED_AFTER_AN_EXCHANGE = {r"atexit: (\d+) was, \d+ is": "a wait at the exit of the process"}


def is_installed(trainer):
    """Whether what a way of training needs is there."""
    package = NEEDS.get(trainer.partition(",")[0])
    return package is None or importlib.util.find_spec(package) is not None


class Plain(nn.Module):
    """A model without experts."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x, labels):
        """As the model of trainers.py."""
        y = self.out(self.inp(x).relu())
        return {"loss": (y - labels).square().mean(), "logits": y}


def batches():
    """Two steps' arguments."""
    sizes = {"x": 6, "labels": 3}
    return [{k: torch.randn(4, n, dtype=torch.float64) for k, n in sizes.items()} for _ in range(2)]


def train(model, parameters, wrapped=None, options=()):
    """Two steps with clipping by each of torch's functions, one after the other."""
    wrapped = model if wrapped is None else wrapped
    for kwargs in ({"foreach": True}, {"fused": True}, {"foreach": False}, *options):
        optimizer = torch.optim.AdamW(parameters, **kwargs)
        for batch in batches():
            wrapped(**batch)["loss"].backward()
            nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
            optimizer.zero_grad()


def plainly(folder):
    """Use torch and the tools as the ways of training do, with a model that has no experts."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    model = Plain()
    train(model, list(model.parameters()))
    train(model, list(model.parameters()), DistributedDataParallel(model))
    model = replicate(Plain())
    train(model, list(model.parameters()))
    model = fully_shard(Plain(), mesh=mesh)
    train(model, list(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/plain")
    dcp.load(state, checkpoint_id=f"{folder}/plain")
    held = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    (DTensor.from_local(held.to_local(), mesh, [Shard(0)]).full_tensor()).sum().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([held]))
    for name, (need, use) in TOOLS.items():
        if importlib.util.find_spec(need):
            use(f"{folder}/plain {name}")


def _accelerate(folder):
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), Plain()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for batch in batches():
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    accelerator.save_model(model, f"{folder}/model")


def _transformers(folder):
    from transformers import Trainer, TrainingArguments

    class OwnBatches(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(batches(), batch_size=None)

    for steps, resume in ((2, None), (4, f"{folder}/checkpoint-2")):
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=steps, save_steps=2, report_to=[], disable_tqdm=True
        )
        OwnBatches(Plain(), arguments, train_dataset=batches()).train(resume)


def _lightning(folder):
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Plain()

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    for steps, resume in ((2, None), (4, f"{folder}/state.ckpt")):
        files = pl.callbacks.ModelCheckpoint(folder, "state", every_n_train_steps=2)
        tool = pl.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=DDPStrategy(process_group_backend="gloo"),
            plugins=[LightningEnvironment()],
            max_steps=steps,
            gradient_clip_val=0.1,
            use_distributed_sampler=False,
            callbacks=[files],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        data = torch.utils.data.DataLoader(batches(), batch_size=None)
        tool.fit(Module(), data, ckpt_path=resume)


TOOLS = {
    "Accelerate": ("accelerate", _accelerate),
    "Trainer": ("transformers", _transformers),
    "Lightning": ("lightning", _lightning),
}


@contextlib.contextmanager
def replacing(owner, name, value):
    """Another attribute, for a while."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@contextlib.contextmanager
def replacing_cell():
    """Another content of the cell that holds what `clip_grad_norm_` runs, for a while."""
    cell = nn.utils.clip_grad_norm_.__closure__[0]
    before = cell.cell_contents
    cell.cell_contents = lambda *args: before(*args)
    yield
    cell.cell_contents = before


@contextlib.contextmanager
def with_hook(register):
    """A hook of all optimizers, or of all modules, for a while."""
    handle = register(lambda *_: None)
    yield
    handle.remove()


@contextlib.contextmanager
def with_call_at_exit():
    """A function that the exit of the process calls, for a while."""
    atexit.register(dir)
    yield
    atexit.unregister(dir)


@contextlib.contextmanager
def _replacing_item(table, key, value):
    before = table[key]
    table[key] = value
    yield
    table[key] = before


def _wrapped(*args):
    return None


# Part of the name that `Fingerprint.changes` has to tell, to what makes such a change for a while.
SEEDS = {
    "get_total_norm": lambda: replacing(nn.utils, "get_total_norm", _wrapped),
    "DistributedDataParallel.__init__": lambda: replacing(
        nn.parallel.DistributedDataParallel, "__init__", _wrapped
    ),
    "clip_grad_norm_.<": replacing_cell,
    "_global_optimizer_pre_hooks": lambda: with_hook(register_optimizer_step_pre_hook),
    "_global_forward_hooks": lambda: with_hook(register_module_forward_hook),
    "atexit": with_call_at_exit,
    "_engine_run_backward": lambda: replacing(torch.autograd, "_engine_run_backward", _wrapped),
    "SUPPORTED_NODES.[builtins.list]": lambda: _replacing_item(SUPPORTED_NODES, list, _wrapped),
}


def run_rank(rank, folder, results):
    """Body of a rank: what was done, to changes; last the seeded ones."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    os.chdir(folder)
    try:
        found = _run(folder, rank)
    except Exception:
        found = {"error": [traceback.format_exc()]}
    results.send(found)
    os._exit(0)


def _run(folder, rank):
    plainly(folder)
    taken, found = Fingerprint(PACKAGES), {}
    import moe_ext

    layer = moe_ext.MoELayer(8, 6, 8, 2)
    layer(torch.randn(4, 8)).sum().backward()
    # A walk takes a second, and what is replaced stays: the other rank looks once, at the end.
    if rank == 0:
        found["one process"] = taken.changes()

    import composition
    from torch.distributed._composable.replicate import replicate
    from trainers import TRAINERS, Job, Model

    from moe_ext import distributed as md

    mesh = md.MoEMesh(dp=1, ep=RANKS)

    def by_replicate(job):
        moe_ext.parallelize(job.model)
        replicate(job.model, ignored_modules=[layer.experts for layer in job.model.layers])
        for batch in job.batches:
            job.model(**batch)["loss"].backward()

    for name, trainer in {**TRAINERS, "replicate": by_replicate}.items():
        # Tools that save their files do all else, too.
        if not is_installed(name) or f"{name}, its files" in TRAINERS:
            continue
        path = Path(folder) / name
        path.mkdir(exist_ok=True)

        def save_and_load(*trained, path=path):
            md.checkpoint.save(path, *trained)
            md.checkpoint.load(path, *trained)

        for resumed in (False, True) if name.endswith("its files") else (False,):
            model, steps = Model(mesh.ep_group), composition.batches(rank, RANKS)[:2]
            rest = (False, lambda *_: None, save_and_load, str(path), resumed)
            trainer(Job(model, mesh, steps, *rest))
    found["ranks"] = taken.changes()
    # A mesh of the user's own stays what it is.
    own = dist.device_mesh.init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("edp", "ep"))
    dense = dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    Model(md.MoEMesh.from_device_mesh(dense, own).ep_group)
    assert [type(made) for made in (own, own["ep"], dense)] == [dist.DeviceMesh] * 3
    if rank == 0:
        with contextlib.ExitStack() as stack:
            for make in SEEDS.values():
                stack.enter_context(make())
            found["seeded"] = sorted(set(taken.changes()) - set(found["ranks"]))
    return found


def outcomes():
    """What was done to the changes that were seen, on each rank."""
    for need in ("accelerate", "transformers.trainer", "lightning.pytorch", "peft"):
        if importlib.util.find_spec(need.partition(".")[0]):
            importlib.import_module(need)
    assert "moe_ext" not in sys.modules
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            ranks.append(context.Process(target=run_rank, args=(rank, folder, theirs)))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            found = [p.recv() if p.poll(300) else {"error": ["no answer"]} for p in pipes]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return found


if __name__ == "__main__":
    # Tools print lines of their own.
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(outcomes(), file, indent=1)
    print(file.name)
