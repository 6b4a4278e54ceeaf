"""Prints registers, shared memory and spills of every CUDA kernel, as ptxas reported them.

    python tools/kernel_resources.py BUILD_DIR

Exits with 1 if a kernel spills registers, or if the build has no kernels at all.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What ptxas says about one kernel for one architecture; bytes, and registers a thread."""

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
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
