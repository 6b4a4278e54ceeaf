"""The cases that are kept of a product of parameters."""

import itertools

import pairwise
import pytest


def pairs(rows):
    return {
        (i, j, row[i], row[j])
        for row in rows
        for i, j in itertools.combinations(range(len(row)), 2)
    }


@pytest.mark.parametrize("sizes", [(2, 2, 2), (12, 2, 3, 4), (3, 3, 3, 3, 3), (2,) * 9])
def test_every_pair_is_held_by_few(sizes):
    rows = list(itertools.product(*map(range, sizes)))
    kept = [rows[i] for i in pairwise.covering(rows)]
    assert pairs(kept) == pairs(rows)
    largest, second = sorted(sizes)[-1:-3:-1]
    assert len(kept) <= 2 * largest * second


def test_names_of_one_mark_count_as_one():
    rows = [(i, -i, j) for i in range(4) for j in range(3)]
    assert pairwise.covering(rows) == list(range(12))
    rows = [(i, i % 2, j, k) for i in range(4) for j in range(3) for k in range(2)]
    assert pairs([rows[i] for i in pairwise.covering(rows)]) == pairs(rows)


def test_a_product_with_gaps_keeps_every_pair_it_has():
    rows = [row for row in itertools.product(range(4), repeat=3) if sum(row) % 3]
    kept = [rows[i] for i in pairwise.covering(rows)]
    assert pairs(kept) == pairs(rows) and len(kept) < len(rows)


def test_loops_of_ranks_hold_every_pair_of_any_values(monkeypatch):
    monkeypatch.setattr(pairwise, "FULL", False)
    parameters = ({"a": 0, "b": 0}, range(5), [[], [1], [2, 3]])
    kept = pairwise.pairs(*parameters)
    rows = list(itertools.product(*parameters))
    for i, j in itertools.combinations(range(3), 2):
        assert all(any((k[i], k[j]) == (row[i], row[j]) for k in kept) for row in rows)
    assert len(kept) < 20 < len(rows)
    monkeypatch.setattr(pairwise, "FULL", True)
    assert pairwise.pairs(*parameters) == rows


def test_nothing_is_left_out_of_one_parameter_or_none():
    assert pairwise.covering([(3,), (4,), (5,)]) == [0, 1, 2]
    assert pairwise.covering([]) == []
