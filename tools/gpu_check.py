"""Checks and measures the CUDA operators on the GPU at hand; writes one JSON file.

    python tools/gpu_check.py [--out gpu.json] [--report docs/gpu.md]

Needs no network: it takes the Python it runs in with what that has (torch 2.11 or later with CUDA,
pytest, ninja, cmake) and nvcc. It builds for this card alone, runs the tests on the device, the
kernel benchmarks, and a few tests under compute-sanitizer where that is installed. No faulty kernel
ends it: every step is a process, tests go on in a new one behind a test that ended theirs, and the
JSON is written after each step. With --report alone it turns the JSON into a page. Exits with 1 if
a step failed.
"""

import argparse
import collections
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
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
# Families of benchmarks/gpu_kernels.py.
BENCHMARKS = ("gating", "activation", "permutation", "attention", "compression", "layer")
# Seconds of each step, and of all together: a step gets no more than what is left.
LIMIT = {"build": 240, "tests": 200, "sanitizer": 50, "benchmarks": 60}
TOTAL = 570
STARTED = time.monotonic()


@dataclass(frozen=True)
class Step:
    """One command: how it ended, how long it took, and its last lines."""

    name: str
    state: str  # passed, failed, timed out, or why it was not run
    seconds: float
    tail: str = ""


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
    return Step(name, state, time.monotonic() - start, tail)


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
    """Builds for one architecture by CMake itself: setuptools may be too old for pyproject.toml."""
    import torch

    cmake, ninja, nvcc = find_tool("cmake"), find_tool("ninja"), find_tool("nvcc")
    if not (cmake and ninja and nvcc):
        return Step("build", f"failed: cmake {cmake}, ninja {ninja}, nvcc {nvcc}", 0.1)
    build = ROOT / "build" / f"gpu-{torch.__version__}"
    build.mkdir(parents=True, exist_ok=True)
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
        "CMAKE_CUDA_COMPILER": nvcc,
        "MOE_EXT_CUDA": "ON",
        "MOE_EXT_CUDA_ARCHS": capability,
    }
    flags = [f"-D{name}={value}" for name, value in options.items()]
    start = time.monotonic()
    step = run("configure", [cmake, "-S", ".", "-B", str(build), "-G", "Ninja", *flags], 60)
    if step.state == "passed":
        step = run("compile", [cmake, "--build", str(build), "--parallel"], LIMIT["build"])
    if step.state == "passed":
        for library in ("_C.so", "_C_cuda.so"):
            staged = ROOT / "moe_ext" / f"{library}.new"
            shutil.copy2(build / "csrc" / library, staged)
            staged.replace(ROOT / "moe_ext" / library)
    return Step("build", step.state, time.monotonic() - start, step.tail)


def find_tool(name: str) -> str | None:
    """A program beside this Python, on PATH, or in the CUDA toolkit."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    for place in (str(Path(sys.executable).parent), None, str(toolkit)):
        found = shutil.which(name, path=place)
        if found:
            return found
    return None


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


SUITE = ["tests/ops", "tests/gpu", "-k", "cuda or gpu"]


def suite_step(selected: list[str], results: Path) -> Step:
    """Tests, in a new process behind each that ended its own."""
    results.unlink(missing_ok=True)
    start, num_records, state = time.monotonic(), -1, ""
    env = {"MOE_EXT_RESULTS": str(results)}
    command = [*PYTEST, "-p", "tools.surviving_tests", *selected]
    # A process that adds nothing would be started for ever.
    while num_records < len(records := surviving_tests.records(results)):
        if any("end" in record for record in records):
            break
        num_records = len(records)
        left = int(start + LIMIT["tests"] - time.monotonic())
        step = run("tests", command, max(left, 0), env)
        state = step.state
    outcomes = surviving_tests.ended(results)
    count = collections.Counter(outcomes.values())
    bad = {test: outcome for test, outcome in outcomes.items() if outcome in ("failed", "died")}
    complete = any("end" in record for record in records)
    if bad or not complete:
        cut = "" if complete else f"; {state} before the last"
        state = f"failed: {count['failed']} failed, {count['died']} ended their process{cut}"
    texts = {r["test"]: r["text"].strip() for r in records if "text" in r}
    last = [f"{test}: {texts.get(test, '?').splitlines()[-1:]}" for test in bad]
    seconds = time.monotonic() - start
    return Step("tests", state or "passed", seconds, "\n".join([f"{dict(count)}", *last]))


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


def benchmark_steps() -> Iterator[tuple[Step, dict[str, Any]]]:
    """The kernel benchmarks by family, each with the JSON that it printed last."""
    for family in BENCHMARKS:
        command = [sys.executable, "benchmarks/gpu_kernels.py", "cuda", family]
        step = run(f"benchmarks of {family}", command, LIMIT["benchmarks"])
        yield step, figures_in(step.tail)


def figures_in(output: str) -> dict[str, object]:
    """The last line that is a JSON object: libraries may print more when the process ends."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found: dict[str, object] = json.loads(line)
                return found
    return {}


def check(out: Path) -> int:
    """Runs every step, even after one that failed, unless nothing was built."""
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: expected a CUDA device, got none", file=sys.stderr)
        return 1
    result: dict[str, Any] = {"device": device_facts(), "steps": [], "figures": {}}

    def keep(step: Step) -> None:
        result["steps"].append(asdict(step))
        out.write_text(json.dumps(result, indent=1) + "\n")

    keep(build_step(str(result["device"]["compute_capability"])))
    if result["steps"][0]["state"] == "passed":
        keep(suite_step(SUITE, out.with_suffix(".tests.jsonl")))
        for step, found in benchmark_steps():
            kernels = [*result["figures"].get("kernels", []), *found.pop("kernels", [])]
            result["figures"] |= {**found, "kernels": kernels} if found else {}
            keep(step)
        for step in sanitizer_steps():
            keep(step)
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
    lines += [f"| {s['name']} | {s['state']} | {s['seconds']:.0f} |" for s in result["steps"]]
    figures = result["figures"]
    if not figures:
        return "\n".join([*lines, "", "Kernels: not measured.", "", *estimate_lines(), ""])
    lines += [
        "",
        f"A copy on the device moves {figures['copy_gigabytes_per_second']:.0f} GB/s, read and "
        "written bytes together; shares are of that.",
        "",
        "| kernel | shape | dtype | us | GB/s | share of copy |",
        "|---|---|---|---|---|---|",
    ]
    for k in figures["kernels"]:
        rate, share = k["gigabytes_per_second"], k["share_of_copy"]
        moved = "| |" if rate is None else f"{rate:.0f} | {100 * share:.0f} % |"
        row = f"| {k['name']} | {k['shape']} | {k['dtype']} | {k['microseconds']:.1f} | {moved}"
        lines.append(row)
    lines += ["", *layer_lines(figures.get("layer", {})), "", *estimate_lines(figures["kernels"])]
    return "\n".join([*lines, ""])


def estimate_lines(kernels: Iterable[dict[str, Any]] = ()) -> list[str]:
    """Expected times beside the measured ones."""
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
