"""Runs a compiler command, and keeps ptxas's report of each kernel beside the object file.

CMake calls it as the launcher of nvcc. A file beside the object, unlike the build's output, is
still there when the next build finds nothing to do.
"""

import subprocess
import sys
from pathlib import Path


def main(command: list[str]) -> int:
    """Returns the exit status of `command`; `ptxas info` lines go to `<object>.ptxas`."""
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    report, rest = [], []
    in_report = False
    for line in result.stderr.splitlines(keepends=True):
        # The figures of a kernel follow its "ptxas info" line, indented.
        in_report = line.startswith("ptxas info") or (in_report and line.startswith("    "))
        (report if in_report else rest).append(line)
    sys.stderr.write("".join(rest))
    if "-o" in command and report:
        Path(command[command.index("-o") + 1] + ".ptxas").write_text("".join(report))
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
