"""permute_tokens and unpermute_tokens against the reference, and what must hold for any routing."""

import dataclasses

import emulation
import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, NUM_TOKENS, examples

from moe_ext import ops, reference

TABLES = ["slot_of_row", "row_of_slot", "expert_offsets", "num_tokens_per_expert", "num_dropped"]
OPTIONS = {
    "dropless": {},
    "aligned": {"align": 16},
    "capacity_by_position": {"capacity": 50},
    "capacity_by_score": {"capacity": 50, "drop_policy": "score"},
    "capacity_aligned": {"capacity": 5, "align": 8},
    "capacity_never_reached": {"capacity": 10_000},
}

# A sum of K products in the accumulator's precision, then one rounding to the output's dtype.
# The vector loops fuse the multiply-add and the reference does not: at most one rounding a term.
EPS = {
    torch.float32: 4 * 2.0**-24,
    torch.float64: 4 * 2.0**-53,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


def make(num_tokens, *, top_k=3, num_experts=8, dim=33, dtype=torch.float32, device="cpu"):
    x = torch.randn(num_tokens, dim).to(dtype)
    idx = torch.randint(-1, num_experts, (num_tokens, top_k))
    weights = torch.rand(num_tokens, top_k)
    return x.to(device), idx.to(device), weights.to(device)


def assert_same_permutation(actual, expected):
    for table in TABLES:
        assert torch.equal(getattr(actual, table), getattr(expected, table)), table
    assert actual.top_k == expected.top_k


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("option", OPTIONS)
def test_tables_and_rows_equal_the_reference(device, option, num_tokens):
    x, idx, weights = make(num_tokens, device=device)
    options = {"topk_weights": weights, **OPTIONS[option]}
    rows, permutation = ops.permute_tokens(x, idx, 8, **options)
    expected_rows, expected = reference.permute_tokens(x, idx, 8, **options)
    assert torch.equal(rows, expected_rows)
    assert_same_permutation(permutation, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("dim", [5, 16])
def test_permute_moves_bytes_of_any_dtype(device, dtype, dim):
    x = torch.randint(0, 2, (257, dim)).to(device, dtype)
    _, idx, _ = make(257, device=device)
    assert torch.equal(ops.permute_tokens(x, idx, 8)[0], reference.permute_tokens(x, idx, 8)[0])


@pytest.mark.every_isa
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dim", [0, 1, 33, 256, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermute_equals_the_reference(backend, dtype, dim, weighted):
    x, idx, weights = make(63, dim=dim, dtype=dtype, device=backend)
    rows, permutation = ops.permute_tokens(x, idx, 8, capacity=20)
    weights = weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
    w = weights if weighted else None
    actual = ops.unpermute_tokens(rows, permutation, w)
    expected = reference.unpermute_tokens(rows, permutation, w)
    assert actual.dtype == dtype
    bound = EPS[dtype] * reference.unpermute_tokens(rows.abs(), permutation, w).to(torch.float64)
    assert (
        (actual.double() - expected.double()).abs() <= bound + 1e-7 * (dtype == torch.float16)
    ).all()


def test_indices_of_32_bits(device):
    x, idx, _ = make(257, device=device)
    (rows, permutation), (expected_rows, expected) = (
        ops.permute_tokens(x, idx.to(dtype), 8) for dtype in (torch.int32, torch.int64)
    )
    assert torch.equal(rows, expected_rows)
    assert_same_permutation(permutation, expected)


@pytest.mark.parametrize("option", OPTIONS)
def test_gradcheck(backend, option):
    num_tokens = 5 if emulation.is_active() else 13
    x, idx, weights = make(num_tokens, dim=5, dtype=torch.float64, device=backend)
    x.requires_grad_()
    weights = weights.double().requires_grad_()
    options = {"topk_weights": weights, **OPTIONS[option]}

    def there_and_back(x, weights):
        rows, permutation = ops.permute_tokens(x, idx, 8, **options)
        return ops.unpermute_tokens(rows.square(), permutation, weights)

    assert emulation.gradcheck(there_and_back, (x, weights))


def test_second_derivative_without_weights(device):
    x, idx, _ = make(9, dim=4, dtype=torch.float64, device=device)

    def there_and_back(x):
        rows, permutation = ops.permute_tokens(x, idx, 8, capacity=3)
        return ops.unpermute_tokens(rows.square(), permutation)

    assert emulation.gradgradcheck(there_and_back, (x.requires_grad_(),))


@pytest.mark.parametrize("dim", [32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_the_reference(backend, dtype, dim):
    x, idx, weights = make(257, dim=dim, dtype=dtype, device=backend)
    grad = torch.randn(257, dim).to(backend, dtype)
    results = []
    for module in (ops, reference):
        leaves = (x.clone().requires_grad_(), weights.clone().requires_grad_())
        rows, permutation = module.permute_tokens(leaves[0], idx, 8, capacity=70, align=4)
        y = module.unpermute_tokens(rows, permutation, leaves[1])
        results.append(torch.autograd.grad(y, leaves, grad))
    # Sums over K = 3 rows, and over the 33 columns of a dot product, of numbers of order one.
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=4 * EPS[dtype], atol=33 * EPS[dtype])


def test_expanded_gradient(device):
    x, idx, weights = make(33, device=device)
    x.requires_grad_()
    rows, permutation = ops.permute_tokens(x, idx, 8)
    ops.unpermute_tokens(rows, permutation, weights).sum().backward()
    routed = ((idx >= 0) * weights).sum(dim=1)
    torch.testing.assert_close(x.grad, routed[:, None].expand_as(x), rtol=1e-6, atol=1e-6)


def test_rows_without_weights_are_not_saved():
    x, idx, weights = make(64, dim=512)
    x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rows, permutation = ops.permute_tokens(x, idx, 8)
        ops.unpermute_tokens(rows, permutation)
    assert all(t.dtype == torch.int64 for t in saved)


def test_compiles_as_one_graph_for_any_number_of_tokens(device):
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def there_and_back(x, idx, weights):
        rows, permutation = ops.permute_tokens(x, idx, 8, capacity=100)
        return ops.unpermute_tokens(rows, permutation, weights)

    for num_tokens in (64, 65, 130):
        x, idx, weights = make(num_tokens, device=device)
        rows, permutation = ops.permute_tokens(x, idx, 8, capacity=100)
        expected = ops.unpermute_tokens(rows, permutation, weights)
        assert torch.equal(there_and_back(x, idx, weights), expected)


def test_of_equal_weights_the_lower_slot_keeps_its_row(device):
    x, weights = torch.randn(40, 3), torch.full((40, 1), 0.5)
    options = {"topk_weights": weights, "capacity": 7, "drop_policy": "score"}
    _, permutation = ops.permute_tokens(x, torch.zeros(40, 1, dtype=torch.int64), 2, **options)
    assert permutation.slot_of_row[:7].tolist() == [*range(7)]


@examples(60)
@given(
    num_tokens=st.integers(0, 70),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    capacity=st.none() | st.integers(1, 40),
    align=st.integers(1, 9),
    policy=st.sampled_from(["position", "score"]),
    seed=st.integers(0, 2**31),
)
def test_invariants(device, num_tokens, num_experts, top_k, capacity, align, policy, seed):
    generator = torch.Generator(device).manual_seed(seed)
    idx = torch.randint(-1, num_experts, (num_tokens, top_k), generator=generator)
    # Few distinct weights, so that the tie rule is at work.
    weights = torch.randint(0, 3, (num_tokens, top_k), generator=generator) / 2
    x = torch.randn(num_tokens, 3, generator=generator)
    options = dict(topk_weights=weights, capacity=capacity, align=align, drop_policy=policy)
    rows, permutation = ops.permute_tokens(x, idx, num_experts, **options)
    assert_same_permutation(
        permutation, reference.permute_tokens(x, idx, num_experts, **options)[1]
    )
    counts = permutation.num_tokens_per_expert
    assert counts.sum() + permutation.num_dropped == (idx >= 0).sum()
    assert ((permutation.expert_offsets.diff() - counts) < align).all()
    assert (permutation.expert_offsets % align == 0).all()
    has_slot = permutation.slot_of_row >= 0
    assert has_slot.sum() == counts.sum()
    assert (rows[~has_slot] == 0).all()
    if capacity is None and (idx >= 0).all():
        back = ops.unpermute_tokens(
            rows, permutation, torch.full((num_tokens, top_k), 1 / top_k).to(device)
        )
        torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)


X = torch.zeros(4, 2)
IDX = torch.zeros(4, 1, dtype=torch.int64)


REFUSED = {
    "permute_tokens": [
        {"x_TD": X, "topk_idx_TK": IDX, "num_experts": 2},
        ({"topk_idx_TK": IDX.float()}, "topk_idx to be int32 or int64, got Float"),
        ({"x_TD": X[0]}, r"x to be a 2-D tensor \[T, D\], got shape \[2\]"),
        ({"topk_idx_TK": IDX[:, 0]}, r"topk_idx to be a 2-D tensor \[T, K\], got shape \[4\]"),
        ({"topk_idx_TK": IDX[:3]}, r"topk_idx to be of size 4 in dim 0 \(the tokens of x\)"),
        ({"topk_idx_TK": IDX[:, :0]}, "topk_idx to have at least 1 column"),
        ({"num_experts": 0}, "num_experts to be at least 1, got 0"),
        ({"num_experts": 2**61}, r"num_experts to be below 2\^31, got 2305843009213693952"),
        ({"capacity": 0}, "capacity to be at least 1, got 0"),
        ({"align": 0}, "align to be at least 1, got 0"),
        ({"align": 2**61}, "align to be at most 65536, got 2305843009213693952"),
        ({"drop_policy": "last"}, "to be position or score, got last"),
        (
            {"capacity": 1, "drop_policy": "score"},
            "topk_weights to be given with drop_policy score, got None",
        ),
        (
            {"topk_weights": IDX, "capacity": 1},
            "topk_weights to be float32, float64, bfloat16 or float16, got Long",
        ),
        ({"topk_weights": X}, "topk_weights to be of size 1 in dim 1"),
        ({"topk_idx_TK": IDX + 2}, r"to be in \[0, 2\) or -1, got 2 at token 0, choice 0"),
        ({"topk_idx_TK": IDX - 2}, r"to be in \[0, 2\) or -1, got -2 at token 0, choice 0"),
        (
            {"topk_weights": X[:, :1] / 0, "capacity": 1, "drop_policy": "score"},
            "topk_weights to be free of NaN with drop_policy score",
        ),
    ],
}
test_permute_refuses = refusals.test_on_devices(REFUSED)


@pytest.mark.parametrize(
    ("change", "rows", "weights", "message"),
    [
        ({}, torch.zeros(4, 2, dtype=torch.int64), None, r"expected rows to be float32"),
        ({}, torch.zeros(4), None, r"expected rows to be a 2-D tensor \[N, D\]"),
        ({}, torch.zeros(5, 2), None, r"expected rows to be of size 4 in dim 0"),
        ({"slot_of_row": IDX[:, 0].int()}, X, None, r"expected slot_of_row to be Long, got Int"),
        ({"row_of_slot": IDX}, X, None, r"expected row_of_slot to be a 1-D tensor"),
        ({"row_of_slot": IDX[:, 0] + 4}, X, None, r"row_of_slot to be in \[0, 4\) or -1, got 4"),
        ({"row_of_slot": IDX[:, 0] - 2}, X, None, r"row_of_slot to be in \[0, 4\) or -1, got -2"),
        ({"top_k": 3}, X, None, r"expected top_k to be a divisor of the 4 slots, got 3"),
        ({}, X, torch.zeros(3, 1), r"expected topk_weights to be of size 4 in dim 0"),
        ({}, X, torch.zeros(4, 2), r"expected topk_weights to be of size 1 in dim 1 \(top_k\)"),
    ],
)
def test_unpermute_refuses(moved, change, rows, weights, message):
    x, idx, change, rows, weights = moved((X, IDX, change, rows, weights))
    permutation = dataclasses.replace(ops.permute_tokens(x, idx, 2)[1], **change)
    with pytest.raises(RuntimeError, match=r"unpermute_tokens: .*" + message):
        ops.unpermute_tokens(rows, permutation, weights)


def test_backward_refuses_a_table_that_points_outside():
    permutation = ops.permute_tokens(X, IDX, 2)[1]
    bad = dataclasses.replace(permutation, slot_of_row=permutation.slot_of_row + 1)
    for weights in (None, torch.ones(4, 1)):
        y = ops.unpermute_tokens(X.clone().requires_grad_(), bad, weights)
        with pytest.raises(RuntimeError, match=r"slot_of_row to be in \[0, 4\) or -1, got 4"):
            y.sum().backward()
