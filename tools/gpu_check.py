"""Checks and measures the CUDA operators on the GPU at hand; writes one JSON file.

    python tools/gpu_check.py [--out gpu.json] [--report docs/gpu.md] [--tune] [--pretend]

Needs no network: it takes the Python it runs in with what that has (torch 2.11 or later with CUDA,
pytest, ninja, cmake) and nvcc. It builds for this card alone and goes through `plan`, the riskiest
steps first. No faulty kernel ends the check: operators, files of tests and families of figures run
in processes of their own, and after a process that ended a new one goes on behind the cause.
Figures come line by line, and the JSON is written after each step. Steps that the time did not
reach are listed and are no failures; the exit code is 1 if a step failed. With --report alone it
turns the JSON into a page. With --pretend it goes through the plan without a device: operators on
the emulated one, all else by `PRETENDED` times. With --tune it builds, times each alternative of
benchmarks/gpu_tune.py and writes which won to `gpu-tune.json` beside --out.
"""

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_estimates
import surviving_tests

ROOT = Path(__file__).resolve().parent.parent
# Findings by reading and by the compiler, for the page.
NOTES = Path(__file__).with_name("gpu_notes.md")
NO_SANITIZER = "not run: compute-sanitizer is not installed"
# Small inputs of every kernel: the sanitizer makes a launch some hundred times slower.
SANITIZED_TESTS = [
    "tests/ops/test_attention.py::test_edge_sizes_and_key_heads",
    "tests/ops/test_permutation.py::test_tables_and_rows_equal_the_reference",
    "tests/ops/test_activation.py::test_gated_equals_the_reference",
    "tests/ops/test_gating.py::test_gate_of_any_number_of_tokens",
    "tests/ops/test_quantize.py::test_equals_the_reference",
    "tests/ops/test_scale_into.py::test_unaligned",
    "tests/ops/test_sparse_blocks.py::test_blocks_equal_the_reference",
    "tests/ops/test_topk.py::test_topk_equals_the_reference",
]
SMALL = "257 or swiglu or unaligned"
# Scripts of benchmarks/ and their families: the layer's before the tests, the others behind them.
FIRST_FIGURES = (
    ("gpu_kernels", "layer"),
    ("gpu_layer_parts", "layer"),
    ("gpu_layer_parts", "products"),
)
FIGURES = (
    *(("gpu_attention", name) for name in ("chosen", "errors", "rates", "ring")),
    *(("gpu_layer_parts", name) for name in ("ceilings", "memory", "peers")),
    *(
        ("gpu_kernels", name)
        for name in ("attention", "permutation", "activation", "router", "gating", "compression")
    ),
)
TUNED = tuple(("gpu_tune", family) for family in ("products", "attention", "pipelines"))
# Seconds of each step at most, and of all together: a step gets no more than what is left.
LIMIT = {
    **{"build": 240, "operators": 70, "layer": 40, "tests": 150, "sanitizer": 60, "figures": 60},
    "tune": 300,
}
TOTAL = 570
# Seconds that the tests leave for what comes behind them.
RESERVED = 100
# Seconds that steps should take on an H100 with 16 cores, by the first word of their names: of a
# process of tests, of which several run at once, and of a family of figures.
PRETENDED = {
    **{"build": 130, "operators": 40, "layer": 25, "expert": 20, "tests": 13},
    **{"compute-sanitizer": 45, "gpu_kernels": 9, "gpu_layer_parts": 12, "gpu_attention": 11},
    "gpu_tune": 60,
}
PRETENDED_CHOICES = (("slow", 3.0), ("fast", 2.0))


@dataclass(frozen=True)
class Step:
    """Result of a command: status, seconds, last lines, and all its output."""

    name: str
    state: str  # passed, failed, timed out, or why it was not run
    seconds: float
    tail: str = ""
    output: str = field(default="", repr=False)


# A step, and the rows of figures that it printed.
Found = tuple[Step, list[dict[str, Any]]]
IS_OVER = "time over"


class Clock:
    """Seconds since the beginning; those of `pretended` steps count without passing."""

    def __init__(self) -> None:
        self.began, self.pretended = time.monotonic(), 0.0
        self.lock = threading.Lock()

    def now(self) -> float:
        """Seconds."""
        return time.monotonic() - self.began + self.pretended

    def pretend(self, seconds: float) -> None:
        """Lets so much time pass."""
        with self.lock:
            self.pretended += seconds


class PretendedClock(Clock):
    """Pretended seconds alone, the same on every machine."""

    def now(self) -> float:
        """Seconds."""
        return self.pretended


CLOCK = Clock()


def run(name: str, command: list[str], limit: int, env: dict[str, str] | None = None) -> Step:
    """Runs a command in the repository, with the repository's package first on the path."""
    start, own = CLOCK.now(), limit
    limit = min(limit, int(TOTAL - start))
    if limit < 5:
        print(f"gpu_check: {name}: no time is left", flush=True)
        return Step(name, f"{IS_OVER}: not reached", 0.0)
    print(f"gpu_check: {name}: {' '.join(map(str, command))}", flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        state = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        # The whole group: a compiler or a sanitized process that lives on would hold the pipe.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        whose = "its own" if limit == own else "of all"
        state = f"{IS_OVER} after {limit} s ({whose})"
    tail = "\n".join(output.splitlines()[-30:])
    if state != "passed":
        print(tail, flush=True)
    print(f"gpu_check: {name}: {state}", flush=True)
    return Step(name, state, CLOCK.now() - start, tail, output)


def pretend(
    name: str,
    command: list[str],
    limit: int,
    env: dict[str, str] | None = None,
    *,
    emulates: bool = True,
) -> Step:
    """In place of `run`: passes after its `PRETENDED` seconds, where as many are left."""
    left = min(limit, int(TOTAL - CLOCK.now()))
    if left < 5:
        return Step(name, f"{IS_OVER}: not reached", 0.0)
    kind, *families = name.split()
    seconds = PRETENDED[kind] * (len(families) if kind.startswith("gpu_") else 1)
    CLOCK.pretend(min(seconds, left))
    state = "passed" if seconds <= left else f"{IS_OVER} after {left} s (of all)"
    if kind == "operators" and emulates:
        emulated = [*command[:2], "simt", *command[3:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(emulated, cwd=ROOT, env=environment, check=False)
        state = state if done.returncode == 0 else "failed"
    if kind == "tests" and env is not None and state == "passed":
        records = ({"collected": "1"}, {"test": name, "outcome": "passed"}, {"end": "reached"})
        text = "".join(json.dumps(record) + "\n" for record in records)
        Path(env["MOE_EXT_RESULTS"]).write_text(text)
    rows: list[dict[str, object]] = []
    for family in families if kind.startswith("gpu_") else ():
        row = {"section": f"{kind} {family}", "us": 1.0, "SM MHz": "1980", "W": "650.0"}
        rows += [{"family": family}, row]
        if kind == "gpu_tune":
            rows[-1:] = [{**row, "choice": name, "us": us} for name, us in PRETENDED_CHOICES]
    return Step(name, state, min(seconds, left), "", "\n".join(map(json.dumps, rows)))


def device_facts() -> dict[str, object]:
    """Return the card, driver and versions that the figures belong to."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "num_sms": properties.multi_processor_count,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": said("git", "describe", "--always", "--dirty"),
    }


def said(*command: str) -> str:
    """The first line that a program prints; unknown where it fails or is not installed."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    lines = result.stdout.strip().splitlines()
    return lines[0] if lines and result.returncode == 0 else "unknown"


def build_step(capability: str) -> Step:
    """Builds what an install builds, for one architecture."""
    tools = {name: find_tool(name) for name in ("cmake", "ninja", "nvcc")}
    if not all(tools.values()):
        found = ", ".join(f"{name} {path}" for name, path in tools.items())
        return Step("build", f"failed: {found}", 0.1)
    folders = [str(Path(path).parent) for path in tools.values() if path]
    env = {
        "MOE_EXT_CUDA": "1",
        "MOE_EXT_WERROR": "0",  # make asks for it; an install does not
        "TORCH_CUDA_ARCH_LIST": capability,
        "MAX_JOBS": str(os.cpu_count()),
        "PATH": os.pathsep.join([*folders, os.environ.get("PATH", "")]),
    }
    command = [sys.executable, "-c", "import setup; setup.build_in_place()"]
    step = run("build", command, LIMIT["build"], env)
    # Nothing can be checked then.
    return replace(step, state=f"failed: {step.state}") if step.state.startswith(IS_OVER) else step


def find_tool(name: str) -> str | None:
    """A program beside this Python, on PATH, or in the CUDA toolkit."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    for place in (str(Path(sys.executable).parent), None, str(toolkit)):
        found = shutil.which(name, path=place)
        if found:
            return found
    return None


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


# Modules made of many operators: tools/gpu_operators.py knows them by these names.
LAYER = ("MoELayer", "attention_by_a_library")


def operator_step(name: str, results: Path, *names: str) -> Step:
    """Operators once; the first that failed is run again for the name of its kernel."""
    results.unlink(missing_ok=True)
    command = [sys.executable, "tools/gpu_operators.py", "cuda", str(results), *names]
    step = run(name, command, LIMIT[name])
    found = surviving_tests.records(results)
    count = collections.Counter(record["state"] for record in found)
    bad = [record for record in found if record["state"] != "passed"]
    if not bad:
        return replace(step, tail=f"{dict(count)}")
    # Ones that end their process come first: a wrong number is most likely their neighbours' fault.
    first = min(bad, key=lambda record: record["state"] == "failed")
    state = f"failed: first {first['operator']} ({first['why']}){faulty_kernel(first['operator'])}"
    told = [f"{r['operator']}: {r['state']}: {r['why']}" for r in bad]
    return Step(name, state, step.seconds, "\n".join([f"{dict(count)}", *told]))


def faulty_kernel(operator: str) -> str:
    """The kernel of an operator that compute-sanitizer names, as an end of a sentence."""
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        return ""
    here = [sys.executable, "tools/gpu_operators.py", "cuda", os.devnull, "--here", operator]
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    output = run(f"kernel of {operator}", [sanitizer, *here], LIMIT["sanitizer"], env).output
    named = re.search(r"^=+ (\S.*)\n=+ +at (?:void )?([\w:~]+)", output, re.MULTILINE)
    return f", kernel {named[2]}: {named[1]}" if named else ", no kernel named by compute-sanitizer"


SUITE = ("tests/ops", "tests/gpu")
CHOSEN = ("-k", "cuda or gpu")
# Files with the kernels that are most likely to break a device: each has a process of its own.
RISKIEST = ("attention", "grouped_gemm", "permutation", "quantize", "recurrence")
ONE_RANK = ["tests/gpu/test_layer_on_gpu.py", "-k", "one_nccl_rank or over_nccl"]


def suite_steps(folder: Path) -> Iterator[Step]:
    """Tests: a process for each of the riskiest files, and one for all others."""
    files = sorted(file for name in SUITE for file in (ROOT / name).glob("test_*.py"))
    parts = {name: [file for file in files if file.stem == f"test_{name}"] for name in RISKIEST}
    alone = [file for part in parts.values() for file in part]
    parts["the others"] = [file for file in files if file not in alone]
    now = CLOCK.now()
    deadline = max(min(now + LIMIT["tests"], TOTAL - RESERVED), now + 30)
    if deadline > TOTAL:
        deadline = now
    with ThreadPoolExecutor(len(parts)) as pool:
        steps = [
            pool.submit(
                tests_step, name, part, folder / f"{name.replace(' ', '_')}.jsonl", deadline
            )
            for name, part in parts.items()
            if part
        ]
        for step in as_completed(steps):
            yield step.result()


def tests_step(name: str, files: list[Path], results: Path, deadline: float) -> Step:
    """Tests of some files, in a new process behind each that ended its own."""
    results.unlink(missing_ok=True)
    name, start = f"tests of {name}", CLOCK.now()
    num_ran, state, records = 0, "", list[dict[str, str]]()
    env = {"MOE_EXT_RESULTS": str(results), "OMP_NUM_THREADS": "2"}
    command = [*PYTEST, "-p", "tools.surviving_tests", *map(str, files), *CHOSEN]
    # A process that runs nothing would be started for ever.
    while num_ran < len(surviving_tests.ended(results)) or not state:
        num_ran = len(surviving_tests.ended(results))
        step = run(name, command, max(int(deadline - CLOCK.now()), 0), env)
        state, records = step.state, surviving_tests.records(results)
        if state.startswith(IS_OVER) or any("end" in record for record in records):
            break
    outcomes = surviving_tests.ended(results)
    # The time ended the last one, not its own fault.
    over = state.startswith(IS_OVER)
    if over and outcomes and "outcome" not in records[-1]:
        outcomes.pop(records[-1].get("test", ""), None)
    count = collections.Counter(outcomes.values())
    bad = {test: outcome for test, outcome in outcomes.items() if outcome in ("failed", "died")}
    complete = any("end" in record for record in records)
    collected = next((r["collected"] for r in records if "collected" in r), "?")
    cut = "" if complete else f"; {state}: {len(outcomes)} of {collected} tests ran"
    if bad or not (complete or over):
        state = f"failed: {count['failed']} failed, {count['died']} ended their process{cut}"
    else:
        state = "passed" if complete else cut.removeprefix("; ")  # and where nothing was selected
    texts = {r["test"]: r["text"].strip() for r in records if "text" in r}
    last = [f"{test}: {texts.get(test, '?').splitlines()[-1:]}" for test in bad]
    told = "\n".join([f"{dict(count)}", *last])
    return Step(name, state, CLOCK.now() - start, told)


def sanitizer_step(tool: str) -> Step:
    """A few tests under a tool of compute-sanitizer."""
    sanitizer, name = find_tool("compute-sanitizer"), f"compute-sanitizer {tool}"
    if sanitizer is None:
        return Step(name, NO_SANITIZER, 0.0)
    # The caching allocator would hide an access past the end of a tensor.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", "--target-processes=all"]
    selected = [*SANITIZED_TESTS, "-k", f"cuda and ({SMALL})"]
    return run(name, [*command, *PYTEST, *selected], LIMIT["sanitizer"], env)


def figure_steps(wanted: Iterable[tuple[str, str]]) -> Iterator[Found]:
    """Figures: a process a script, and a new one behind the family that ended it."""
    left = collections.deque(
        (script, [name for _, name in group])
        for script, group in itertools.groupby(wanted, key=lambda one: one[0])
    )
    while left:
        script, families = left.popleft()
        command = [sys.executable, f"benchmarks/{script}.py", "cuda", *families]
        limit = LIMIT["tune" if script == "gpu_tune" else "figures"] + 15 * len(families)
        step = run(f"{script} {' '.join(families)}", command, limit)
        rows = rows_in(step.output)
        begun = [str(row["family"]) for row in rows if "family" in row]
        if step.state != "passed" and begun and families[len(begun) :]:
            left.appendleft((script, families[len(begun) :]))
        yield step, [row for row in rows if "family" not in row]


def rows_in(output: str) -> list[dict[str, Any]]:
    """Lines that are a JSON object: libraries print others, and the last one may be cut off."""
    rows = []
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def plan(capability: str, folder: Path) -> Iterator[tuple[str, Callable[[], Iterable[Found]]]]:
    """Names of steps and what runs each, the most telling first."""

    def alone(step: Callable[[], Step]) -> Callable[[], Iterable[Found]]:
        return lambda: [(step(), [])]

    def sanitizer(tool: str) -> tuple[str, Callable[[], Iterable[Found]]]:
        return tool, alone(lambda: sanitizer_step(tool))

    yield "build", alone(lambda: build_step(capability))
    yield "operators", alone(lambda: operator_step("operators", folder / "operators.jsonl"))
    yield "layer", alone(lambda: operator_step("layer", folder / "layer.jsonl", *LAYER))
    one_rank = [*PYTEST, *ONE_RANK]
    yield "expert", alone(lambda: run("expert parallel, one rank", one_rank, LIMIT["layer"]))
    yield "first figures", lambda: figure_steps(FIRST_FIGURES)
    yield sanitizer("memcheck")
    yield "tests", lambda: ((step, []) for step in suite_steps(folder))
    yield "figures", lambda: figure_steps(FIGURES)
    yield sanitizer("racecheck")
    yield sanitizer("synccheck")


def tune_plan(capability: str, folder: Path) -> Iterator[tuple[str, Callable[[], Iterable[Found]]]]:
    """As `plan`, of --tune."""
    yield "build", lambda: [(build_step(capability), [])]
    yield "alternatives", lambda: figure_steps(TUNED)


def expected_steps(planned: Callable[..., Any]) -> list[Step]:
    """Steps of a plan with the seconds that they should take; nothing runs."""
    global run, find_tool, CLOCK
    before = run, find_tool, CLOCK
    run, find_tool, CLOCK = functools.partial(pretend, emulates=False), str, PretendedClock()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = [step for _, steps in planned("9.0", Path(folder)) for step, _ in steps()]
        # Processes of tests pass time side by side, and end in any order.
        tests = sorted((s.name for s in found if s.name.startswith("tests of ")), reverse=True)
        return [
            replace(step, name=tests.pop(), seconds=PRETENDED["tests"])
            if step.name.startswith("tests of ")
            else step
            for step in found
        ]
    finally:
        run, find_tool, CLOCK = before


def step_lines(measured: dict[str, Any] | None, tuned: dict[str, Any] | None) -> list[str]:
    """List each step of both commands with its expected seconds, and measured ones if it ran."""
    lines = ["## Steps", "", "| command | step | expected s | measured s | result |"]
    lines.append("|---|---|---|---|---|")
    for command, planned, result in (
        ("gpu-check", plan, measured),
        ("gpu-tune", tune_plan, tuned),
    ):
        steps = expected_steps(planned)
        expected = {
            step.name: f"{step.seconds:.0f}{', time over' * step.state.startswith(IS_OVER)}"
            for step in steps
        }
        ran = {step["name"]: step for step in (result or {}).get("steps", ())}
        for name in {**expected, **ran}:
            found = (
                f"{ran[name]['seconds']:.0f} | {ran[name]['state']}"
                if name in ran
                else "never run | "
            )
            lines.append(f"| {command} | {name} | {expected.get(name, '')} | {found} |")
        total = sum(step.seconds for step in steps)
        lines.append(f"| {command} | all | {total:.0f} of {TOTAL} | | |")
    return [*lines, ""]


# The columns that name one contest in the rows of benchmarks/gpu_tune.py.
CONTEST = ("section", "T", "routing", "dtype", "D", "S")


def winners(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest choice of each contest, and how many times as long the next one took."""
    contests: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "choice" in row and "us" in row:
            contests.setdefault(tuple(row.get(name) for name in CONTEST), []).append(row)
    found = []
    for names, entries in contests.items():
        first, *others = sorted(entries, key=lambda row: row["us"])
        labels = {name: value for name, value in zip(CONTEST, names, strict=True) if value}
        won = {"what": labels.pop("section"), **labels, "won": first["choice"], "us": first["us"]}
        if others:
            won |= {"next": others[0]["choice"], "times": others[0]["us"] / first["us"]}
        found.append(won)
    return found


def check(out: Path, facts: dict[str, object], planned: Callable[..., Any] = plan) -> int:
    """Runs every step, even after one that failed, unless nothing was built."""
    result: dict[str, Any] = {"device": facts, "steps": [], "not_reached": [], "rows": []}
    # Many files, that need not come back from a machine that is lent.
    folder = ROOT / "build" / "gpu-check"
    folder.mkdir(parents=True, exist_ok=True)

    def keep(step: Step, rows: Iterable[dict[str, Any]] = ()) -> None:
        found = asdict(step)
        del found["output"]
        result["steps"].append(found)
        result["rows"] += rows
        if step.state.startswith(IS_OVER):
            result["not_reached"].append(step.name)
        if planned is tune_plan:
            result["won"] = winners(result["rows"])
        out.write_text(json.dumps(result, indent=1) + "\n")

    for name, steps in planned(str(facts["compute_capability"]), folder):
        # A fault of this program costs its own steps alone.
        try:
            for step, rows in steps():
                keep(step, rows)
        except Exception as error:
            why = f"failed: {type(error).__name__}: {error}"
            keep(Step(name, why, 0.0, traceback.format_exc()))
        if name == "build" and result["steps"][0]["state"] != "passed":
            break
    print(f"gpu_check: wrote {out}; not reached: {', '.join(result['not_reached']) or 'nothing'}")
    return int(any(step["state"].startswith("failed") for step in result["steps"]))


def page(result: dict[str, Any] | None, tuned: dict[str, Any] | None = None) -> str:
    """docs/gpu.md; without a result it says that nothing was measured."""
    written = "Written by `make gpu-report` from what `make gpu-check` found."
    lines = ["# Figures from a GPU", "", written, ""]
    notes = [NOTES.read_text()]
    if result is None:
        lines += [
            "Not measured: no GPU has run this version.",
            "",
            *notes,
            *step_lines(None, tuned),
        ]
        return "\n".join([*lines, *tune_lines(tuned), *estimate_lines(), ""])
    device = result["device"]
    lines += [
        f"{device['name']}, compute capability {device['compute_capability']}, "
        f"{device['num_sms']} SMs, {device['memory_gib']} GiB; driver {device['driver']}, "
        f"torch {device['torch']} (CUDA {device['cuda']}), revision {device['commit']}.",
        "",
        *notes,
        *step_lines(result, tuned),
    ]
    for title, rows in sections(result["rows"]).items():
        lines += [f"## {title}", "", *table(rows), ""]
    kernels = [row["kernel"] for row in result["rows"] if "kernel" in row]
    layer = next((row["layer"] for row in result["rows"] if "layer" in row), {})
    lines += [*layer_lines(layer), "", *kernel_lines(kernels, result["rows"]), ""]
    return "\n".join([*lines, *tune_lines(tuned), *estimate_lines(result["rows"]), ""])


def tune_lines(tuned: dict[str, Any] | None) -> list[str]:
    """The winners among alternatives, or that none was tried."""
    lines = ["## Alternatives", ""]
    if tuned is None:
        return [*lines, "Not run: `make gpu-tune` times each one and writes which won.", ""]
    device = tuned["device"]
    lines += [f"{device['name']}, revision {device['commit']}; {len(tuned['won'])} contests.", ""]
    return [*lines, *(table(tuned["won"]) if tuned["won"] else ["None was timed."]), ""]


def sections(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of a table by its title."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "section" in row:
            found.setdefault(row["section"], []).append(row)
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A table with a column for each name that some row has."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "section"))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = (row.get(name) for name in names)
        lines.append("| " + " | ".join(map(gpu_estimates.figure, cells)) + " |")
    return lines


def kernel_lines(kernels: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    """Tables of each kernel beside a copy of as many bytes."""
    copies = [
        row["copy_gigabytes_per_second"] for row in rows if "copy_gigabytes_per_second" in row
    ]
    if not kernels or not copies:
        return ["Kernels: not measured."]
    lines = [
        "## Kernels",
        "",
        f"A copy on the device moves {max(copies):.0f} GB/s, read and written bytes together; each "
        "share is of the copy in its own process.",
        "",
        "| kernel | shape | dtype | us | GB/s | share of copy | copy GB/s | SM MHz | W |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for k in kernels:
        rate, share = k["gigabytes_per_second"], k["share_of_copy"]
        moved = "| |" if rate is None else f"{rate:.0f} | {100 * share:.0f} % |"
        card = (k.get(name) for name in ("copy GB/s", "SM MHz", "W"))
        row = f"| {k['name']} | {k['shape']} | {k['dtype']} | {k['microseconds']:.1f} | {moved}"
        lines.append(f"{row} {' | '.join(map(gpu_estimates.figure, card))} |")
    return lines


def estimate_lines(rows: Iterable[dict[str, Any]] = ()) -> list[str]:
    """Expected figures beside the measured ones."""
    rows = list(rows)
    kernels = [row["kernel"] for row in rows if "kernel" in row]
    rates = ", ".join(f"{rate} TB/s on an {name}" for name, rate in gpu_estimates.MEMORY.items())
    return [
        "## Estimates",
        "",
        f"Made without a GPU, by `tools/gpu_estimates.py`: bytes by {rates}, products by "
        f"{gpu_estimates.PRODUCTS:.0f} TFLOP/s, the larger of both by the share of that limit that "
        "a reading of the kernel's machine code for sm_90 lets expect, and "
        f"{gpu_estimates.LAUNCH_MICROSECONDS:.0f} us a launch. Occupancy is what registers leave "
        "room for.",
        "",
        *gpu_estimates.table(kernels),
        "",
        "Of the other figures; products and attention by what libraries reach, memory by the sums "
        "in [design.md](design.md):",
        "",
        *gpu_estimates.other_table(rows),
    ]


def layer_lines(layer: dict[str, Any]) -> list[str]:
    """The whole layer beside its peer, or by itself where there was none."""
    if "ours_microseconds" not in layer:
        return ["Layer: not measured."]
    ours, products = (layer[f"{name}_microseconds"] / 1e3 for name in ("ours", "products"))
    peer = layer.get("peer_microseconds")
    cells = ["", ""] if peer is None else [f"{peer / 1e3:.2f}", f"{ours / peer * 1e3:.2f}"]
    beside = f"Peer: {layer['peer']}."
    if peer is not None:
        beside = (
            "Same weights, same routing; outputs differ by at most "
            f"{100 * layer['difference']:.2f} % of the largest."
        )
    return [
        f"## Layer ({layer['shape']}, {layer['dtype']}, forward and backward)",
        "",
        "| MoELayer ms | " + layer["peer"].partition(":")[0] + " ms | MoELayer / peer | "
        "grouped products alone ms | their share of MoELayer | SM MHz | W |",
        "|---|---|---|---|---|---|---|",
        f"| {ours:.2f} | {' | '.join(cells)} | {products:.2f} | {100 * products / ours:.0f} % | "
        f"{layer.get('SM MHz', '')} | {layer.get('W', '')} |",
        "",
        f"{beside} The layer in one CUDA graph, forward and backward: {layer['graph']}.",
    ]


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--report", type=Path, help="write the page from --out, and check nothing")
    parser.add_argument("--tune", action="store_true", help="time alternatives, and check nothing")
    parser.add_argument("--pretend", action="store_true", help="the plan without a device")
    args = parser.parse_args()
    tuned = args.out.with_name("gpu-tune.json")
    if args.report and not args.pretend:
        found = [json.loads(p.read_text()) if p.exists() else None for p in (args.out, tuned)]
        args.report.write_text(page(*found))
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    out, planned = (tuned, tune_plan) if args.tune else (args.out, plan)
    if args.pretend:
        return check_pretended(out, planned)
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: expected a CUDA device, got none", file=sys.stderr)
        return 1
    return check(out, device_facts(), planned)


def check_pretended(out: Path, planned: Callable[..., Any] = plan) -> int:
    """The plan with the emulated device and pretended times."""
    global run, find_tool
    run, find_tool = pretend, str
    names = ("num_sms", "memory_gib", "driver", "torch", "cuda", "python", "commit")
    facts: dict[str, object] = {"name": "pretended", "compute_capability": "9.0"}
    return check(out, {**facts, **dict.fromkeys(names, "?")}, planned)


if __name__ == "__main__":
    sys.exit(main())
