"""torch and the tools are, function for function, what they were; see nothing_replaced.py."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nothing_replaced
import pytest


@pytest.fixture(scope="module")
def outcomes():
    program = [sys.executable, nothing_replaced.__file__]
    done = subprocess.run(program, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.splitlines()[-1])
    found = json.loads(path.read_text())
    path.unlink()
    for rank in found:
        assert "error" not in rank, rank["error"]
    return found


def assert_allowed(changes, *patterns):
    allowed = [*nothing_replaced.ALLOWED, *patterns]
    others = [line for line in changes if not any(re.fullmatch(p, line) for p in allowed)]
    assert others == []


def test_importing_and_training_in_one_process_replace_nothing(outcomes):
    assert_allowed(outcomes[0]["one process"])


def test_training_over_ranks_replaces_nothing(outcomes):
    for rank in outcomes:
        assert_allowed(rank["ranks"], *nothing_replaced.ALLOWED_AFTER_AN_EXCHANGE)


@pytest.mark.parametrize("seed", nothing_replaced.SEEDS)
def test_a_seeded_change_is_seen(outcomes, seed):
    assert any(seed in line for line in outcomes[0]["seeded"])
