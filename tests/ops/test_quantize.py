"""Block quantisers against plain PyTorch: the same bits."""

import contextlib

import emulation
import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import examples

from moe_ext import ops, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = ["int8", "int6", "int4", "int3", "int2", "fp8", "sign"]
SIZES = [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1025]


def rng_state(step=3):
    return torch.tensor([2**40 + 12345, 7, step, 2])


def assert_same(x, residual=None, *, elsewhere=False, **options):
    """The operator and the reference: equal codes, scales and residuals."""
    outs = []
    for module in (ops, reference):
        e = None if residual is None else residual.clone()
        if elsewhere:
            old, e = e, torch.full_like(residual, float("nan"))
            found = module.quantize_blockwise(x, residual=e, residual_in=old, **options)
            assert torch.equal(old, residual)
        else:
            found = module.quantize_blockwise(x, residual=e, **options)
        outs.append([*found, e])
    for actual, expected in zip(*outs, strict=True):
        if actual is not None:
            assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    return outs[0]


@pytest.mark.every_isa
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_equals_the_reference(backend, numel, dtype, format):
    x, residual = torch.randn(numel).to(dtype), torch.randn(numel)
    for block in (64, 128, 256, 1024, None):
        if block is None and format == "sign":
            continue
        codes, scales, _ = assert_same(x, format=format, block=block)
        here = assert_same(x, residual, format=format, block=block)
        there = assert_same(x, residual, elsewhere=True, format=format, block=block)
        assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))
        if format != "sign":
            for number in (0, 4096):
                random = {"rng_state": rng_state(), "element_offset": number}
                assert_same(x, residual, format=format, block=block, **random)
        shape = {"format": format, "block": block}
        for out in DTYPES:
            actual = ops.dequantize_blockwise(codes, scales, numel, dtype=out, **shape)
            expected = reference.dequantize_blockwise(codes, scales, numel, dtype=out, **shape)
            assert actual.dtype == out and torch.equal(actual, expected)
        sums = [x.clone(), x.clone()]
        ops.dequantize_add_(sums[0], codes, scales, **shape)
        reference.dequantize_add_(sums[1], codes, scales, **shape)
        assert torch.equal(*sums)
        for out, module in zip(sums, (ops, reference), strict=True):
            module.dequantize_add_(
                out.fill_(float("nan")), codes, scales, accumulate=False, **shape
            )
        assert torch.equal(*sums)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rounds_at_random", [False, True])
def test_pieces_give_the_codes_of_the_whole(backend, format, rounds_at_random):
    if format == "sign" and rounds_at_random:
        pytest.skip("signs are not rounded")
    x, state = torch.randn(1000), rng_state() if rounds_at_random else None
    options = {"format": format, "block": 128, "rng_state": state}
    whole = ops.quantize_blockwise(x, **options)
    pieces = [
        ops.quantize_blockwise(piece, element_offset=256 * i, **options)
        for i, piece in enumerate(x.split(256))
    ]
    assert torch.equal(torch.cat([piece.codes for piece in pieces]), whole.codes)
    assert torch.equal(torch.cat([piece.scales for piece in pieces]), whole.scales)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-42, 1e-38, 1e-30, 1e30, 3.4028234e38])
def test_extreme_magnitudes(backend, format, magnitude):
    x = (2 * torch.rand(300) - 1) * magnitude
    x[::100] = magnitude
    codes, scales, rest = assert_same(x, torch.zeros(300), format=format)
    values = ops.dequantize_blockwise(codes, scales, 300, format=format)
    assert values.isfinite().all() and rest.isfinite().all()
    assert torch.equal(x - values, rest)


def test_every_code_of_e4m3(backend):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0  # NaN is never made
    values = ops.dequantize_blockwise(codes, torch.ones(1), 256, block=256, format="fp8")
    assert torch.equal(values, codes.view(torch.float8_e4m3fn).float())
    again = ops.quantize_blockwise(values, block=256, format="fp8")
    assert torch.equal(again.codes, codes) and again.scales == 1
    # Halfway between neighbours: to even, as torch rounds.
    between = (values[:126] + values[1:127]) / 2
    between = torch.cat([between, torch.tensor([448.0])])
    out = ops.quantize_blockwise(between, block=128, format="fp8")
    assert torch.equal(out.codes, between.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_zero_blocks_stay_zero(backend, format):
    x = torch.randn(512)
    x[128:256] = 0
    codes, scales, rest = assert_same(x, torch.zeros(512), format=format)
    values = ops.dequantize_blockwise(codes, scales, 512, format=format)
    assert scales[1] == 0 and not values[128:256].any() and not rest[128:256].any()
    assert (scales[[0, 2, 3]] > 0).all()


INTEGERS = {8: 127, 6: 31, 4: 7, 3: 3, 2: 1}


@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize(("bits", "steps"), INTEGERS.items())
def test_error_is_half_a_step(backend, bits, steps, block):
    x = torch.randn(1000)
    codes, scales, rest = assert_same(x, torch.zeros(1000), bits=bits, block=block)
    # Half a step, and a rounding each of the scaled element and of the value: a number of at most
    # `steps` steps is off by 2^-24 of itself.
    bound = scales.repeat_interleave(block or 1000)[:1000] * (0.5 + 2 * steps * 2.0**-24)
    assert (rest.abs() <= bound).all()
    assert torch.equal(scales, torch.stack([b.abs().max() for b in x.split(block or 1000)]) / steps)
    assert codes.numel() == -(-1000 * bits // 8)
    if bits in (2, 4, 8):  # the largest error is reached: by a step that lies half way
        halfway = torch.tensor([1.0, 0.5 / steps])
        _, _, rest = assert_same(halfway, torch.zeros(2), bits=bits, block=block)
        assert abs(rest[1]) == pytest.approx(0.5 / steps, rel=1e-6)


@pytest.mark.parametrize("bits", INTEGERS)
def test_codes_follow_each_other_without_gaps(backend, bits):
    """Element i has the bits from bits * i on, the lowest first, as a number of Python."""
    steps, generator = INTEGERS[bits], torch.Generator().manual_seed(bits)
    numbers = torch.randint(-steps, steps + 1, (203,), generator=generator)
    numbers[0] = steps  # the scale is one
    out = ops.quantize_blockwise(numbers.float(), bits=bits, block=None)
    stream = int.from_bytes(bytes(out.codes.tolist()), "little")
    found = [stream >> bits * i & (2**bits - 1) for i in range(203)]
    assert found == [n % 2**bits for n in numbers.tolist()] and stream >> bits * 203 == 0
    assert out.scales.tolist() == [1.0]
    values = ops.dequantize_blockwise(*out, 203, bits=bits, block=None)
    assert torch.equal(values, numbers.float())


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "sign"])
def test_random_rounding_is_unbiased(format):
    steps = {"fp8": 7}.get(format) or INTEGERS[int(format[3:])]
    x = torch.rand(64) * 0.9 + 0.05
    x[0] = 1.0
    total = torch.zeros(64)
    draws = 2000
    for step in range(draws):
        codes, scales = ops.quantize_blockwise(
            x, block=64, format=format, rng_state=rng_state(step)
        )
        ops.dequantize_add_(total, codes, scales, block=64, format=format)
    # Four deviations of the mean, one half of a step each; fp8's are 1/8 at most.
    assert (total / draws - x).abs().max() < 4 * (0.5 / steps) / draws**0.5
    other = ops.quantize_blockwise(
        x, block=64, format=format, rng_state=rng_state() + torch.tensor([0, 0, 0, 1])
    )
    same = ops.quantize_blockwise(x, block=64, format=format, rng_state=rng_state())
    assert not torch.equal(other.codes, same.codes)


@examples(40)
@given(
    numel=st.integers(1, 400),
    format=st.sampled_from(FORMATS),
    block=st.sampled_from([64, 128, 256, None]),
    steps=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_nothing_is_lost(backend, numel, format, block, steps, seed):
    """What was sent plus the residual is the sum of the gradients, to rounding."""
    block = 1024 if format == "sign" and block is None else block
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(steps, numel, generator=generator)
    residual, sent = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
    for grad in grads:
        out = ops.quantize_blockwise(grad, residual=residual, format=format, block=block)
        sent += ops.dequantize_blockwise(*out, numel, format=format, block=block).double()
    expected = grads.double().sum(dim=0)
    # Two roundings a step, of numbers below 64.
    assert (sent + residual - expected).abs().max() <= 2 * steps * 64 * 2.0**-24


@pytest.mark.parametrize("threads", [1, 3])
def test_same_bits_for_any_number_of_threads(num_threads, threads):
    x, residual = torch.randn(100000), torch.randn(100000)
    num_threads(threads)
    for format in FORMATS:
        state = None if format == "sign" else rng_state()
        assert_same(x, residual, format=format, rng_state=state)
        if format != "sign":
            assert_same(x, residual, format=format, block=None)


def test_strided_and_shaped(backend):
    assert_same(torch.randn(40, 30).t(), torch.randn(30, 40), bits=4)
    assert_same(torch.randn(3, 5, 7), bits=1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_refuses_what_is_not_finite_and_changes_nothing(isa, bad, format):
    for where in (0, 299):
        x, residual = torch.randn(300), torch.randn(300)
        before = residual.clone()
        x[where] = bad
        with pytest.raises(RuntimeError, match=rf"x to be finite, got .* at element {where}$"):
            ops.quantize_blockwise(x, format=format)
        with pytest.raises(RuntimeError, match=rf"residual to be finite.* at element {where}$"):
            ops.quantize_blockwise(x, format=format, residual=residual)
        assert torch.equal(residual, before)
        old = before.clone()
        with pytest.raises(RuntimeError, match=rf"residual to be finite.* at element {where}$"):
            ops.quantize_blockwise(x, format=format, residual=residual, residual_in=old)
        assert torch.equal(old, before)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_refused_call_is_undone_bit_for_bit(isa, dtype, format):
    numel = 3 * 16384 + 77
    x = torch.randn(numel).to(dtype)
    residual = torch.randn(numel)
    # Residuals that the pass taken backwards finds, some that it does not, and subnormal ones.
    residual[9000:30000] *= 1e-2
    residual[30000:40000] *= 1e-9
    residual[40000:45000] *= torch.finfo(torch.float32).tiny
    x[-3] = float("nan")
    for state in (None,) if format == "sign" else (None, rng_state()):
        owed = residual.clone()
        with pytest.raises(RuntimeError, match=f"got nan at element {numel - 3}$"):
            ops.quantize_blockwise(x, format=format, residual=owed, rng_state=state)
        assert torch.equal(owed.view(torch.int32), residual.view(torch.int32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("owed", [None, "in place", "elsewhere"])
def test_a_block_that_is_not_finite_comes_back_as_nan_unchecked(isa, owed, bad, format):
    kwargs = {"format": format, "check_finite": False}
    for where in (0, 299):
        x, residual = torch.randn(300), torch.randn(300) if owed else None
        old = None if residual is None else residual.clone()
        good = ops.quantize_blockwise(x, residual=None if old is None else old.clone(), **kwargs)
        want = ops.dequantize_blockwise(*good, 300, format=format)
        begin, end = where // 128 * 128, min(where // 128 * 128 + 128, 300)
        want[begin:end] = float("nan")
        x[where] = bad
        out = ops.quantize_blockwise(
            x, residual=residual, residual_in=old if owed == "elsewhere" else None, **kwargs
        )
        found = ops.dequantize_blockwise(*out, 300, format=format)
        assert torch.allclose(found, want, rtol=0, atol=0, equal_nan=True)
        if old is not None:
            kept = (old + x)[begin:end]
            assert torch.allclose(residual[begin:end], kept, rtol=0, atol=0, equal_nan=True)
            assert residual.isfinite().sum() == 299


@pytest.mark.parametrize("format", FORMATS)
def test_cuda_leaves_the_residual_where_something_is_not_finite(device, format):
    """No error without a synchronisation: it travels as a scale, and the emulation traps it."""
    traps = emulation.is_active()
    if device.type == "cpu" and not traps:
        pytest.skip("the CPU refuses it")
    x, residual = torch.randn(300), torch.randn(300)
    before = residual.clone()
    x[200] = float("nan")
    with pytest.raises(RuntimeError, match="trap") if traps else contextlib.nullcontext():
        out = ops.quantize_blockwise(x, format=format, residual=residual)
        values = ops.dequantize_blockwise(*out, 300, format=format)
        assert values[200].isnan() and values[:128].isfinite().all()
    assert torch.equal(residual, before)
    with pytest.raises(RuntimeError, match="trap") if traps else contextlib.nullcontext():
        ops.quantize_blockwise(x, format=format, residual=torch.empty(300), residual_in=residual)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("format", ["int8", "int3"])
def test_one_scale_that_is_not_finite(isa, format):
    """Refused with everything as it was; unchecked, all comes back as NaN and is kept."""
    x, residual = torch.randn(3000), torch.randn(3000)
    x[2999], before = float("inf"), residual.clone()
    options = {"format": format, "block": None}
    for owed in ({"residual": residual}, {}):
        with pytest.raises(RuntimeError, match=r"to be finite, got inf at element 2999$"):
            ops.quantize_blockwise(x, **owed, **options)
    assert torch.equal(residual, before)
    out = ops.quantize_blockwise(x, residual=residual, check_finite=False, **options)
    assert ops.dequantize_blockwise(*out, 3000, **options).isnan().all()
    assert torch.equal(residual, before + x)


@pytest.mark.parametrize("format", FORMATS)
def test_any_address(backend, format):
    x, residual = torch.randn(301)[1:], torch.randn(301)[1:]
    assert_same(x, residual, elsewhere=True, format=format)
    codes, scales, _ = assert_same(x, residual, format=format)
    codes = torch.cat([codes[:1], codes])[1:]
    sums = [torch.ones(301)[1:], torch.ones(301)[1:]]
    ops.dequantize_add_(sums[0], codes, scales, format=format)
    reference.dequantize_add_(sums[1], codes, scales, format=format)
    assert torch.equal(*sums)


X, OWED = torch.zeros(4, 64), torch.zeros(4, 64)
CODES = torch.zeros(256, dtype=torch.uint8)


REFUSED = {
    "quantize_blockwise": [
        {"x": X},
        ({"x": X.double()}, "x to be float32, bfloat16 or float16, got Double"),
        ({"format": "int5"}, "format to be int8, int6, int4, int3, int2, fp8 or sign, got int5"),
        (
            {"block": 96},
            r"block to be a power of two from 64 to 1024, or None \(0\) for .* of all, got 96",
        ),
        (
            {"format": "sign", "block": None},
            "block to be above 0 for signs, whose scale is the mean of a block, got 0",
        ),
        (
            {"block": None, "element_offset": 512},
            "element_offset to be a multiple of 1024, got 512",
        ),
        ({"block": 32}, "block to be a power of two .*, got 32"),
        ({"residual": X.bfloat16()}, "residual to be Float, got BFloat16"),
        (
            {"residual": torch.zeros(256)},
            r"residual to be of shape \[4, 64\], that of x, got shape \[256\]",
        ),
        ({"residual": torch.zeros(64, 4).t()}, "residual to be contiguous"),
        ({"residual": X}, "residual to be in memory of its own"),
        (
            {"residual_in": torch.zeros(4, 64)},
            "residual to be given with residual_in, which is only read, got none",
        ),
        (
            {"residual": OWED, "residual_in": OWED[:2]},
            r"residual_in to be of shape \[4, 64\], that of x, got shape \[2, 64\]",
        ),
        ({"residual": OWED, "residual_in": OWED.half()}, "residual_in to be Float, got Half"),
        (
            {"residual": OWED, "residual_in": OWED},
            "residual_in to be in memory of its own, got a part of residual's",
        ),
        ({"element_offset": 64}, r"element_offset to be a multiple of block \(128\), got 64"),
        (
            {"rng_state": rng_state()[:3]},
            r"rng_state to be of size 4 in dim 0 \(seed, tensor, step, rank\), got shape \[3\]",
        ),
        ({"bits": 1, "rng_state": rng_state()}, "rng_state to be absent for signs"),
    ],
    "dequantize_blockwise": [
        {"codes": CODES, "scales": torch.ones(2), "numel": 256},
        (
            {"block": None},
            r"scales to be of size 1 in dim 0 \(the blocks of that many elements\), got shape",
        ),
        ({"bits": 3}, r"codes to be of size 96 in dim 0 \(the bytes of"),
        ({"numel": 255}, r"codes to be of size 255 in dim 0 \(the bytes of"),
        (
            {"scales": torch.ones(3)},
            r"scales to be of size 2 in dim 0 \(the blocks of that many elements\), got shape",
        ),
        ({"codes": CODES.char()}, "codes to be Byte, got Char"),
        ({"dtype": torch.float64}, "dtype to be float32, bfloat16 or float16, got Double"),
        ({"numel": -1}, "numel to be at least 0, got -1"),
    ],
    "dequantize_add_": [
        {"out": X.clone(), "codes": CODES, "scales": torch.ones(2)},
        ({"out": X.t()}, "out to be contiguous"),
        ({"bits": 4}, "codes to be of size 128 in dim 0"),
    ],
}
test_refuses = refusals.test(REFUSED)


def test_refuses_a_number_of_bits():
    with pytest.raises(
        ValueError, match=r"quantize_blockwise: expected bits to be one of .* got 5"
    ):
        ops.quantize_blockwise(X, bits=5)
