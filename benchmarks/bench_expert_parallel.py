"""A layer whose experts are spread over two nodes of two ranks, by what is sent between them.

Every node is a network namespace, see namespaces.py. Run by run.py.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bench_allreduce
import expert_parallel_peers as peers
import namespaces
from _harness import Table
from expert_parallel_peers import TORCH
from expert_parallel_rank import ALLTOALL, AUTO, CODED, EXACT, REDUCED
from namespaces import Network, Ranks

from moe_ext.planner.expert_load import LOADS

SCRIPT = Path(__file__).resolve().parent / "expert_parallel_rank.py"
CHART = Path(__file__).resolve().parent.parent / "docs" / "images" / "expert_loads.png"
NUM_NODES = 2
NODE_SIZES = (1, 2)
SHAPES = (
    {"num_tokens": 512, "model_dim": 512, "ffn_dim": 192, "num_experts": 64, "top_k": 8},
    {"num_tokens": 512, "model_dim": 512, "ffn_dim": 1792, "num_experts": 8, "top_k": 2},
)
# On one host: no link is slow, so that work beside the products shows.
HOST_SIZES = (2, 4)
SMALL = {"num_tokens": 64, "model_dim": 256, "ffn_dim": 256, "num_experts": 8, "top_k": 2}
ON_ONE_HOST = (ALLTOALL, "dedup, reduced", "allgather, reduced")
HOST_TURNS = 20
LOADED = {"num_tokens": 256, "model_dim": 512, "ffn_dim": 192, "num_experts": 64, "top_k": 8}
# Bits a second, and how often each contender takes its turn, of which the first warms up: as many
# as show a burst, where the load changes from step to step.
LINKS: dict[str, tuple[float | None, int]] = {
    "1 Gbit/s": (1e9, 4),
    "unthrottled": (None, 6),
}
LOADED_TURNS = 5
EQUAL = {"num_tokens": 2048, "model_dim": 512, "ffn_dim": 352, "num_experts": 8, "top_k": 2}
PARTS = (2, 4, 6, 8)
HIDDEN_TURNS = 8
COLUMNS = (
    "link",
    "contender",
    "ms",
    f"{TORCH} / this",
    "CPU ms",
    "sent MB",
    "peak MB",
    "difference",
    "chosen",
    "over the best",
)


@dataclass(frozen=True)
class Cost(bench_allreduce.Cost):
    """Costs of one contender; means over the turns where these differ.

    Attributes:
        peak: bytes of memory of the fullest rank.
        error: largest difference to `alltoall`, relative to the largest output.
        chosen: what "auto" chose.
    """

    peak: int
    error: float
    chosen: str


Costs = dict[str, Cost]


def contenders(node_size: int, extra: Sequence[str] = ()) -> list[str]:
    """Names of the contenders; a node of one rank needs no hop inside it."""
    names = [*peers.installed(), *EXACT, *REDUCED, *AUTO, *extra]
    return [name for name in names if node_size > 1 or "hierarchical" not in name]


def measure(
    wires: Network, ranks: Ranks, job: dict[str, object], turns: dict[str, int]
) -> dict[str, Costs]:
    """Contenders in turn, A B C A B C ..., on every link."""
    names = job["names"]
    first = ranks.ask({"do": "prepare", **job})
    found = {}
    for label in turns:
        wires.limit(LINKS[label][0])
        choices = ranks.ask({"do": "choose"})[0]
        for text in choices.values():
            print(f"{job}, {label}: {text}", file=sys.stderr)
        answers = [
            ranks.ask({"do": "time", "names": names, "step": step}) for step in range(turns[label])
        ][1:]
        average = statistics.mean if job.get("load") else statistics.median
        costs = {
            name: bench_allreduce.cost_of([[a[name] for a in turn] for turn in answers], average)
            for name in names
        }
        found[label] = {
            name: Cost(
                **vars(costs[name]),
                peak=max(a[name][1] for a in first),
                error=max(a[name][0] for a in first),
                chosen=choices[name].partition(":")[0] if name in choices else "",
            )
            for name in names
        }
    return found


def layer_of(sizes: dict[str, int]) -> str:
    """The sizes of a layer, by the field's letters."""
    return " ".join(
        f"{letter}={size}" for letter, size in zip("TDFEK", sizes.values(), strict=True)
    )


def rows_of(labels: tuple[str, ...], link: str, costs: Costs) -> list[tuple[str, ...]]:
    """The rows of a layer on one link."""
    rows = []
    for name, cost in costs.items():
        over = ""
        if name in AUTO:
            fixed = EXACT if "exact" in name else REDUCED
            least = min(costs[other].wall for other in fixed if other in costs)
            over = f"{100 * (cost.wall / least - 1):+.0f} %"
        rows.append(
            (
                *labels,
                link,
                name,
                f"{1e3 * cost.wall:.0f}",
                f"{costs[TORCH].wall / cost.wall:.2f}",
                f"{1e3 * cost.cpu:.0f}",
                f"{cost.sent / 1e6:.2f}",
                f"{cost.peak / 1e6:.1f}",
                f"{cost.error:.0e}" if cost.error else "0",
                cost.chosen,
                over,
            )
        )
    return rows


def note() -> str:
    """The text above the first table."""
    return (
        f"Forward and backward of a float32 layer over {NUM_NODES} nodes of one or two ranks of "
        "one thread each, over Gloo; each node is a network namespace, joined to the other by a "
        "wire that `tc tbf` holds to the rate at both ends. *ms* is the slowest rank's wall "
        "time (the machine may have fewer cores than ranks), *CPU* that of all ranks together "
        "without the kernel's work in their stead, *sent* what the busier node's interface "
        "counted, headers included, *peak* how far the resident memory of the fullest rank rises "
        "in a step. *difference* is the largest between the output and that of "
        f"`{ALLTOALL}`, relative to the largest output. `torch` is what one writes by hand: sort, "
        "`all_to_all_single`, the same products, and back; `torchtitan` its AllToAll dispatcher "
        "with the same products; `transformers` the all-to-all that it trains by, with its "
        "experts; `DeepSpeed` its MoE layer without drops, which pads every expert to the fullest. "
        "*int8* and *mx* round what goes to the experts (`wire=`), forward and backward; "
        "*lossless* codes all rows without loss. *auto* "
        "chose on that link; the last columns say what, and its time over that of the best fixed "
        "dispatcher of its combine."
    )


def load_note() -> str:
    """The text above the table of uneven loads."""
    return (
        f"As above, for {layer_of(LOADED)} on {NUM_NODES} x {NODE_SIZES[-1]} ranks and the loads "
        "of NVIDIA/Megatron-LM pull request 7488, whose routing follows from (load, seed, step) "
        "and is the same on every rank: even (W0); three of four tokens at a quarter of the "
        "experts, which lie on one rank (W1, W2, which differ by their draws); at every other "
        "expert (W3); rank r with a share r + 1 of the tokens (W4); half of the experts unused "
        "(W5); a hot quarter that moves every three steps (W6); half of the tokens at a quarter of "
        f"the experts every fourth step (W7). Means over the steps 1 to {LOADED_TURNS - 1}; *auto* "
        "chose at step 0."
    )


def host_table() -> Table:
    """Ranks of one host, beside peers that send by Gloo."""
    names = [*peers.installed(), *ON_ONE_HOST]
    rows = []
    for num_ranks in HOST_SIZES:
        with (
            namespaces.network(1) as wires,
            namespaces.ranks_on(wires, SCRIPT, per_node=num_ranks) as ranks,
        ):
            for sizes in (SMALL, *SHAPES):
                job = {"sizes": sizes, "names": names, "node_size": num_ranks}
                costs = measure(wires, ranks, job, {"unthrottled": HOST_TURNS})["unthrottled"]
                for name, cost in costs.items():
                    over = f"{costs[TORCH].wall / cost.wall:.2f}"
                    shown = (f"{1e3 * cost.wall:.1f}", over, f"{1e3 * cost.cpu:.1f}")
                    peak = f"{cost.peak / 1e6:.1f}"
                    rows.append((f"{num_ranks}", layer_of(sizes), name, *shown, peak))
    header = ("ranks", "layer", "contender", "ms", f"{TORCH} / this", "CPU ms", "peak MB")
    note = (
        "As above, for ranks in one namespace. Ours exchange through memory that they share, the "
        "others through Gloo's sockets. Four ranks on two cores wait for each other's turn."
    )
    return Table("Experts over ranks of one host", note, header, rows)


def hidden_table(wires: Network, ranks: Ranks) -> Table:
    """The share of the transfer that hides behind the experts, by the number of parts."""
    ranks.ask({"do": "prepare_parts", "sizes": EQUAL, "parts": PARTS})
    wires.limit(LINKS["1 Gbit/s"][0])
    parts = (1, *PARTS)
    names = ["transfer", *(f"experts in {n}" for n in parts), *map(str, parts)]
    turns = [ranks.ask({"do": "time", "names": names, "step": 0}) for _ in range(HIDDEN_TURNS)][1:]
    wall = {n: statistics.median(max(a[n][0] for a in turn) for turn in turns) for n in names}
    # Half of the rows leave their rank, four times.
    left = 4 * EQUAL["num_tokens"] * EQUAL["top_k"] // 2 * 4 * EQUAL["model_dim"]
    wire = 8 * left / LINKS["1 Gbit/s"][0]
    transfer, whole = wall["transfer"], wall["experts in 1"]
    shorter = min(transfer, whole)
    rows = []
    for n in parts:
        experts = wall[f"experts in {n}"]
        least = experts + transfer - (1 - 3 / (4 * n)) * min(wire, experts)
        hidden = [100 * (transfer + whole - each) / shorter for each in (wall[f"{n}"], least)]
        times = (wall[f"{n}"], experts)
        rows.append(
            (f"{n}", *(f"{1e3 * t:.0f}" for t in times), *(f"{share:.0f} %" for share in hidden))
        )
    note = (
        "Forward and backward of `Dispatch('alltoall', overlap=)` with "
        f"{layer_of(EQUAL)} on {NUM_NODES} nodes of one rank, 1 Gbit/s apart, where both take "
        "about as long. A layer whose experts do nothing takes "
        f"{1e3 * transfer:.0f} ms, of which {1e3 * wire:.0f} are the wire's and the others the "
        "processor's. The experts alone, on as many rows in as many parts, take *experts ms*. "
        "*hidden* is what a step takes less than both one after the other, experts in one part, as "
        "a share of the shorter of the two. *at most*: all of the wire's time but for the first "
        "rows, the last results and the first gradients of a pass, which nothing is left to hide "
        "behind. The last gradients travel while those of the weights are computed."
    )
    header = ("parts", "ms", "experts ms", "hidden", "at most")
    return Table("Transfer behind experts", note, header, rows)


def chart(found: dict[str, dict[str, Costs]]) -> None:
    """Draws the step times by load, one panel a link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    links = list(LINKS)
    panels = figure.subplots(1, len(links), squeeze=False)[0]
    for axes, link in zip(panels, links, strict=True):
        names = [n for n in found[LOADS[0]][link] if n in peers.PEERS or n in (ALLTOALL, *AUTO)]
        for i, name in enumerate(names):
            places = [g + i / (len(names) + 1) for g in range(len(LOADS))]
            heights = [1e3 * found[load][link][name].wall for load in LOADS]
            label = name if link == links[0] else None
            axes.bar(places, heights, width=1 / (len(names) + 1), label=label, color=f"C{i}")
        axes.set_xticks([g + 0.4 for g in range(len(LOADS))], [load[:2] for load in LOADS])
        title = f"link of {link}" if LINKS[link][0] else "link without a limit, on one machine"
        axes.set(ylabel="ms a step of the layer", title=title)
        axes.set(xlabel="load of the experts: W0 even, the others uneven")
    figure.legend(loc="outside upper center", ncols=8)
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, dpi=100)


def tables() -> list[Table]:
    """The tables of docs/benchmarks.md; none, with a line that says why, where they cannot be."""
    reason = namespaces.why_not()
    if reason:
        print(f"benchmark expert_parallel: skipped, since {reason}", file=sys.stderr)
        return []
    rows: list[tuple[str, ...]] = []
    loaded_rows: list[tuple[str, ...]] = []
    loaded: dict[str, dict[str, Costs]] = {}
    hidden: list[Table] = []
    for node_size in NODE_SIZES:
        with (
            namespaces.network(NUM_NODES) as wires,
            namespaces.ranks_on(wires, SCRIPT, per_node=node_size) as ranks,
        ):
            turns = {label: turns for label, (_, turns) in LINKS.items()}
            for sizes in SHAPES:
                names = contenders(node_size, CODED)
                job = {"sizes": sizes, "names": names, "node_size": node_size}
                for link, costs in measure(wires, ranks, job, turns).items():
                    rows += rows_of((f"{NUM_NODES} x {node_size}", layer_of(sizes)), link, costs)
            if node_size == 1:
                hidden.append(hidden_table(wires, ranks))
            if node_size < max(NODE_SIZES):
                continue
            turns = dict.fromkeys(LINKS, LOADED_TURNS)
            job = {"sizes": LOADED, "names": contenders(node_size), "node_size": node_size}
            for load in LOADS:
                loaded[load] = measure(wires, ranks, {**job, "load": load}, turns)
                for link, costs in loaded[load].items():
                    loaded_rows += rows_of((load,), link, costs)
    chart(loaded)
    return [
        Table("Experts over two nodes", note(), ("ranks", "layer", *COLUMNS), rows),
        host_table(),
        Table("Uneven loads of experts", load_note(), ("load", *COLUMNS), loaded_rows),
        *hidden,
    ]
