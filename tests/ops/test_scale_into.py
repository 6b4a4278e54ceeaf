"""Scaled copies against plain PyTorch, what is found not to be finite, and what is refused."""

import itertools
import math

import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import examples

from moe_ext import ops, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PAIRS = list(itertools.product(DTYPES, DTYPES))
NUMELS = [0, 1, 7, 15, 16, 17, 31, 255, 256, 257, 40_003]
WORD = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x):
    """Of all numbers; NaN has many, of which any will do."""
    return torch.where(x.isnan(), 0.0, x).view(WORD[x.element_size()]), x.isnan()


def assert_same(got, want):
    for a, b in zip(bits(got), bits(want), strict=True):
        assert torch.equal(a, b)


def check(x, dtype, scale, *, offset=0):
    """Into another tensor, and in place where that has the same dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    want = (x.to(wide) * scale).to(dtype)
    slow = torch.empty_like(want)
    room = torch.full((x.numel() + 2 * offset,), 7, dtype=dtype, device=x.device)
    out = room[offset : offset + x.numel()]
    nonfinite = ops.scale_into_(out, x, scale=scale)
    assert nonfinite.dtype == torch.bool and nonfinite.shape == () and nonfinite.device == x.device
    assert_same(out, want)
    assert bool((room[:offset] == 7).all()) and bool((room[offset + x.numel() :] == 7).all())
    assert bool(nonfinite) == (not bool(torch.isfinite(want).all()))
    assert torch.equal(reference.scale_into_(slow, x, scale=scale), nonfinite)
    assert_same(slow, want)
    if x.dtype == dtype:
        assert torch.equal(ops.scale_into_(x, x, scale=scale), nonfinite)
        assert_same(x, want)


@pytest.mark.every_isa
@pytest.mark.parametrize(("given", "dtype"), PAIRS)
def test_equals_two_operators(backend, given, dtype):
    for numel in NUMELS:
        check(torch.randn(numel, device=backend).to(given), dtype, 1 / 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned(device, dtype, offset):
    check(torch.randn(1000, device=device)[offset:], dtype, 0.5, offset=offset)


@examples(80)
@given(
    pair=st.sampled_from(PAIRS),
    numel=st.integers(1, 300),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, -0.125, 1e-20, 1e20, 1e-45, 0.0]),
    ordinary=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_bits(device, pair, numel, scale, ordinary, seed):
    """Subnormal numbers, signed zeros, NaN and infinity in any lane, and halves between two."""
    generator = torch.Generator().manual_seed(seed)
    size = pair[0].itemsize
    raw = torch.randint(256, (numel * size,), dtype=torch.uint8, generator=generator)
    if seed % 3 == 0 and size > 2:
        raw.view(-1, size)[:, : size - 2] = 0
    x = raw.view(pair[0])
    if ordinary:
        x = torch.where(x.abs() < 1e4, x, 1.5)
    check(x.to(device), pair[1], scale)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [1, 67, 20_001])
def test_one_number_that_is_not_finite(device, value, numel):
    for place in {0, numel // 2, numel - 1}:
        for dtype in DTYPES:
            x = torch.ones(numel, device=device)
            x[place] = value
            out = torch.empty(numel, dtype=dtype, device=device)
            assert bool(ops.scale_into_(out, x, scale=0.5))
            x[place] = 1
            assert not bool(ops.scale_into_(out, x, scale=0.5))


@pytest.mark.parametrize(
    ("dtype", "fits", "not_so"),
    [
        (torch.float16, 65519.996, 65520.0),
        (torch.bfloat16, 3.396177e38, 3.3961776e38),
        (torch.float32, 3.4028234e38, math.inf),
    ],
)
def test_rounding_to_infinity_counts(device, dtype, fits, not_so):
    for value, nonfinite in ((fits, False), (not_so, True), (-fits, False), (-not_so, True)):
        x = torch.full((37,), value, device=device)
        out = torch.empty(37, dtype=dtype, device=device)
        assert bool(ops.scale_into_(out, x, scale=1.0)) == nonfinite
        assert bool(torch.isfinite(out).all()) == (not nonfinite)


def test_large_numbers_are_finite(device):
    x = torch.full((9,), 3e38, device=device)
    assert not bool(ops.scale_into_(x, x, scale=0.5))
    assert bool(ops.scale_into_(x, x, scale=4.0))


def test_shapes_may_differ(device):
    x, out = torch.randn(6, 50, device=device), torch.empty(3, 100, device=device)
    assert not bool(ops.scale_into_(out, x, scale=2.0))
    assert torch.equal(out.flatten(), 2 * x.flatten())


OUT, X = torch.zeros(10), torch.ones(10)
BOTH = torch.zeros(15)


REFUSED = {
    "scale_into_": [
        {"out": OUT, "x": X, "scale": 1.0},
        ({"x": X.int()}, "x to be float32, float64, bfloat16 or float16, got Int$"),
        ({"out": OUT.int()}, "out to be float32, .* Int$"),
        ({"out": OUT[:9]}, r"out to have 10 elements as x, got shape \[9\]$"),
        ({"out": OUT[:5], "x": X[::2]}, "x to be contiguous, got"),
        ({"out": OUT[::2], "x": X[:5]}, "out to be contiguous"),
        (
            {"out": BOTH[5:], "x": BOTH[:10]},
            "out to be x or in memory of its own, got a part of x's memory$",
        ),
        ({"out": BOTH.view(torch.bfloat16)[:10], "x": BOTH[:10]}, "got a part of x's memory$"),
    ],
}


@refusals.parametrize(REFUSED)
def test_refuses(name, given, message):
    refusals.check(name, given, message)
    assert not OUT.any() and not BOTH.any()
