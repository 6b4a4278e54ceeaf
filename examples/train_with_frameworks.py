"""A mixture of experts over ranks, trained by the Trainer of transformers, Accelerate or Lightning.

    torchrun --standalone --nproc-per-node 2 examples/train_with_frameworks.py --ep 2 --out run
    torchrun --standalone --nproc-per-node 2 examples/train_with_frameworks.py --tool lightning

The tools do not know of moe_ext. They wrap the model in DistributedDataParallel, for which
`moe_ext.replace` has prepared it, clip gradients, and write checkpoints on rank 0. One line for
each tool makes clipping and files right for the experts of all ranks: `SavesExperts` in the
Trainer, `whole_state_dicts` around what Accelerate saves, `ExpertParallel` in the strategy of
Lightning, `FabricExpertParallel` in that of Fabric. A run goes on from the last checkpoint in
--out, on any number of ranks, to --steps more.

Output: the tool's own lines. The last line has the held-out loss before and after.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from finetune_hf_moe import CONFIGS, NUM_EXPERTS, build
from hf_text import TextTask, add_common_options, check, import_transformers
from moe_lm.runtime import Runtime, agree, make_folder, run_and_exit, run_example
from torch import nn
from torch.utils.data import Dataset

import moe_ext
from moe_ext.distributed import whole_state_dicts
from moe_ext.integrations.huggingface import SavesExperts
from moe_ext.integrations.lightning import ExpertParallel, FabricExpertParallel


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text, drawn with a fixed seed; the tools give each rank its own share."""

    def __init__(self, task: TextTask) -> None:
        args, self.bytes_N = task.args, task.data.train_N
        generator = torch.Generator().manual_seed(args.seed)
        last = len(self.bytes_N) - args.seq_len
        self.starts = torch.randint(last, (args.steps * args.batch,), generator=generator).tolist()
        self.seq_len: int = args.seq_len

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window_S = self.bytes_N[self.starts[index] :][: self.seq_len].long()
        return {"input_ids": window_S, "labels": window_S}


def batches(task: TextTask) -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    """Windows for one rank at a time; the tools have each rank take its own."""
    share = task.args.batch // task.runtime.world_size
    return torch.utils.data.DataLoader(Windows(task), batch_size=share)


def run_trainer(task: TextTask, model: nn.Module, state: Path) -> None:
    """`Trainer.train`, and its own checkpoints."""
    transformers, args = import_transformers(), task.args

    class Trainer(SavesExperts, transformers.Trainer):  # type: ignore[name-defined, misc]
        """The Trainer, whose files hold all experts."""

    last = None
    if state.exists():
        last = transformers.trainer_utils.get_last_checkpoint(state)
    done = 0 if last is None else int(last.rpartition("-")[2])
    arguments = transformers.TrainingArguments(
        output_dir=state,
        max_steps=done + args.steps,
        per_device_train_batch_size=args.batch // task.runtime.world_size,
        learning_rate=args.lr,
        use_cpu=task.runtime.device.type == "cpu",
        save_strategy="steps" if args.out is not None else "no",
        save_steps=args.steps,
        report_to=[],
        disable_tqdm=True,
    )
    if last is not None:
        task.say(f"goes on from {last}")
    trainer = Trainer(model, arguments, train_dataset=Windows(task))
    trainer.train(resume_from_checkpoint=last)


def run_accelerate(task: TextTask, model: nn.Module, state: Path) -> None:
    """The loop of Accelerate's documentation, with `save_state` and `load_state`."""
    from accelerate import Accelerator

    args = task.args
    accelerator = Accelerator(cpu=task.runtime.device.type == "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    wrapped, prepared, loader = accelerator.prepare(model, optimizer, batches(task))
    if state.exists():
        with whole_state_dicts(prepared):
            accelerator.load_state(str(state))
        task.say(f"goes on from {state}")
    for batch in loader:
        prepared.zero_grad()
        accelerator.backward(wrapped(**batch).loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        prepared.step()
    if args.out is not None:
        with whole_state_dicts(prepared):
            accelerator.save_state(str(state))


def run_lightning(task: TextTask, model: nn.Module, state: Path) -> None:
    """`Trainer.fit` of Lightning, `save_checkpoint` and `ckpt_path=`."""
    import lightning.pytorch as pl

    args, file = task.args, state / "state.ckpt"

    class Strategy(ExpertParallel, pl.strategies.DDPStrategy):  # type: ignore[misc]
        """Strategy that knows of experts over ranks."""

    class Module(pl.LightningModule):
        """The model, its loss and its optimizer."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=args.lr)

    done = torch.load(file, weights_only=True)["global_step"] if file.exists() else 0
    trainer = pl.Trainer(
        accelerator=task.runtime.device.type,
        devices=task.runtime.world_size,
        strategy=Strategy(),
        max_steps=done + args.steps,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    if done:
        task.say(f"goes on from {file}")
    trainer.fit(Module(), batches(task), ckpt_path=file if done else None)
    if args.out is not None:
        trainer.save_checkpoint(file)
    model.to(task.runtime.device)  # Lightning leaves it on the CPU


def run_fabric(task: TextTask, model: nn.Module, state: Path) -> None:
    """The loop of Fabric's documentation, with `save` and `load`."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    args, file = task.args, state / "state.ckpt"

    class Strategy(FabricExpertParallel, DDPStrategy):  # type: ignore[misc]
        """Strategy that knows of experts over ranks."""

    fabric = Fabric(
        accelerator=task.runtime.device.type,
        devices=task.runtime.world_size,
        strategy=Strategy(),
    )
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=args.lr))
    both = {"model": wrapped, "optimizer": optimizer}
    if file.exists():
        fabric.load(file, both)
        task.say(f"goes on from {file}")
    for batch in fabric.setup_dataloaders(batches(task)):
        optimizer.zero_grad()
        fabric.backward(wrapped(**batch).loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
    if args.out is not None:
        fabric.save(file, both)


TOOLS = {
    "trainer": run_trainer,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
    "fabric": run_fabric,
}


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Train, and print the held-out loss before and after."""
    check(args, runtime.world_size, NUM_EXPERTS)
    task = TextTask(args, runtime)
    model = build(args).to(runtime.device)
    mesh = moe_ext.distributed.MoEMesh(dp=runtime.world_size // args.ep, ep=args.ep)
    group = mesh.ep_group if args.ep > 1 else None
    agree(lambda: moe_ext.replace(model, ep_group=group), ValueError)
    make_folder(args.out)
    before = task.validate(model)
    TOOLS[args.tool](task, model, (args.out or Path("unused")) / args.tool)
    after = task.validate(model)
    if args.out is not None:
        # Every rank takes part; the first one writes.
        model.save_pretrained(args.out, is_main_process=runtime.is_main)
    task.say(f"result: held-out loss {before:.4f} before, {after:.4f} after")


def main(argv: list[str] | None = None) -> int:
    """Run the job; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser, steps=100)
    parser.add_argument("--tool", default="trainer", choices=sorted(TOOLS), help="(%(default)s)")
    parser.add_argument(
        "--family", default="mixtral", choices=sorted(CONFIGS), help="(%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder for the checkpoint and the model")
    parser.set_defaults(model=None)
    return run_example(work, parser.parse_args(argv))


if __name__ == "__main__":
    run_and_exit(main)
