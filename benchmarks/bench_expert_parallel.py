"""A layer whose experts are spread over two nodes of two ranks, by what is sent between them.

Every node is a network namespace, see namespaces.py. Run by run.py.
"""

import sys
from pathlib import Path

import namespaces
from _harness import Table
from bench_allreduce import Cost, cost_of
from expert_parallel_rank import NAMES, NODE_SIZE, TORCH
from namespaces import Network, Ranks

SCRIPT = Path(__file__).resolve().parent / "expert_parallel_rank.py"
NUM_NODES = 2
SHAPES = (
    {"num_tokens": 512, "model_dim": 512, "ffn_dim": 192, "num_experts": 64, "top_k": 8},
    {"num_tokens": 512, "model_dim": 512, "ffn_dim": 1792, "num_experts": 8, "top_k": 2},
)
# Bits a second, and how often each contender takes its turn; the first turn warms up.
LINKS: dict[str, tuple[float | None, int]] = {
    "1 Gbit/s": (1e9, 5),
    "unthrottled": (None, 7),
}
HEADER = (
    "layer",
    "link",
    "dispatcher, combine",
    "ms",
    f"{TORCH} / this",
    "CPU ms",
    "sent MB",
    "difference",
)


def measure(wires: Network, ranks: Ranks) -> dict[str, dict[str, Cost]]:
    """Contenders in turn, A B C A B C ..., on every link."""
    found = {}
    for label, (rate, turns) in LINKS.items():
        wires.limit(rate)
        answers = [ranks.ask({"do": "time", "names": NAMES}) for _ in range(turns)][1:]
        found[label] = {
            name: cost_of([[a[name] for a in turn] for turn in answers]) for name in NAMES
        }
    return found


def note() -> str:
    """The text above the table."""
    return (
        f"Forward and backward of a float32 layer over {NUM_NODES} nodes of {NODE_SIZE} ranks of "
        "one thread each, over Gloo; each node is a network namespace, joined to the other by a "
        "wire that `tc tbf` holds to the rate at both ends. *ms* is the slowest rank's wall "
        "time (the machine may have fewer cores than ranks), *CPU* that of all ranks together "
        "without the kernel's work in their stead, *sent* what the busier node's interface "
        "counted, headers included. *difference* is the largest between the output and that of "
        "`alltoall`, relative to the largest output. `torch` is what one writes by hand: sort, "
        "`all_to_all_single`, the same products, and back."
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md; none, with a line that says why, where it cannot be made."""
    reason = namespaces.why_not()
    if reason:
        print(f"benchmark expert_parallel: skipped, since {reason}", file=sys.stderr)
        return []
    rows = []
    with (
        namespaces.network(NUM_NODES) as wires,
        namespaces.ranks_on(wires, SCRIPT, per_node=NODE_SIZE) as ranks,
    ):
        for sizes in SHAPES:
            errors = ranks.ask({"do": "prepare", "sizes": sizes})
            found = measure(wires, ranks)
            letters = zip(("T", "D", "F", "E", "K"), sizes.values(), strict=True)
            layer = " ".join(f"{letter}={size}" for letter, size in letters)
            for link, costs in found.items():
                for name, cost in costs.items():
                    error = max(answer[name] for answer in errors)
                    rows.append(
                        (
                            layer,
                            link,
                            name,
                            f"{1e3 * cost.wall:.0f}",
                            f"{costs[TORCH].wall / cost.wall:.2f}",
                            f"{1e3 * cost.cpu:.0f}",
                            f"{cost.sent / 1e6:.2f}",
                            f"{error:.0e}" if error else "0",
                        )
                    )
    return [Table("Experts over two nodes", note(), HEADER, rows)]
