"""The algorithms of examples/all_reduce.py: their sums, and what each rank sends."""

import all_reduce
import pytest
import torch

from moe_ext.testing import spawn_ranks

# A length that cuts into unequal chunks, and one that cuts into equal ones.
LENGTHS = 1003, 1024
ALGORITHMS = ("ring",), ("halving_doubling",), ("tree",), ("two_levels", 2), ("servers", 2)


def run(rank):
    found = {}
    for name, *args in ALGORITHMS:
        for length in LENGTHS:
            x = torch.arange(length, dtype=torch.float64) + 1000 * rank
            found[name, length] = all_reduce.measured(getattr(all_reduce, name), x, *args), x
    return found


@pytest.fixture(scope="module")
def found():
    return spawn_ranks(run, 4)


def sizes_that_do_not_fit(rank):
    texts = []
    for algorithm, *args in (
        (all_reduce.halving_doubling,),
        (all_reduce.two_levels, 2),
        (all_reduce.servers, 2),
    ):
        try:
            algorithm(torch.ones(12), *args)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_refuses_ranks_that_do_not_fit():
    for texts in spawn_ranks(sizes_that_do_not_fit, 3):
        assert texts == [
            "halving_doubling: expected a power of two of ranks, got 3",
            "two_levels: expected node_size to divide 3 ranks, got 2",
            "servers: expected num_servers to be in [1, half of 3 ranks], got 2",
        ]


@pytest.mark.parametrize("name", [name for name, *_ in ALGORITHMS])
def test_sums_and_bytes(name, found):
    for length in LENGTHS:
        # Of four ranks, or of two workers beside two servers.
        ranks = 2 if name == "servers" else 4
        want = ranks * torch.arange(length, dtype=torch.float64) + 500 * ranks * (ranks - 1)
        assert all(torch.equal(of_rank[name, length][1], want) for of_rank in found[:ranks])
    sent = [of_rank[name, 1024][0] / (8 * 1024) for of_rank in found]
    # In tensors: 2 (N - 1) / N; 2 (N - 1) in all for a tree; two levels 2 / 2 inside, 2 / 2 / 2
    # between nodes; 1 from a worker, and from a server 2 / 2 for two workers and two servers.
    each = {"tree": [2, 1, 2, 1], "two_levels": [1.5] * 4, "servers": [1.0] * 4}
    assert sent == each.get(name, [1.5] * 4)
