"""Reads how a kernel accesses memory from its machine code, as `cuobjdump -sass` prints it.

A kernel that loads shared memory without writing any is refused: its stores went elsewhere, such as
through an instruction that names global memory. So is one on tensor cores with generic accesses,
each of which finds out first which memory it is of.
"""

import collections
import glob
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

FUNCTION = re.compile(r"^\s*Function : (\S+)", re.M)
# Address, predicate, operation and what qualifies it, up to the operands.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)", re.M)
SHARED_LOADS = {"LDS", "LDSM"}
# Beside stores and atomics: copies from global memory, cp.async and those of the tensor memory
# accelerator, and a sum into another block's memory.
SHARED_WRITES = {"STS", "STSM", "ATOMS", "LDGSTS", "UBLKCP", "UTMALDG", "STAS", "REDAS"}
# Generic accesses: the hardware finds the memory of an address, which may be shared memory.
GENERIC = {"LD", "ST", "ATOM"}
GENERIC_WRITES = GENERIC - {"LD"}
LOCAL = {"LDL", "STL"}
# Instructions of tensor cores: of a warp, and of four.
PRODUCTS = {"HMMA", "HGMMA"}
# Bytes of an access by what it is qualified with; 4 without.
WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass
class Accesses:
    """Instructions of one kernel that access memory, counted as they stand in its code.

    Attributes:
        kernel: mangled name.
        of: operations to their number.
        loads: bytes of a load of global memory to the number of such loads.
        stores: as loads.
    """

    kernel: str
    of: collections.Counter[str] = field(default_factory=collections.Counter)
    loads: collections.Counter[int] = field(default_factory=collections.Counter)
    stores: collections.Counter[int] = field(default_factory=collections.Counter)

    def count(self, operations: set[str]) -> int:
        """Instructions of any of these operations."""
        return sum(self.of[operation] for operation in operations)

    @property
    def reads_what_nobody_wrote(self) -> bool:
        """True if the kernel loads shared memory, and has no instruction that could write it."""
        return self.count(SHARED_LOADS) > 0 and self.count(SHARED_WRITES | GENERIC_WRITES) == 0

    @property
    def multiplies_what_it_looks_for(self) -> bool:
        """True if the kernel uses tensor cores, and has generic accesses."""
        return self.count(PRODUCTS) > 0 and self.count(GENERIC) > 0


def parse(sass: str) -> list[Accesses]:
    """The kernels of what cuobjdump printed."""
    found = []
    # The text before the first kernel, then by turns a name and its code.
    _, *parts = FUNCTION.split(sass)
    for name, code in zip(parts[::2], parts[1::2], strict=True):
        kernel = Accesses(name)
        for match in INSTRUCTION.finditer(code):
            operation, qualifiers = match[1], match[2].split(".")
            kernel.of[operation] += 1
            if operation in ("LDG", "STG"):
                bytes_of = kernel.loads if operation == "LDG" else kernel.stores
                bytes_of[next((WIDTHS[q] for q in qualifiers if q in WIDTHS), 4)] += 1
        found.append(kernel)
    return found


def widths(of: collections.Counter[int]) -> str:
    """Widths in bytes, widest first, with the number of instructions: "16x4 2x8"."""
    return " ".join(f"{size}x{number}" for size, number in sorted(of.items(), reverse=True)) or "-"


def find_tools() -> dict[str, str] | None:
    """The environment in which cuobjdump and the nvdisasm that it calls run; None without them."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    installed = [place for root in roots for place in glob.glob(f"{root}/*/bin")]
    path = os.pathsep.join([*installed, os.environ.get("PATH", "")])
    if all(shutil.which(tool, path=path) for tool in ("cuobjdump", "nvdisasm")):
        return {**os.environ, "PATH": path}
    return None


def disassemble(objects: Iterable[Path], arch: str, env: dict[str, str]) -> list[Accesses]:
    """The kernels of object files for one architecture, "sm_90"."""

    def one(path: Path) -> list[Accesses]:
        command = [shutil.which("cuobjdump", path=env["PATH"]) or "cuobjdump", "-sass"]
        result = subprocess.run(
            [*command, "-arch", arch, str(path)], env=env, capture_output=True, text=True
        )
        if result.returncode != 0:
            raise RuntimeError(f"cuobjdump of {path.name}: {result.stderr.strip()}")
        return parse(result.stdout)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [kernel for kernels in pool.map(one, objects) for kernel in kernels]
