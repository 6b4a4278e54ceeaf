"""Tools that train, placements of experts and memory, in every combination; see composition.py."""

import re

import composition
import pytest
from pairwise import FULL

CELLS = composition.CELLS if FULL else composition.FEW


@pytest.fixture(scope="module")
def outcomes():
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    seeds = range(composition.ALL_MIXTURES if FULL else composition.FEW_MIXTURES)
    return composition.outcomes(CELLS, seeds)


@pytest.mark.parametrize("cell", CELLS, ids=" / ".join)
def test_cells(outcomes, cell):
    outcome = outcomes[cell]
    if cell in composition.REFUSED:
        assert re.search(composition.REFUSED[cell], outcome)
    else:
        assert outcome == "equal"


def test_random_mixtures(outcomes):
    assert outcomes[composition.MIXED[0]] == "equal"


def test_the_page_is_current():
    page = composition.PAGE.read_text()
    assert composition.with_table(page) == page, "run tests/distributed/composition.py"
