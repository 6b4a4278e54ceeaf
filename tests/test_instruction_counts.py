"""Instructions that the AVX2 loops execute, against a checked-in table."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "count_instructions.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("count_instructions", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loops_execute_no_more_instructions_than_the_table_says(tool):
    try:
        faults = tool.check()
    except tool.Unavailable as reason:
        pytest.skip(str(reason))
    assert not faults, "\n".join([*faults, f"if this is meant: {tool.UPDATE}"])


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"a": 106, "b": 10}, "a: 106 instructions, +6.0 %"),
        ({"a": 100}, "b: in the table alone"),
        ({"a": 100, "b": 10, "c": 1}, "c: not in the table"),
    ],
)
def test_growth_and_unknown_cases_are_faults(tool, counts, text):
    assert tool.find_faults(counts, {"a": 100, "b": 10}) == [text]


def test_small_growth_and_any_decrease_are_none(tool):
    assert tool.find_faults({"a": 105, "b": 1}, {"a": 100, "b": 10}) == []


def test_missing_valgrind_and_missing_driver_are_said(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    with pytest.raises(tool.Unavailable, match="valgrind is not installed"):
        tool.count(tmp_path / "count_instructions")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    with pytest.raises(tool.Unavailable, match="MOE_EXT_TESTS=1"):
        tool.find_driver()
