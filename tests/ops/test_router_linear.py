"""router_logits against float64, and that it keeps nothing but its arguments."""

import emulation
import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, UNIT, acc_dtype, examples, saved_by

from moe_ext import ops, reference


def assert_within_bound(actual, a, b, *, dtype, summed_in=None):
    """|fl(a @ b) - a @ b| <= n u |a| @ |b| for n terms in any order, and a rounding to the dtype.

    Of the products' dtype u is 2^-24 (2^-53); products of 16-bit numbers are exact there. Tensor
    cores have up to 17 cuts of 2 u for every 16 terms, and six terms for one of float32 in parts.
    """
    exact = a.double() @ b.double()
    terms = a.shape[1] + 1
    if a.is_cuda:
        terms = 6 * 17 / 16 * 2 * terms
    bound = terms * UNIT[summed_in or acc_dtype(dtype)] * (a.double().abs() @ b.double().abs())
    bound = bound + UNIT[dtype] * exact.abs() + (2.0**-24 if dtype == torch.float16 else 1e-300)
    assert actual.dtype == dtype
    assert ((actual.double() - exact).abs() <= 1.01 * bound).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 257, 700])
def test_is_within_the_bound_of_float64(backend, num_tokens, weight_dtype, dtype):
    weight_dtype = weight_dtype or dtype
    x = torch.randn(num_tokens, 72).to(dtype).requires_grad_()
    weight = torch.randn(10, 72).to(weight_dtype).requires_grad_()
    logits = ops.router_logits(x, weight)
    assert_within_bound(logits.detach(), x.detach(), weight.detach().t(), dtype=acc_dtype(dtype))
    grad = torch.randn_like(logits)
    grad_x, grad_weight = torch.autograd.grad(logits, (x, weight), grad)
    assert_within_bound(grad_x, grad, weight.detach(), dtype=dtype)
    assert grad_weight.dtype == weight_dtype
    # Summed in the dtype of the logits, then rounded to the weight's.
    assert_within_bound(
        grad_weight, grad.t(), x.detach(), dtype=weight_dtype, summed_in=acc_dtype(dtype)
    )


# On CUDA a sum of all tokens is cut, and a large product is rounded by the library.
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_many_tokens_are_within_the_bound(device, weight_dtype):
    x, grad = torch.randn(8200, 512).bfloat16(), torch.randn(8200, 3)
    weight, op = torch.randn(3, 512).to(weight_dtype), torch.ops.moe_ext
    actual = op._router_logits_backward_x(grad, weight, torch.bfloat16)
    assert_within_bound(actual, grad, weight, dtype=torch.bfloat16)
    actual = op._router_logits_backward_weight(grad, x, weight_dtype)
    assert_within_bound(actual, grad.t(), x, dtype=weight_dtype, summed_in=torch.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 0), (5, 0, 3), (0, 4, 4), (3, 257, 1)])
def test_edge_shapes(backend, shape):
    num_tokens, num_experts, dim = shape
    x = torch.randn(num_tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(num_experts, dim, dtype=torch.bfloat16, requires_grad=True)
    logits = ops.router_logits(x, weight)
    assert logits.shape == (num_tokens, num_experts)
    logits.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    if num_tokens == 0 or num_experts == 0:
        assert not weight.grad.any() and not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_arguments(device, dtype):
    x, weight = torch.randn(300, 40).to(dtype), torch.randn(6, 40).to(dtype)
    grad = torch.randn(300, 6)
    expected = ops.router_logits(x, weight)
    views = {
        "columns": lambda t: t.t().contiguous().t(),
        "every second": lambda t: torch.stack([t, -t], dim=2)[:, :, 0],
        "rows of more": lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
    }
    expected_grads = [
        torch.ops.moe_ext._router_logits_backward_x(grad, weight, dtype),
        torch.ops.moe_ext._router_logits_backward_weight(grad, x, dtype),
    ]
    close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-4, "atol": 1e-4}
    for view in views.values():
        x_v, weight_v, grad_v = view(x), view(weight), view(grad)
        torch.testing.assert_close(ops.router_logits(x_v, weight_v), expected, rtol=0, atol=1e-4)
        actual = [
            torch.ops.moe_ext._router_logits_backward_x(grad_v, weight_v, dtype),
            torch.ops.moe_ext._router_logits_backward_weight(grad_v, x_v, dtype),
        ]
        for a, b in zip(actual, expected_grads, strict=True):
            torch.testing.assert_close(a, b, **close)


def test_an_expanded_gradient(device):
    x = torch.randn(20, 8, requires_grad=True)
    weight = torch.randn(5, 8, requires_grad=True)
    ops.router_logits(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(dim=0).expand(20, 8))
    torch.testing.assert_close(weight.grad, x.detach().sum(dim=0).expand(5, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_neighbours(isa, dtype):
    """Ranks may cut anywhere."""
    x, weight = torch.randn(1500, 96).to(dtype), torch.randn(24, 96).to(dtype)
    grad = torch.randn(1500, 24, dtype=acc_dtype(dtype))
    logits = ops.router_logits(x, weight)
    grad_x = torch.ops.moe_ext._router_logits_backward_x(grad, weight, dtype)
    for begin, end in ((0, 1), (77, 78), (1, 1500), (500, 1013), (1499, 1500)):
        assert torch.equal(ops.router_logits(x[begin:end], weight), logits[begin:end])
        part = torch.ops.moe_ext._router_logits_backward_x(grad[begin:end], weight, dtype)
        assert torch.equal(part, grad_x[begin:end])


def test_saves_its_arguments_as_they_are(device):
    x = torch.randn(640, 64).bfloat16().requires_grad_()
    weight = torch.randn(8, 64).bfloat16().requires_grad_()
    saved = saved_by(lambda: ops.router_logits(x, weight))
    assert sum(t.untyped_storage().nbytes() for t in saved) == x.nbytes + weight.nbytes
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr()}
    saved = saved_by(lambda: ops.router_logits(x.detach(), weight))
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


def test_allocates_no_copy_of_the_tokens():
    """Tensors made by the operator: the logits, and a converted weight."""
    x, weight = torch.randn(4096, 512).bfloat16(), torch.randn(8, 512).bfloat16()
    with torch.profiler.profile(profile_memory=True) as profile:
        ops.router_logits(x, weight)
    taken = sum(
        max(0, event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    assert taken < x.nbytes / 4


def test_autocast_does_not_round_the_logits(device):
    x, weight = torch.randn(64, 32), torch.randn(8, 32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = ops.router_logits(x, weight)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, ops.router_logits(x, weight))


def test_gradcheck(backend):
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert emulation.gradcheck(ops.router_logits, (x, weight))
    assert emulation.gradcheck(lambda x: ops.router_logits(x, weight.detach()), (x,))


@examples(30)
@given(
    num_tokens=st.integers(0, 300),
    num_experts=st.integers(1, 40),
    dim=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_equals_the_product_of_upcast_tokens(device, num_tokens, num_experts, dim, dtype, seed):
    generator = torch.Generator(device).manual_seed(seed)
    # Small integers: every sum is exact, in any order.
    x = torch.randint(-8, 9, (num_tokens, dim), generator=generator).to(dtype)
    weight = torch.randint(-8, 9, (num_experts, dim), generator=generator).to(dtype)
    assert torch.equal(ops.router_logits(x, weight), reference.router_logits(x, weight))


X = torch.zeros(4, 6)


REFUSED = {
    "router_logits": [
        {"x_TD": X, "weight_ED": X},
        ({"x_TD": X.int()}, "x to be float32, .*"),
        ({"weight_ED": X.int()}, "weight to be float32, .* got Int"),
        ({"x_TD": X[0]}, r"x to be a 2-D tensor \[T, D\], got shape \[6\]"),
        ({"weight_ED": X[0]}, r"weight to be a 2-D tensor \[E, D\]"),
        (
            {"weight_ED": X[:, :5]},
            r"weight to be of size 6 in dim 1 \(the features of x\), got shape \[4, 5\]",
        ),
    ],
    "_router_logits_backward_x": [
        {"grad": X, "weight": X, "dtype": torch.float32},
        ({}, r"size 6 in dim 0 \(the experts of grad\)"),
        ({"dtype": torch.float64}, "grad to be Double, got Float"),
        ({"dtype": torch.int32}, "dtype to be float32, .* got Int"),
    ],
    "_router_logits_backward_weight": [
        {"grad": X, "x": X[:3], "dtype": torch.float32},
        ({}, r"size 3 in dim 0 \(the tokens of x\)"),
        ({"grad": X.double(), "x": X}, "grad to be Float, got Double"),
    ],
}
test_refuses = refusals.test_on_devices(REFUSED)
