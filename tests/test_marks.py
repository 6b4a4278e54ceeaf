"""Marks that are given by name: no pattern may outlive what it names."""

import re
from pathlib import Path

import pytest
from marks import MARKS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "pattern", sorted({pattern for patterns in MARKS.values() for pattern in patterns})
)
def test_every_pattern_names_a_test(pattern):
    files, name = pattern.split("::")
    name = re.compile("def " + name.rstrip("*").replace("*", r"\w*"))
    assert any(name.search(path.read_text()) for path in ROOT.glob(files))
