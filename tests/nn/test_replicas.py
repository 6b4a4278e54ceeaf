"""Replicas of experts against what EPLB places for the same loads."""

import pytest
import torch

from moe_ext.nn import rebalance_experts

# The example of EPLB's README, and the placement that EPLB returns for it.
LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PLACED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_places_as_eplb():
    loads = torch.tensor(LOADS)
    with torch.device("meta"):  # another default device
        phy2log, log2phy, logcnt = rebalance_experts(loads, 16, 4, 2, 8)
    assert phy2log.tolist() == PLACED
    assert log2phy[0, :2].tolist() == [[12, -1], [15, 13]]
    assert logcnt[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("sizes", [(12, 16, 3, 2, 4), (8, 8, 1, 1, 4), (6, 12, 6, 3, 6)])
def test_maps_are_inverse(sizes):
    loads = torch.rand(3, sizes[0], generator=torch.Generator().manual_seed(0))
    phy2log, log2phy, logcnt = rebalance_experts(loads, *sizes[1:])
    assert torch.equal((log2phy >= 0).sum(-1), logcnt)
    for layer in range(3):
        for expert, replicas in enumerate(log2phy[layer]):
            placed = (phy2log[layer] == expert).nonzero()[:, 0].tolist()
            assert sorted(replicas[replicas >= 0].tolist()) == placed


@pytest.mark.parametrize(
    "shape, sizes, message",
    [
        ((6,), (6, 1, 1, 2), r"expected weight to be \[L, E\], got \(6,\)"),
        ((1, 6), (4, 1, 1, 2), "expected num_replicas to be at least 6, got 4"),
        ((1, 6), (7, 1, 1, 2), "expected num_replicas to be a multiple of 2, got 7"),
        ((1, 6), (6, 4, 2, 2), r"expected weight.shape\[1\] to be a multiple of 4, got 6"),
    ],
)
def test_errors(shape, sizes, message):
    with pytest.raises(ValueError, match=message):
        rebalance_experts(torch.ones(shape), *sizes)
