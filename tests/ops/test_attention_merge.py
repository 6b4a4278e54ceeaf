"""merge_attention and the sinks: any pair of partial results, empty rows of every convention."""

import itertools
import math

import emulation
import pytest
import torch
from attention_cases import assert_close
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, acc_dtype, examples

from moe_ext import ops, reference


def pair(shape, dim, dtype_a, dtype_b):
    acc = acc_dtype(dtype_a)
    outs = [torch.randn(*shape, dim).to(dtype) for dtype in (dtype_a, dtype_b)]
    lses = [5 * torch.randn(shape, dtype=acc) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


def dtype_pairs():
    narrow = [dtype for dtype in DTYPES if dtype != torch.float64]
    return [*itertools.product(narrow, narrow), (torch.float64, torch.float64)]


@pytest.mark.every_isa
@pytest.mark.parametrize("dtypes", dtype_pairs())
@pytest.mark.parametrize("num_rows", [0, 1, 255, 256, 257])
def test_against_float64(backend, num_rows, dtypes):
    acc = acc_dtype(dtypes[0])
    args = [t.requires_grad_() for t in pair((num_rows,), 19, *dtypes)]
    exact_args = [t.detach().double().requires_grad_() for t in args]
    out, lse = ops.merge_attention(*args)
    exact = reference.merge_attention(*exact_args)
    assert_close(out, exact[0], dtype=acc)
    assert_close(lse, exact[1], dtype=acc)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), args, (grad_out, grad_lse))
    exact_grads = torch.autograd.grad(exact, exact_args, (grad_out.double(), grad_lse.double()))
    for grad, exact_grad, x in zip(grads, exact_grads, args, strict=True):
        assert_close(grad, exact_grad, dtype=acc, rounded_to=x.dtype)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 5)])
@pytest.mark.parametrize("dim", [0, 1, 16, 33])
def test_shapes(device, shape, dim):
    args = pair(shape, dim, torch.float32, torch.float32)
    out, lse = ops.merge_attention(*args)
    exact = reference.merge_attention(*(t.double() for t in args))
    assert_close(out, exact[0])
    assert_close(lse, exact[1])


def test_strided_arguments(device):
    out_a, lse_a, out_b, lse_b = pair((2, 4, 7), 6, torch.float32, torch.float32)
    expected = ops.merge_attention(out_a, lse_a, out_b, lse_b)
    actual = ops.merge_attention(
        out_a.transpose(1, 2).contiguous().transpose(1, 2),
        lse_a.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([out_b, out_b], dim=3)[:, :, :, 1],
        lse_b.flip(0).flip(0),
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_empty_rows_weigh_nothing_and_are_not_read(backend, empty):
    out = torch.randn(6, 5)
    lse = torch.randn(6)
    nothing = torch.full((6, 5), math.nan), torch.full((6,), empty)
    for args in ((out, lse, *nothing), (*nothing, out, lse)):
        args = [t.clone().requires_grad_() for t in args]
        merged = ops.merge_attention(*args)
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
        grads = torch.autograd.grad(merged, args, (torch.ones(6, 5), torch.ones(6)))
        full, none = (0, 2) if args[0].isfinite().all() else (2, 0)
        assert torch.equal(grads[full], torch.ones(6, 5))
        assert torch.equal(grads[full + 1], torch.ones(6))
        assert not grads[none].any() and not grads[none + 1].any()


@pytest.mark.parametrize("lses", [*itertools.product([-math.inf, math.inf], repeat=2)])
def test_empty_in_both(backend, lses):
    args = [
        torch.full((3, 5), math.nan, requires_grad=True),
        torch.full((3,), lses[0], requires_grad=True),
        torch.full((3, 5), math.nan, requires_grad=True),
        torch.full((3,), lses[1], requires_grad=True),
    ]
    out, lse = ops.merge_attention(*args)
    assert not out.any() and (lse == -math.inf).all()
    grads = torch.autograd.grad((out, lse), args, (torch.ones(3, 5), torch.ones(3)))
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("lses", [(math.nan, 0.0), (0.0, math.nan), (math.nan, -math.inf)])
def test_nan_is_handed_on(backend, lses):
    lse_a, lse_b = (torch.tensor([x]) for x in lses)
    out, lse = ops.merge_attention(torch.ones(1, 4), lse_a, torch.ones(1, 4), lse_b)
    assert lse.isnan().all() and out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_that_overflow_an_exponential(backend, dtype):
    a, b = torch.zeros(4, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype)
    lse_a = torch.tensor([0.0, 1000.0, -1000.0, 3e38], dtype=dtype)
    lse_b = torch.tensor([1000.0, 0.0, 0.0, -3e38], dtype=dtype)
    out, lse = ops.merge_attention(a, lse_a, b, lse_b)
    assert torch.equal(out[:, 0], torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype))
    assert torch.equal(lse, torch.maximum(lse_a, lse_b))


def test_gradcheck(device):
    args = pair((2, 3), 4, torch.float64, torch.float64)
    args = [t.requires_grad_() for t in args]
    assert emulation.gradcheck(ops.merge_attention, args)
    out, lse, sinks = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5), torch.randn(3)
    args = [t.double().requires_grad_() for t in (out, lse, sinks)]
    assert emulation.gradcheck(ops.merge_attention_sinks, args)


@examples(30)
@given(
    values=st.lists(
        st.one_of(st.floats(-60, 60), st.just(-math.inf), st.just(math.inf)),
        min_size=3,
        max_size=3,
    )
)
def test_commutes_and_associates(device, values):
    outs = [torch.randn(1, 6, dtype=torch.float64) for _ in values]
    parts = [(o, torch.tensor([v], dtype=torch.float64)) for o, v in zip(outs, values, strict=True)]
    expected = ops.merge_attention(*ops.merge_attention(*parts[0], *parts[1]), *parts[2])
    for order in itertools.permutations(range(3)):
        a, b, c = (parts[i] for i in order)
        actual = ops.merge_attention(*a, *ops.merge_attention(*b, *c))
        for x, y in zip(actual, expected, strict=True):
            assert_close(x, y, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_are_a_key_with_value_zero(backend, dtype):
    acc = acc_dtype(dtype)
    out, lse = torch.randn(2, 3, 5, 7).to(dtype), torch.randn(2, 3, 5, dtype=acc)
    lse[1, :, 2] = -math.inf
    sinks = torch.tensor([0.5, -math.inf, 40.0])
    args = [t.requires_grad_() for t in (out, lse, sinks)]
    exact_args = [t.detach().double().requires_grad_() for t in args]
    merged, merged_lse = ops.merge_attention_sinks(*args)
    exact = reference.merge_attention_sinks(*exact_args)
    assert_close(merged, exact[0], dtype=acc)
    assert_close(merged_lse, exact[1], dtype=acc)
    assert torch.equal(merged[:, 1][lse[:, 1].isfinite()], out[:, 1][lse[:, 1].isfinite()].to(acc))
    grads = torch.autograd.grad(merged.sum(), args)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[2][0] != 0 and grads[2][1] == 0


def test_sinks_equal_a_key_of_zero_value(device):
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (5, 7, 7))
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64)
    at = torch.arange(5), torch.arange(7)
    out, _ = ops.merge_attention_sinks(*ops.attention_block(q, k, v, *at), sinks)
    scores = torch.cat([q @ k.mT / 2, sinks[None, :, None, None].expand(1, 2, 5, 1)], dim=3)
    torch.testing.assert_close(out, scores.softmax(dim=3)[..., :7] @ v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [3, 8, 64])
def test_merge_into_rows_of_a_state_is_the_merge(device, dim, dtype):
    acc = acc_dtype(dtype)
    # Rows 0 to 5 have keys in both, b, a, neither by two conventions, and NaN.
    none, inf = -math.inf, math.inf
    lse_a = torch.tensor([0.5, none, 2, none, inf, math.nan], dtype=acc).expand(2, 3, 6)
    lse_b = torch.tensor([-1, 3, inf, none, none, 1], dtype=acc).expand(2, 3, 6).contiguous()
    whole, whole_lse = torch.randn(2, 3, 9, dim, dtype=acc), torch.randn(2, 9, 3, dtype=acc)
    # Rows as a library of [B, S, H, D] gives them, and not at a multiple of 16 bytes.
    padded = torch.randn(2, 6, 3, dim + 1).to(dtype)
    for out_b in (torch.randn(2, 3, 6, dim).to(dtype), padded[..., 1:].transpose(1, 2)):
        state, lse = whole.clone(), whole_lse.clone().transpose(1, 2)
        rows, of_rows = state[:, :, 2:8], lse[:, :, 2:8]
        of_rows.copy_(lse_a)
        # What has no keys may hold anything.
        rows[:, :, 1] = math.nan
        out_b[:, :, 2] = math.nan
        expected = ops.merge_attention(rows, of_rows, out_b, lse_b)
        ops.merge_attention_(rows, of_rows, out_b, lse_b)
        for found, wanted in zip((rows, of_rows), expected, strict=True):
            # A fused product or not: half a rounding of w x, w <= 1 and |x| < 8.
            limit = 4 * torch.finfo(acc).eps
            torch.testing.assert_close(found, wanted, rtol=0, atol=limit, equal_nan=True)
        assert torch.equal(state[:, :, :2], whole[:, :, :2])
        assert torch.equal(state[:, :, 8:], whole[:, :, 8:])
        assert torch.equal(lse[:, :, 8:], whole_lse.transpose(1, 2)[:, :, 8:])
