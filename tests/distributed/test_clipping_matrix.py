"""Ways to clip and functions of torch, with experts over ranks; see clipping_matrix.py."""

import os

import clipping_matrix
import functions_of_torch
import pytest

FULL = os.environ.get("MOE_EXT_FULL") == "1"
CELLS = clipping_matrix.CELLS if FULL else clipping_matrix.FEW
# The first test of all cells waits for them, as long as the ranks may take.
pytestmark = [pytest.mark.timeout(clipping_matrix.TIMEOUT)] if FULL else []


@pytest.fixture(scope="module")
def clipped():
    pytest.importorskip("transformers")
    return clipping_matrix.outcomes(CELLS)


@pytest.fixture(scope="module")
def called():
    return functions_of_torch.outcomes(few=not FULL)


@pytest.mark.parametrize("cell", CELLS, ids=" / ".join)
def test_clipping(clipped, cell):
    outcome, pattern = clipped[cell], clipping_matrix.expected(cell)
    assert clipping_matrix.as_expected(outcome, pattern), f"{outcome}, expected {pattern}"


@pytest.mark.parametrize("key", functions_of_torch.keys(few=not FULL), ids=" / ".join)
def test_functions_of_torch(called, key):
    pattern = functions_of_torch.pattern_of(key)
    assert functions_of_torch.as_expected(key, called[key]), f"{called[key]}, expected {pattern}"


def test_the_page_is_current():
    page = clipping_matrix.PAGE.read_text()
    text = "run tests/distributed/clipping_matrix.py"
    assert clipping_matrix.with_tables(page) == page, text
