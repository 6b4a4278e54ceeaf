"""Runs every benchmark and rewrites docs/benchmarks.md; ``run.py gating`` prints that one."""

import importlib
import sys
from pathlib import Path

import torch
from _harness import keep_memory, machine

BENCHMARKS = (
    "moe_layer",
    "gating",
    "permutation",
    "activation",
    "grouped_gemm",
    "overhead",
    "growth",
)
REPORT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def main() -> None:
    """Runs the benchmarks named on the command line, or all and keeps the report."""
    keep_memory()
    torch.manual_seed(0)
    names = sys.argv[1:] or BENCHMARKS
    sections = []
    for name in names:
        print(f"benchmark {name} ...", file=sys.stderr, flush=True)
        for table in importlib.import_module(f"bench_{name}").tables():
            sections.append(table.markdown())
            print(sections[-1], flush=True)
    if not sys.argv[1:]:
        head = f"# Benchmarks\n\nWritten by `make bench`. {machine()}\n"
        REPORT.write_text("\n".join([head, *sections]))


if __name__ == "__main__":
    main()
