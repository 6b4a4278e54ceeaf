"""Local steps over slow links: losses of four workers, bytes, and time by the rate of the link.

python benchmarks/run.py local_steps         # a quarter of an hour: 3 seeds, 400 steps

With the wheel torchft-nightly installed, its DiLoCo has a row.
"""

import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any

from _harness import Table
from local_steps_rank import PEER, train_diloco
from namespaces import network, ranks_on, why_not

RANKS, PRETRAIN, STEPS, SYNC_EVERY = 4, 1600, 400, 10
SEEDS = (0, 1, 2)
# Steps of the runs that are timed; whole rounds.
TIMED_STEPS = 20
RATES = {"1 Gbit/s": 1e9, "0.2 Gbit/s": 0.2e9}
BASES = {"MuLoCo": "synchronous Muon", "synchronous Muon": "synchronous Muon"}
SCRIPT = Path(__file__).with_name("local_steps_rank.py")


def measured() -> dict[str, dict[str, Any]]:
    """Losses by seed, bytes of a step, and seconds of a step by rate, of each method."""
    names = [*train_diloco.METHODS]
    if importlib.util.find_spec("torchft"):
        names.insert(names.index("DiLoCo") + 1, PEER)
    found: dict[str, dict[str, Any]] = {name: {"losses": []} for name in names}
    options = {"do": "train", "first": PRETRAIN, "sync_every": SYNC_EVERY}
    with network(RANKS) as wires, ranks_on(wires, SCRIPT) as ranks:
        ranks.ask({"do": "pretrain", "steps": PRETRAIN})
        for seed in SEEDS:
            for method, result in found.items():
                if method == PEER and seed:
                    continue  # the losses of DiLoCo, as seed 0 shows
                answers = ranks.ask({**options, "method": method, "steps": STEPS, "seed": seed})
                result["losses"].append(answers[0]["loss"])
                result["bytes"] = answers[0]["bytes"] / STEPS
                result["wire"] = max(answer["wire"] for answer in answers) / STEPS
        for name, rate in RATES.items():
            wires.limit(rate)
            for method, result in found.items():
                answers = ranks.ask({**options, "method": method, "steps": TIMED_STEPS})
                result[name] = max(answer["seconds"] for answer in answers) / TIMED_STEPS
    return found


def table(found: dict[str, dict[str, Any]]) -> Table:
    """The table of docs/benchmarks.md."""
    rows = []
    synchronous = found["synchronous"]
    for method, result in found.items():
        base = found[BASES.get(method, "synchronous")]
        ratios = [a / b for a, b in zip(result["losses"], base["losses"], strict=False)]
        ours = train_diloco.METHODS["DiLoCo" if method == PEER else method]
        rows.append(
            (
                method,
                ours.settings,
                f"{statistics.mean(result['losses']):.4f}",
                f"{100 * (statistics.mean(ratios) - 1):+.1f} %",
                " ".join(f"{100 * (ratio - 1):+.1f}" for ratio in ratios),
                f"{result['bytes'] / 1e3:.1f}" if result["bytes"] else "-",
                f"{result['wire'] / 1e3:.1f}",
                f"{synchronous['wire'] / result['wire']:.0f}",
                *(f"{1e3 * result[name]:.0f}" for name in RATES),
                *(f"{synchronous[name] / result[name]:.2f}" for name in RATES),
            )
        )
    header = (
        "method",
        "settings",
        f"loss after {STEPS} steps",
        "over synchronous",
        "by seed %",
        "KB a step",
        "KB on the wire",
        "synchronous / wire",
        *(f"ms a step, {name}" for name in RATES),
        *(f"synchronous / ms, {name}" for name in RATES),
    )
    note = (
        f"{RANKS} workers in network namespaces, a mixture-of-experts language model of "
        "`examples/train_diloco.py` on the text of Python's library, rounds of "
        f"{SYNC_EVERY} steps. All runs begin with the same weights, those of {PRETRAIN} "
        "synchronous steps of AdamW; a seed draws the batches, the same in every row. Optimizers "
        f"begin anew, learning rates rise for {train_diloco.WARMUP_STEPS} steps and fall by a "
        "cosine to 0. KB are the "
        "messages that leave a worker, on the wire with headers and the coordination of a "
        "manager. MuLoCo is compared with synchronous Muon, the others with synchronous AdamW. "
        f"Workers share the processors, so a step takes what {RANKS} of them compute."
    )
    return Table("Local steps", note, header, rows)


def tables() -> list[Table]:
    """The table, where namespaces can be made."""
    lacking = why_not()
    if lacking:
        sys.exit(f"bench_local_steps: {lacking}")
    return [table(measured())]
