"""The table of mistakes: each has its place in the code, and each published system has one."""

from pathlib import Path

import mutants
import pytest
from system_mutants import BY_SYSTEM, OF_TORCH

PAGE = mutants.ROOT / "docs" / "systems.md"


def rows():
    """System to the cell that names its tests, of all tables of the page."""
    lines = PAGE.read_text().splitlines()
    lines = [line.split("|") for line in lines if line.startswith("| ")]
    return {cells[1].strip(): cells[3] for cells in lines if cells[1].strip() != "system"}


def test_each_mistake_has_its_place():
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    assert not mutants.wrong_places(mutants.MUTANTS)


def test_each_system_has_a_mistake():
    # Searches of planners are on a page of their own.
    assert {*BY_SYSTEM, *OF_TORCH} == {*rows(), "planner searches"}
    assert not {*BY_SYSTEM} & {*OF_TORCH} and all(BY_SYSTEM.values())


@pytest.mark.parametrize("system", [name for name in BY_SYSTEM if name != "planner searches"])
def test_the_row_of_a_system_names_the_tests_of_its_mistakes(system):
    cell = rows()[system]
    for name, (*_, tests) in BY_SYSTEM[system].items():
        path = Path(tests.split()[0])
        assert path.name in cell or f"`{path.parent}/`" in cell, name
