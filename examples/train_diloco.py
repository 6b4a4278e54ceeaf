"""Four workers behind slow links: a language model by local steps, and its loss over bytes.

`torchrun --nproc-per-node 4 examples/train_diloco.py` trains the same small mixture-of-experts
model on the text of Python's library in every way named, and draws validation loss over the bytes
that left a worker.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
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
BATCH, LEARNING_RATE = 32, 2e-3


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The inner optimizer of all but MuLoCo."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for matrices, AdamW for the rest."""
    return Muon(param_groups(model, muon=True), lr=LEARNING_RATE)


def sgd(model: nn.Module, **options: float | bool) -> torch.optim.Optimizer:
    """An outer optimizer."""
    return torch.optim.SGD(model.parameters(), **options)


Local = Callable[[nn.Module, torch.optim.Optimizer, int], contextlib.AbstractContextManager]


def diloco(model: nn.Module, inner: torch.optim.Optimizer, sync_every: int) -> DiLoCo:
    """DiLoCo as published."""
    outer = sgd(model, lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(None, [model], inner, outer, sync_every)


def sparse_loco(model: nn.Module, inner: torch.optim.Optimizer, sync_every: int) -> DiLoCo:
    """1.6 % of the elements in 2 bits."""
    return SparseLoCo(None, [model], inner, sgd(model, lr=1.0), sync_every)


def mu_loco(model: nn.Module, inner: torch.optim.Optimizer, sync_every: int) -> DiLoCo:
    """All elements in 2 bits."""
    outer = sgd(model, lr=0.7, momentum=0.9, nesterov=True)
    return MuLoCo(None, [model], inner, outer, sync_every)


# Inner optimizer, and local steps; without these gradients are averaged in every step.
METHODS = {
    "synchronous": (adamw, None),
    "DiLoCo": (adamw, diloco),
    "SparseLoCo": (adamw, sparse_loco),
    "synchronous Muon": (muon, None),
    "MuLoCo": (muon, mu_loco),
    "DeMo": (lambda model: DeMo(model.parameters(), lr=3e-4), None),
}


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
    method: str, data: object, *, steps: int, sync_every: int, seed: int = 0, every: int = 0
) -> dict[str, object]:
    """Train by one method; the last loss, bytes and seconds of this worker, and the curve."""
    torch.manual_seed(seed)
    model = MoELanguageModel(
        SIZES, ep_group=None, balance_loss_coef=0.01, z_loss_coef=0.0, capacity_factor=None
    )
    init_weights(model, seed)
    make, local = METHODS[method]
    inner = make(model)
    averages = local is None and not isinstance(inner, DeMo)
    rounds = contextlib.nullcontext() if local is None else local(model, inner, sync_every)
    rank, size = dist.get_rank(), dist.get_world_size()
    curve, sent, seconds = [], 0, 0.0
    with rounds:
        for step in range(steps):
            inputs, targets = train_batch(
                data,
                step=step,
                seed=seed,
                batch=BATCH,
                seq_len=SIZES.seq_len,
                rank=rank,
                world_size=size,
            )
            start = time.perf_counter()
            with count_traffic() as traffic:
                inner.zero_grad()
                F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
                if averages:
                    sync_gradients(model)
                inner.step()
            seconds += time.perf_counter() - start
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
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.save_figure(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Train by every method named, on the ranks of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="inner steps (%(default)s)")
    parser.add_argument("--sync-every", type=int, default=20, help="of a round (%(default)s)")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], help="(all: %(default)s)")
    picture = Path("runs/diloco.png")
    parser.add_argument("--out", type=Path, default=picture, help="picture (%(default)s)")
    args = parser.parse_args(argv)
    unknown = {*args.methods} - {*METHODS}
    if unknown:
        parser.error(f"--methods: expected some of {[*METHODS]}, got {sorted(unknown)}")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data, curves = load_text(None, SIZES.seq_len), {}
    for method in args.methods:
        found = train(
            method, data, steps=args.steps, sync_every=args.sync_every, every=args.sync_every
        )
        curves[method] = found["curve"]
        if dist.get_rank() == 0:
            print(
                f"{method}: loss {found['loss']:.3f} after {args.steps} steps, "
                f"{found['bytes'] / 1e6:.2f} MB sent, {found['seconds']:.1f} s",
                flush=True,
            )
    if dist.get_rank() == 0:
        draw(curves, args.out)
        print(f"loss over bytes: {args.out}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
