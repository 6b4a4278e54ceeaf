"""A mixture of experts over ranks, trained by the Trainer of transformers or by Accelerate.

    torchrun --standalone --nproc-per-node 2 examples/train_with_frameworks.py --ep 2 --out run
    torchrun --standalone --nproc-per-node 2 examples/train_with_frameworks.py --tool accelerate

The tools do not know of moe_ext. They wrap the model in DistributedDataParallel and clip gradients,
and both are right for experts that lie over ranks. What is left are checkpoints: the tools write
what rank 0 holds, so `moe_ext.distributed.checkpoint` saves and loads, here in a callback of the
Trainer. A run goes on from the checkpoint in --out, on any number of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from finetune_hf_moe import CONFIGS, NUM_EXPERTS, build
from hf_text import TextTask, add_common_options, check, import_transformers
from moe_lm.runtime import Runtime, agree, run_and_exit, run_example
from torch import nn
from torch.utils.data import Dataset

import moe_ext
from moe_ext.distributed import checkpoint


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text, drawn with a fixed seed; the tools give each rank others of them."""

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


def run_trainer(task: TextTask, model: nn.Module, state: Path | None) -> None:
    """`Trainer.train`, with the checkpoints of moe_ext."""
    transformers, args = import_transformers(), task.args

    class Checkpoints(transformers.TrainerCallback):
        """Loads before the first step and saves after the last one, on every rank."""

        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            if state is not None and state.exists():
                checkpoint.load(state, model, optimizer.optimizer)
                task.say(f"went on from {state}")

        def on_train_end(self, *_: Any, optimizer: Any, **__: Any) -> None:
            if state is not None:
                checkpoint.save(state, model, optimizer.optimizer)

    arguments = transformers.TrainingArguments(
        output_dir="unused",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch // task.runtime.world_size,
        learning_rate=args.lr,
        use_cpu=task.runtime.device.type == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Windows(task), callbacks=[Checkpoints()]
    )
    trainer.train()


def run_accelerate(task: TextTask, model: nn.Module, state: Path | None) -> None:
    """The loop of Accelerate's documentation."""
    from accelerate import Accelerator

    args = task.args
    accelerator = Accelerator(cpu=task.runtime.device.type == "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if state is not None and state.exists():
        checkpoint.load(state, model, optimizer)
        task.say(f"went on from {state}")
    share = args.batch // task.runtime.world_size
    loader = torch.utils.data.DataLoader(Windows(task), batch_size=share)
    wrapped, prepared, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        prepared.zero_grad()
        accelerator.backward(wrapped(**batch).loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        prepared.step()
    if state is not None:
        checkpoint.save(state, model, optimizer)


TOOLS = {"trainer": run_trainer, "accelerate": run_accelerate}


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Train, and say what was learned."""
    check(args, runtime.world_size, NUM_EXPERTS)
    task = TextTask(args, runtime)
    model = build(args).to(runtime.device)
    mesh = moe_ext.distributed.MoEMesh(dp=runtime.world_size // args.ep, ep=args.ep)
    group = mesh.ep_group if args.ep > 1 else None
    agree(lambda: moe_ext.replace(model, ep_group=group), ValueError)
    before = task.validate(model)
    TOOLS[args.tool](task, model, None if args.out is None else args.out / "state")
    task.say(f"held-out loss {before:.4f} before, {task.validate(model):.4f} after")
    if args.out is not None:
        # Every rank takes part; the first one writes.
        model.save_pretrained(args.out, is_main_process=runtime.is_main)


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
