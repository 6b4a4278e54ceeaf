"""Rows that carry their scales against plain PyTorch: the same bits."""

import pytest
import torch

from moe_ext import ops, reference
from moe_ext.ops.quantize import row_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = ["int8", "fp8", "mx"]


def assert_same(x, format):
    """Bytes and values of the operators are those of the reference; returns bytes and values."""
    rows = ops.quantize_rows(x, format)
    assert rows.dtype == torch.uint8
    assert torch.equal(rows, reference.quantize_rows(x, format))
    options = {"dtype": x.dtype}
    values = ops.dequantize_rows(rows, x.shape[1], format, **options)
    expected = reference.dequantize_rows(rows, x.shape[1], format, **options)
    assert values.dtype == x.dtype and values.shape == x.shape
    assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))
    return rows, values


@pytest.mark.every_isa
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(backend, dtype, format):
    for num_rows, dim in ((0, 64), (1, 1), (5, 31), (3, 33), (2, 127), (7, 128), (4, 260), (3, 0)):
        x = torch.randn(num_rows, dim).to(dtype)
        rows, values = assert_same(x, format)
        blocks = -(-dim // 32) if format == "mx" else 4 * -(-dim // 128)
        assert rows.shape == (num_rows, dim + blocks) == (num_rows, row_bytes(dim, format))
        # What an element loses at most: half a step of the format, and a rounding to the dtype of
        # x or one of float32 (2^-24) for each of the scale, the product and the quotient.
        block = 32 if format == "mx" else 128
        if dim == 0:
            continue
        tops = [b.abs().amax(1, True).expand_as(b) for b in x.double().split(block, 1)]
        top = torch.cat(tops, 1)
        step = top / 254 if format == "int8" else torch.maximum(x.double().abs() / 16, top / 2**17)
        bound = step + top * (torch.finfo(dtype).eps / 2 + 4 * 2.0**-24)
        assert ((values.double() - x.double()).abs() <= bound).all()


def test_codes_and_scales_of_a_row_are_those_of_blocks(backend):
    x = torch.randn(3, 384)
    for format in ("int8", "fp8"):
        codes, scales = ops.quantize_blockwise(x, format=format)
        rows = ops.quantize_rows(x, format)
        assert torch.equal(rows[:, :384].flatten(), codes)
        assert torch.equal(rows[:, 384:].contiguous().view(torch.float32).flatten(), scales)


def test_scale_of_mx_is_the_least_that_cuts_nothing_off(backend):
    tops = torch.tensor([448.0, 448.001, 449.0, 896.0, 1.0, 2.0**-120, 1e-45, 0.0, 3.4e38])
    x = torch.zeros(len(tops), 32)
    x[:, 3] = tops
    rows, values = assert_same(x, "mx")
    assert rows[:, 32].tolist() == [127, 128, 128, 128, 119, 0, 0, 0, 247]
    # Codes of float8 that torch reads, and times a power of two.
    codes = rows[:, :32].view(torch.float8_e4m3fn).double()
    power = torch.ldexp(torch.ones(len(tops), 1).double(), rows[:, 32:].int() - 127)
    assert torch.equal((codes * power)[:-1], values[:-1].double())
    assert values[0, 3] == 448 and values[7].eq(0).all()
    # 255.8 rounds to 256, and 2^128 is no float32.
    assert values[-1, 3] == torch.finfo(torch.float32).max


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_magnitudes_stay_finite(backend, dtype, format):
    tiny = torch.finfo(dtype).smallest_normal
    for top in (torch.finfo(dtype).max, torch.finfo(dtype).max * 0.97, tiny, tiny / 64, 0.0):
        x = (torch.rand(2, 200) * 2 - 1).mul(top).to(dtype)
        x[0, 0], x[1, 199] = top, -top
        _, values = assert_same(x, format)
        assert values.isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_comes_back_as_nan(backend, bad, format):
    block = 32 if format == "mx" else 128
    x = torch.randn(3, 300)
    _, want = assert_same(x, format)
    x[1, 150], x[2, 299] = bad, bad
    want[1, 150 // block * block : (150 // block + 1) * block] = float("nan")
    want[2, 299 // block * block :] = float("nan")
    _, values = assert_same(x, format)
    assert torch.allclose(values, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_see_each_other(num_threads, format):
    num_threads(3)
    x = torch.randn(700, 130)
    rows, values = assert_same(x, format)
    order = torch.randperm(700)
    assert torch.equal(ops.quantize_rows(x[order], format), rows[order])
    assert torch.equal(ops.dequantize_rows(rows[order], 130, format), values[order])
    # A second time nothing is lost: "mx" multiplies by powers of two alone.
    if format == "mx":
        assert torch.equal(
            ops.dequantize_rows(ops.quantize_rows(values, format), 130, format), values
        )


@pytest.mark.parametrize("format", FORMATS)
def test_any_address(backend, format):
    storage = torch.randn(4 * 128 + 1)
    assert_same(storage[1:].view(4, 128), format)
    assert_same(torch.randn(128, 4).t(), format)
    rows = ops.quantize_rows(torch.ones(2, 128), format)
    shifted = torch.cat([rows.flatten()[:1], rows.flatten()])[1:].view_as(rows)
    assert ops.dequantize_rows(shifted, 128, format).eq(1).all()


X, ROWS = torch.zeros(2, 128), torch.zeros(2, 132, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.quantize_rows(X.double(), "int8"),
            "^quantize_rows: expected x to be float32, bfloat16 or float16, got Double",
        ),
        (lambda: ops.quantize_rows(X[0], "int8"), r"expected x to be a 2-D tensor \[N, D\]"),
        (lambda: ops.quantize_rows(X, "int4"), "expected format to be int8, fp8 or mx, got int4"),
        (
            lambda: ops.dequantize_rows(ROWS, 129, "mx"),
            r"^dequantize_rows: expected rows to be of size 134 in dim 1 \(the bytes of a row",
        ),
        (lambda: ops.dequantize_rows(ROWS.char(), 128, "mx"), "expected rows to be Byte, got Char"),
        (lambda: ops.dequantize_rows(ROWS, -1, "mx"), "expected dim to be at least 0, got -1"),
        (
            lambda: ops.dequantize_rows(ROWS, 128, "mx", dtype=torch.float64),
            "expected dtype to be float32, bfloat16 or float16, got Double",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
