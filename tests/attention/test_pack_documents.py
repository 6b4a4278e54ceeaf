"""`pack_documents`: whole documents in rows whose attention costs alike."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ext.attention import Mask, pack_documents

SEQ_LEN = 300
LENGTHS = st.lists(st.integers(0, SEQ_LEN), max_size=40)
WINDOWS = st.none() | st.tuples(st.integers(-1, 40), st.integers(-1, 40))
PREFIXES = st.none() | st.integers(0, 200)


def first_fit(lengths):
    """Lengths of each row, by first fit in order of falling length."""
    rows = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + length <= SEQ_LEN), None)
        rows.append([length]) if row is None else row.append(length)
    return rows


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(0, 12), st.booleans(), WINDOWS, PREFIXES)
def test_every_document_once_in_rows_of_even_cost(
    lengths, num_ranks, more, is_causal, window, prefix
):
    if not is_causal or window is not None:
        prefix = None
    lens = None if prefix is None else ((prefix,),)
    mask = Mask(is_causal, *(window or (-1, -1)), prefix_lens=lens)
    kwargs = {
        "num_ranks": num_ranks,
        "is_causal": is_causal,
        "window": window,
        "prefix_len": prefix,
    }
    count = (len(first_fit(lengths)) + more) // num_ranks * num_ranks + num_ranks
    longest, tokens = max(lengths, default=0), sum(lengths)

    def area(row):
        return sum(int(mask.areas(length).sum()) for length in row)

    for num_rows in (None, count):
        packed = pack_documents(lengths, SEQ_LEN, num_rows=num_rows, **kwargs)
        held = torch.tensor(lengths).long()
        for same in (held, held.numpy()):
            assert packed == pack_documents(same, SEQ_LEN, num_rows=num_rows, **kwargs)
        rows = len(packed.documents)
        assert rows == num_rows if num_rows else rows % num_ranks == 0
        assert sorted(itertools.chain(*packed.documents)) == list(range(len(lengths)))
        for row, offsets in zip(packed.documents, packed.cu_seqlens, strict=True):
            sizes = [b - a for a, b in itertools.pairwise(offsets)]
            assert sizes[: len(row)] == [lengths[i] for i in row]
            assert offsets[0] == 0 and offsets[-1] == SEQ_LEN
            assert all(0 < size <= 128 for size in sizes[len(row) :]) or offsets[-2] == SEQ_LEN
        areas = [area([lengths[i] for i in row]) for row in packed.documents]
        assert list(packed.areas) == areas == sorted(areas, reverse=True)
        worst = max(areas, default=0)
        if rows >= len(first_fit(lengths)):
            assert worst <= max(map(area, first_fit(lengths)), default=0)
        # Rows without room for the longest document; the document that came last to the costliest
        # row found the other rows costlier.
        full = tokens // (SEQ_LEN - longest + 1)
        if full < rows:
            assert worst <= sum(areas) / (rows - full) + area([longest])


def test_rows_of_short_and_long_documents():
    lengths = torch.distributions.LogNormal(6.0, 1.2)
    torch.manual_seed(0)
    sizes = lengths.sample((400,)).long().clamp(16, 8192).tolist()
    packed = pack_documents(sizes, 8192, num_ranks=8)
    mean = sum(packed.areas) / len(packed.areas)
    # The longest document cannot be divided, and has a row almost for itself.
    assert packed.areas[0] <= max(1.01 * mean, 1.001 * max(n * (n + 1) // 2 for n in sizes))
    # The costliest rows of all steps: 1.20, and 1.32 by first fit.
    assert sum(packed.areas[::8]) * 8 <= 1.22 * sum(packed.areas)
    # A short document that all of it sees is as costly as a longer causal one.
    packed = pack_documents([10, 9, 9, 6], 19, prefix_len=[0, 0, 9, 0])
    assert packed.documents == ((2, 3), (0, 1)) and packed.areas == (81 + 21, 55 + 45)
    # By first or best fit the costliest row has 511.
    assert pack_documents([20, 8, 13, 20, 8, 9, 14, 12, 9], 60, num_rows=2).areas == (441, 415)


@pytest.mark.parametrize(
    ("lengths", "changes", "message"),
    [
        ([3, 9], {}, r"lengths\[1\] to be from 0 to seq_len, 8, got 9"),
        ([-1], {}, r"lengths\[0\] to be from 0 to seq_len, 8, got -1"),
        ([2.5], {}, "lengths to be a row of integers"),
        (torch.ones(2, 2).long(), {}, "lengths to be a row of integers"),
        (7, {}, "lengths to be a row of integers"),
        ([3], {"seq_len": 0}, "seq_len to be at least 1, got 0"),
        ([3], {"num_ranks": 0}, "num_ranks to be at least 1, got 0"),
        ([5, 5, 5], {"num_rows": 2}, "num_rows to be a multiple of num_ranks, 1, and at least 3"),
        ([5], {"num_rows": 3, "num_ranks": 2}, "num_rows to be a multiple of num_ranks, 2, and"),
        ([5], {"window": (-2, 0)}, "window to be -1"),
        ([5], {"window": (2, 0), "prefix_len": 1}, "window to be None with prefix_len"),
        ([5], {"is_causal": False, "prefix_len": 1}, "is_causal to be True with prefix_len"),
        ([5, 1], {"prefix_len": [1]}, "prefix_len to be .* 2, one for each document"),
    ],
)
def test_arguments_refused(lengths, changes, message):
    with pytest.raises(ValueError, match=f"pack_documents: .*{message}"):
        pack_documents(lengths, **{"seq_len": 8, **changes})
