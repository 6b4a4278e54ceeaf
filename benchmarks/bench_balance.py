"""Plans of even loads: time to plan, and experts that move, for Zipf loads over P ranks."""

import torch
from _harness import Table, interleaved, milliseconds

from moe_ext import ops

SIZES = ((8, 64), (64, 256), (1024, 1024), (1024, 4096))
ROWS = 4096


def row(num_ranks: int, num_experts: int) -> tuple[str, ...]:
    """One number of ranks and experts."""
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


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = ("P", "E", "heaviest rank over even", "most moved to a rank", "plan ms", "split ms")
    note = (
        f"`bench_balance.py`: {ROWS} rows a rank by Zipf's law (1.2); after it, every rank has its "
        "share exactly. CPU, one thread."
    )
    return [Table("Exact balance", note, header, [row(*sizes) for sizes in SIZES])]


if __name__ == "__main__":
    for table in tables():
        print(table)
