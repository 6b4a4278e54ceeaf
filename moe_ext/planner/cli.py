"""The command ``python -m moe_ext plan``."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from moe_ext._files import replacing
from moe_ext.comm.rates import CostTable
from moe_ext.planner.apply import plan_problem
from moe_ext.planner.axes import NAMES
from moe_ext.planner.cluster import ClusterSpec
from moe_ext.planner.job import Job
from moe_ext.planner.plan import Plan, plan
from moe_ext.planner.profile import measure_cluster
from moe_ext.planner.report import html_report
from moe_ext.planner.spec import model_spec


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# Type and help text of the option for each field of a job. Defaults are those of `Job`.
_OF_JOB: dict[str, tuple[Callable[[str], object], str]] = {
    "seq_len": (int, "tokens of a sequence"),
    "global_batch": (int, "sequences of a step"),
    "dtype": (str, "of products and messages"),
    "load": (_number, "of experts: s of Zipf's law, W0 to W7, or a JSON file of tokens"),
    "capacity_factor": (
        float,
        "rows of an expert over those of an even load, the others are dropped",
    ),
    "local_steps": (int, "inner steps of a round of DiLoCo (%(default)s)"),
    "local_codec": (str, "of rounds: int8, say, or sparseloco (%(default)s)"),
    "layer_dtype": (str, "of another program's layers, float8 say, which --cluster has to name"),
    "node_limit": (int, "nodes with the experts of a token (0 for any)"),
}
_HIDDEN = {
    "exchanges": "rows to experts and back",
    "gradients": "messages of gradients",
    "tensor": "messages of tensor parallelism",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("--model", required=True, help="config.json or name of a preset")
    parser.add_argument("--cluster", required=True, help="YAML or JSON file, or name of a preset")
    parser.add_argument(
        "--gpus",
        dest="num_ranks",
        metavar="GPUS",
        type=int,
        required=True,
        help="processors of the job",
    )
    for name, (kind, text) in _OF_JOB.items():
        option, default = f"--{name.replace('_', '-')}", getattr(Job, name)
        parser.add_argument(option, type=kind, default=default, help=text)
    parser.add_argument(
        "--eager-attention", action="store_true", help="attention has no fused kernel"
    )
    for name, what in _HIDDEN.items():
        parser.add_argument(
            f"--hidden-{name}", action="store_true", help=f"another program has {what} behind work"
        )
    parser.add_argument(
        "--fix", action="append", default=[], metavar="AXIS=VALUE", help="a value to keep, pp=1 say"
    )
    parser.add_argument(
        "--why-not", action="append", default=[], metavar="AXIS=VALUE", help="explain another value"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="measure rates of products, memory, launches and codecs here, with a layer of the "
        "model",
    )
    parser.add_argument(
        "--costs", help="cost table of codecs, as CostTable.save or the benchmark codecs writes it"
    )
    parser.add_argument("--out", default="plan.json", help="file of the plan")
    parser.add_argument("--report", help="file of a report in HTML")


def _pair(text: str) -> dict[str, int | str | None]:
    name, is_pair, value = text.partition("=")
    if not is_pair:
        raise ValueError(f"plan: expected AXIS=VALUE, got {text!r}")
    if value == "none" and None in NAMES.get(name, (None,)):
        return {name: None}
    return {name: int(value) if value.isdigit() else value}


def _rates(cluster: ClusterSpec) -> str:
    ((dtype, rate),) = cluster.flops.items()
    return (
        f"{rate / 1e9:.4g} Gflop/s in {dtype}, {cluster.memory_bandwidth / 1e9:.4g} GB/s, "
        f"{1e6 * cluster.layer_seconds:.4g} us of launches a layer"
    )


class _Progress(threading.Thread):
    """Reports progress after the first second, by a bar on a terminal or by lines elsewhere."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stage = "reading the model"
        self._done, self._total = 0, 1
        self._over = threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        self.stage = "simulating pipelines" if done == total else "costing"

    def __enter__(self) -> _Progress:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        began, pause, is_terminal = time.monotonic(), 1.0, sys.stderr.isatty()
        while not self._over.wait(pause):
            text = f"{self.stage}, {time.monotonic() - began:.0f} s"
            if self._total > 1:
                text = f"{self._done}/{self._total} meshes, {text}"
            if is_terminal:
                filled, pause = 30 * self._done // self._total, 0.5
                bar = f"[{'#' * filled}{'.' * (30 - filled)}] {text}"
                print(f"\r{bar:<80}", end="", file=sys.stderr, flush=True)
            else:
                # Pauses double, because a log keeps every line.
                pause *= 2
                print(f"moe_ext plan: {text}", file=sys.stderr, flush=True)
        if is_terminal and pause < 1.0:
            print(file=sys.stderr)


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise ValueError, before the search, for outputs that cannot be written or replace inputs."""
    known: dict[Path, str] = {}
    for name in ("model", "cluster", "load", "costs", "out", "report"):
        given = getattr(arguments, name)
        if not isinstance(given, str):
            continue
        path, is_written = Path(given).resolve(), name in ("out", "report")
        if is_written and (not path.parent.is_dir() or path.is_dir()):
            raise ValueError(
                f"plan: expected --{name} to be a file in a folder that exists, got {given!r}"
            )
        # Two options may name the same pipe or terminal, which can take both texts.
        is_plain = path.is_file() or not path.exists()
        if is_written and is_plain and path in known:
            raise ValueError(
                f"plan: expected --{name} to be another file than {known[path]}, got {given!r}"
            )
        known[path] = f"--{name}"


def _found(arguments: argparse.Namespace, progress: _Progress) -> tuple[Plan, dict[str, str]]:
    """Return the plan, and the answers to the questions of `--why-not`."""
    fixed: dict[str, int | str | None] = {}
    for text in arguments.fix:
        pair = _pair(text)
        if not fixed.keys().isdisjoint(pair):
            raise ValueError(f"plan: expected --fix to name each axis once, got {arguments.fix}")
        fixed |= pair
    others = {text: _pair(text) for text in arguments.why_not}
    model, cluster = model_spec(arguments.model), ClusterSpec.of(arguments.cluster)
    if arguments.profile:
        progress.stage = "measuring rates"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        cluster = measure_cluster(model, cluster, dtype=arguments.dtype, device=device)
        print(f"{cluster.source}: {_rates(cluster)}")
    if arguments.costs is not None:
        cluster = replace(cluster, costs=CostTable.load(arguments.costs))
    job = {each.name: getattr(arguments, each.name) for each in fields(Job)}
    found = plan(model, cluster, **job, fixed=fixed, progress=progress)
    reasons = {}
    for text, values in others.items():
        progress.stage = f"looking at {text}"
        try:
            reasons[text] = found.why_not(**values)
        except ValueError as error:
            reasons[text] = f"{text}: {error}"
    return found, reasons


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    try:
        _check_files(arguments)
        with _Progress() as progress:
            found, reasons = _found(arguments, progress)
        print(found)
        for reason in reasons.values():
            print(f"why not {reason}")
        found.to_json(arguments.out)
        if arguments.report is not None:
            with replacing(arguments.report) as file:
                file.write_text(html_report(found, why_not=reasons, plan_file=arguments.out))
    except (ValueError, ImportError, OSError) as error:
        print(f"moe_ext plan: {error}", file=sys.stderr)
        return 2
    if problem := plan_problem(found):
        print(f"Nothing builds it yet: {problem}; other options give another plan")
        return 0
    print(f"{arguments.out} has the plan; in the folder of moe_ext this trains by it, on text:")
    print(found.commands(plan_file=arguments.out)["torchrun"])
    print(
        f"A script of your own calls moe_ext.planner.Plan.from_json({arguments.out!r}).apply(model)"
    )
    return 0
