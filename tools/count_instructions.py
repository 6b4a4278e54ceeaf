"""Counts the instructions of the AVX2 loops under callgrind and compares them with a table.

Times cannot guard the loops on a shared machine; the number of instructions that a build executes
is the same on every run. `count_instructions.py` fails where a case takes over 5 % more than
benchmarks/instructions.json says, `count_instructions.py --update` writes that table. It wants
valgrind, and the test binaries of `make test`.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "instructions.json"
ALLOWED_GROWTH = 0.05
UPDATE = "python tools/count_instructions.py --update"


class Unavailable(Exception):
    """The counts cannot be taken or compared here; the message says why."""


def find_driver() -> Path:
    """The driver of the newest build."""
    found = list(ROOT.glob("build/cmake-*/tests/cpp/count_instructions"))
    if not found:
        raise Unavailable(
            "count_instructions is not built: MOE_EXT_TESTS=1 builds it, on x86-64 alone"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def count(driver: Path) -> tuple[str, dict[str, int]]:
    """The compiler of the driver, and the instructions of each of its cases."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise Unavailable("valgrind is not installed: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        command = [valgrind, "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += ["--toggle-collect=count_case", "--dump-after=count_case", str(driver)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise Unavailable(f"valgrind cannot run the driver:\n{result.stderr[-2000:]}")
        names = re.findall(r"^case: (.*)$", result.stdout, re.MULTILINE)
        compiler = re.findall(r"^compiler: (.*)$", result.stdout, re.MULTILINE)[0]
        counts = {}
        for number, name in enumerate(names, start=1):
            dump = Path(folder, f"out.{number}").read_text()
            counts[name] = int(re.findall(r"^totals: (\d+)$", dump, re.MULTILINE)[0])
    return compiler, counts


def find_faults(counts: dict[str, int], expected: dict[str, int]) -> list[str]:
    """A line for each case that grew, has no entry, or is gone."""
    faults = []
    for name, now in counts.items():
        before = expected.get(name)
        if before is None:
            faults.append(f"{name}: not in the table")
        elif now > before * (1 + ALLOWED_GROWTH):
            faults.append(f"{name}: {now} instructions, {100 * (now / before - 1):+.1f} %")
    return faults + [f"{name}: in the table alone" for name in expected.keys() - counts.keys()]


def check() -> list[str]:
    """The faults of this build; Unavailable where there is nothing to compare it with."""
    table = json.loads(TABLE.read_text())
    compiler, counts = count(find_driver())
    if compiler != table["compiler"]:
        raise Unavailable(
            f"the table was made with {table['compiler']}, this build with {compiler}"
        )
    return find_faults(counts, table["instructions"])


def main() -> None:
    """Updates the table, or prints the faults and fails if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the table from this build")
    try:
        if parser.parse_args().update:
            compiler, counts = count(find_driver())
            table = {"compiler": compiler, "instructions": counts}
            TABLE.write_text(json.dumps(table, indent=1) + "\n")
            return
        faults = check()
    except Unavailable as reason:
        sys.exit(f"count_instructions: {reason}")
    for fault in faults:
        print(fault)
    if faults:
        sys.exit(f"count_instructions: if this is meant, update the table: {UPDATE}")


if __name__ == "__main__":
    main()
