"""Four workers behind slow links: a language model by local steps, and its loss over bytes.

    torchrun --standalone --nproc-per-node 4 examples/train_diloco.py

The script trains the same small mixture-of-experts model on the text of Python's library by every
method named, and draws validation loss over the bytes that left a worker.

Output: loss, bytes and time of each way. The last line has the picture of all.
"""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_lm.data import load_text, train_batch, validation_batches
from moe_lm.model import ModelConfig, MoELanguageModel, init_weights
from torch import nn

from moe_ext import plot
from moe_ext.distributed import count_traffic, sync_gradients
from moe_ext.optim import DeMo, DiLoCo, MuLoCo, Muon, SparseLoCo, param_groups

SIZES = ModelConfig(model_dim=64, num_layers=2, num_heads=4, ffn_dim=64, seq_len=64)
BATCH = 32
# The inner learning rate rises for so many steps, then falls to nothing by a cosine.
WARMUP_STEPS = 20

Local = Callable[[nn.Module, torch.optim.Optimizer, int], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class Method:
    """An inner optimizer and local steps; without local steps every step averages gradients."""

    settings: str
    inner: Callable[[nn.Module], torch.optim.Optimizer]
    local: Local | None = None


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The inner optimizer of all but MuLoCo."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)


def muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Muon for matrices, AdamW for the rest, with one learning rate for both."""
    return Muon(param_groups(model, muon=True), lr=lr, adjust_lr_fn="match_rms_adamw")


def outer_sgd(model: nn.Module, momentum: float = 0.5) -> torch.optim.Optimizer:
    """The outer optimizer, with little momentum, since there are few rounds."""
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum, nesterov=momentum > 0)


def diloco(model: nn.Module, inner: torch.optim.Optimizer, sync_every: int) -> DiLoCo:
    """The mean of the workers."""
    return DiLoCo(None, [model], inner, outer_sgd(model), sync_every)


def sparse_loco(model: nn.Module, inner: torch.optim.Optimizer, sync_every: int) -> DiLoCo:
    """The largest elements in 2 bits."""
    return SparseLoCo(None, [model], inner, outer_sgd(model, 0.0), sync_every, density=1 / 32)


def mu_loco(model: nn.Module, inner: torch.optim.Optimizer, sync_every: int) -> DiLoCo:
    """All elements in 2 bits."""
    return MuLoCo(None, [model], inner, outer_sgd(model, 0.0), sync_every)


METHODS = {
    "synchronous": Method("AdamW 3e-3", lambda model: adamw(model, 3e-3)),
    "DiLoCo": Method("AdamW 3e-3, SGD 1 Nesterov 0.5", lambda model: adamw(model, 3e-3), diloco),
    "SparseLoCo": Method("AdamW 4e-3, SGD 1", lambda model: adamw(model, 4e-3), sparse_loco),
    "synchronous Muon": Method("Muon 4e-3", lambda model: muon(model, 4e-3)),
    "MuLoCo": Method("Muon 4e-3, SGD 1", lambda model: muon(model, 4e-3), mu_loco),
    "DeMo": Method("1e-3", lambda model: DeMo(model.parameters(), lr=1e-3)),
}


def new_model(seed: int) -> MoELanguageModel:
    """The same weights on all workers."""
    torch.manual_seed(seed)
    model = MoELanguageModel(
        SIZES, ep_group=None, balance_loss_coef=0.01, z_loss_coef=0.0, capacity_factor=None
    )
    init_weights(model, seed)
    return model


def share(data: object, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's part of a batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"batch": BATCH, "seq_len": SIZES.seq_len, "rank": rank, "world_size": size}
    return train_batch(data, step=step, seed=seed, **options)


def pretrain(data: object, *, steps: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights after synchronous steps of AdamW, which all methods begin with."""
    model = new_model(seed)
    optimizer = adamw(model, 2e-3)
    for step in range(steps):
        inputs, targets = share(data, step, seed)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        sync_gradients(model)
        optimizer.step()
    return model.state_dict()


def validate(model: nn.Module, data: object, num_batches: int) -> float:
    """Mean loss over held-out batches and workers, in nats."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shares = {"batch": BATCH, "seq_len": SIZES.seq_len, "rank": rank, "world_size": size}
    losses = []
    with torch.no_grad():
        for inputs, targets in validation_batches(data, num_batches=num_batches, **shares):
            losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
    mean = torch.stack(losses).double().mean()
    dist.all_reduce(mean)
    return float(mean) / size


def train(
    method: Method,
    data: object,
    start: dict[str, torch.Tensor],
    *,
    first: int,
    steps: int,
    sync_every: int,
    seed: int = 0,
    every: int = 0,
) -> dict[str, object]:
    """Train by one method from weights `start` and batch `first`.

    Returns:
        The last loss, bytes and seconds of this worker, and the curve.
    """
    model = new_model(seed)
    model.load_state_dict(start)
    inner = method.inner(model)
    rate = torch.optim.lr_scheduler.LambdaLR(
        inner,
        lambda step: min(
            (step + 1) / WARMUP_STEPS,
            0.5
            + 0.5 * math.cos(math.pi * max(0, step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)),
        ),
    )
    local = method.local
    averages = local is None and not isinstance(inner, DeMo)
    rounds = contextlib.nullcontext() if local is None else local(model, inner, sync_every)
    curve, sent, seconds = [], 0, 0.0
    with rounds:
        for step in range(steps):
            inputs, targets = share(data, first + step, seed)
            begin = time.perf_counter()
            with count_traffic() as traffic:
                inner.zero_grad()
                F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
                if averages:
                    sync_gradients(model)
                inner.step()
            seconds += time.perf_counter() - begin
            rate.step()
            sent += traffic.total_bytes
            if every and (step + 1) % every == 0:
                curve.append((sent, validate(model, data, 4)))
    loss = validate(model, data, 32 if steps >= 100 else 2)
    return {"loss": loss, "bytes": sent, "seconds": seconds, "curve": curve}


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Validation loss over the bytes that left a worker."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    for method, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker=".", label=method)
    axes.set(xscale="log", xlabel="bytes sent by a worker", ylabel="validation loss (nats)")
    axes.legend()
    plot.save_figure(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Train by every method named, on the ranks of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pretrain", type=int, default=400, help="synchronous steps before (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=200, help="inner steps (%(default)s)")
    parser.add_argument("--sync-every", type=int, default=10, help="of a round (%(default)s)")
    parser.add_argument("--data", help="text file or folder (the Python standard library)")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], help="(all: %(default)s)")
    picture = Path("runs/diloco.png")
    parser.add_argument("--out", type=Path, default=picture, help="picture (%(default)s)")
    args = parser.parse_args(argv)
    unknown = {*args.methods} - {*METHODS}
    if unknown:
        parser.error(f"--methods: expected some of {[*METHODS]}, got {sorted(unknown)}")
    for name in ("steps", "sync_every"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"expected --{option} to be positive, got {getattr(args, name)}")
    if args.out.is_dir():
        parser.error(f"expected --out to be a picture, got a folder: {args.out}")
    args.out.parent.mkdir(parents=True, exist_ok=True)  # before hours of training are lost
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data, curves = load_text(args.data, SIZES.seq_len), {}
    start = pretrain(data, steps=args.pretrain)
    options = {"first": args.pretrain, "steps": args.steps, "sync_every": args.sync_every}
    for method in args.methods:
        found = train(METHODS[method], data, start, every=args.sync_every, **options)
        curves[method] = found["curve"]
        if dist.get_rank() == 0:
            print(
                f"{method}: loss {found['loss']:.3f} after {args.steps} steps, "
                f"{found['bytes'] / 1e6:.2f} MB sent, {found['seconds']:.1f} s",
                flush=True,
            )
    if dist.get_rank() == 0:
        draw(curves, args.out)
        print(f"result: loss over bytes is in {args.out}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
