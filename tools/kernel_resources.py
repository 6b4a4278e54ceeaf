"""Prints what every CUDA kernel uses, as ptxas reported it, and how it accesses memory.

    python tools/kernel_resources.py BUILD_DIR

Exits with 1 if a kernel spills registers, if one loads shared memory that nothing in it writes, if
one on tensor cores has generic accesses, or if the build has no kernels at all. Accesses are those
of one architecture, 9.0 where it was compiled; they need cuobjdump and nvdisasm
(`pip install moe_ext[cuda]`).
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import kernel_sass

KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """Report of ptxas on a kernel for one architecture: bytes, and registers a thread."""

    kernel: str
    arch: str
    registers: int
    shared: int
    stack: int
    spill: int


def parse(report: str) -> list[Resources]:
    """The kernels of one file's report; a function that is no kernel has no registers there."""
    found = []
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", report):
        kernel, used = KERNEL.search(part), USED.search(part)
        if kernel and used:
            spill, shared = SPILL.search(part), SHARED.search(part)
            stack, stores, loads = map(int, spill.groups()) if spill else (0, 0, 0)
            found.append(
                Resources(
                    kernel=kernel[1],
                    arch=kernel[2],
                    registers=int(used[1]),
                    shared=int(shared[1]) if shared else 0,
                    stack=stack,
                    spill=stores + loads,
                )
            )
    return found


def readable(names: list[str]) -> list[str]:
    """Names without argument lists and namespaces; mangled where c++filt is missing."""
    try:
        result = subprocess.run(
            ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return names
    lines = [re.sub(r"^void |\(.*$", "", line) for line in result.stdout.split("\n")]
    return [re.sub(r"moe_ext::|c10::|\((int|bool)\)", "", line) for line in lines]


def print_accesses(build_dir: str, archs: set[str]) -> int:
    """Prints how the kernels access memory; returns the number of those that are refused."""
    env = kernel_sass.find_tools()
    if env is None:
        print("kernel_resources: accesses were not checked: cuobjdump and nvdisasm are missing")
        return 0
    arch = "sm_90" if "sm_90" in archs else min(archs)
    objects = sorted(Path(build_dir).glob("csrc/CMakeFiles/_C_cuda.dir/**/*.cu.o"))
    kernels = kernel_sass.disassemble(objects, arch, env)
    mangled = [kernel.kernel for kernel in kernels]
    names = dict(zip(mangled, readable(mangled), strict=True))
    print(f"{'generic':>9} {'local':>7}  bytes x instructions: loads | stores of global memory")
    for k in sorted(kernels, key=lambda kernel: names[kernel.kernel]):
        moved = f"{kernel_sass.widths(k.loads)} | {kernel_sass.widths(k.stores)}"
        counts = f"{k.count(kernel_sass.GENERIC):>9} {k.count(kernel_sass.LOCAL):>7}"
        print(f"{counts}  {moved:<24} {names[k.kernel]}")
    unwritten = [names[k.kernel] for k in kernels if k.reads_what_nobody_wrote]
    for name in unwritten:
        print(f"kernel_resources: {name} loads shared memory, and has no store or atomic to it")
    slow = [names[k.kernel] for k in kernels if k.multiplies_what_it_looks_for]
    for name in slow:
        print(f"kernel_resources: {name} uses tensor cores, and has generic accesses")
    generic, local = (
        sum(k.count(operations) > 0 for k in kernels)
        for operations in (kernel_sass.GENERIC, kernel_sass.LOCAL)
    )
    print(
        f"{len(kernels)} kernels of {arch}: {generic} with generic accesses, {local} with local "
        f"memory, {len(unwritten)} that load shared memory which they do not write"
    )
    return len(unwritten) + len(slow)


def main(build_dir: str) -> int:
    """Prints the table; returns the exit status."""
    reports = sorted(Path(build_dir).glob("csrc/**/*.cu.o.ptxas"))
    kernels = [kernel for path in reports for kernel in parse(path.read_text())]
    if not kernels:
        print(f"kernel_resources: no report of ptxas under {build_dir}", file=sys.stderr)
        return 1
    names = readable([kernel.kernel for kernel in kernels])
    print(f"{'registers':>9} {'shared':>7} {'stack':>6} {'spill':>6}  arch     kernel")
    for name, k in sorted(
        zip(names, kernels, strict=True), key=lambda pair: (pair[0], pair[1].arch)
    ):
        print(f"{k.registers:>9} {k.shared:>7} {k.stack:>6} {k.spill:>6}  {k.arch:<8} {name}")
    spilled = sum(kernel.spill > 0 for kernel in kernels)
    most = max(kernel.registers for kernel in kernels)
    print(f"{len(kernels)} kernels, at most {most} registers, {spilled} with spilled registers")
    refused = print_accesses(build_dir, {kernel.arch for kernel in kernels})
    return 1 if spilled or refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
