"""Tiles that packed documents cost, counted from the products of a block."""

import itertools

import pytest
import torch
from helpers import visible

from moe_ext.attention import make_layout
from moe_ext.ops import attention_block
from moe_ext.ops.attention import document_ids

SEQ_LEN, ROWS, COLS = 2048, 128, 512


def packed(mean, seed):
    """Offsets of documents of random lengths."""
    cuts = torch.randperm(SEQ_LEN - 1, generator=torch.Generator().manual_seed(seed))
    return (0, *sorted((cuts[: SEQ_LEN // mean - 1] + 1).tolist()), SEQ_LEN)


def computed_tiles(q_positions, k_positions, offsets):
    """(rows, columns) of each product of queries and keys."""
    q, k = torch.randn(1, 1, len(q_positions), 8), torch.randn(1, 1, len(k_positions), 8)
    at, cu = (q_positions, k_positions), torch.tensor(offsets)
    documents = dict(
        zip(("q_documents", "k_documents"), (document_ids(x, cu) for x in at), strict=True)
    )
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        attention_block(q, k, k, *at, causal=True, **documents)
    # Products pass torch's dispatcher by: what is recorded of the two of a tile are looks at their
    # five matrices, the scores first and last.
    shapes = [e.input_shapes[0] for e in profile.events() if e.name == "aten::resolve_conj"]
    assert shapes[::5] == shapes[4::5]
    return [tuple(shape) for shape in shapes[::5]]


def needed_tiles(q_positions, k_positions, seen):
    """(rows, columns) of the rectangle around what is seen in each tile that has anything."""
    block, found = seen[q_positions][:, k_positions], []
    for rows, cols in itertools.product(range(0, len(block), ROWS), range(0, block.shape[1], COLS)):
        inside = block[rows : rows + ROWS, cols : cols + COLS].nonzero()
        if len(inside):
            found.append(tuple((inside.amax(0) - inside.amin(0) + 1).tolist()))
    return found


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "per_document", "cost_balanced"])
def test_tiles_of_packed_documents(layout, num_ranks):
    computed, needed, offsets = [], [], packed(SEQ_LEN // 16, num_ranks)
    made = make_layout(layout, SEQ_LEN, num_ranks, cu_seqlens=offsets)
    seen = visible(SEQ_LEN, is_causal=True, cu_seqlens=offsets)
    for q_rank, k_rank in itertools.product(range(num_ranks), repeat=2):
        at = made.positions(q_rank), made.positions(k_rank)
        computed += computed_tiles(*at, offsets)
        needed += needed_tiles(*at, seen)
    areas = [sum(rows * cols for rows, cols in tiles) for tiles in (computed, needed)]
    assert 0 < len(computed) <= 1.1 * len(needed)
    assert areas[0] <= 1.1 * areas[1]
    assert areas[0] < SEQ_LEN**2 / 2
