import itertools

import pytest
import torch
from helpers import seen_by
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ext.attention import (
    LAYOUTS,
    Layout,
    Mask,
    make_layout,
    position_ids,
    shard_sequence,
    shift_labels,
    token_mean_loss,
    unshard_sequence,
)
from moe_ext.attention.masks import needed_keys


def documents(seq_len, num_documents):
    """Offsets of uneven documents, some of them empty."""
    inner = torch.randint(0, seq_len + 1, (num_documents - 1,)).sort().values
    return [0, *inner.tolist(), seq_len]


def test_zigzag_has_even_causal_work_for_every_length():
    for num_ranks in range(2, 9):
        # Some of the longer ones, with every remainder by the number of stretches.
        for seq_len in (*range(2 * num_ranks, 160), *range(160, 421, 11)):
            layout = make_layout("zigzag", seq_len, num_ranks)
            areas = [
                sum((r.start + 1 + r.stop) * len(r) // 2 for r in shard) for shard in layout.shards
            ]
            mean = seq_len * (seq_len + 1) / 2 / num_ranks
            # Areas are whole numbers: none can be less than the mean rounded up. The shortest
            # sequences have one pair more here and there.
            least = -(-sum(areas) // num_ranks) + (seq_len < 38)
            assert max(areas) <= max(1.01 * mean, least), (num_ranks, seq_len)
            assert max(layout.sizes) - min(layout.sizes) <= 2


def test_zigzag_is_two_stretches_where_they_come_out_even():
    assert make_layout("zigzag", 16, 2).shards == (
        (range(0, 4), range(12, 16)),
        (range(4, 12),),
    )
    assert all(len(shard) <= 2 for shard in make_layout("zigzag", 4099, 8).shards)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_position_has_one_place(name):
    for num_ranks, seq_len in itertools.product((1, 2, 3, 5), (0, 1, 2, 3, 7, 9, 10, 31, 64)):
        layout = make_layout(name, seq_len, num_ranks, cu_seqlens=documents(seq_len, 4))
        held = torch.cat([layout.positions(rank) for rank in range(num_ranks)])
        assert held.sort().values.tolist() == list(range(seq_len))
        assert layout.sizes == tuple(len(layout.positions(rank)) for rank in range(num_ranks))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.booleans(),
    st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.integers(1, 5),
    st.none() | st.integers(0, 20),
)
def test_keys_are_needed_by_every_rank_that_sees_them(
    seq_len, is_causal, window, packed, name, num_ranks, prefix
):
    offsets = tuple(documents(seq_len, 3)) if packed else None
    mask = Mask(is_causal, *window, offsets)
    if prefix is not None:
        lens = (prefix,) * (len(offsets) - 1 if packed else 1)
        mask = Mask(is_causal=True, cu_seqlens=offsets, prefix_lens=(lens,))
    cu_seqlens = offsets or (0, seq_len)
    layout = make_layout(name, seq_len, num_ranks, cu_seqlens=cu_seqlens, is_causal=is_causal)
    seen = seen_by(mask, seq_len)
    assert mask.areas(seq_len).tolist() == seen.sum(1).tolist()
    needs = needed_keys(layout.shards, mask, seq_len)
    exact = all(part.step == 1 for shard in layout.shards for part in shard)
    for r, c in itertools.product(range(num_ranks), repeat=2):
        sees = bool(seen[layout.positions(r)][:, layout.positions(c)].any())
        assert needs[r][c] == sees if exact else needs[r][c] >= sees


def test_a_window_takes_contiguous_keys_to_the_neighbours_alone():
    needs = needed_keys(make_layout("contiguous", 32, 4).shards, Mask(is_causal=True, left=4), 32)
    assert needs == tuple(tuple(r - c in (0, 1) for c in range(4)) for r in range(4))


@pytest.mark.parametrize("name", ["per_document", "cost_balanced"])
def test_packed_documents_are_balanced(name):
    offsets = (0, 700, 710, 1500, 1501, 1999, 2048)
    mask = Mask(is_causal=True, cu_seqlens=offsets)
    areas = make_layout(name, 2048, 4, cu_seqlens=offsets).areas(mask)
    assert max(areas) <= 1.02 * sum(areas) / 4
    uneven = make_layout("contiguous", 2048, 4).areas(mask)
    assert max(uneven) > 1.3 * sum(uneven) / 4


def test_cost_balanced_follows_a_window():
    layout = make_layout("cost_balanced", 1000, 4, cu_seqlens=[0, 1000], window=(50, 0))
    areas = layout.areas(Mask(True, 50, 0))
    # Stretches of 15 and 16 positions, 16 a rank.
    assert max(areas) <= 1.03 * sum(areas) / 4


def test_cost_balanced_follows_prefixes():
    """By the causal mask one rank has 1.06 times the mean."""
    offsets, lens = (0, 300, 700, 1024), (280, 0, 200)
    mask = Mask(True, cu_seqlens=offsets, prefix_lens=(lens,))
    where = {"layout": "cost_balanced", "seq_len": 1024, "num_ranks": 4, "cu_seqlens": offsets}
    areas = make_layout(**where, prefix_len=lens).areas(mask)
    assert max(areas) <= 1.01 * sum(areas) / 4
    areas = make_layout(**where).areas(mask)
    assert max(areas) >= 1.05 * sum(areas) / 4
    assert make_layout(**where, prefix_len=0) == make_layout(**where)
    with pytest.raises(ValueError, match="make_layout: expected prefix_len .* 3, one for each doc"):
        make_layout(**where, prefix_len=[1, 2])
    with pytest.raises(ValueError, match="make_layout: expected is_causal to be True with prefix"):
        make_layout(**where, prefix_len=2, is_causal=False)


def test_runs_of_documents_on_a_rank():
    layout = make_layout("contiguous", 12, 2)
    offsets, document = layout.local_cu_seqlens([0, 4, 4, 8, 12], 0)
    assert offsets.tolist() == [0, 4, 6]
    assert document.tolist() == [0, 2]
    offsets, document = layout.local_cu_seqlens([0, 4, 4, 8, 12], 1)
    assert offsets.tolist() == [0, 2, 6]
    assert document.tolist() == [2, 3]


def test_helpers_of_one_process():
    x = torch.randn(2, 7, 3)
    assert torch.equal(shard_sequence(x, group=None, dim=1), x)
    assert torch.equal(unshard_sequence(x, group=None, dim=1), x)
    assert position_ids(5, group=None).tolist() == [0, 1, 2, 3, 4]
    ids = position_ids(6, group=None, cu_seqlens=[0, 2, 2, 6])
    assert ids.tolist() == [0, 1, 0, 1, 2, 3]


def test_labels_are_shifted_within_documents():
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    assert shift_labels(tokens).tolist() == [[6, 7, 8, 9, -100]]
    assert shift_labels(tokens, cu_seqlens=[0, 2, 2, 5]).tolist() == [[6, -100, 8, 9, -100]]
    assert shift_labels(tokens[:, :0]).shape == (1, 0)


def test_the_mean_loss_of_one_process():
    loss = torch.tensor(6.0, requires_grad=True)
    mean = token_mean_loss(loss, 4, group=None)
    mean.backward()
    assert mean.item() == 1.5
    assert loss.grad.item() == 0.25
    assert token_mean_loss(torch.tensor(0.0), 0, group=None).item() == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("diagonal", 8, 2), "layout to be one of .* got 'diagonal'"),
        (("zigzag", -1, 2), "seq_len to be at least 0"),
        (("per_document", 8, 2), "cu_seqlens to be given for 'per_document'"),
        (("cost_balanced", 8, 2), "cu_seqlens to be given for 'cost_balanced'"),
        ((make_layout("zigzag", 8, 2), 9, 2), "for 9 positions on 2 ranks, got 8 on 2"),
    ],
)
def test_layouts_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_layout(*arguments)


@pytest.mark.parametrize(
    "shards",
    [
        ((range(0, 3),), (range(4, 8),)),
        ((range(0, 4),), (range(3, 7),)),
        ((range(0, 4),), (range(5, 9),)),
        ((range(-4, 0),), (range(0, 4),)),
    ],
)
def test_a_layout_of_ones_own_holds_every_position_once(shards):
    with pytest.raises(ValueError, match="hold each of the 8 positions once"):
        Layout("mine", 8, shards)


@pytest.mark.parametrize("offsets", [[], [1, 8], [0, 5, 4, 8], [0, 7]])
def test_documents_refused(offsets):
    with pytest.raises(ValueError, match="expected cu_seqlens to"):
        make_layout("per_document", 8, 2, cu_seqlens=offsets)
    with pytest.raises(ValueError, match="expected cu_seqlens to"):
        shift_labels(torch.zeros(8), cu_seqlens=offsets)
