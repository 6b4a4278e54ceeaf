"""Blocks of keys that no query of a rank sees are not sent, by a mask of all pairs."""

import pytest
import torch
from helpers import visible

from moe_ext.attention import Mask, make_layout
from moe_ext.attention.block import KeysForm
from moe_ext.attention.layouts import even_grid
from moe_ext.attention.schemes import SCHEMES
from moe_ext.attention.schemes.base import Workload

DOCUMENTS = (0, 9, 50, 50, 71, 96)
MASKS = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"window": (10, 3)},
    "causal window": {"is_causal": True, "window": (13, 0)},
    "documents": {"cu_seqlens": DOCUMENTS},
    "causal documents": {"is_causal": True, "cu_seqlens": DOCUMENTS},
    "causal window in documents": {"is_causal": True, "window": (7, 0), "cu_seqlens": DOCUMENTS},
}
FORM = KeysForm(batch=2, heads=3, dim=16, v_dim=8, dtype=torch.bfloat16, masked=True)


def workload(layout, num_ranks, is_causal=False, window=(-1, -1), cu_seqlens=None):
    made = make_layout(layout, 96, num_ranks, cu_seqlens=cu_seqlens or (0, 96))
    mask = Mask(is_causal, *window, cu_seqlens)
    return Workload(3, FORM, torch.float32, made, mask, (0,) * num_ranks)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "per_document"])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_and_bytes_of_a_ring_are_those_of_the_mask(layout, name):
    seen_SS = visible(96, **MASKS[name])
    for num_ranks in range(1, 9):
        work = workload(layout, num_ranks, **MASKS[name])
        positions = [work.layout.positions(rank) for rank in range(num_ranks)]
        # The oracle: a block is needed where one of its pairs is seen.
        needed = [[bool(seen_SS[q][:, k].any()) for k in positions] for q in positions]
        assert [list(row) for row in work.needs] == needed, num_ranks
        sent = [0] * num_ranks
        for source in range(num_ranks):
            steps = [s for s in range(1, num_ranks) if needed[(source + s) % num_ranks][source]]
            # From home to the first rank that needs them, then on to the last one.
            onward = range(steps[0], steps[-1]) if steps else ()
            for sender in [source, *((source + s) % num_ranks for s in onward)] if steps else ():
                sent[sender] += FORM.num_bytes(len(positions[source]))
        traffic = SCHEMES["ring"].traffic(work, even_grid(num_ranks, num_ranks))
        assert traffic.forward.sent == sent, num_ranks
