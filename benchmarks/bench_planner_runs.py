"""Step times of small training runs on this machine beside those that the planner predicts."""

import statistics
from pathlib import Path
from typing import Any

from _harness import Table
from namespaces import network, ranks_on, why_not

SCRIPT = Path(__file__).with_name("planner_rank.py")
LIMITS = {"none": None, "1 Gbit/s": 1e9}
STEPS = 3
BASE = {"pp": 1, "tp": 1, "cp": 1, "zero": 0, "recompute": 0, "micro_batch": 1, "ep": 1}
ALL = -1  # ranks
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"recompute": 1},
    {"micro_batch": 2},
    {"ep": 2, "dispatcher": "alltoall", "combine": "exact"},
    {"ep": ALL, "dispatcher": "alltoall", "combine": "exact"},
    {"ep": ALL, "dispatcher": "alltoall", "combine": "exact", "wire": "int8"},
    {"ep": ALL, "dispatcher": "dedup", "combine": "exact"},
    {"ep": ALL, "dispatcher": "dedup", "combine": "reduced"},
    {"ep": ALL, "dispatcher": "allgather", "combine": "reduced"},
    {"ep": ALL, "dispatcher": "alltoall", "combine": "exact", "recompute": 1},
)
SKEWS = {"as it comes": 0.0, "two hot experts": 0.05}


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = ("ranks", "limit", "load", "plan", "ms", "planned ms", "error")
    if (reason := why_not()) != "":
        print(f"planner_runs: left out, {reason}")
        return []
    rows, errors, regrets = [], [], []
    for num_ranks in (2, 4):
        # With two ranks, all are two.
        plans = [made for made in PLANS if made.get("ep") != 2 or num_ranks > 2]
        with network(num_ranks) as wires:
            for limit, rate in LIMITS.items():
                wires.limit(rate)
                with ranks_on(wires, SCRIPT) as ranks:
                    job = {"do": "steps", "cluster": ranks.ask({"do": "profile"})[0]}
                    for load, skew in SKEWS.items():
                        found = []
                        for made in plans:
                            named = {**made, "ep": num_ranks} if made.get("ep") == ALL else made
                            asked = {**job, "skew": skew, "count": STEPS}
                            seconds = ranks.ask({**asked, "choice": {**BASE, **named}})[0]
                            found.append(seconds)
                            errors.append(abs(seconds[1] / seconds[0] - 1))
                            label = ", ".join(f"{k} {v}" for k, v in named.items()) or "copies"
                            cells = (*(f"{1e3 * s:.0f}" for s in seconds), f"{errors[-1]:.0%}")
                            rows.append((str(num_ranks), limit, load, label, *cells))
                        chosen = min(found, key=lambda each: each[1])
                        regrets.append(chosen[0] / min(ms for ms, _ in found) - 1)
    note = (
        "`bench_planner_runs.py`: a Mixtral of two layers (D 256, F 512, 8 experts, K 2) trained "
        "in float32 on ranks of one thread each, which share the cores of this machine; rates of "
        "the planner are measured by all ranks at once (`measure_cluster`), the load is the one "
        f"that the experts get. Mean error {statistics.mean(errors):.0%}; the plan foretold to be "
        "the quickest of twelve or thirteen takes "
        f"{statistics.mean(regrets):.0%} longer than the quickest one on average, "
        f"{max(regrets):.0%} at most."
    )
    return [Table("Steps of this machine, planned", note, header, rows)]


if __name__ == "__main__":
    for table in tables():
        print(table)
