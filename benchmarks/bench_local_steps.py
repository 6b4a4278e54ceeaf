"""Local steps over slow links: losses of four workers, bytes, and time by the rate of the link.

python benchmarks/run.py local_steps         # a quarter of an hour: 3 seeds, 400 steps
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from _harness import Table
from namespaces import network, ranks_on, why_not

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import train_diloco  # noqa: E402

RANKS, STEPS, SYNC_EVERY = 4, 400, 20
SEEDS = (0, 1, 2)
# Steps of the runs that are timed; whole rounds.
TIMED_STEPS = 40
RATES = {"1 Gbit/s": 1e9, "0.2 Gbit/s": 0.2e9}
BASES = {"DiLoCo": "synchronous", "SparseLoCo": "synchronous", "DeMo": "synchronous"} | {
    "MuLoCo": "synchronous Muon"
}
SCRIPT = Path(__file__).with_name("local_steps_rank.py")


def measured(steps: int, timed_steps: int, seeds: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Losses by seed, bytes of a step, and seconds of a step by rate, of each method."""
    found: dict[str, dict[str, Any]] = {name: {"losses": []} for name in train_diloco.METHODS}
    with network(RANKS) as wires, ranks_on(wires, SCRIPT) as ranks:
        for method, result in found.items():
            options = {"do": "train", "method": method, "sync_every": SYNC_EVERY}
            for seed in seeds:
                answers = ranks.ask({**options, "steps": steps, "seed": seed})
                result["losses"].append(answers[0]["loss"])
                result["bytes"] = answers[0]["bytes"] / steps
            for name, rate in RATES.items():
                wires.limit(rate)
                answers = ranks.ask({**options, "steps": timed_steps, "seed": 0})
                result[name] = max(answer["seconds"] for answer in answers) / timed_steps
            wires.limit(None)
    return found


def table(found: dict[str, dict[str, Any]], steps: int) -> Table:
    """The table of docs/benchmarks.md."""
    rows = []
    for method, result in found.items():
        base = found[BASES.get(method, method)]
        ratios = [a / b for a, b in zip(result["losses"], base["losses"], strict=True)]
        times = [f"{1e3 * result[name]:.0f}" for name in RATES]
        gains = [f"{found['synchronous'][name] / result[name]:.2f}" for name in RATES]
        rows.append(
            (
                method,
                f"{statistics.mean(result['losses']):.4f}",
                f"{100 * (statistics.mean(ratios) - 1):+.1f} %",
                " ".join(f"{100 * (ratio - 1):+.1f}" for ratio in ratios),
                f"{result['bytes'] / 1e3:.1f}",
                f"{found['synchronous']['bytes'] / result['bytes']:.0f}",
                *times,
                *gains,
            )
        )
    header = (
        "method",
        f"loss after {steps} steps",
        "over synchronous",
        "by seed %",
        "KB a step",
        "synchronous / KB",
        *(f"ms a step, {name}" for name in RATES),
        *(f"synchronous / ms, {name}" for name in RATES),
    )
    note = (
        f"{RANKS} workers in network namespaces, a mixture-of-experts language model of "
        "`examples/train_diloco.py` on the text of Python's library, the same batches in every "
        f"row, rounds of {SYNC_EVERY} steps. KB are those that leave a worker. MuLoCo is compared "
        "with synchronous Muon. Workers share the processors, so a step takes what "
        f"{RANKS} of them compute."
    )
    return Table("Local steps", note, header, rows)


def tables() -> list[Table]:
    """The table, where namespaces can be made."""
    lacking = why_not()
    if lacking:
        sys.exit(f"bench_local_steps: {lacking}")
    return [table(measured(STEPS, TIMED_STEPS, SEEDS), STEPS)]
