"""The folder of benchmarks on the path of their tests, and scripts of ranks in forks."""

import ctypes
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
from forked import Fork, forkserver

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

# Constants of Linux.
CLONE_NEWNS, CLONE_NEWNET, MS_PRIVATE_OF_ALL, MNT_DETACH = 0x20000, 0x40000000, 0x44000, 2


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path():
    """Lets the tests of a file that imports this fixture import benchmarks."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path[:] = before


class ForkedScript(Fork):
    """As `subprocess.Popen(["ip", "netns", "exec", namespace, python, script, ...])` with pipes."""

    def __init__(self, command, *, env, **_):
        assert command[:3] == ["ip", "netns", "exec"] and command[4] == sys.executable
        context = forkserver()
        questions, asked = context.Pipe(duplex=False)
        answered, answers = context.Pipe(duplex=False)
        given = (command[3], command[5:], dict(env), questions, answers)
        super().__init__(context, _run, *given, daemon=True)
        questions.close()
        answers.close()
        self.stdin = os.fdopen(os.dup(asked.fileno()), "w")
        self.stdout = os.fdopen(os.dup(answered.fileno()))
        asked.close()
        answered.close()


def _run(namespace, words, environment, questions, answers):
    """Run a script in a namespace, and see its devices in /sys as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    for name, arguments in (
        ("setns", (held, CLONE_NEWNET)),
        ("unshare", (CLONE_NEWNS,)),
        ("mount", (b"none", b"/", None, MS_PRIVATE_OF_ALL, None)),
        ("umount2", (b"/sys", MNT_DETACH)),
        ("mount", (namespace.encode(), b"/sys", b"sysfs", 0, None)),
    ):
        if getattr(libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), name)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(questions.fileno(), 0)
    os.dup2(answers.fileno(), 1)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def fork_ranks(monkeypatch):
    """Has `namespaces.ranks_on` fork scripts for the rest of a test."""
    import namespaces

    names = ("PIPE", "TimeoutExpired", "run")
    held = {name: getattr(subprocess, name) for name in names}
    forked = types.SimpleNamespace(Popen=ForkedScript, **held)
    monkeypatch.setattr(namespaces, "subprocess", forked)
