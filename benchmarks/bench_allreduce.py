"""A bucket of gradients averaged over ranks on slow and fast links, beside PyTorch's ways.

Every rank is in a network namespace of its own, see namespaces.py. Run by run.py.
"""

import random
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import namespaces
from _harness import Table
from allreduce_peers import AUTO, AUTO_TOPK, BF16, DENSE, DENSITY, MAKERS, POWERSGD, RANK, SHAPE
from namespaces import Network, Ranks

SCRIPT = Path(__file__).resolve().parent / "allreduce_rank.py"
NUM_RANKS = (2, 4)
# Bits a second, and how often each contender takes its turn; the first turn warms up.
LINKS: dict[str, tuple[float | None, int]] = {
    "200 Mbit/s": (200e6, 8),
    "1 Gbit/s": (1e9, 16),
    "10 Gbit/s": (10e9, 21),
    "unthrottled": (None, 41),
}
# Turns in which `auto` measures its candidates; reported apart from later turns.
FIRST_TURNS = 50
# Contenders whose first steps are dense.
LATE = (AUTO, AUTO_TOPK, POWERSGD)


@dataclass(frozen=True)
class Cost:
    """Costs of a contender: medians over the turns.

    Attributes:
        wall: seconds of the slowest rank.
        cpu: seconds of all ranks together.
        sent: bytes out of the busiest rank's interface.
    """

    wall: float
    cpu: float
    sent: float


@dataclass(frozen=True)
class Found:
    """Results on one link, by contender.

    Attributes:
        costs: once those that choose have chosen.
        said: explanation and choice of those that choose.
        first: seconds of one of their first steps, on average.
    """

    costs: dict[str, Cost]
    said: dict[str, tuple[str, str]]
    first: dict[str, float]


@dataclass(frozen=True)
class Copies:
    """Seconds of a copy of the bucket: on one rank while the others wait, and on all at once."""

    alone: float
    together: float


def cost_of(
    turns: list[list[list[float]]],
    average: Callable[[Iterable[float]], float] = statistics.median,
) -> Cost:
    """From (wall, CPU, bytes) of every rank in every turn."""
    walls, cpus, sents = zip(*(zip(*ranks, strict=True) for ranks in turns), strict=True)
    return Cost(
        average(max(wall) for wall in walls),
        average(sum(cpu) for cpu in cpus),
        average(max(sent) for sent in sents),
    )


def measure(wires: Network, ranks: Ranks, names: list[str]) -> dict[str, Found]:
    """Contenders in turns, each in an order of its own, on every link."""
    found, shuffle = {}, random.Random(0)
    for label, (rate, turns) in LINKS.items():
        wires.limit(rate)
        # New cost models probe the link as it is now.
        choosing = [name for name in names if name in (AUTO, AUTO_TOPK)]
        ranks.ask({"do": "renew", "names": choosing})
        early = [ranks.ask({"do": "time", "names": choosing}) for _ in range(FIRST_TURNS)]
        first = {
            name: cost_of([[a[name] for a in turn] for turn in early], statistics.fmean).wall
            for name in choosing
        }
        orders = [shuffle.sample(names, len(names)) for _ in range(turns)]
        answers = [ranks.ask({"do": "time", "names": order}) for order in orders][1:]
        costs = {name: cost_of([[a[name] for a in turn] for turn in answers]) for name in names}
        found[label] = Found(costs, ranks.ask({"do": "explain", "names": choosing})[0], first)
    return found


def row(key: tuple[int, str, str], found: Found, error: float | None) -> tuple[str, ...]:
    """A line of the table."""
    num_ranks, link, name = key
    cost = found.costs[name]
    return (
        str(num_ranks),
        link,
        name,
        f"{1e3 * cost.wall:.1f}",
        f"{found.costs[DENSE].wall / cost.wall:.2f}",
        f"{found.costs[BF16].wall / cost.wall:.2f}",
        f"{1e3 * cost.cpu:.0f}",
        f"{cost.sent / 1e6:.3f}",
        "-" if error is None else f"{error:.1e}",
        f"{1e3 * found.first[name]:.1f}" if name in found.first else "-",
        found.said[name][1] if name in found.said else "",
    )


HEADER = (
    "P",
    "link",
    "contender",
    "ms",
    f"{DENSE} / this",
    f"{BF16} / this",
    "CPU ms",
    "sent MB",
    "error",
    "first ms",
    "took",
)


def note(copies: dict[int, Copies]) -> str:
    """The text above the table."""
    shared = "; ".join(
        f"{1e3 * copy.alone:.1f} ms on one rank alone and {1e3 * copy.together:.1f} ms on all "
        f"{num_ranks} at once"
        for num_ranks, copy in copies.items()
    )
    megabytes = 4 * SHAPE[0] * SHAPE[1] / 1e6
    return (
        f"One bucket of {megabytes:.0f} MB of normally distributed float32, P ranks of one thread "
        "each over Gloo, each rank in a network namespace of its own; two are joined by one veth "
        "pair, four by a bridge, and `tc tbf` holds every end of every wire to the rate. *ms* is "
        "the slowest rank's wall time (the machine may have fewer cores than P), *CPU* that of all "
        "ranks together without the kernel's work in their stead, *sent* what the busiest rank's "
        "interface counted, headers included. Every turn has an order of its own: without a limit, "
        "the same all-reduce takes up to a quarter longer after some contenders than after others. "
        "*error* is the relative distance of the first step "
        "to the mean in float64: what is missing stays in residuals and is sent in later steps, "
        "but in the 16-bit contenders. `eager top-k` is error feedback, `torch.topk`, all-gather "
        f"and `index_add_`; top-k is {100 * DENSITY:g} %, PowerSGD of rank {RANK}. `ours, auto` "
        "chooses from dense, bf16, int8 and int4, the other one from dense, bf16, int8 and top-k; "
        "*took* is the choice, and *first* the mean of the first "
        f"{FIRST_TURNS} steps, in which it is made. Ours are measured as the hook that "
        "DistributedDataParallel calls, with its look for NaN and its message of status, where a "
        "step needs one. Ranks that "
        "share a machine share its memory: a copy of the bucket takes "
        f"{shared}. "
        "Speed is one side only: what training loses by it is in the table of convergence."
    )


def explanation(found: dict[int, dict[str, Found]]) -> str:
    """The explanations of `auto`, for every link."""
    lines = []
    for num_ranks, links in found.items():
        for link, one in links.items():
            for name, (text, _) in one.said.items():
                lines += [f"{name}, P = {num_ranks}, {link}:", text, ""]
    return "\n".join(lines)


def tables() -> list[Table]:
    """The table of docs/benchmarks.md; none, with a line that says why, where it cannot be made."""
    reason = namespaces.why_not()
    if reason:
        print(f"benchmark allreduce: skipped, since {reason}", file=sys.stderr)
        return []
    names, found, rows, copies = list(MAKERS), {}, [], {}
    for num_ranks in NUM_RANKS:
        with namespaces.network(num_ranks) as wires, namespaces.ranks_on(wires, SCRIPT) as ranks:
            ranks.ask({"do": "prepare", "names": names, "shape": SHAPE})
            first = [name for name in names if name not in LATE]
            errors = ranks.ask({"do": "error", "names": first})[0]
            alone, together = zip(*ranks.ask({"do": "copies"}), strict=True)
            copies[num_ranks] = Copies(alone[0], max(together))
            found[num_ranks] = measure(wires, ranks, names)
        for link, one in found[num_ranks].items():
            rows += [row((num_ranks, link, name), one, errors.get(name)) for name in names]
    print(explanation(found), file=sys.stderr)
    return [Table("All-reduce of gradients over slow links", note(copies), HEADER, rows)]
