"""Memory and traffic of one training step in jobs of their own, for several numbers of ranks."""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from moe_lm.data import TextData
from moe_lm.model import DenseFFN, LanguageModel, init_weights

from moe_ext import plot
from moe_ext.testing import spawn_ranks

from .sequence import cut, loss_of, model_config, sequence_of

PROC = Path("/proc/self")
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Cost:
    """Cost of a forward and backward pass on one rank."""

    peak_bytes: int
    sent_bytes: int


def supported() -> bool:
    """True if this system tells a process the memory and bytes that it used."""
    return all((PROC / name).exists() for name in ("io", "status", "clear_refs"))


def field(file: str, key: str) -> int:
    """The number after `key:` in a file of /proc/self."""
    for line in (PROC / file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    raise RuntimeError(f"expected /proc/self/{file} to have a line {key}")


def build(args: argparse.Namespace) -> LanguageModel:
    """A dense model, its weights drawn from --seed."""
    config = model_config(args)
    model = LanguageModel(config, lambda _: DenseFFN(config))
    init_weights(model, args.seed)
    return model


def cost_of_step(_rank: int, args: argparse.Namespace, data: TextData) -> Cost:
    """Cost of the second forward and backward of this process; the first one warms it up."""
    # Freed tensors go back to the system at once, so that the high-water mark is that of this step.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    group = dist.group.WORLD
    model, (tokens_S, offsets) = build(args), sequence_of(args, data, 0)
    shard = cut(args, tokens_S, offsets, group)
    loss_of(args, model, shard, group).backward()
    model.zero_grad(set_to_none=True)
    dist.barrier(group)
    (PROC / "clear_refs").write_text("5")  # the high-water mark becomes what is resident now
    resident, written = field("status", "VmRSS"), field("io", "wchar")
    loss_of(args, model, shard, group).backward()
    # Gloo writes to sockets what it sends; nothing else is written here.
    sent = field("io", "wchar") - written
    return Cost((field("status", "VmHWM") - resident) * 1024, sent)


def measure(args: argparse.Namespace, data: TextData) -> dict[int, list[Cost]]:
    """The cost on every rank, for each number of ranks in `args.measure`."""
    return {
        num_ranks: spawn_ranks(
            cost_of_step,
            num_ranks,
            args,
            data,
            timeout=args.timeout,
            group_timeout=args.timeout,
        )
        for num_ranks in args.measure
    }


def largest(found: dict[int, list[Cost]]) -> list[tuple[int, float, float]]:
    """(ranks, peak MB, sent MB) of the rank with most of each."""
    return [
        (
            num_ranks,
            max(cost.peak_bytes for cost in costs) / 1e6,
            max(cost.sent_bytes for cost in costs) / 1e6,
        )
        for num_ranks, costs in sorted(found.items())
    ]


def sent_by_formula(args: argparse.Namespace, num_ranks: int) -> float:
    """MB that a rank of a full ring sends: K and V forward and back, dK and dV in float32."""
    item = 2 if args.dtype == "bf16" else 4
    shard = 2 * args.seq_len / num_ranks * args.model_dim
    return args.num_layers * (num_ranks - 1) * shard * (2 * item + 4) / 1e6


def draw(args: argparse.Namespace, found: dict[int, list[Cost]], path: Path) -> None:
    """Peak memory and bytes of the fullest rank against the number of ranks.

    ImportError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is not installed; try `pip install matplotlib`") from error

    ranks, peaks, sent = zip(*largest(found), strict=True)
    figure = Figure(figsize=(9, 4), layout="constrained")
    memory, traffic = figure.subplots(1, 2)
    memory.plot(ranks, peaks, "o-", label="measured")
    memory.plot(ranks, [peaks[0] * ranks[0] / p for p in ranks], "--", color="gray", label="1 / P")
    memory.set(title="Peak memory of a rank in one step", ylabel="MB")
    traffic.plot(ranks, sent, "o-", label="measured")
    if args.scheme == "ring":
        line = [sent_by_formula(args, p) for p in ranks]
        traffic.plot(ranks, line, "--", color="gray", label="every key to every rank")
    traffic.set(title="Sent by a rank in one step", ylabel="MB")
    for axes in (memory, traffic):
        axes.set(xlabel="ranks P", xticks=ranks, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(
        f"{args.seq_len} bytes, {args.layout}, {args.scheme}, {args.dtype}", fontsize="medium"
    )
    plot.save_figure(figure, path)


def as_json(found: dict[int, list[Cost]]) -> dict[str, Any]:
    """For result.json."""
    return {
        str(num_ranks): {
            "peak_bytes": [cost.peak_bytes for cost in costs],
            "sent_bytes": [cost.sent_bytes for cost in costs],
        }
        for num_ranks, costs in found.items()
    }
