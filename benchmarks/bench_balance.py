"""Even loads: time to plan, and steps of four ranks with and without experts that move."""

import statistics
import time

import torch
import torch.distributed as dist
from _harness import Table, interleaved, milliseconds
from expert_loads import routing, tokens_of

import moe_ext
from moe_ext import ops
from moe_ext.nn import Rebalance, RouterOutput
from moe_ext.planner.expert_load import LOADS
from moe_ext.testing import spawn_ranks

SIZES = ((8, 64), (64, 256), (1024, 1024), (1024, 4096))
ROWS = 4096
MODEL_DIM, FFN_DIM, NUM_EXPERTS, TOP_K, STEPS = 256, 512, 8, 1, 9
TOKENS = (1024, 4096)
ONE_EXPERT = "95 % on one"
LAYERS = {"none": None, "by cost": Rebalance(), "always": Rebalance(break_even=0)}


def row(num_ranks: int, num_experts: int) -> tuple[str, ...]:
    """A row for one number of ranks and experts."""
    weight = 1 / torch.arange(1, num_experts + 1.0) ** 1.2
    chosen = torch.multinomial(weight.expand(num_ranks, -1), ROWS, True)
    counts = torch.stack([torch.bincount(row, minlength=num_experts) for row in chosen])
    total, at_home = counts.sum(0), num_experts // num_ranks
    plan = ops.plan_balance(total, num_ranks)
    times = interleaved(
        {
            "plan": lambda: ops.plan_balance(total, num_ranks),
            "split": lambda: ops.split_rows(counts, plan),
        }
    )
    moved = (plan.slot_expert[:, at_home:] >= 0).sum(1)
    heaviest = total.view(num_ranks, -1).sum(1).max() / (counts.sum() / num_ranks)
    return (
        str(num_ranks),
        str(num_experts),
        f"{heaviest:.1f}",
        f"{int(moved.max())} of {at_home}",
        milliseconds(times["plan"]),
        milliseconds(times["split"]),
    )


class GivenRouter(torch.nn.Module):
    """Sends tokens as a load says, whatever they are."""

    def __init__(self, load: str, num_tokens: int) -> None:
        super().__init__()
        num_tokens = tokens_of(load, num_tokens, dist.get_rank(), dist.get_world_size())
        if load == ONE_EXPERT:
            tokens = torch.arange(num_tokens)
            idx = torch.where(tokens < 0.95 * num_tokens, 0, tokens % NUM_EXPERTS)[:, None]
            self.choice = idx, torch.ones(num_tokens, 1)
        else:
            self.choice = routing(load, 0, 3, num_tokens, NUM_EXPERTS, TOP_K)

    def forward(self, x: torch.Tensor, token_mask: torch.Tensor | None = None) -> RouterOutput:
        """The load's choice."""
        idx, weights = self.choice
        counts = torch.bincount(idx.flatten(), minlength=NUM_EXPERTS)
        gate = ops.GateOutput(weights, idx, counts, counts.float())
        return RouterOutput(x.new_zeros(x.shape[0], NUM_EXPERTS), gate)


def step(load: str, num_tokens: int) -> tuple[str, ...]:
    """A row of the second table."""
    sizes = (MODEL_DIM, FFN_DIM, NUM_EXPERTS, TOP_K)
    routers = {name: GivenRouter(load, num_tokens) for name in LAYERS}
    layers = {
        name: moe_ext.MoELayer(
            *sizes,
            router=routers[name],
            dispatcher=moe_ext.nn.Dispatch("alltoall", rebalance=rebalance),
            balance=0.0,
            ep_group=dist.group.WORLD,
        )
        for name, rebalance in LAYERS.items()
    }
    x = torch.randn(routers["none"].choice[0].shape[0], MODEL_DIM, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(1 + STEPS):
        first = turn % len(layers)
        for name in (list(layers) * 2)[first : first + len(layers)]:
            dist.barrier()
            start = time.perf_counter()
            layers[name](x).sum().backward()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    counts = layers["none"].metrics["num_tokens_per_expert"].clone()
    dist.all_reduce(counts)
    ranks = counts.view(dist.get_world_size(), -1).sum(1)
    sent = layers["always"].metrics["moved_bytes"].clone()
    dist.all_reduce(sent)
    cells = [f"{1e3 * statistics.median(found[1:]):.1f}" for found in times.values()]
    heaviest = f"{ranks.max() / (ranks.sum() / len(ranks)):.2f}"
    return (str(num_tokens), load, heaviest, f"{sent / 1e6:.1f}", *cells)


def steps(rank: int) -> list[tuple[str, ...]]:
    """Rows of the second table, on one of the ranks."""
    torch.set_num_threads(1)
    small, large = TOKENS
    rows = [step(load, small) for load in (*LOADS, ONE_EXPERT)]
    return rows + [step(load, large) for load in (LOADS[0], ONE_EXPERT)]


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = ("P", "E", "heaviest rank over even", "most moved to a rank", "plan ms", "split ms")
    note = (
        f"`bench_balance.py`: {ROWS} rows a rank by Zipf's law (1.2); after it, every rank has its "
        "share exactly. CPU, one thread."
    )
    plans = Table("Exact balance", note, header, [row(*sizes) for sizes in SIZES])
    header = (
        "T",
        "load",
        "heaviest rank over even",
        "moved MB",
        *(f"{name} ms" for name in LAYERS),
    )
    note = (
        f"Forward and backward pass of four ranks on one host, T tokens a rank, D {MODEL_DIM}, F "
        f"{FFN_DIM}, {NUM_EXPERTS} experts, K {TOP_K}, float32, one thread a rank: "
        "without rebalance, where it pays by measured rates, and in every pass. Where the ranks "
        "share fewer cores, the cores even the load out, and the cost alone shows."
    )
    return [plans, Table("Steps under uneven loads", note, header, spawn_ranks(steps, 4)[0])]


if __name__ == "__main__":
    for table in tables():
        print(table)
