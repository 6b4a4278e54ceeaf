"""Ways to clip and functions of torch, with experts over ranks; see clipping_matrix.py."""

import importlib.util
import re

import clipping_matrix
import functions_of_torch
import pytest
from pairwise import FULL

CELLS = clipping_matrix.CELLS if FULL else clipping_matrix.FEW
# The first test waits for all cells, as long as the ranks may take.
pytestmark = [pytest.mark.timeout(clipping_matrix.TIMEOUT)] if FULL else []


@pytest.fixture(scope="module")
def outcomes():
    cells = CELLS if importlib.util.find_spec("transformers") else []
    return clipping_matrix.outcomes(cells, few=not FULL)


@pytest.mark.parametrize("cell", CELLS, ids=" / ".join)
def test_clipping(outcomes, cell):
    pytest.importorskip("transformers")
    assert re.search(clipping_matrix.pattern_of(cell), outcomes[cell])


@pytest.mark.parametrize("key", functions_of_torch.keys(few=not FULL), ids=" / ".join)
def test_functions_of_torch(outcomes, key):
    assert re.search(functions_of_torch.pattern_of(key), outcomes[key])


def test_the_page_is_current():
    page = clipping_matrix.PAGE.read_text()
    text = "run tests/distributed/clipping_matrix.py"
    assert clipping_matrix.with_tables(page) == page, text
