"""Tools that train, placements of experts and memory, in every combination; see composition.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import composition
import pytest

FULL = os.environ.get("MOE_EXT_FULL") == "1"
CELLS = composition.CELLS if FULL else composition.FEW


@pytest.fixture(scope="module")
def outcomes():
    """Run in a process of its own, from which ranks are forked that have the tools imported."""
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    program = [sys.executable, str(Path(composition.__file__)), *([] if FULL else ["--few"])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    # Behind what the frameworks print, which may be nothing.
    printed = f"\n{done.stdout}"
    return json.loads(printed[printed.rindex("\n{\n") :])


@pytest.mark.parametrize("cell", CELLS, ids=" / ".join)
def test_cells(outcomes, cell):
    outcome = outcomes[" / ".join(cell)]
    if cell in composition.REFUSED:
        assert re.search(composition.REFUSED[cell], outcome)
    else:
        assert outcome == "equal"


def test_random_mixtures(outcomes):
    assert outcomes["mixtures"] == "equal"


def test_fabric_saves_the_experts_of_all_ranks(outcomes):
    assert outcomes["Fabric"] == "equal"


def test_the_page_is_current():
    page = composition.PAGE.read_text()
    assert composition.with_table(page) == page, "run tests/distributed/composition.py"
