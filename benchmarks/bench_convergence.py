"""Validation loss of a small MoE language model under compressed data parallelism.

    python benchmarks/run.py convergence         # twenty minutes: 3 seeds, 400 steps
    python benchmarks/bench_convergence.py --seeds 0 --steps 40 dense int8

Every setting trains the same model from the same weights on the same batches, with the hooks and
optimizers that a user gets.

Shape suffixes: B sequences, S bytes in a sequence, V vocabulary.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _harness import Table
from torch import Tensor, nn

from moe_ext.compression import (
    Codec,
    CodecMemory,
    CompressionState,
    Reduction,
    TopK,
    Warmup,
    compress_gradients,
    compress_hook,
)
from moe_ext.distributed import count_traffic, sync_gradients
from moe_ext.nn import Dispatch
from moe_ext.optim import OneBitAdam, ZeroOneAdam
from moe_ext.testing import spawn_ranks

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from compressed_ddp.training import data_parallel  # noqa: E402
from moe_lm.data import TextData, load_text, train_batch, validation_batches  # noqa: E402
from moe_lm.model import ModelConfig, MoELanguageModel, init_weights  # noqa: E402

RANKS = 2
RAMP_STEPS = 200
SEEDS = (0, 1, 2)
STEPS = 400
WARM_STEPS = 100
BATCH = 32
VALIDATION_BATCHES = 32
LEARNING_RATE = 2e-3
TIMEOUT = 1800.0
SIZES = ModelConfig(model_dim=96, num_layers=2, num_heads=4, ffn_dim=128, seq_len=64)


@dataclass(frozen=True)
class Trained:
    """The module of the forward pass, and the object whose `step` is called."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Setting:
    """A way to train; `limit` is how far above dense the loss may be, as a ratio."""

    prepare: Callable[[nn.Module, int], Trained]
    warm: bool = False
    limit: float | None = None
    control: bool = False
    spread: bool = False  # experts over the ranks, in the place of a copy of each on all
    wire: str | None = None


@dataclass(frozen=True)
class Found:
    """Results of a setting and seed on one rank; costs are those of a step after the warm-up."""

    loss: float
    sent_bytes: float
    seconds: float


@dataclass(frozen=True)
class ForgetfulTopK(TopK):
    """Top-k without error feedback: what is not sent is lost."""

    def start(self, grad_N: Tensor, memory: CodecMemory, **kwargs: Any) -> Reduction:
        """See `Codec`."""
        memory.put("residual", None)
        return super().start(grad_N, memory, **kwargs)


def hooked(codec: str | Codec) -> Callable[[nn.Module, int], Trained]:
    """The hook of moe_ext, as a user registers it."""

    def prepare(model: nn.Module, warm_steps: int) -> Trained:
        wrapped = data_parallel(model)
        state = CompressionState(model=wrapped, codec=codec, warmup=Warmup(dense_steps=warm_steps))
        wrapped.register_comm_hook(state, compress_hook)
        return Trained(wrapped, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE))

    return prepare


def one_bit_adam(**options: Any) -> Callable[[nn.Module, int], Trained]:
    """1-bit Adam, which averages by itself: gradients, then momentum."""

    def prepare(model: nn.Module, warm_steps: int) -> Trained:
        optimizer = OneBitAdam(
            model.parameters(), lr=LEARNING_RATE, freeze_step=warm_steps, **options
        )
        return Trained(model, optimizer)

    return prepare


def zero_one_adam(model: nn.Module, _warm_steps: int) -> Trained:
    """A bit an element from the second step on, but for those that renew the variance."""
    return Trained(model, ZeroOneAdam(model.parameters(), lr=LEARNING_RATE))


class SyncedAdam(torch.optim.Adam):
    """Adam that makes gradients those of the mean over ranks first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=LEARNING_RATE)
        self.model = model

    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer`."""
        sync_gradients(self.model)
        return super().step(closure)


class AdamThenTopK(torch.optim.SGD):
    """Adam on each rank's own gradients; ranks exchange the largest elements of the steps.

    Steps are comparable numbers where gradients are not, what is owed keeps its meaning, and Adam
    does not take a gradient that was owed for long for one that varies.
    """

    def __init__(self, model: nn.Module, warm_steps: int, betas: tuple[float, float]) -> None:
        super().__init__(model.parameters(), lr=LEARNING_RATE)
        ramp = Warmup(ramp_steps=warm_steps * RAMP_STEPS // WARM_STEPS)
        self.compression = CompressionState(model=model, codec=TopK(0.01), warmup=ramp)
        self.model, self.warm_steps, self.betas, self.steps = model, warm_steps, betas, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer`."""
        is_dense, size = self.steps < self.warm_steps, dist.get_world_size()
        if is_dense:
            sync_gradients(self.model)
        self.steps += 1
        first, second = self.betas
        for parameter in self.model.parameters():
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(parameter))
            mean = state["exp_avg"].lerp_(parameter.grad, 1 - first) / (1 - first**self.steps)
            square = state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
            scale = (square / (1 - second**self.steps)).sqrt_().add_(1e-8)
            # The noise of one rank is that of the mean times sqrt(P), and steps so much shorter.
            parameter.grad = mean.div_(scale).mul_(1.0 if is_dense else size**0.5)
        if not is_dense:
            compress_gradients(self.model, self.compression)
        return super().step(closure)


def adam_then_topk(model: nn.Module, warm_steps: int) -> Trained:
    """Adam on each rank, then selection with what is owed."""
    return Trained(model, AdamThenTopK(model, warm_steps, (0.9, 0.999)))


def over_ranks(model: nn.Module, _warm_steps: int) -> Trained:
    """Experts that are spread out: their tokens travel."""
    return Trained(model, SyncedAdam(model))


SETTINGS = {
    "dense": Setting(hooked("none")),
    "bf16": Setting(hooked("bf16")),
    "int8": Setting(hooked("int8"), limit=1.015),
    "int4": Setting(hooked("int4"), limit=1.015),
    "fp8": Setting(hooked("fp8")),
    "1-bit Adam": Setting(one_bit_adam(), warm=True, limit=1.015),
    "1-bit Adam, variance fixed": Setting(
        one_bit_adam(variance_interval=0), warm=True, limit=1.015
    ),
    "0/1 Adam": Setting(zero_one_adam),
    "top 5 %": Setting(hooked(TopK(0.05)), warm=True, limit=1.07),
    "top 1 %": Setting(hooked(TopK(0.01)), warm=True),
    "top 1 % of Adam's steps": Setting(adam_then_topk, warm=True, limit=1.04),
    "top 1 %, rest forgotten": Setting(hooked(ForgetfulTopK(0.01)), warm=True, control=True),
    "signs of the gradient": Setting(hooked("onebit"), warm=True, control=True),
    "experts over ranks": Setting(over_ranks, spread=True),
    "experts over ranks, int8": Setting(over_ranks, limit=1.005, spread=True, wire="int8"),
    "experts over ranks, fp8": Setting(over_ranks, limit=1.005, spread=True, wire="fp8"),
    "experts over ranks, mx": Setting(over_ranks, limit=1.005, spread=True, wire="mx"),
}


def loss_of(model: nn.Module, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean over this rank's bytes, in nats."""
    return F.cross_entropy(model(inputs_BS).flatten(0, 1), targets_BS.flatten())


@torch.no_grad()
def validate(model: nn.Module, data: TextData, num_batches: int) -> float:
    """Mean loss over so many held-out batches, equal on every rank."""
    batches = validation_batches(
        data,
        num_batches=num_batches,
        batch=BATCH,
        seq_len=SIZES.seq_len,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    total = torch.stack([loss_of(model, *batch).double() for batch in batches]).mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(setting: Setting, data: TextData, seed: int, steps: int) -> Found:
    """Train a setting from the first step to the last."""
    model = MoELanguageModel(
        SIZES,
        ep_group=dist.group.WORLD if setting.spread else None,
        balance_loss_coef=0.01,
        z_loss_coef=0.0,
        capacity_factor=None,
        dispatcher=Dispatch(wire=setting.wire),
    )
    init_weights(model, seed)
    warm_steps = steps * WARM_STEPS // STEPS if setting.warm else 0
    trained = setting.prepare(model, warm_steps)
    sent, seconds = [], []
    for step in range(steps):
        batch = train_batch(
            data,
            step=step,
            seed=seed,
            batch=BATCH,
            seq_len=SIZES.seq_len,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
        start = time.perf_counter()
        with count_traffic() as traffic:
            loss_of(trained.forward, *batch).backward()
            trained.optimizer.step()
        seconds.append(time.perf_counter() - start)
        sent.append(traffic.total_bytes)
        trained.optimizer.zero_grad(set_to_none=True)
    # The first step makes buffers and lays buckets out.
    first = max(1, warm_steps)
    mean, median = statistics.mean(sent[first:]), statistics.median(seconds[first:])
    # A few steps to try it out want no long validation.
    return Found(validate(model, data, min(VALIDATION_BATCHES, steps)), mean, median)


def settings_here(_rank: int, names: tuple[str, ...], seed: int, steps: int) -> dict[str, Found]:
    """All settings one after the other on this rank."""
    data = load_text(None, SIZES.seq_len)
    return {name: train(SETTINGS[name], data, seed, steps) for name in names}


def measure(
    names: tuple[str, ...], seed: int, steps: int = STEPS, ranks: int = RANKS
) -> dict[str, Found]:
    """The settings of one seed on processes of one thread each: the first rank's findings."""
    found = spawn_ranks(
        settings_here, ranks, names, seed, steps, timeout=TIMEOUT, group_timeout=TIMEOUT
    )
    return found[0]


def verdict(setting: Setting, ratio: float) -> str:
    """Text for the table."""
    if setting.limit is None:
        return "control" if setting.control else "-"
    met = "met" if ratio <= setting.limit else "missed"
    return f"+{100 * (setting.limit - 1):g} %: {met}"


def row(name: str, found: list[dict[str, Found]]) -> tuple[str, ...]:
    """The row of a setting over its seeds."""
    here = [of_seed[name] for of_seed in found]
    losses = [one.loss for one in here]
    ratio = statistics.mean(
        one.loss / of_seed["dense"].loss for one, of_seed in zip(here, found, strict=True)
    )
    return (
        name,
        f"{1e3 * statistics.median(one.seconds for one in here):.1f}",
        f"{statistics.mean(one.sent_bytes for one in here) / 1e6:.4f}",
        f"{statistics.mean(losses):.3f}",
        f"{min(losses):.3f} to {max(losses):.3f}",
        f"{100 * (ratio - 1):+.1f} %",
        verdict(SETTINGS[name], ratio),
    )


def table(found: list[dict[str, Found]], steps: int = STEPS, ranks: int = RANKS) -> Table:
    """The table of docs/benchmarks.md, from the findings of each seed."""
    seeds = f"{len(found)} seed{'s' if len(found) > 1 else ''},"
    note = (
        f"A byte-level language model ({SIZES.num_layers} layers, D={SIZES.model_dim}, top "
        f"{SIZES.top_k} of {SIZES.num_experts} experts, context {SIZES.seq_len}) on the sources of "
        f"the Python standard library: {steps} steps of {BATCH} sequences over {ranks} ranks of "
        f"one thread, Adam with {LEARNING_RATE}, {seeds} through the hooks and "
        f"optimizers as a user registers them. The first {steps * WARM_STEPS // STEPS} steps of "
        "1-bit Adam, of top-k, of its control and of signs are dense; 0/1 Adam has the defaults. "
        "Of *Adam's steps*, the density then falls from 25 to 1 % in "
        f"{steps * RAMP_STEPS // STEPS} steps, and *sent MB* is the mean of these too. "
        "*loss* is that of held-out "
        "text, nats a byte: mean and range over the seeds, and how far the mean is above dense. "
        "*sent MB* leaves a rank in a step after the warm-up; *step ms* is its wall time, on one "
        f"machine whose network is memory{cores(ranks)}. *variance fixed* is the published 1-bit "
        "Adam, without looks at how far gradients have grown since the freeze "
        "(`variance_interval=0`). *Experts over ranks* sends tokens to experts that are on one "
        "rank each, in a byte an element where a format is named (`Dispatch(wire=)`). The controls "
        "show what error feedback is for, and that signs "
        "want 1-bit Adam: Adam divides by the variance of what it is given."
    )
    header = ("setting", "step ms", "sent MB", "loss", "range", "above dense", "target")
    rows = [row(name, found) for name in found[0]]
    return Table("Convergence of compressed data parallelism", note, header, rows)


def cores(ranks: int) -> str:
    """Text for the note."""
    found = os.cpu_count() or 1
    return f" and which has {found} cores" if found < ranks else ""


def tables() -> list[Table]:
    """For run.py; a line a seed as they come, since it takes a while."""
    found = []
    for seed in SEEDS:
        found.append(measure(tuple(SETTINGS), seed))
        losses = ", ".join(f"{name} {one.loss:.3f}" for name, one in found[-1].items())
        print(f"seed {seed}: {losses}", file=sys.stderr, flush=True)
    return [table(found)]


def main() -> None:
    """Measure a part: settings by name, all without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="setting", help=", ".join(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ranks", type=int, default=RANKS)
    args = parser.parse_args()
    unknown = set(args.names) - set(SETTINGS)
    if unknown or args.steps < 4 or BATCH % args.ranks:
        parser.error(
            f"expected settings of {', '.join(SETTINGS)}, at least 4 steps, and ranks "
            f"that divide {BATCH}"
        )
    names = tuple(dict.fromkeys(["dense", *(args.names or SETTINGS)]))
    found = [measure(names, seed, args.steps, args.ranks) for seed in args.seeds]
    print(table(found, args.steps, args.ranks).markdown())


if __name__ == "__main__":
    main()
