"""Runs every benchmark and rewrites docs/benchmarks.md; ``run.py gating`` prints that one.

``run.py --keep gating`` also puts its tables in the place of those in the report. The figures are
kept in docs/benchmarks.json, and every run prints its ratios to those. A report is of one
processor: on another than that of docs/benchmarks.md it is docs/benchmarks/<processor>.md.
"""

import importlib
import json
import re
import sys
import time
from pathlib import Path

import aims
import torch
from _harness import Table, compare, cpu_model, keep_memory, machine

BENCHMARKS = (
    "moe_layer",
    "gating",
    "permutation",
    "activation",
    "grouped_gemm",
    "routers",
    "overhead",
    "growth",
    "memory",
    "huggingface",
    "compat",
    "attention",
    "recurrence",
    "recurrent_ranks",
    "compression",
    "codecs",
    "sparsity",
    "allreduce",
    "expert_parallel",
    "pipeline",
    "optim",
    "weight_sync",
    "balance",
    "planner",
    "planner_memory",
    "planner_runs",
    "search",
)
# Run by name alone, for the time that they take: twenty minutes and more.
BY_NAME = ("auto_dispatch", "convergence", "dtensors", "local_steps")
REPORT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def run(name: str) -> list[Table]:
    """The tables of one benchmark, printed as they come."""
    start = time.perf_counter()
    print(f"benchmark {name} ...", file=sys.stderr, flush=True)
    tables = importlib.import_module(f"bench_{name}").tables()
    for table in tables:
        print(table.markdown(), flush=True)
    print(f"benchmark {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return tables


def merged(report: str, tables: list[Table]) -> str:
    """A report with tables in the place of those of the same title, new ones at the end.

    The table of aims comes first.
    """
    head, *sections = re.split(r"^(?=## )", report, flags=re.MULTILINE)
    by_title = {section.splitlines()[0].removeprefix("## "): section for section in sections}
    by_title = {title: section.rstrip("\n") + "\n" for title, section in by_title.items()}
    by_title |= {table.title: table.markdown() for table in tables}
    by_title.pop(aims.TITLE, None)
    found = aims.table(by_title)
    first = [found.markdown()] if found.rows else []
    return "\n".join([head.rstrip("\n") + "\n", *first, *by_title.values()])


def report_of(processor: str, first: Path = REPORT) -> Path:
    """The report of a processor: the first one if that is its own, or nobody's yet."""
    figures = first.with_suffix(".json")
    if not figures.exists() or processor in json.loads(figures.read_text())["machine"][0]:
        return first
    return first.with_suffix("") / f"{re.sub('[^a-z0-9]+', '-', processor.lower()).strip('-')}.md"


def main() -> None:
    """Runs the benchmarks named on the command line, or all and keeps the report."""
    names = [name for name in sys.argv[1:] if name != "--keep"]
    unknown = [name for name in names if name not in (*BENCHMARKS, *BY_NAME)]
    if unknown:
        sys.exit(f"run.py: expected benchmarks of {(*BENCHMARKS, *BY_NAME)}, got {unknown}")
    keep_memory()
    torch.manual_seed(0)
    path = report_of(cpu_model())
    kept = path.with_suffix(".json")
    last = json.loads(kept.read_text()) if kept.exists() else {"tables": {}}
    about = machine()
    tables = [table for name in names or BENCHMARKS for table in run(name)]
    figures = {table.title: table.figures() for table in tables}
    for title, found in figures.items():
        print(compare(title, found, last["tables"].get(title, {})), file=sys.stderr)
    if names and "--keep" not in sys.argv:
        return
    written = "Written by `make bench`; other processors have pages in `docs/benchmarks`."
    report = "\n\n".join(["# Benchmarks", written, *about])
    if names and path.exists():
        # Tables that were not run again were measured on the machine that the report names.
        report, about = path.read_text(), last.get("machine", about)
        figures = last["tables"] | figures
    path.parent.mkdir(exist_ok=True)
    # Pages of other processors lie a folder deeper than the charts.
    charts = "](images/" if path == REPORT else "](../images/"
    path.write_text(merged(report, tables).replace("](images/", charts))
    kept.write_text(json.dumps({"machine": about, "tables": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
