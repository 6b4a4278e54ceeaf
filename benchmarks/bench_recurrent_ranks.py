"""Delta rules over a sequence that ranks share, by states, by heads, and gathered on every rank.

Shapes: B batch, H heads, S whole sequence, L positions of a rank, K and V dims of a state, P ranks.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import Table
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_ext.attention import gated_delta_rule, make_layout
from moe_ext.attention.recurrent.functional import most_sent_bytes
from moe_ext.comm.collectives import all_gather, reduce_scatter
from moe_ext.distributed import count_traffic
from moe_ext.testing import spawn_ranks

CHART = Path(__file__).resolve().parent.parent / "docs" / "images" / "recurrent.png"
RANKS = (2, 4)
LAYOUT = "contiguous"
CONTENDERS = ("state", "heads", "gathered")
# Lengths of the lines of the chart.
LENGTHS = tuple(2**i for i in range(5, 18))
TIMEOUT = 280.0


@dataclass(frozen=True)
class Case:
    """Sizes of a delta rule, with as many values as keys."""

    seq_len: int
    heads: int
    dim: int
    repeats: int

    @property
    def width(self) -> int:
        """Numbers of a position and head: q, k, v, g and beta."""
        return 3 * self.dim + 2

    def sent(self, num_ranks: int, contender: str, seq_len: int | None = None) -> int:
        """Bytes of the rank that sends most, forward."""
        length = self.seq_len if seq_len is None else seq_len
        if contender == "gathered":
            return 4 * self.heads * self.width * length * (num_ranks - 1) // num_ranks
        sizes = {"heads": self.heads, "dim": self.dim, "v_dim": self.dim, "has_beta": True}
        return most_sent_bytes(make_layout(LAYOUT, length, num_ranks), batch=1, **sizes)[contender]


CASES = (Case(8192, 8, 64, 5), Case(65536, 2, 32, 3))


class _Gathered(torch.autograd.Function):
    """Rows `[B, H, L, F]` of all ranks; each rank has the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = all_gather(x.contiguous(), dist.group.WORLD, operation="gathered")
        return torch.cat(parts.view(-1, *x.shape).unbind(), 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        parts = torch.cat(grad.chunk(dist.get_world_size(), 2))
        return reduce_scatter(parts, dist.group.WORLD, operation="gathered")


@dataclass
class Cost:
    """Seconds of passes of a contender on one rank, bytes that it sent forward, its result."""

    seconds: list[float] = field(default_factory=list)
    forward: int = 0
    out: Tensor | None = None


def contender_of(name: str, case: Case, rank: int) -> Callable[[], Tensor]:
    """A forward pass of this rank's positions, as a function without arguments."""
    size, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    shape = (1, case.heads, case.seq_len)
    rows = [torch.randn(*shape, case.dim, generator=generator) for _ in range(3)]
    rows[:2] = (torch.nn.functional.normalize(x, dim=-1) for x in rows[:2])
    rows += [torch.rand(*shape, generator=generator) for _ in range(2)]
    q, k, v, g, beta = (x.chunk(size, 2)[rank].clone().requires_grad_() for x in rows)

    def run() -> Tensor:
        if name != "gathered":
            how: dict[str, Any] = {"group": dist.group.WORLD, "layout": LAYOUT, "scheme": name}
            return gated_delta_rule(q, k, v, -g, beta, **how)[0]
        row = torch.cat([q, k, v, -g.unsqueeze(-1), beta.unsqueeze(-1)], -1)
        whole = _Gathered.apply(row).split([case.dim] * 3 + [1, 1], -1)
        out, _ = gated_delta_rule(*whole[:3], *(x.squeeze(-1) for x in whole[3:]))
        return out.chunk(size, 2)[rank]

    return run


def costs_here(rank: int, case: Case) -> dict[str, Cost]:
    """Costs of all contenders on this rank, timed in turn."""
    torch.set_num_threads(1)
    made = {name: contender_of(name, case, rank) for name in CONTENDERS}
    found = {name: Cost() for name in CONTENDERS}
    for turn in range(case.repeats + 1):
        for name, run in made.items():
            dist.barrier()
            start = time.perf_counter()
            with count_traffic() as traffic:
                out = run()
                forward = traffic.total_bytes
                out.square().mean().backward()
            seconds = time.perf_counter() - start
            if turn == 0:  # connections are made
                found[name].forward, found[name].out = forward, out.detach()
            else:
                found[name].seconds.append(seconds)
    for name in CONTENDERS[1:]:
        torch.testing.assert_close(found[name].out, found["state"].out, rtol=1e-3, atol=1e-4)
    for cost in found.values():
        cost.out = None
    return found


def measure(case: Case, num_ranks: int) -> dict[str, tuple[float, int]]:
    """Seconds of the slowest rank, and bytes of the one that sends most, of each contender."""
    ranks = spawn_ranks(costs_here, num_ranks, case, timeout=TIMEOUT)
    return {
        name: (
            statistics.median(map(max, zip(*(each[name].seconds for each in ranks), strict=True))),
            max(each[name].forward for each in ranks),
        )
        for name in CONTENDERS
    }


def chart(found: dict[tuple[Case, int], dict[str, tuple[float, int]]]) -> None:
    """Draws bytes over the length of the sequence, and what was counted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(CASES)), CASES, strict=True):
        for i, name in enumerate(CONTENDERS):
            for num_ranks, style in zip(RANKS, ("-", "--"), strict=True):
                line = [case.sent(num_ranks, name, length) / 1e6 for length in LENGTHS]
                label = f"{name}, {num_ranks} ranks"
                axes.loglog(LENGTHS, line, style, color=f"C{i}", label=label, base=2)
                counted = found[case, num_ranks][name][1] / 1e6
                axes.loglog([case.seq_len], [counted], "o", color=f"C{i}", base=2)
        title = f"{case.heads} heads of K = V = {case.dim}; lines: formula, points: counted"
        axes.set(xlabel="positions of the sequence", title=title)
        axes.set(ylabel="MB that a rank sends, forward")
        axes.legend(fontsize=8)
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, dpi=90)


@functools.cache
def results() -> dict[tuple[Case, int], dict[str, tuple[float, int]]]:
    """Measurements by case and number of ranks."""
    return {(case, size): measure(case, size) for case in CASES for size in RANKS}


def tables() -> list[Table]:
    """The table of docs/benchmarks.md; the chart is drawn beside it."""
    found, rows = results(), []
    chart(found)
    for (case, num_ranks), costs in found.items():
        for name, (seconds, sent) in costs.items():
            sizes = f"S={case.seq_len} H={case.heads} K=V={case.dim}"
            labels = (sizes, str(num_ranks), name, f"{1e3 * seconds:.0f}")
            ratios = [seconds / costs["gathered"][0], sent / costs["gathered"][1]]
            rows.append((*labels, *(f"{r:.2g}" for r in ratios), f"{sent / 1e6:.3f}"))
    note = (
        "`gated_delta_rule` with beta, float32, a contiguous layout, forward and backward, P ranks "
        "of one thread each over Gloo on one machine of two cores, contenders in turn; medians of "
        "the slowest rank. *gathered*: every rank gathers the whole sequence and computes all of "
        "it. *sent*: bytes of the rank that sends most, forward, as counted; the formula has as "
        f"many.\n\n![Bytes over positions](images/{CHART.name})"
    )
    header = ("sizes", "P", "contender", "ms", "time / gathered", "sent / gathered", "sent MB")
    return [Table("Delta rules over ranks", note, header, rows)]
