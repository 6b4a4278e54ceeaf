"""Runs every benchmark and rewrites docs/benchmarks.md; ``run.py gating`` prints that one.

The figures are kept in docs/benchmarks.json, and every run prints its ratios to those.
"""

import importlib
import json
import sys
import time
from pathlib import Path

import torch
from _harness import Table, compare, keep_memory, machine

BENCHMARKS = (
    "moe_layer",
    "gating",
    "permutation",
    "activation",
    "grouped_gemm",
    "routers",
    "overhead",
    "growth",
    "huggingface",
    "compat",
)
REPORT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
FIGURES = REPORT.with_suffix(".json")


def run(name: str) -> list[Table]:
    """The tables of one benchmark, printed as they come."""
    start = time.perf_counter()
    print(f"benchmark {name} ...", file=sys.stderr, flush=True)
    tables = importlib.import_module(f"bench_{name}").tables()
    for table in tables:
        print(table.markdown(), flush=True)
    print(f"benchmark {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return tables


def main() -> None:
    """Runs the benchmarks named on the command line, or all and keeps the report."""
    keep_memory()
    torch.manual_seed(0)
    last = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"tables": {}}
    about = machine()
    tables = [table for name in sys.argv[1:] or BENCHMARKS for table in run(name)]
    figures = {table.title: table.figures() for table in tables}
    for title, found in figures.items():
        print(compare(title, found, last["tables"].get(title, {})), file=sys.stderr)
    if not sys.argv[1:]:
        head = "\n\n".join(["# Benchmarks", "Written by `make bench`.", *about])
        REPORT.write_text("\n".join([head + "\n", *(table.markdown() for table in tables)]))
        FIGURES.write_text(json.dumps({"machine": about, "tables": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
