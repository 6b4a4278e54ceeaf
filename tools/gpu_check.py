"""Checks and measures the CUDA operators on the GPU at hand; writes one JSON file.

    python tools/gpu_check.py [--out gpu.json] [--report docs/gpu.md]

Needs no network: it takes the Python it runs in with what that has (torch 2.11 or later with CUDA,
pytest, ninja, cmake) and nvcc. It builds for this card alone, runs every operator once, measures
the layer, runs the tests on the device, measures all else, and runs a few tests under
compute-sanitizer where that is installed. No faulty kernel ends it: each operator, file of tests
and family of figures is a process, tests go on in a new one behind a test that ended theirs,
figures come line by line, and the JSON is written after each step. With --report alone it turns the
JSON into a page. Exits with 1 if a step failed.
"""

import argparse
import collections
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpu_estimates
import surviving_tests

ROOT = Path(__file__).resolve().parent.parent
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
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
# Scripts of benchmarks/ and their families: the layer's before the tests, the others behind them.
FIRST_FIGURES = (
    ("gpu_layer_parts", "layer"),
    ("gpu_layer_parts", "products"),
    ("gpu_kernels", "layer"),
)
FIGURES = (
    ("gpu_attention", "chosen"),
    ("gpu_attention", "errors"),
    ("gpu_attention", "rates"),
    ("gpu_layer_parts", "ceilings"),
    ("gpu_attention", "ring"),
    ("gpu_layer_parts", "memory"),
    ("gpu_layer_parts", "peers"),
    *(
        ("gpu_kernels", name)
        for name in ("attention", "permutation", "activation", "router", "gating")
    ),
    ("gpu_kernels", "compression"),
)
# Seconds of each step, and of all together: a step gets no more than what is left.
LIMIT = {"build": 240, "operators": 45, "tests": 110, "sanitizer": 50, "figures": 60}
TOTAL = 570
# Seconds that tests leave for the figures behind them.
RESERVED = 180
STARTED = time.monotonic()


@dataclass(frozen=True)
class Step:
    """One command: how it ended, how long it took, its last lines, and all it printed."""

    name: str
    state: str  # passed, failed, timed out, or why it was not run
    seconds: float
    tail: str = ""
    output: str = field(default="", repr=False)


# A step, and the rows of figures that it printed.
Found = tuple[Step, list[dict[str, Any]]]


def run(name: str, command: list[str], limit: int, env: dict[str, str] | None = None) -> Step:
    """Runs a command in the repository, with the repository's package first on the path."""
    start = time.monotonic()
    limit = min(limit, int(TOTAL - (start - STARTED)))
    if limit < 5:
        print(f"gpu_check: {name}: no time is left", flush=True)
        return Step(name, f"not run: the {TOTAL} s of all steps are over", 0.0)
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
        state = f"timed out after {limit} s"
    tail = "\n".join(output.splitlines()[-30:])
    if state != "passed":
        print(tail, flush=True)
    print(f"gpu_check: {name}: {state}", flush=True)
    return Step(name, state, time.monotonic() - start, tail, output)


def device_facts() -> dict[str, object]:
    """What the figures were measured on."""
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
    return run("build", command, LIMIT["build"], env)


def find_tool(name: str) -> str | None:
    """A program beside this Python, on PATH, or in the CUDA toolkit."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    for place in (str(Path(sys.executable).parent), None, str(toolkit)):
        found = shutil.which(name, path=place)
        if found:
            return found
    return None


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def operator_step(results: Path) -> Step:
    """Every operator once; the first that failed is run again for the name of its kernel."""
    results.unlink(missing_ok=True)
    command = [sys.executable, "tools/gpu_operators.py", "cuda", str(results)]
    step = run("operators", command, LIMIT["operators"])
    found = surviving_tests.records(results)
    count = collections.Counter(record["state"] for record in found)
    bad = [record for record in found if record["state"] != "passed"]
    if not bad:
        return Step("operators", step.state, step.seconds, f"{dict(count)}")
    # Ones that end their process come first: a wrong number is most likely their neighbours' fault.
    first = min(bad, key=lambda record: record["state"] == "failed")
    state = f"failed: first {first['operator']} ({first['why']}){faulty_kernel(first['operator'])}"
    told = [f"{r['operator']}: {r['state']}: {r['why']}" for r in bad]
    return Step("operators", state, step.seconds, "\n".join([f"{dict(count)}", *told]))


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


def suite_steps(files: Iterable[Path], folder: Path) -> Iterator[Step]:
    """Tests, a process a file and a few at a time."""
    folder.mkdir(exist_ok=True)
    now = time.monotonic()
    deadline = max(min(now + LIMIT["tests"], STARTED + TOTAL - RESERVED), now + 30)
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        steps = [
            pool.submit(file_step, file, folder / f"{file.stem}.jsonl", deadline) for file in files
        ]
        for step in as_completed(steps):
            yield step.result()


def file_step(file: Path, results: Path, deadline: float) -> Step:
    """The tests of a file, in a new process behind each that ended its own."""
    results.unlink(missing_ok=True)
    start, num_records, state = time.monotonic(), -1, ""
    env = {"MOE_EXT_RESULTS": str(results), "OMP_NUM_THREADS": "2"}
    command = [*PYTEST, "-p", "tools.surviving_tests", str(file), *CHOSEN]
    name = f"tests of {file.stem}"
    # A process that adds nothing would be started for ever.
    while num_records < len(records := surviving_tests.records(results)):
        if any("end" in record for record in records):
            break
        num_records = len(records)
        step = run(name, command, max(int(deadline - time.monotonic()), 0), env)
        state = step.state
    outcomes = surviving_tests.ended(results)
    count = collections.Counter(outcomes.values())
    bad = {test: outcome for test, outcome in outcomes.items() if outcome in ("failed", "died")}
    complete = any("end" in record for record in records)
    if bad or not complete:
        cut = "" if complete else f"; {state} before the last"
        state = f"failed: {count['failed']} failed, {count['died']} ended their process{cut}"
    else:
        state = "passed"  # and where nothing was selected
    texts = {r["test"]: r["text"].strip() for r in records if "text" in r}
    last = [f"{test}: {texts.get(test, '?').splitlines()[-1:]}" for test in bad]
    return Step(name, state, time.monotonic() - start, "\n".join([f"{dict(count)}", *last]))


def sanitizer_steps() -> Iterator[Step]:
    """A few tests under each tool of compute-sanitizer."""
    sanitizer = find_tool("compute-sanitizer")
    for tool in SANITIZER_TOOLS:
        name = f"compute-sanitizer {tool}"
        if sanitizer is None:
            yield Step(name, "not run: compute-sanitizer is not installed", 0.0)
            continue
        # The caching allocator would hide an access past the end of a tensor.
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", "--target-processes=all"]
        selected = [*SANITIZED_TESTS, "-k", "cuda and (257 or swiglu)"]
        yield run(name, [*command, *PYTEST, *selected], LIMIT["sanitizer"], env)


def figure_steps(wanted: Iterable[tuple[str, str]]) -> Iterator[Found]:
    """Figures by family, each with the rows that it printed before it ended."""
    for script, family in wanted:
        command = [sys.executable, f"benchmarks/{script}.py", "cuda", family]
        step = run(f"{script} {family}", command, LIMIT["figures"])
        yield step, rows_in(step.output)


def rows_in(output: str) -> list[dict[str, Any]]:
    """Lines that are a JSON object: libraries print others, and the last one may be cut off."""
    rows = []
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def check(out: Path) -> int:
    """Runs every step, even after one that failed, unless nothing was built."""
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: expected a CUDA device, got none", file=sys.stderr)
        return 1
    result: dict[str, Any] = {"device": device_facts(), "steps": [], "rows": []}
    # Many files, that need not come back from a machine that is lent.
    folder = ROOT / "build" / "gpu-check"
    folder.mkdir(parents=True, exist_ok=True)

    def keep(step: Step, rows: Iterable[dict[str, Any]] = ()) -> None:
        found = asdict(step)
        del found["output"]
        result["steps"].append(found)
        result["rows"] += rows
        out.write_text(json.dumps(result, indent=1) + "\n")

    def keep_all(name: str, steps: Callable[[], Iterable[Found]]) -> None:
        """Keeps what comes; a fault of this program costs its own steps alone."""
        try:
            for step, rows in steps():
                keep(step, rows)
        except Exception as error:
            why = f"failed: {type(error).__name__}: {error}"
            keep(Step(name, why, 0.0, traceback.format_exc()))

    keep(build_step(str(result["device"]["compute_capability"])))
    if result["steps"][0]["state"] == "passed":
        files = sorted(file for name in SUITE for file in (ROOT / name).glob("test_*.py"))
        keep_all("operators", lambda: [(operator_step(folder / "operators.jsonl"), [])])
        keep_all("first figures", lambda: figure_steps(FIRST_FIGURES))
        keep_all("tests", lambda: ((step, []) for step in suite_steps(files, folder)))
        keep_all("figures", lambda: figure_steps(FIGURES))
        keep_all("sanitizer", lambda: ((step, []) for step in sanitizer_steps()))
    print(f"gpu_check: wrote {out}")
    absent = "not run: compute-sanitizer"
    states = [step["state"] for step in result["steps"]]
    return int(any(state != "passed" and not state.startswith(absent) for state in states))


def page(result: dict[str, Any] | None) -> str:
    """docs/gpu.md; without a result it says that nothing was measured."""
    written = "Written by `make gpu-report` from what `make gpu-check` found."
    lines = ["# Figures from a GPU", "", written, ""]
    if result is None:
        lines += ["Not measured: no GPU has run this version.", ""]
        return "\n".join([*lines, *estimate_lines(), ""])
    device = result["device"]
    lines += [
        f"{device['name']}, compute capability {device['compute_capability']}, "
        f"{device['num_sms']} SMs, {device['memory_gib']} GiB; driver {device['driver']}, "
        f"torch {device['torch']} (CUDA {device['cuda']}), revision {device['commit']}.",
        "",
        "| step | result | seconds |",
        "|---|---|---|",
    ]
    # Of files of tests, those that failed alone.
    files = [s for s in result["steps"] if s["name"].startswith("tests of ")]
    good = [s for s in files if s["state"] == "passed"]
    lines += [
        f"| {s['name']} | {s['state']} | {s['seconds']:.0f} |"
        for s in result["steps"]
        if s not in good
    ]
    if good:
        seconds = max(s["seconds"] for s in good)
        lines.append(f"| {len(good)} of {len(files)} files of tests | passed | {seconds:.0f} |")
    lines += [""]
    for title, rows in sections(result["rows"]).items():
        lines += [f"## {title}", "", *table(rows), ""]
    kernels = [row["kernel"] for row in result["rows"] if "kernel" in row]
    layer = next((row["layer"] for row in result["rows"] if "layer" in row), {})
    lines += [*layer_lines(layer), "", *kernel_lines(kernels, result["rows"]), ""]
    return "\n".join([*lines, *estimate_lines(result["rows"]), ""])


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
    """Each kernel beside a copy of as many bytes."""
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
        "| kernel | shape | dtype | us | GB/s | share of copy |",
        "|---|---|---|---|---|---|",
    ]
    for k in kernels:
        rate, share = k["gigabytes_per_second"], k["share_of_copy"]
        moved = "| |" if rate is None else f"{rate:.0f} | {100 * share:.0f} % |"
        row = f"| {k['name']} | {k['shape']} | {k['dtype']} | {k['microseconds']:.1f} | {moved}"
        lines.append(row)
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
    """The whole layer beside its peer; says so where there was none."""
    if "ours_microseconds" not in layer:
        return [f"Layer beside that of Hugging Face: {layer.get('peer', 'not measured')}."]
    ours, peer, products = (
        layer[f"{name}_microseconds"] / 1e3 for name in ("ours", "peer", "products")
    )
    return [
        f"## Layer ({layer['shape']}, {layer['dtype']}, forward and backward)",
        "",
        "| MoELayer ms | " + layer["peer"] + " ms | MoELayer / peer | grouped products alone ms | "
        "their share of MoELayer |",
        "|---|---|---|---|---|",
        f"| {ours:.2f} | {peer:.2f} | {ours / peer:.2f} | {products:.2f} | "
        f"{100 * products / ours:.0f} % |",
        "",
        "Same weights, same routing; outputs differ by at most "
        f"{100 * layer['difference']:.2f} % of the largest. The layer in one CUDA graph, forward "
        f"and backward: {layer['graph']}.",
    ]


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--report", type=Path, help="write the page from --out, and check nothing")
    args = parser.parse_args()
    if args.report:
        result = json.loads(args.out.read_text()) if args.out.exists() else None
        args.report.write_text(page(result))
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return check(args.out)


if __name__ == "__main__":
    sys.exit(main())
