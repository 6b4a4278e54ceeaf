"""The diffs of CONTRIBUTING.md apply, and their tests pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A section, and what has to be new in it.
TASKS = {
    "Add a router": "moe_ext/nn/routers/",
    "Add a dispatcher": "moe_ext/dispatch/",
    "Add a codec": "moe_ext/compression/codecs/",
    "Add a scheme of sequence parallelism": "moe_ext/attention/schemes/",
    "Add an optimizer that compresses": "moe_ext/optim/",
}


def diffs():
    """Title of each section of CONTRIBUTING.md that has a diff, and the diff."""
    sections = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    found = {}
    for section in sections:
        blocks = re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        if blocks:
            found[section.partition("\n")[0]] = "".join(blocks)
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package and of the tests that has all diffs."""
    root = tmp_path_factory.mktemp("tree")
    skipped = shutil.ignore_patterns("__pycache__", "cpp")
    for name in ("moe_ext", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", root)
    for title, diff in diffs().items():
        run = ["git", "apply", "-"]
        # No repository above it: paths are those of the tree.
        done = subprocess.run(
            run,
            cwd=root,
            input=diff,
            text=True,
            capture_output=True,
            check=False,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)},
        )
        assert done.returncode == 0, f"{title}: {done.stderr}"
    return root


def new_files(diff):
    return re.findall(r"^--- /dev/null\n\+\+\+ b/(.*)$", diff, re.MULTILINE)


@pytest.mark.parametrize("title", TASKS)
def test_a_task_is_one_file_and_its_test(title):
    made = new_files(diffs()[title])
    sources = [name for name in made if not name.startswith("tests/")]
    assert len(made) == 2 and len(sources) == 1 and sources[0].startswith(TASKS[title]), made


def test_no_task_is_left_out():
    assert diffs().keys() == TASKS.keys()


def test_their_tests_pass(tree):
    tests = [name for diff in diffs().values() for name in new_files(diff) if "test_" in name]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
