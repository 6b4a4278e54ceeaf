"""The algorithms of examples/all_reduce.py: their sums, and what each rank sends."""

from fractions import Fraction

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


def run_numbers(rank, size):
    """With numbers of ranks that are no power of two, nodes of all sizes, few servers and many."""
    cases = [("ring",), ("tree",)]
    cases += [("two_levels", n) for n in range(1, size + 1) if size % n == 0]
    cases += [("servers", k) for k in range(1, size // 2 + 1)]
    found = {}
    for name, *args in cases:
        for length in (1003, 960):
            x = torch.arange(length, dtype=torch.float64) + 1000 * rank
            found[(name, *args, length)] = (
                all_reduce.measured(getattr(all_reduce, name), x, *args),
                x,
            )
    return found


def sent_tensors(name, size, rank, option=None):
    """What a rank sends, in tensors, by the papers' formulas."""
    if name == "ring":
        return Fraction(2 * (size - 1), size)
    if name == "two_levels":
        nodes = size // option
        return Fraction(2 * (option - 1), option) + Fraction(2 * (nodes - 1), nodes * option)
    if name == "servers":
        workers = size - option
        return Fraction(1) if rank < workers else Fraction(workers, option)
    # Up to the parent, and down to each child: the bits below the lowest one of the rank.
    lowest = rank & -rank if rank else 1 << (size - 1).bit_length()
    children = [d for d in (1 << i for i in range(10)) if d < lowest and rank + d < size]
    return Fraction(len(children) + (rank > 0))


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_sums_and_bytes_of_any_number_of_ranks(size):
    of_ranks = spawn_ranks(run_numbers, size, size, group_timeout=20)
    for (name, *args, length), _ in of_ranks[0].items():
        ranks = size - args[0] if name == "servers" else size
        want = ranks * torch.arange(length, dtype=torch.float64) + 500 * ranks * (ranks - 1)
        for rank, found in enumerate(of_ranks):
            sent, x = found[(name, *args, length)]
            assert rank >= ranks or torch.equal(x, want), (name, args, rank)
            if length == 960:  # cut by 2 to 6, and by 2 and 3 once more, into equal parts
                assert sent == 8 * length * sent_tensors(name, size, rank, *args), (name, args)


def sizes_that_do_not_fit(rank):
    texts = []
    for algorithm, *args in (
        (all_reduce.halving_doubling,),
        (all_reduce.two_levels, 2),
        (all_reduce.two_levels, 0),
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
            "two_levels: expected node_size to divide 3 ranks, got 0",
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
