"""Parts that the examples with Hugging Face models share: text as bytes, steps, held-out loss.

Shape suffixes: B sequences of this rank, S bytes in a sequence.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_lm.data import DataError, TextData, load_text, train_batch, validation_batches
from moe_lm.report import plot_curves
from moe_lm.runtime import Runtime, UserError, agree
from torch import nn
from tqdm import tqdm

import moe_ext

VALIDATION_BATCHES = 4


def add_common_options(parser: argparse.ArgumentParser, *, steps: int) -> None:
    """The options of both examples."""
    parser.add_argument("--data", help="text file or folder (the Python standard library)")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes of each (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--ep", type=int, default=1, help="ranks sharing the experts (%(default)s)")
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto takes a GPU where there is one (%(default)s)",
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="of collectives, in seconds (%(default)s)"
    )


def import_transformers() -> Any:
    """Transformers 5, or an error that says what to install."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("expected transformers 5: pip install 'transformers>=5'") from error
    return transformers


def check(args: argparse.Namespace, world_size: int, num_experts: int) -> None:
    """UserError for options that do not fit the job."""
    for name in ("steps", "batch", "seq_len", "ep"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise UserError(f"expected --{option} to be at least 1, got {getattr(args, name)}")
    if not args.lr > 0:
        raise UserError(f"expected --lr to be positive, got {args.lr}")
    if args.out is not None and args.out.is_file():
        raise UserError(f"expected --out to be a folder, got a file: {args.out}")
    if world_size % args.ep or num_experts % args.ep:
        raise UserError(
            f"expected --ep to divide the {world_size} ranks and the {num_experts} experts, got "
            f"{args.ep}"
        )
    if args.batch % world_size:
        raise UserError(
            f"expected --batch to be a multiple of the {world_size} ranks, got {args.batch}"
        )


class TextTask:
    """Batches of text for this rank, training steps and the held-out loss.

    Args:
        args: the common options.
        runtime: this rank's place in the job.
    """

    def __init__(self, args: argparse.Namespace, runtime: Runtime) -> None:
        self.args = args
        self.runtime = runtime
        self.data: TextData = agree(
            lambda: load_text(args.data, args.seq_len), (DataError, OSError)
        )
        spread = {"rank": runtime.rank, "world_size": runtime.world_size}
        self.sizes: dict[str, int] = {"batch": args.batch, "seq_len": args.seq_len, **spread}
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.held_out = validation_batches(self.data, num_batches=VALIDATION_BATCHES, **self.sizes)

    def say(self, text: str) -> None:
        """Print on one rank."""
        if self.runtime.is_main:
            tqdm.write(text)
            sys.stdout.flush()

    def draw(self, folder: Path, title: str) -> None:
        """Write loss.png, with the training loss of every model trained so far."""

        def write() -> None:
            if self.runtime.is_main:
                plot_curves(self.curves, folder / "loss.png", title)

        agree(write, OSError)
        self.say(f"wrote {folder / 'loss.png'}")

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Inputs and labels of this rank; transformers shifts the labels itself."""
        inputs_BS, _ = train_batch(self.data, step=step, seed=self.args.seed, **self.sizes)
        inputs_BS = inputs_BS.to(self.runtime.device)
        return {"input_ids": inputs_BS, "labels": inputs_BS}

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        """Mean held-out loss over all ranks, nats a byte, without auxiliary losses."""
        training = model.training
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        for inputs_BS, _ in self.held_out:
            inputs_BS = inputs_BS.to(self.runtime.device)
            total += model(input_ids=inputs_BS, labels=inputs_BS).loss.double()
        model.train(training)
        dist.all_reduce(total)
        return float(total) / len(self.held_out) / self.runtime.world_size

    def train(self, model: nn.Module, name: str, *, first_step: int = 0, **kwargs: Any) -> None:
        """Run --steps steps and keep the mean loss over ranks. `kwargs` go to the model."""
        groups = moe_ext.distributed.expert_param_groups(model)
        optimizer = torch.optim.AdamW(groups, lr=self.args.lr, weight_decay=0.01)
        model.train()
        points = self.curves.setdefault(name, [])
        steps = range(first_step, first_step + self.args.steps)
        bar = tqdm(steps, desc=name, unit="step", disable=not self.runtime.is_main)
        for step in bar:
            optimizer.zero_grad()
            loss = model(**self.batch(step), **kwargs).loss
            loss.backward()
            moe_ext.distributed.sync_gradients(model)
            norm = moe_ext.distributed.clip_grad_norm_(model, 1.0)
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            points.append((step, float(mean) / self.runtime.world_size))
            bar.set_postfix_str(f"loss {points[-1][1]:.3f}", refresh=False)
            if step % max(1, self.args.steps // 10) == 0:
                self.say(f"{name} step {step}: loss {points[-1][1]:.4f}, norm {float(norm):.3f}")
