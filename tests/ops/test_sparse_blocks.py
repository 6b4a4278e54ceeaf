"""Block and row sparsity against plain PyTorch, and what it refuses."""

import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, examples

from moe_ext import ops, reference

SIZES = [0, 1, 7, 8, 9, 255, 256, 257, 5000]


def sparse(numel, dtype, block):
    x = torch.randn(numel).to(dtype)
    for i in range(0, numel, block):
        if torch.rand(()) < 0.6:
            x[i : i + block] = 0
            x[i : i + block : 2] = -0.0
        elif torch.rand(()) < 0.5:
            x[i : i + block] = 0
            x[min(numel, i + block) - 1] = 1
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_blocks_equal_the_reference(device, numel, dtype):
    for block in (1, 3, 33, 256, 10000):
        x = sparse(numel, dtype, block)
        bitmap = ops.nonzero_blocks(x, block=block)
        assert torch.equal(bitmap, reference.nonzero_blocks(x, block=block))
        idx = ops.block_indices(bitmap)
        packed = ops.gather_blocks(x, idx, block=block)
        assert torch.equal(packed, reference.gather_blocks(x, idx, block=block))
        out, expected = torch.zeros_like(x), torch.ones_like(x)
        ops.scatter_blocks_(out, packed, idx, block=block)
        assert torch.equal(out, x)  # nothing is lost
        other = expected.clone()
        ops.scatter_blocks_(other, 2 * packed, idx, block=block)
        reference.scatter_blocks_(expected, 2 * packed, idx, block=block)
        assert torch.equal(other, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_smallest_numbers_and_nan_are_not_zero(device, dtype):
    for number in (torch.finfo(dtype).smallest_normal, float("nan"), float("-inf")):
        x = torch.zeros(1000, dtype=dtype)
        x[999] = number
        assert ops.block_indices(ops.nonzero_blocks(x, block=100)).tolist() == [9]
    subnormal = torch.ones(1, dtype=torch.int16).view(torch.bfloat16)
    assert ops.nonzero_blocks(subnormal).tolist() == [1]


@examples(40)
@given(
    ranks=st.integers(1, 4),
    numel=st.integers(1, 500),
    block=st.integers(1, 64),
    seed=st.integers(0, 2**31),
)
def test_the_sum_over_ranks_is_exact(device, ranks, numel, block, seed):
    """Union of the maps, sum of the packed blocks, scatter: the dense sum."""
    torch.manual_seed(seed)
    grads = [sparse(numel, torch.float32, block) for _ in range(ranks)]
    union = torch.zeros_like(ops.nonzero_blocks(grads[0], block=block))
    for grad in grads:
        union |= ops.nonzero_blocks(grad, block=block)
    idx = ops.block_indices(union)
    packed = sum(ops.gather_blocks(grad, idx, block=block) for grad in grads)
    out = torch.zeros(numel)
    ops.scatter_blocks_(out, packed, idx, block=block)
    assert torch.equal(out, sum(grads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 300])
def test_rows_equal_the_reference(device, num_tokens, dtype):
    for width in (0, 1, 5, 64):
        rows = torch.randn(num_tokens, width).to(dtype)
        idx = torch.randint(-1, 40, (num_tokens,))
        actual, expected = ops.sum_rows(rows, idx, 40), reference.sum_rows(rows, idx, 40)
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_rows_that_cancel_are_kept(device):
    rows = torch.tensor([[1.0, -1.0], [2.0, 0.0], [-2.0, 0.0]])
    sums, idx = ops.sum_rows(rows, torch.tensor([7, 3, 3]), 9)
    assert idx.tolist() == [3, 7] and sums.tolist() == [[0.0, 0.0], [1.0, -1.0]]


@pytest.mark.parametrize("threads", [1, 3])
def test_same_bits_for_any_number_of_threads(num_threads, threads):
    rows, idx = torch.randn(3000, 40), torch.randint(0, 50, (3000,))
    x = sparse(100000, torch.float32, 256)
    num_threads(threads)
    sums, unique = ops.sum_rows(rows, idx, 50)
    expected, _ = reference.sum_rows(rows, idx, 50)
    assert torch.equal(sums, expected) and unique.tolist() == list(range(50))
    assert torch.equal(ops.nonzero_blocks(x), reference.nonzero_blocks(x))


X, IDX = torch.zeros(4, 100), torch.tensor([0, 2])
PACKED = torch.zeros(2, 100)


REFUSED = {
    "nonzero_blocks": [
        {"x": X},
        ({"x": X.int()}, "x to be float32, .* Int"),
        ({"block": 0}, "block to be at least 1, got 0"),
    ],
    "gather_blocks": [
        {"x": X, "block_idx_B": IDX},
        ({"block_idx_B": IDX.int()}, "block_idx to be Long, got Int"),
        ({"block_idx_B": IDX + 2, "block": 100}, r"block_idx to be in \[0, 4\), got 4 at 1"),
        ({"block_idx_B": IDX - 1}, r"block_idx to be in \[0, 2\), got -1 at 0"),
    ],
    "scatter_blocks_": [
        {"out": X.clone(), "packed": PACKED, "block_idx_B": IDX, "block": 100},
        ({"out": X.t()}, "out to be contiguous"),
        ({"block_idx_B": IDX.flip(0)}, "block_idx to be ascending, got 0 after 2 at 1"),
        ({"block_idx_B": IDX * 0}, "block_idx to be ascending, got 0 after 0 at 1"),
        ({"packed": PACKED[:1]}, r"packed to be of size 2 in dim 0 \(the blocks of block_idx\)"),
        ({"block": 99}, "packed to be of size 99 in dim 1"),
        ({"packed": PACKED.double()}, "packed to be Float, got Double"),
        ({"out": X, "packed": X[:2]}, "out to be in memory of its own, got a part of packed's"),
    ],
    "sum_rows": [
        {"rows_ND": X, "row_idx_N": IDX[[0, 0, 0, 0]], "num_rows": 5},
        (
            {"row_idx_N": torch.tensor([0, 1, 2, 5])},
            r"row_idx to be in \[0, 5\) or -1, got 5 at row 3",
        ),
        ({"row_idx_N": IDX}, r"row_idx to be of size 4 in dim 0 \(the number of rows"),
        ({"rows_ND": X[0], "row_idx_N": IDX}, r"rows to be a 2-D tensor \[N, D\]"),
        ({"num_rows": -1}, "num_rows to be at least 0, got -1"),
    ],
}
test_refuses = refusals.test(REFUSED)
