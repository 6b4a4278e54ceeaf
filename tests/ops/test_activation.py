"""Plain and gated activations against the reference in float64, for every instruction set."""

import itertools

import emulation
import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, examples, saved_by
from ops_helpers import UNIT as OUT_EPS

from moe_ext import ops, reference

KINDS = ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
LAYOUTS = ["concatenated", "interleaved"]
SIZES = [0, 1, 255, 256, 257]


def bound(dtype, kind, x, expected, factor):
    """How far |factor * f(x)| or |factor * f'(x)| may be from ``expected``, all in float64.

    The cumulative functions are good to eight roundings of the accumulator (exponential 2.5,
    polynomial 2.5, division, sum, product), and an exponential turns a relative error of its
    argument into that of the result times the argument: x^2 / 2 has one rounding, 2 u has four.
    A slope is the sum of two such terms, of which neither is larger than 1.2 + f'.
    For the 16-bit types they are good to 2^-16 in place of the eight roundings: the fit of the
    exponential to 2^-18.4, that of the normal distribution to 2^-17.7, 1 - s loses 2^-18, and some
    roundings.
    Results below 2^-126 may be flushed. In float64 the formulas of torch cancel: their own error.
    """
    eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    u = 0.8 * (x + 0.0447 * x**3)
    argument = {"gelu": x.square() / 2, "gelu_tanh": 8 * u.abs()}.get(kind, 0 * x).clamp(max=200)
    tail = torch.exp(-argument / (8 if kind == "gelu_tanh" else 1)) * argument * (1 + x.abs())
    good_to = 2.0**-16 if dtype.itemsize == 2 else 8 * eps
    scale = good_to * (expected.abs() + torch.exp(-x.abs() / 2) * factor.abs())
    scale = scale + tail * factor.abs() * eps
    if dtype == torch.float64:
        scale = scale + 8 * eps * (1 + x.abs()) * factor.abs()
    subnormal = 2.0**-25 if dtype == torch.float16 else 2.0**-118
    return scale + OUT_EPS[dtype] * expected.abs() + subnormal


def make(*shape, dtype):
    # The middle, where the functions bend, and the tails, where they are flat.
    return (torch.randn(shape) * torch.tensor([0.1, 1.0, 5.0])[torch.randint(3, shape)]).to(dtype)


def slope_and_value(kind, gate):
    leaf = gate.detach().double().requires_grad_()
    value = reference.activation(leaf, kind=kind)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return slope, value.detach()


def check_activation(x, kind, grad=None):
    leaf = x.detach().requires_grad_()
    y = ops.activation(leaf, kind=kind)
    grad = make(*x.shape, dtype=x.dtype) if grad is None else grad
    (grad_x,) = torch.autograd.grad(y, leaf, grad)
    assert y.dtype == grad_x.dtype == x.dtype and y.is_contiguous()
    slope, value = slope_and_value(kind, x)
    wide, wide_grad = x.double(), grad.double()
    one = torch.ones_like(wide)
    assert ((y.double() - value).abs() <= bound(x.dtype, kind, wide, value, one)).all()
    expected = wide_grad * slope
    assert (
        (grad_x.double() - expected).abs() <= bound(x.dtype, kind, wide, expected, wide_grad)
    ).all()


def split(x, layout):
    return x.chunk(2, dim=-1) if layout == "concatenated" else (x[..., ::2], x[..., 1::2])


def check_gated(x, kind, layout, grad=None):
    leaf = x.detach().requires_grad_()
    y = ops.gated_activation(leaf, kind=kind, layout=layout)
    assert y.shape == (*x.shape[:-1], x.shape[-1] // 2)
    grad = make(*y.shape, dtype=x.dtype) if grad is None else grad
    (grad_x,) = torch.autograd.grad(y, leaf, grad)
    assert y.dtype == grad_x.dtype == x.dtype and y.is_contiguous()
    gate, up = (t.double() for t in split(x.detach(), layout))
    slope, value = slope_and_value(GATES[kind], gate)
    g = grad.double()
    grad_gate, grad_up = split(grad_x, layout)
    results = [(y, value * up, up), (grad_gate, g * up * slope, g * up), (grad_up, g * value, g)]
    for actual, expected, factor in results:
        difference = (actual.double() - expected).abs()
        assert (difference <= bound(x.dtype, GATES[kind], gate, expected, factor)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_equals_the_reference(backend, dtype, kind):
    for size in SIZES:
        check_activation(make(size, 3, dtype=dtype), kind)
    check_activation(make(9001, dtype=dtype), kind)
    check_activation(make(dtype=dtype), kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_within_the_bound(isa, dtype):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    x = x[x.isfinite()]
    for kind in ("silu", "gelu", "gelu_tanh"):
        check_activation(x, kind, torch.ones_like(x))


@pytest.mark.every_isa
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_equals_the_reference(backend, dtype, kind, layout):
    for num_rows in SIZES:
        check_gated(make(num_rows, 2 * 19, dtype=dtype), kind, layout)
    for dim in (0, 1, 255, 4099):
        check_gated(make(2, 3, 2 * dim, dtype=dtype), kind, layout)
    check_gated(make(6, dtype=dtype), kind, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_expanded_arguments(device, dtype, layout):
    x = make(63, 2 * 19, dtype=dtype)
    views = {
        "column major": x.t().contiguous().t(),
        "every other": torch.stack([x, -x], dim=2)[:, :, 0],
        "part of a wider matrix": torch.cat([x, x], dim=1)[:, 7:45],
        "expanded": x[:1].expand(63, -1),
    }
    grads = [x.new_ones(()).expand(63, 19), make(19, 63, dtype=dtype).t()]
    for view, grad in itertools.product(views.values(), [None, *grads]):
        check_gated(view, "swiglu", layout, grad)
        plain_grad = None if grad is None else torch.cat([grad, grad], dim=1)
        check_activation(view, "gelu", plain_grad)


def permuted(num_rows, num_slots):
    """Slot of each row: some rows have none, and some slots no row."""
    slot_of_row = torch.full((num_rows,), -1)
    used = torch.randperm(min(num_rows, num_slots))[: max(0, min(num_rows, num_slots) - 2)]
    slot_of_row[used] = torch.randperm(num_slots)[: used.shape[0]]
    return slot_of_row


@pytest.mark.every_isa
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_equals_the_reference(backend, dtype, kind, layout):
    for num_rows, dim in ((0, 3), (1, 5), (12, 0), (12, 257), (64, 19), (3, 4099)):
        x = make(num_rows, 2 * dim, dtype=dtype).requires_grad_()
        weights = torch.rand(num_rows // 3 + 1, 4, requires_grad=True)
        slot_of_row = permuted(num_rows, weights.numel())
        y = ops.gated_activation(
            x, kind=kind, layout=layout, slot_weights=weights, slot_of_row=slot_of_row
        )
        grad = make(*y.shape, dtype=dtype)
        grad_x, grad_weights = torch.autograd.grad(y, (x, weights), grad)
        wide, wide_weights = (t.detach().double().requires_grad_() for t in (x, weights))
        want = reference.gated_activation(
            wide, kind=kind, layout=layout, slot_weights=wide_weights, slot_of_row=slot_of_row
        )
        wants = torch.autograd.grad(want, (wide, wide_weights), grad.double())
        gate, up = (t.double() for t in split(x.detach(), layout))
        row_weight = weights.detach().double().flatten()[slot_of_row.clamp(min=0)]
        row_weight = row_weight.where(slot_of_row >= 0, 0)[:, None]
        g = grad.double() * row_weight
        pairs = [(y, want, up * row_weight)]
        found, expected = split(grad_x, layout), split(wants[0], layout)
        pairs += zip(found, expected, (g * up, g), strict=True)
        for actual, exact, factor in pairs:
            # Two roundings more: of the weight, which float32 holds, and of its product.
            allowed = bound(dtype, GATES[kind], gate, exact.detach(), factor)
            assert (
                (actual.double() - exact).abs() <= 1.01 * allowed + 2.0**-22 * exact.abs()
            ).all()
        # The error of each term, and of sixteen sums of a sixteenth of the terms.
        terms = torch.zeros_like(wide_weights).flatten()
        value = grad.double() * reference.gated_activation(
            x.double().detach(), kind=kind, layout=layout
        )
        has_slot = slot_of_row >= 0
        terms[slot_of_row[has_slot]] = value.abs().sum(1)[has_slot]
        eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
        good_to = (2.0**-14 if dtype == torch.bfloat16 else 64 * eps) + (dim / 16 + 16) * eps
        # The weights of float64 rows are cast from float32, and their gradients back to it.
        allowed = terms * max(good_to, 2.0**-23)
        assert ((grad_weights.double() - wants[1]).flatten().abs() <= allowed).all()
        assert not grad_weights.flatten()[terms == 0].any()


def test_weights_of_one_change_no_bit(isa):
    torch.manual_seed(4)
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        x = make(9, 2 * 32, dtype=dtype).requires_grad_()
        ones = {"slot_weights": torch.ones(9), "slot_of_row": torch.arange(9)}
        found = []
        for options in ({}, ones):
            y = ops.gated_activation(x, layout=layout, **options)
            found.append((y, *torch.autograd.grad(y.sum(), x)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e30, -1e30, 3e19, -3e19]


def assert_same_kind_of_number(actual, expected):
    # Against float64: torch's float32 gelu of inf is NaN in a vector body and inf in a scalar tail.
    for predicate in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(predicate(actual), predicate(expected.to(actual.dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_propagate(backend, dtype, kind):
    # Repeated, so that vector bodies and scalar tails both see them.
    x = torch.tensor(SPECIAL, dtype=dtype).repeat(21)
    for grad in (1.0, float("inf"), float("nan")):
        results = []
        for module, leaf in ((ops, x.clone()), (reference, x.double())):
            y = module.activation(leaf.requires_grad_(), kind=kind)
            results.append((y, *torch.autograd.grad(y, leaf, torch.full_like(y, grad))))
        for actual, expected in zip(*results, strict=True):
            assert_same_kind_of_number(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", GATES)
def test_gated_nan_and_infinity_propagate(backend, kind, layout):
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
    x = pairs.t().reshape(-1) if layout == "concatenated" else pairs.reshape(-1)
    results = []
    for module, leaf in ((ops, x.clone()), (reference, x.double())):
        y = module.gated_activation(leaf.requires_grad_(), kind=kind, layout=layout)
        results.append((y, *torch.autograd.grad(y.sum(), leaf)))
    for actual, expected in zip(*results, strict=True):
        assert_same_kind_of_number(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(backend, kind):
    # Away from the kink of relu at zero.
    x = torch.randn(5, 6, dtype=torch.float64)
    x = (x + x.sign() * 0.01).requires_grad_()
    assert emulation.gradcheck(lambda x: ops.activation(x, kind=kind), x)
    for gate, layout in itertools.product([g for g, k in GATES.items() if k == kind], LAYOUTS):
        assert emulation.gradcheck(
            lambda x, g=gate, at=layout: ops.gated_activation(x, kind=g, layout=at), x
        )
        weights = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
        slots = torch.tensor([5, -1, 0, 3, 2])
        assert emulation.gradcheck(
            lambda x, w, g=gate, at=layout, s=slots: ops.gated_activation(
                x, kind=g, layout=at, slot_weights=w, slot_of_row=s
            ),
            (x, weights),
        )


def test_second_derivative_is_refused(device):
    x = torch.randn(4, 6, requires_grad=True)
    weighted = {"slot_weights": torch.rand(4), "slot_of_row": torch.arange(4)}
    for y in (
        ops.activation(x, kind="silu"),
        ops.gated_activation(x),
        ops.gated_activation(x, **weighted),
    ):
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="expected the result to be differentiated once"):
            grad.sum().backward()


def test_compiles_as_one_graph_for_any_number_of_rows(device):
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def both(x):
        return ops.gated_activation(ops.activation(x, kind="gelu"), kind="swiglu")

    for num_rows in (3, 4, 9):
        x = torch.randn(num_rows, 8, requires_grad=True)
        y = both(x)
        expected = ops.gated_activation(ops.activation(x, kind="gelu"), kind="swiglu")
        assert torch.equal(y, expected)
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in (y, expected)]
        assert torch.equal(*grads)


def test_saves_only_its_input(device):
    x = torch.randn(64, 128, requires_grad=True)
    for function in (lambda: ops.gated_activation(x), lambda: ops.activation(x, kind="gelu")):
        assert [(t.data_ptr(), t.nbytes) for t in saved_by(function)] == [(x.data_ptr(), x.nbytes)]
    kept = (x, torch.rand(32, 2, requires_grad=True), torch.arange(64))
    saved = saved_by(lambda: ops.gated_activation(x, slot_weights=kept[1], slot_of_row=kept[2]))
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in kept}


X, GRAD, SLOTS, WEIGHTS = torch.ones(3, 4), torch.ones(3, 2), torch.arange(3), torch.ones(3)
WEIGHTED = {"slot_weights": WEIGHTS, "slot_of_row": SLOTS}
REFUSED = {
    "activation": [
        {"x": X, "kind": "silu"},
        ({"x": X.long()}, "x to be float32, .*, got Long"),
        ({"kind": "swish"}, "kind to be silu, .* or relu_squared, got "),
    ],
    "gated_activation": [
        {"x": X},
        ({"x": X.int()}, "x to be float32, .*, got Int"),
        ({"kind": "silu"}, "kind to be swiglu, .* reglu, got silu"),
        ({"layout": "rows"}, "layout to be .* interleaved, got rows"),
        ({"x": X[:, :3]}, r"x to be of even size in the last dim, got shape \[3, 3\]"),
        ({"x": X[0, 0]}, r"x to be of even size .*, got shape \[\]"),
        (
            {"slot_weights": WEIGHTS},
            "slot_weights and slot_of_row to be given together, got slot_weights alone",
        ),
        ({"slot_of_row": SLOTS}, "slot_weights and .* together, got slot_of_row alone"),
        (WEIGHTED | {"slot_of_row": SLOTS.int()}, "slot_of_row to be Long, got Int"),
        (WEIGHTED | {"x": X[0]}, r"x to be a 2-D tensor \[N, 2F\] with slot_weights, got .*\[4\]"),
        (
            WEIGHTED | {"slot_of_row": SLOTS[:2]},
            r"slot_of_row to be of size 3 .*rows of x\), got shape \[2\]",
        ),
    ],
    "_gated_activation_backward": [
        {"grad": GRAD, "x": X, "kind": "swiglu", "layout": "concatenated"},
        ({"grad": GRAD.double()}, "grad to be Float, got Double"),
        *(
            ({"grad": grad}, r"grad to be shaped as the output for x \[3, 4\]")
            for grad in (X, GRAD[0], GRAD[:2])
        ),
    ],
    "_activation_backward": [
        {"grad": X, "x": X, "kind": "silu"},
        ({"grad": X[0]}, "grad to be shaped"),
    ],
}
test_refuses = refusals.test_on_devices(REFUSED)


def test_the_operator_refuses_weights_that_are_not_cast(device):
    operator = torch.ops.moe_ext.gated_activation
    with pytest.raises(
        RuntimeError, match="^gated_activation: .* slot_weights to be Float, got Double"
    ):
        operator(X, "swiglu", "concatenated", WEIGHTS.double(), SLOTS)


def test_slots_out_of_range_are_refused():
    x, weights = torch.randn(3, 4), torch.ones(3)
    for bad in (3, -2):
        slots = torch.tensor([0, bad, 1])
        with pytest.raises(
            RuntimeError, match=rf"slot_of_row to be in \[0, 3\) or -1, got {bad} at position 1"
        ):
            ops.gated_activation(x, slot_weights=weights, slot_of_row=slots)


@examples(40)
@given(
    kind=st.sampled_from(list(GATES)),
    shape=st.lists(st.integers(0, 5), max_size=3),
    dim=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_layouts_agree_and_gate_is_the_activation(device, kind, shape, dim, dtype):
    x = torch.randn(*shape, 2, dim).to(dtype)
    concatenated = x.flatten(-2)
    interleaved = x.transpose(-1, -2).flatten(-2)
    y = ops.gated_activation(concatenated, kind=kind)
    assert y.shape == (*shape, dim)
    # Vector bodies and scalar tails cut the two layouts differently: one rounding apart at most.
    other = ops.gated_activation(interleaved, kind=kind, layout="interleaved")
    torch.testing.assert_close(y, other, rtol=4 * OUT_EPS[dtype], atol=1e-37)
    ones = torch.stack([x[..., 0, :], torch.ones_like(x[..., 0, :])], dim=-2).flatten(-2)
    torch.testing.assert_close(
        ops.gated_activation(ones, kind=kind),
        ops.activation(x[..., 0, :], kind=GATES[kind]),
        rtol=4 * OUT_EPS[dtype],
        atol=1e-37,
    )
