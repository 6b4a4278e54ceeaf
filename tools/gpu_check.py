"""Checks and measures the CUDA operators on the GPU at hand; writes one JSON file.

    python tools/gpu_check.py [--out gpu.json] [--report docs/gpu.md]

Needs no network: it takes the Python it runs in with what that has (torch 2.11 or later with CUDA,
pytest, ninja, cmake) and nvcc. It builds for this card alone, runs the tests on the device, a few
of them under compute-sanitizer where that is installed, and the kernel benchmarks. With --report
alone it turns the JSON into a page. Exits with 1 if a step failed.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
# Small inputs of every kernel: the sanitizer makes a launch some hundred times slower.
SANITIZED_TESTS = [
    "tests/ops/test_permutation.py::test_tables_and_rows_equal_the_reference",
    "tests/ops/test_activation.py::test_gated_equals_the_reference",
    "tests/ops/test_gating.py::test_gate_of_any_number_of_tokens",
]
# Seconds; together they stay below ten minutes.
LIMIT = {"build": 240, "tests": 150, "sanitizer": 40, "benchmarks": 85}


@dataclass(frozen=True)
class Step:
    """One command: how it ended, how long it took, and its last lines."""

    name: str
    state: str  # passed, failed, timed out, or why it was not run
    seconds: float
    tail: str = ""


def run(name: str, command: list[str], limit: int, env: dict[str, str] | None = None) -> Step:
    """Runs a command in the repository, with the repository's package first on the path."""
    print(f"gpu_check: {name}: {' '.join(map(str, command))}", flush=True)
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    try:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        state, output = "passed" if result.returncode == 0 else "failed", result.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or ""
        output = output.decode(errors="replace") if isinstance(output, bytes) else output
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
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "num_sms": properties.multi_processor_count,
        "driver": driver.stdout.strip().split("\n")[0] if driver.returncode == 0 else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """The revision, with a mark where files differ from it; unknown outside of git."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return result.stdout.strip() or "unknown"


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


def test_steps() -> list[Step]:
    """The suite on the device, and a few tests under each tool of compute-sanitizer."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    steps = [run("tests", [*pytest, "tests/ops", "tests/gpu", "-k", "cuda or gpu"], LIMIT["tests"])]
    sanitizer = find_tool("compute-sanitizer")
    for tool in SANITIZER_TOOLS:
        name = f"compute-sanitizer {tool}"
        if sanitizer is None:
            steps.append(Step(name, "not run: compute-sanitizer is not installed", 0.0))
            continue
        # The caching allocator would hide an access past the end of a tensor.
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", "--target-processes=all"]
        selected = [*SANITIZED_TESTS, "-k", "cuda and (257 or swiglu)"]
        steps.append(run(name, [*command, *pytest, *selected], LIMIT["sanitizer"], env))
    return steps


def benchmark_step() -> tuple[Step, dict[str, object]]:
    """The kernel benchmarks, and the JSON that they printed last."""
    step = run(
        "benchmarks", [sys.executable, "benchmarks/gpu_kernels.py", "cuda"], LIMIT["benchmarks"]
    )
    last = step.tail.splitlines()[-1] if step.tail else ""
    return step, json.loads(last) if step.state == "passed" else {}


def check(out: Path) -> int:
    """Runs every step, even after one that failed, unless nothing was built."""
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: expected a CUDA device, got none", file=sys.stderr)
        return 1
    facts = device_facts()
    steps = [build_step(str(facts["compute_capability"]))]
    figures: dict[str, object] = {}
    if steps[0].state == "passed":
        steps += test_steps()
        step, figures = benchmark_step()
        steps.append(step)
    result = {"device": facts, "steps": [asdict(step) for step in steps], "figures": figures}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"gpu_check: wrote {out}")
    return int(any(step.state != "passed" and step.seconds > 0 for step in steps))


def page(result: dict[str, Any] | None) -> str:
    """docs/gpu.md; without a result it says that nothing was measured."""
    written = "Written by `make gpu-report` from what `make gpu-check` found."
    lines = ["# Figures from a GPU", "", written, ""]
    if result is None:
        return "\n".join([*lines, "Not measured: no GPU has run this version.", ""])
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
        return "\n".join([*lines, "", "Kernels: not measured.", ""])
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
    return "\n".join([*lines, ""])


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
