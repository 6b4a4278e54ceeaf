import pytest
import torch
from helpers import seen_by
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ext.attention.layouts import LAYOUTS, make_layout
from moe_ext.attention.libraries import cut_block, runs_of
from moe_ext.attention.masks import Mask

OFFSETS = (0, 5, 5, 14, 30, 37)


def check(q_runs, k_runs, mask, seq_len):
    """Every pair that is seen is in one piece, and each piece is what it says."""
    seen = seen_by(mask, seq_len)
    rows, cols = ([p for run in runs for p in run] for runs in (q_runs, k_runs))
    block = seen[rows][:, cols] if rows and cols else torch.zeros(len(rows), len(cols)).bool()
    times = torch.zeros(block.shape, dtype=torch.int64)
    pieces = cut_block(q_runs, k_runs, mask)
    for piece in pieces:
        part = slice(*piece.rows), slice(*piece.cols)
        times[part] += 1
        height, width = block[part].shape
        assert height and width and piece.num_pairs == height * width
        if piece.kind == "full":
            assert block[part].all()
        if piece.kind == "causal":
            assert height == width and torch.equal(block[part], torch.ones_like(block[part]).tril())
    assert not (times > 1).any() and not (block & (times == 0)).any()
    return pieces


MASKS = {
    "full": Mask(),
    "causal": Mask(True),
    "right": Mask(False, -1, 4),
    "window": Mask(True, 9),
    "both sides": Mask(False, 3, 4),
    "documents": Mask(True, cu_seqlens=OFFSETS),
    "documents whole": Mask(cu_seqlens=OFFSETS),
    "prefix": Mask(True, prefix_lens=((13,),)),
    "prefixes": Mask(True, cu_seqlens=OFFSETS, prefix_lens=((2, 1, 0, 20, 3),)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_of_every_layout(layout, num_ranks, mask):
    made = make_layout(layout, 37, num_ranks, cu_seqlens=OFFSETS)
    for q_runs in made.shards:
        for k_runs in made.shards:
            check(q_runs, k_runs, MASKS[mask], 37)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), mask=st.sampled_from(list(MASKS.values())))
def test_pieces_of_any_runs(data, mask):
    def runs():
        found = []
        for _ in range(data.draw(st.integers(0, 4))):
            start, step = data.draw(st.integers(0, 36)), data.draw(st.integers(1, 3))
            found.append(range(start, data.draw(st.integers(start, 37)), step))
        return tuple(found)

    check(runs(), runs(), mask, 37)


def test_a_zigzag_ring_takes_one_call_a_block():
    layout = make_layout("zigzag", 64, 4)
    for rank, q_runs in enumerate(layout.shards):
        kinds = [check(q_runs, k_runs, Mask(True), 64) for k_runs in layout.shards]
        assert [len(pieces) for pieces in kinds] == [1, 1, 1, 1]
        assert [pieces[0].kind == "causal" for pieces in kinds] == [r == rank for r in range(4)]
        assert sum(piece.num_pairs for pieces in kinds for piece in pieces) <= 16 * 64 // 2 + 16 * 8


def test_a_striped_ring_is_causal_throughout():
    layout = make_layout("striped", 64, 4)
    for q_runs in layout.shards:
        for k_runs in layout.shards:
            (piece,) = check(q_runs, k_runs, Mask(True), 64)
            assert piece.kind == "causal" and piece.num_pairs >= 15 * 15


def test_documents_are_pieces_of_their_own():
    pieces = check((range(37),), (range(37),), MASKS["documents"], 37)
    assert [piece.rows for piece in pieces] == [(0, 5), (5, 14), (14, 30), (30, 37)]
    assert all(piece.kind == "causal" and piece.rows == piece.cols for piece in pieces)


def test_too_many_documents_are_left_whole():
    mask = Mask(True, cu_seqlens=tuple(range(101)))
    (piece,) = cut_block((range(100),), (range(100),), mask)
    assert piece.kind == "masked" and piece.rows == piece.cols == (0, 100)


@pytest.mark.parametrize(
    ("positions", "runs"),
    [
        ([], ()),
        ([4], (range(4, 5),)),
        ([4, 5, 6, 1, 2, 9], (range(4, 7), range(1, 3), range(9, 10))),
        ([0, 2, 4, 1, 3, 5], (range(0, 5, 2), range(1, 6, 2))),
        ([9, 1, 2, 30, 40], (range(9, 10), range(1, 3), range(30, 31), range(40, 41))),
        ([5, 3, 1, 1], (range(5, 6), range(3, 4), range(1, 2), range(1, 2))),
    ],
)
def test_runs_of_positions(positions, runs):
    assert runs_of(torch.tensor(positions, dtype=torch.int64)) == runs


@given(positions=st.lists(st.integers(0, 12), max_size=30))
def test_runs_hold_the_positions_in_their_order(positions):
    runs = runs_of(torch.tensor(positions, dtype=torch.int64))
    assert [position for run in runs for position in run] == positions
