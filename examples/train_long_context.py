"""Train a small byte-level language model on sequences that all ranks share: ring attention.

    torchrun --standalone --nproc-per-node 2 examples/train_long_context.py
    torchrun --standalone --nproc-per-node 4 examples/train_long_context.py --layout striped
    python examples/train_long_context.py          # one process, without torchrun

Each step trains on one long sequence of packed documents, by default files of the Python standard
library. Each of P ranks holds S / P of its bytes, in every layer. A byte attends to earlier bytes
of its document, on whichever rank they are. Runs on CPU over Gloo.

Every --check-every steps rank 0 computes the same step by itself, from the same weights, with
PyTorch's attention on each document. Loss, gradient norm and the whole gradient must agree within
a tolerance that is derived, see `tolerance`; the job fails (exit code 1) where they do not.

At the end jobs of 1, 2 and 4 ranks (--measure) take a step each, to measure what a rank needs. The
folder --out receives memory_and_bytes.png and result.json.

Output: a progress bar, the comparison with one process, what a rank needs. The last line has the
first loss and the last one.

Shape suffixes: S bytes of the whole sequence.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from long_context import measure
from long_context.sequence import cut, loss_of, model_config, sequence_of
from moe_lm.data import DataError, TextData, load_text, unigram_entropy
from moe_lm.model import LanguageModel
from moe_lm.options import learning_rate
from moe_lm.runtime import (
    Runtime,
    UserError,
    agree,
    from_main,
    make_folder,
    run_and_exit,
    run_example,
)
from torch import Tensor
from tqdm import tqdm

import moe_ext

ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-9}
# About how often a gradient is rounded in one layer, in the forward and the backward pass.
ROUNDINGS_PER_LAYER = 16
POSITIVE = ("steps", "seq_len", "lr", "clip", "timeout")


def tolerance(args: argparse.Namespace) -> float:
    """Tolerance: the relative difference that two right runs may have.

    Both runs add the same numbers in another order: up to S terms in a sum, some 16 sums on the way
    through a layer and back. Rounding errors of random sign grow with the square root of their
    number. In bfloat16 sums are float32, and only the results are rounded to bfloat16.
    """
    terms = args.seq_len if args.dtype == "fp32" else 1
    return ROUNDING[args.dtype] * math.sqrt(terms * ROUNDINGS_PER_LAYER * args.num_layers)


def worse(a: float, b: float) -> float:
    """The larger; NaN if one is, which `max` would pass over."""
    return a if math.isnan(a) or a > b else b


@dataclass
class Differences:
    """The largest found so far between the job and one process, relative."""

    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    checks: int = 0

    def add(self, losses: tuple[float, float], found: list[Tensor], wanted: list[Tensor]) -> None:
        """One more step: loss and gradients of the job and of one process."""
        a, b = (torch.cat([g.double().flatten() for g in grads]) for grads in (found, wanted))
        norm = float(b.norm())
        self.loss = worse(self.loss, abs(losses[0] - losses[1]) / abs(losses[1]))
        self.norm = worse(self.norm, abs(float(a.norm()) - norm) / norm)
        self.gradient = worse(self.gradient, float((a - b).norm()) / norm)
        self.checks += 1

    @property
    def worst(self) -> float:
        """The largest of the three; NaN if one is."""
        return worse(worse(self.loss, self.norm), self.gradient)


@dataclass
class Job:
    """All that the training loop works on."""

    args: argparse.Namespace
    runtime: Runtime
    data: TextData
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    differences: Differences = field(default_factory=Differences)

    def say(self, text: str) -> None:
        """Print on rank 0, above the progress bar."""
        if self.runtime.is_main:
            tqdm.write(text)
            sys.stdout.flush()


def check_args(args: argparse.Namespace) -> None:
    """Refuse values that cannot work, before anything is read."""
    for name in POSITIVE:
        if not getattr(args, name) > 0:
            option = name.replace("_", "-")
            raise UserError(f"expected --{option} to be positive, got {getattr(args, name)}")
    # The label of a byte is the next byte of its document.
    for name, least in (("longest", 2), ("warmup", 0), ("check_every", 0)):
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            raise UserError(
                f"expected --{option} to be at least {least}, got {getattr(args, name)}"
            )
    if any(ranks < 1 for ranks in args.measure):
        raise UserError(f"expected --measure to be numbers of ranks, got {args.measure}")


def build_job(args: argparse.Namespace, runtime: Runtime) -> Job:
    """Read the data, build the model, try the attention."""
    check_args(args)
    data = agree(lambda: load_text(args.data, args.seq_len), (DataError, OSError))
    expected = from_main(lambda: data.sha256, ())
    agree(
        lambda: require(data.sha256 == expected, "--data to be the same on every rank"), UserError
    )
    agree(lambda: model_config(args), ValueError)
    model = measure.build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    job = Job(args, runtime, data, model, optimizer)
    agree(lambda: try_attention(job), ValueError)
    return job


def require(condition: bool, rule: str) -> None:
    """UserError unless a condition holds."""
    if not condition:
        raise UserError(f"expected {rule}")


def try_attention(job: Job) -> None:
    """ValueError where --scheme, --precision or --layout do not fit the heads or the ranks."""
    offsets = [0, job.args.seq_len]
    shard = cut(job.args, torch.zeros(job.args.seq_len, dtype=torch.int64), offsets, group())
    q = torch.zeros(1, job.args.num_heads, len(shard.ids_L), 2)
    shard.attend(q, q, q)


def group() -> dist.ProcessGroup:
    """The ranks that share the sequence: all of them."""
    world = dist.group.WORLD
    assert world is not None
    return world


def check_step(job: Job, tokens_S: Tensor, offsets: list[int], loss: float) -> None:
    """On rank 0: the same step in one process, beside the gradients that the model has."""
    parameters = list(job.model.parameters())
    whole = cut(job.args, tokens_S, offsets, None, ring=False)
    expected = loss_of(job.args, job.model, whole, None)
    grads = torch.autograd.grad(expected, parameters)
    found = [parameter.grad for parameter in parameters]
    job.differences.add((loss, expected.item()), found, list(grads))


def train_step(job: Job, step: int) -> tuple[float, float]:
    """Take one optimizer step; return loss and gradient norm, equal on every rank."""
    args = job.args
    for options in job.optimizer.param_groups:
        options["lr"] = learning_rate(args, step)
    tokens_S, offsets = sequence_of(args, job.data, step)
    shard = cut(args, tokens_S, offsets, group())
    loss = loss_of(args, job.model, shard, group())
    loss.backward()
    moe_ext.distributed.sync_gradients(job.model)
    checks = args.check_every and (step % args.check_every == 0 or step == args.steps - 1)
    if checks and job.runtime.is_main:
        check_step(job, tokens_S, offsets, loss.item())
    norm = float(moe_ext.distributed.clip_grad_norm_(job.model, args.clip))
    if not math.isfinite(norm):
        raise UserError(f"the gradient norm of step {step + 1} is {norm}: try a lower --lr")
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    return loss.item(), norm


def train(job: Job) -> list[float]:
    """Train with a progress bar; return the losses."""
    args, main = job.args, job.runtime.is_main
    interval = 0.5 if sys.stderr.isatty() else 15  # a log file gets a line now and then
    bar = tqdm(total=args.steps, unit="step", disable=not main, mininterval=interval)
    losses = []
    for step in range(args.steps):
        started = time.perf_counter()
        loss, norm = train_step(job, step)
        losses.append(loss)
        rate = args.seq_len / (time.perf_counter() - started)
        bar.set_postfix_str(
            f"loss {loss:.3f}, norm {norm:.2f}, {rate:.0f} bytes/s, "
            f"off one process {job.differences.worst:.0e}",
            refresh=False,
        )
        bar.update()
    bar.close()
    return losses


def describe(job: Job) -> None:
    """Print what will be trained, on what and how."""
    args, ranks = job.args, job.runtime.world_size
    total = sum(parameter.numel() for parameter in job.model.parameters())
    _, offsets = sequence_of(args, job.data, 0)
    job.say(
        f"ranks       {ranks}, {torch.get_num_threads()} threads each\n"
        f"data        {job.data.describe()}\n"
        f"sequence    {args.seq_len} bytes over {ranks} ranks, {args.layout}; {len(offsets) - 1} "
        "documents in the first\n"
        f"attention   {args.scheme}, precision {args.precision}, {args.dtype}\n"
        f"model       {total / 1e6:.2f} M parameters, {args.num_layers} layers\n"
        f"loss of a model without context: {unigram_entropy(job.data.validation_N):.3f}"
    )


def verdict(job: Job) -> bool:
    """Print how far the job was from one process; whether that is within the tolerance."""
    if job.args.check_every == 0:
        return True
    found, allowed = job.differences, tolerance(job.args)
    equal = found.worst <= allowed  # NaN is not
    job.say(
        f"{'equal' if equal else 'NOT EQUAL'} to one process in {found.checks} steps: loss "
        f"{found.loss:.1e}, gradient norm {found.norm:.1e}, gradient {found.gradient:.1e} apart "
        f"(relative; tolerance {allowed:.1e})"
    )
    return equal


def measure_costs(job: Job, result: dict[str, Any]) -> None:
    """On rank 0: what a rank needs, for several numbers of ranks, printed and drawn."""
    args = job.args
    if not args.measure or not measure.supported():
        job.say("not measured: --measure is empty, or this system has no /proc")
        return
    found = measure.measure(args, job.data)
    for num_ranks, peak, sent in measure.largest(found):
        job.say(f"{num_ranks} ranks: a rank needs {peak:.1f} MB and sends {sent:.1f} MB in a step")
    result["costs"] = measure.as_json(found)
    picture = args.out / "memory_and_bytes.png"
    try:
        measure.draw(args, found, picture)
    except ImportError as error:
        job.say(f"no picture: {error}")
        return
    job.say(f"wrote {picture}")


def work(args: argparse.Namespace, runtime: Runtime) -> int:
    """Train, compare, measure; return the exit code."""
    job = build_job(args, runtime)
    make_folder(args.out)
    describe(job)
    losses = train(job)

    def finish() -> bool:
        if not runtime.is_main:
            return True
        result: dict[str, Any] = {"losses": losses, "tolerance": tolerance(args)}
        result["differences"] = vars(job.differences)
        equal = verdict(job)
        measure_costs(job, result)
        (args.out / "result.json").write_text(json.dumps(result))
        ends = f"{losses[0]:.4f} at first, {losses[-1]:.4f} after {args.steps} steps"
        job.say(f"result: loss {ends}")
        return equal

    return 0 if from_main(finish, OSError) else 1


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/long_context"), help="folder (%(default)s)")
    add("--data", help="text file or folder (the Python standard library)")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    add("--timeout", type=float, default=300, help="seconds to wait for another rank (%(default)s)")
    add = parser.add_argument_group("attention").add_argument
    add(
        "--layout",
        choices=moe_ext.attention.LAYOUTS,
        default="zigzag",
        help="who holds which positions (%(default)s)",
    )
    add("--scheme", default="ring", help="of moe_ext.attention.ring_attention (%(default)s)")
    add("--precision", default="exact", help="likewise (%(default)s)")
    add(
        "--dtype",
        choices=["fp32", "bf16"],
        default="fp32",
        help="bf16 runs under autocast (%(default)s)",
    )
    add = parser.add_argument_group("model and training").add_argument
    add("--seq-len", type=int, default=8192, help="bytes of a sequence (%(default)s)")
    add("--longest", type=int, default=4096, help="bytes of a document (%(default)s)")
    add("--steps", type=int, default=30, help="optimizer steps (%(default)s)")
    add("--lr", type=float, default=3e-3, help="highest learning rate (%(default)s)")
    add("--warmup", type=int, default=5, help="steps until it is reached (%(default)s)")
    add("--clip", type=float, default=1.0, help="highest gradient norm (%(default)s)")
    add("--model-dim", type=int, default=128, help="width (%(default)s)")
    add("--num-layers", type=int, default=3, help="blocks (%(default)s)")
    add("--num-heads", type=int, default=4, help="heads of attention (%(default)s)")
    add("--ffn-dim", type=int, default=256, help="width inside a network (%(default)s)")
    add = parser.add_argument_group("proof").add_argument
    add(
        "--check-every",
        type=int,
        default=5,
        help="steps between comparisons; 0 for none (%(default)s)",
    )
    add(
        "--measure",
        type=int,
        nargs="*",
        default=[1, 2, 4],
        help="numbers of ranks to measure (%(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the job; return the exit code."""
    args = parse_args(argv)
    args.device = "cpu"
    return run_example(work, args)


if __name__ == "__main__":
    run_and_exit(main)
