"""`dispatcher="auto"` beside the best fixed dispatcher, over turns enough to tell chance apart.

Run by name: `run.py auto_dispatch`.
"""

import random
import statistics
import sys
from dataclasses import dataclass

import namespaces
from _harness import Table, processor
from bench_expert_parallel import LINKS, LOADED, NUM_NODES, SCRIPT, layer_of
from expert_parallel_rank import ALLTOALL, AUTO, EXACT, REDUCED
from namespaces import Network, Ranks

from moe_ext.planner.expert_load import LOADS

NODE_SIZE = 2
# The layer looks at its choice before training passes 16 and 64; the first is that of `choose`.
TURNS, MOVING_TURNS = 40, 80
LOOKS = (16, 64)
MOVING = ("W6_rotating_hotspot", "W7_burst")
HEADER = (
    *("load", "link", "combine", "auto ms", "best ms", "over the best", "error"),
    *("over alltoall", "looks", "chosen", "in the end", "best"),
)


@dataclass(frozen=True)
class Turns:
    """Seconds of the slowest rank in every turn, by contender, and what "auto" chose.

    Attributes:
        seconds: in every turn.
        first: at the first forward pass.
        last: when the turns end.
    """

    seconds: dict[str, list[float]]
    first: dict[str, str]
    last: dict[str, str]


def measure(wires: Network, ranks: Ranks, load: str) -> dict[str, Turns]:
    """All contenders, in an order of its own in every turn, on every link."""
    names = [*EXACT, *REDUCED, *AUTO]
    shuffle, found = random.Random(0), {}
    ranks.ask(
        {"do": "prepare", "sizes": LOADED, "names": names, "node_size": NODE_SIZE, "load": load}
    )
    for link, (rate, _) in LINKS.items():
        wires.limit(rate)
        first = ranks.ask({"do": "choose"})[0]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for step in range(MOVING_TURNS if load in MOVING else TURNS):
            order = shuffle.sample(names, len(names))
            answers = ranks.ask({"do": "time", "names": order, "step": step})
            for name in names:
                seconds[name].append(max(answer[name][0] for answer in answers))
        last = ranks.ask({"do": "chosen"})[0]
        found[link] = Turns(seconds, {n: c.partition(":")[0] for n, c in first.items()}, last)
    return found


def row(turns: Turns, auto: str) -> tuple[str, ...]:
    """A line of the table behind load and link."""
    fixed = EXACT if "exact" in auto else REDUCED
    # Turn i is pass i + 2. The first one warms up.
    looks = {number - 2 for number in LOOKS} if fixed is EXACT else set()
    every = range(1, len(turns.seconds[auto]))
    plain = [i for i in every if i not in looks]

    def sum_of(name: str) -> float:
        return sum(turns.seconds[name][i] for i in plain)

    best = min(fixed, key=sum_of)
    longer = [turns.seconds[auto][i] - turns.seconds[best][i] for i in plain]
    error = statistics.stdev(longer) * len(plain) ** 0.5
    looked = [turns.seconds[auto][i] for i in every if i in looks]
    usual = sum_of(auto) / len(plain)
    return (
        auto.partition(", ")[2],
        f"{1e3 * usual:.0f}",
        f"{1e3 * sum_of(best) / len(plain):.0f}",
        f"{100 * sum(longer) / sum_of(best):+.1f} %",
        f"{100 * error / sum_of(best):.1f} %",
        f"{100 * (sum_of(auto) / sum_of(ALLTOALL) - 1):+.0f} %",
        f"{sum(looked) / usual - len(looked):.1f}" if looked else "-",
        turns.first[auto],
        turns.last[auto],
        best.partition(", ")[0],
    )


def tables() -> list[Table]:
    """The table, a row for each load, link and combine; without namespaces none, and a line why."""
    reason = namespaces.why_not()
    if reason:
        print(f"benchmark auto_dispatch: skipped, since {reason}", file=sys.stderr)
        return []
    rows = []
    with (
        namespaces.network(NUM_NODES) as wires,
        namespaces.ranks_on(wires, SCRIPT, per_node=NODE_SIZE) as ranks,
    ):
        for load in LOADS:
            for link, turns in measure(wires, ranks, load).items():
                for auto in AUTO:
                    rows.append((load, link, *row(turns, auto)))
                    print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    note = (
        f"Forward and backward of {layer_of(LOADED)} in float32 on {NUM_NODES} x {NODE_SIZE} ranks "
        "of one thread each over Gloo, under the loads of the table of uneven loads. All "
        f"dispatchers take turns in an order of their own, {TURNS} times, and {MOVING_TURNS} where "
        "the load moves. *chosen*: at the first forward pass, and what is used *in the end*: with "
        f'"exact" the layer looks at its choice again before training pass {LOOKS[0]}, and before '
        f"pass {LOOKS[1]} where there are as many. Turns with a look are left out of the times. "
        "*best*: the fixed dispatcher with the least time. *over the best* is how much longer a "
        "step with auto takes on the mean; *error* the standard error of that mean. *looks*: what "
        "all looks took, in steps. "
        f"Measured on {processor()}."
    )
    return [Table("Dispatchers chosen by auto", note, HEADER, rows)]
