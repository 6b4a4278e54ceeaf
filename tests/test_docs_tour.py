"""The programs of docs/tour.md run as they stand, and print what the page shows.

The first one is started by torchrun. The others, whose interpreters would import torch twenty
times, are forks with its environment; a torchrun that forks starts what dies.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "examples"))

from example_jobs import Ranks, torchrun  # noqa: E402 - lies in another folder

PAGE = (ROOT / "docs" / "tour.md").read_text()
NUMBER = re.compile(r"-?\d+\.\d+")


def sections():
    """Title, and a file's name and text for each program, and each command with its output."""
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        programs = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", section, re.DOTALL)
        shown = "".join(re.findall(r"```console\n(.*?)```", section, re.DOTALL))
        commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
        yield section.splitlines()[0], programs, commands


def equals(shown, printed):
    """Numbers with decimals may end otherwise on another processor."""
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return NUMBER.sub("", shown) == NUMBER.sub("", printed) and all(
        abs(float(a) - float(b)) <= 2e-3 for a, b in pairs
    )


def test_every_program_has_a_name_and_a_command():
    found = list(sections())
    blocks = len(re.findall(r"```python", PAGE))
    assert blocks == sum(len(programs) for _, programs, _ in found) > 4
    for title, _, commands in found:
        assert any("python" in command or "torchrun" in command for command, _ in commands), title


START = re.compile(
    r"(?:torchrun --standalone --nproc-per-node (\d)|python) (\w+\.py)((?: [\w-]+)*)(?: \|\| (.*))?"
)


def forked(command, folder, logs):
    """Exit codes of the ranks of a command, and what they print."""
    count, script, args, otherwise = START.fullmatch(command).groups()
    logs.mkdir()
    if otherwise:
        args = [f"--nproc-per-node={count}", script, *args.split()]
        log = logs / "output", logs / "errors"
        assert torchrun(["--standalone", *args], log, folder).wait(timeout=200) != 0
        (words,) = re.findall('echo "(.*)"', otherwise)
        return [0], f"{log[0].read_text()}{words}\n"
    ranks = Ranks(args.split(), int(count or 1), logs, script=folder / script, cwd=folder)
    codes = ranks.wait(timeout=200)
    return codes, "".join(ranks.output(rank) for rank in range(len(codes)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_prints_what_it_shows(tmp_path):
    pytest.importorskip("transformers", minversion="5.0")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": path, "PATH": python, "OMP_NUM_THREADS": "1"}
    launched = False
    for title, programs, commands in sections():
        for name, text in programs:
            (tmp_path / name).write_text(text)
        for i, (command, shown) in enumerate(commands):
            if START.fullmatch(command) and (launched or "torchrun" not in command):
                codes, printed = forked(command, tmp_path, tmp_path / f"logs of {title} {i}")
                assert not any(codes), f"{title}: {command}\n{printed}"
                assert equals(shown, printed), f"{title}: {command}\n{printed}"
                continue
            launched |= "torchrun" in command
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, f"{title}: {command}\n{done.stderr}"
            assert equals(shown, done.stdout), f"{title}: {command}\n{done.stdout}"
