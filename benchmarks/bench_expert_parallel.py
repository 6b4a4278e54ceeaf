"""A layer whose experts are spread over two nodes of two ranks, by what is sent between them.

Every node is a network namespace, see namespaces.py. Run by run.py.
"""

import sys
from pathlib import Path

import namespaces
from _harness import Table
from bench_allreduce import Cost, cost_of
from expert_parallel_rank import NAMES, TORCH
from namespaces import Network, Ranks

SCRIPT = Path(__file__).resolve().parent / "expert_parallel_rank.py"
NUM_NODES = 2
NODE_SIZES = (1, 2)
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
    "ranks",
    "layer",
    "link",
    "dispatcher, combine, wire",
    "ms",
    f"{TORCH} / this",
    "CPU ms",
    "sent MB",
    "difference",
    "chosen",
)


def contenders(node_size: int) -> list[str]:
    """Their names; a node of one rank needs no hop inside it."""
    return [name for name in NAMES if node_size > 1 or "hierarchical" not in name]


def measure(
    wires: Network, ranks: Ranks, names: list[str]
) -> dict[str, tuple[dict[str, Cost], dict[str, str]]]:
    """Contenders in turn, A B C A B C ..., on every link; and what "auto" says of its choice."""
    found = {}
    for label, (rate, turns) in LINKS.items():
        wires.limit(rate)
        choices = ranks.ask({"do": "choose"})[0]
        answers = [ranks.ask({"do": "time", "names": names}) for _ in range(turns)][1:]
        costs = {name: cost_of([[a[name] for a in turn] for turn in answers]) for name in names}
        found[label] = costs, choices
    return found


def note() -> str:
    """The text above the table."""
    return (
        f"Forward and backward of a float32 layer over {NUM_NODES} nodes of one or two ranks of "
        "one thread each, over Gloo; each node is a network namespace, joined to the other by a "
        "wire that `tc tbf` holds to the rate at both ends. *ms* is the slowest rank's wall "
        "time (the machine may have fewer cores than ranks), *CPU* that of all ranks together "
        "without the kernel's work in their stead, *sent* what the busier node's interface "
        "counted, headers included. *difference* is the largest between the output and that of "
        "`alltoall`, relative to the largest output. `torch` is what one writes by hand: sort, "
        "`all_to_all_single`, the same products, and back; *int8* and *mx* round what goes to the "
        "experts (`wire=`), forward and backward. *auto* chose on that link, and the last column "
        "says what."
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md; none, with a line that says why, where it cannot be made."""
    reason = namespaces.why_not()
    if reason:
        print(f"benchmark expert_parallel: skipped, since {reason}", file=sys.stderr)
        return []
    rows = []
    for node_size in NODE_SIZES:
        with (
            namespaces.network(NUM_NODES) as wires,
            namespaces.ranks_on(wires, SCRIPT, per_node=node_size) as ranks,
        ):
            for sizes in SHAPES:
                rows += rows_of(wires, ranks, sizes, node_size)
    return [Table("Experts over two nodes", note(), HEADER, rows)]


def rows_of(
    wires: Network, ranks: Ranks, sizes: dict[str, int], node_size: int
) -> list[tuple[str, ...]]:
    """The rows of a layer."""
    names, rows = contenders(node_size), []
    job = {"do": "prepare", "sizes": sizes, "names": names, "node_size": node_size}
    errors = ranks.ask(job)
    letters = zip(("T", "D", "F", "E", "K"), sizes.values(), strict=True)
    layer = " ".join(f"{letter}={size}" for letter, size in letters)
    for link, (costs, choices) in measure(wires, ranks, names).items():
        for text in choices.values():
            print(f"{layer}, {node_size * NUM_NODES} ranks, {link}: {text}", file=sys.stderr)
        for name, cost in costs.items():
            error = max(answer[name] for answer in errors)
            rows.append(
                (
                    f"{NUM_NODES} x {node_size}",
                    layer,
                    link,
                    name,
                    f"{1e3 * cost.wall:.0f}",
                    f"{costs[TORCH].wall / cost.wall:.2f}",
                    f"{1e3 * cost.cpu:.0f}",
                    f"{cost.sent / 1e6:.2f}",
                    f"{error:.0e}" if error else "0",
                    choices[name].partition(":")[0] if name in choices else "",
                )
            )
    return rows
