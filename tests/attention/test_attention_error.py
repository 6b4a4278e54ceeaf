"""Error of a ring against float64, by the study that the docs quote."""

import pytest
import ring_error


@pytest.fixture(scope="module")
def rows():
    return ring_error.study(512, ranks=(2, 8))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_exact_is_one_rounding_and_fast_rounds_blocks_and_no_more(rows, num_ranks):
    pairs = zip(rows[f"exact, P = {num_ranks}"], rows["rounding alone"], strict=True)
    assert all(found < 1.01 * floor for found, floor in pairs)
    assert all(1.7e-3 < error < 8e-3 for error in rows[f"fast, P = {num_ranks}"])
