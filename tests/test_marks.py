"""Marks that are given by name: no pattern may outlive what it names."""

import re
from pathlib import Path

import pytest
from marks import DEAREST, MARKS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "pattern", sorted({pattern for patterns in MARKS.values() for pattern in patterns})
)
def test_every_pattern_names_a_test(pattern):
    files, name = pattern.split("::")
    name = re.compile("^(def )?" + name.rstrip("*").replace("*", r"\w*"), re.MULTILINE)
    assert any(name.search(path.read_text()) for path in ROOT.glob(files))


def test_the_files_that_start_first_are_there():
    assert len(set(DEAREST)) == len(DEAREST)
    assert all((ROOT / name).is_file() for name in DEAREST)


def test_the_makefile_looks_for_what_runs_alone_where_it_is():
    """Collecting every test takes longer than those that run alone."""
    pattern = r"^SERIAL = \$\(addprefix (\S+),(.+)\)$"
    ((prefix, names),) = re.findall(pattern, (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = {prefix + name for name in names.split()}
    assert files == {pattern.partition("::")[0] for pattern in MARKS["serial"]}
