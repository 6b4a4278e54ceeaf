"""grouped_mm against the reference in float64, and what must hold for any offsets."""

import emulation
import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, examples, saved_by
from ops_helpers import UNIT as OUT_EPS

from moe_ext import ops, reference
from moe_ext.ops.grouped_gemm import row_alignment

NUM_ROWS = [0, 1, 255, 256, 257]

HALF_SUBNORMAL = 2.0**-25


def acc_eps(dtype):
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def assert_close(actual, expected, magnitude, num_terms, also_rounded=None):
    """expected in float64; magnitude is the sum of the absolute values of the num_terms terms."""
    bound = OUT_EPS[actual.dtype] * expected.abs()
    if also_rounded is not None:
        bound = bound + 1.01 * OUT_EPS[actual.dtype] * also_rounded.abs()
    bound = bound + (2 * num_terms + 2) * acc_eps(actual.dtype) * magnitude
    bound = bound + HALF_SUBNORMAL * (actual.dtype == torch.float16)
    assert ((actual.double() - expected).abs() <= bound).all()


def make_offsets(num_rows, num_experts, *, head=0, tail=0):
    """Random offsets with an empty expert; the first head and the last tail rows are left out."""
    inner = torch.randint(head, max(head, num_rows - tail) + 1, (num_experts - 1,)).sort().values
    offsets = torch.tensor([head, *inner.tolist(), max(head, num_rows - tail)])
    if num_experts > 2:
        offsets[1] = offsets[2]
    return offsets


def make(num_rows, *, num_experts=5, k=33, m=17, dtype=torch.float32, **kwargs):
    x = torch.randn(num_rows, k).to(dtype).requires_grad_()
    weight = torch.randn(num_experts, m, k).to(dtype).requires_grad_()
    bias = torch.randn(num_experts, m).to(dtype).requires_grad_()
    return x, weight, bias, make_offsets(num_rows, num_experts, **kwargs)


def in_float64(args, offsets, grad):
    """Result and gradients of the reference, and the same of absolute values."""
    found = []
    for transform in (lambda t: t, torch.abs):
        wide = [transform(t.detach().double()).requires_grad_() for t in args]
        wide_bias = wide[2] if len(wide) == 3 else None
        out = reference.grouped_mm(wide[0], wide[1], offsets, bias_EM=wide_bias)
        found.append((out.detach(), *torch.autograd.grad(out, wide, transform(grad.double()))))
    return found


def check_against_reference(x, weight, bias, offsets, grad=None, exact=in_float64):
    args = [t for t in (x, weight, bias) if t is not None]
    y = ops.grouped_mm(x, weight, offsets, bias_EM=bias)
    grad = torch.randn(y.shape).to(y.dtype) if grad is None else grad(y)
    grads = torch.autograd.grad(y, args, grad)
    expected, magnitude = exact(args, offsets, grad)
    num_rows, num_terms = x.shape[0], (x.shape[1] + 1, weight.shape[1])
    counts = (num_terms[0], num_terms[1], num_rows, num_rows)
    for actual, wide, bound, terms in zip((y, *grads), expected, magnitude, counts, strict=False):
        assert actual.dtype == x.dtype
        if actual is y and bias is not None and (x.is_cuda or emulation.is_active()):
            # To torch's product over experts it is added when that is rounded already.
            also_rounded = ops.grouped_mm(x, weight, offsets).double()
        else:
            also_rounded = torch.zeros_like(wide)
        assert_close(actual, wide, bound, terms, also_rounded)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(device, dtype, num_rows, with_bias):
    x, weight, bias, offsets = make(num_rows, dtype=dtype)
    check_against_reference(x, weight, bias if with_bias else None, offsets)


@pytest.mark.every_isa
@pytest.mark.parametrize(
    "num_experts, k, m",
    [(1, 8, 8), (1, 1, 1), (4, 0, 3), (4, 3, 0), (40, 5, 3), (3, 256, 129)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_sizes(backend, dtype, num_experts, k, m):
    x, weight, bias, offsets = make(31, num_experts=num_experts, k=k, m=m, dtype=dtype)
    check_against_reference(x, weight, bias, offsets)


EXACT = {}


def once(key):
    """`in_float64` of arguments that are the same for every instruction set."""

    def exact(*args):
        if key not in EXACT:
            EXACT[key] = in_float64(*args)
        return EXACT[key]

    return exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_in_several_blocks(isa, dtype):
    """Sums of more terms, and more columns, than copies in float32 have: forward and backward."""
    x, weight, bias, _ = make(600, num_experts=2, k=540, m=530, dtype=dtype)
    offsets = torch.tensor([0, 40, 600])
    check_against_reference(x, weight, bias, offsets, exact=once(("dense", dtype)))
    apart = weight.detach().mT.contiguous().mT.requires_grad_()
    check_against_reference(
        x,
        apart,
        None,
        offsets,
        lambda y: torch.randn_like(y[:1]).expand(y.shape),
        once(("apart", dtype)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_experts(device, dtype):
    x, weight = torch.randn(7, 3).to(dtype).requires_grad_(), torch.randn(0, 5, 3).to(dtype)
    y = ops.grouped_mm(x, weight, torch.tensor([2]))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == (7, 5) and (y == 0).all() and (grad == 0).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_arguments(backend, dtype):
    x, weight, bias, offsets = make(63, dtype=dtype)
    variants = {
        "column major": (
            x.t().contiguous().t(),
            weight.transpose(1, 2).contiguous().transpose(1, 2),
        ),
        "experts innermost": (x, weight.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
        "every other": (
            torch.stack([x, -x], dim=2)[:, :, 0],
            torch.stack([weight, -weight], dim=3)[:, :, :, 0],
        ),
        "expanded": (x[:1].expand(63, -1), weight[:1].expand(5, -1, -1)),
    }
    for x_view, weight_view in variants.values():
        check_against_reference(
            x_view.detach().requires_grad_(), weight_view.detach().requires_grad_(), bias, offsets
        )


@pytest.mark.parametrize("layout", ["column major", "expanded", "shifted", "apart"])
def test_rows_that_the_library_would_refuse(device, layout):
    # Widths of whole 16 bytes: bfloat16 goes to torch's kernel on devices that have one.
    x, weight, bias, offsets = make(64, k=16, m=8, dtype=torch.bfloat16)
    rows = {
        "column major": lambda t: t.t().contiguous().t(),
        "expanded": lambda t: t[:1].expand(t.shape),
        "shifted": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
        "apart": lambda t: torch.cat([t, t[:, :5]], dim=1)[:, : t.shape[1]],
    }[layout]
    x = rows(x.detach()).requires_grad_()
    check_against_reference(x, weight, bias, offsets, lambda y: rows(torch.randn_like(y)))
    grad_NM = rows(torch.randn(64, 8).bfloat16())
    actual = torch.ops.moe_ext._grouped_mm_backward_weight(grad_NM, x, offsets)
    expected = torch.ops.moe_ext._grouped_mm_backward_weight(
        grad_NM.contiguous(), x.contiguous(), offsets
    )
    torch.testing.assert_close(actual, expected)


def test_more_experts_than_the_library_takes(device):
    x, weight, bias, offsets = make(64, num_experts=1025, k=8, m=8, dtype=torch.bfloat16)
    check_against_reference(x, weight, bias, offsets)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_and_strided_gradients(backend, dtype):
    x, weight, bias, offsets = make(63, dtype=dtype)
    check_against_reference(x, weight, bias, offsets, lambda y: y.new_ones(()).expand(y.shape))
    check_against_reference(
        x, weight, bias, offsets, lambda y: torch.randn(y.shape[1], 63).to(dtype).t()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_no_expert_are_zero_and_get_no_gradient(device, dtype):
    x, weight, bias, offsets = make(63, dtype=dtype, head=5, tail=9)
    with torch.no_grad():
        x[:5], x[-9:] = float("nan"), float("inf")
    y = ops.grouped_mm(x, weight, offsets, bias_EM=bias)
    grads = torch.autograd.grad(y.sum(), (x, weight, bias))
    for rows in (y, grads[0]):
        assert (rows[:5] == 0).all() and (rows[-9:] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)
    empty = (offsets.diff() == 0).nonzero().flatten()
    assert len(empty) and (grads[1][empty] == 0).all() and (grads[2][empty] == 0).all()


# 16-bit gradients of the weight take padded copies of ragged rows.
@pytest.mark.parametrize("count", [31, 32, 33, 100, 257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_experts_do_not_see_their_neighbours(device, dtype, count):
    x, weight, bias, _ = make(2 * count + 40, num_experts=3, dtype=dtype)
    offsets = torch.tensor([20, 20 + count, 20 + count, 20 + 2 * count])
    with torch.no_grad():
        x[:20], x[20 + count :] = float("nan"), float("inf")
    y = ops.grouped_mm(x, weight, offsets, bias_EM=bias)
    grad = torch.randn(y.shape).to(dtype)
    (grad_weight,) = torch.autograd.grad(y, weight, grad)
    rows = slice(20, 20 + count)
    terms = grad[rows].double(), x[rows].detach().double()
    assert_close(grad_weight[0], terms[0].T @ terms[1], terms[0].abs().T @ terms[1].abs(), count)
    assert (grad_weight[1] == 0).all() and not grad_weight[2].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_experts_of_strided_rows(device, dtype):
    x, weight, bias, _ = make(300, num_experts=2, dtype=dtype)
    offsets = torch.tensor([3, 120, 277])
    for view in (torch.cat([x, x], dim=1)[:, :33], x.t().contiguous().t(), x[:1].expand(300, -1)):
        check_against_reference(view.detach().requires_grad_(), weight, bias, offsets)


def with_ends(num_rows, **kwargs):
    """Offsets by which every row has an expert, one of which has none, and the ends of them."""
    x, weight, bias, offsets = make(num_rows, **kwargs)
    offsets[0] = 0
    return x, weight, bias, offsets, offsets[1:].int()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ends_are_offsets_where_every_row_has_an_expert(device, dtype, num_rows, with_bias):
    # 16 and 8 columns: bfloat16 goes to torch's product on devices that have one.
    x, weight, bias, offsets, ends = with_ends(num_rows, k=16, m=8, dtype=dtype)
    args = (x, weight, bias) if with_bias else (x, weight)
    results = []
    for bounds in (offsets, ends):
        y = ops.grouped_mm(x, weight, bounds, bias_EM=bias if with_bias else None)
        gradients = torch.autograd.grad(y, args, torch.ones_like(y).cumsum(1) - 3)
        transposed = torch.ops.moe_ext._grouped_mm_backward_weight(y.detach(), x, bounds, True)
        results.append((y, *gradients, transposed))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    expected = reference.grouped_mm(x, weight, ends, bias_EM=bias if with_bias else None)
    wide = reference.grouped_mm(x, weight, offsets, bias_EM=bias if with_bias else None)
    assert torch.equal(expected, wide)


def test_no_experts_by_ends(device):
    y = ops.grouped_mm(torch.ones(0, 3), torch.ones(0, 5, 3), torch.empty(0, dtype=torch.int32))
    assert y.shape == (0, 5)


def launches_beside_products(call):
    """Kernels of ours, and copies, fills and casts of torch's, without those of its product."""
    before = emulation.num_launches()
    with torch.profiler.profile() as profile:
        call()
    names = [event.name for event in profile.events()]
    assert names.count("aten::_grouped_mm") == 1
    # The stand-in for the product copies rows itself; casts to int32 are none of its own.
    return emulation.num_launches() - before, names.count("aten::_to_copy")


@pytest.mark.skipif(not emulation.is_built(), reason="no emulation of CUDA")
def test_ends_spare_the_launches_around_the_librarys_product():
    x, weight, bias, offsets, ends = (
        t.detach() for t in with_ends(64, k=16, m=8, dtype=torch.bfloat16)
    )
    grad = torch.ones(64, 8, dtype=torch.bfloat16)
    calls = {
        "rows": lambda bounds: ops.grouped_mm(x, weight, bounds),
        "biased": lambda bounds: ops.grouped_mm(x, weight, bounds, bias_EM=bias),
        "weight": lambda bounds: torch.ops.moe_ext._grouped_mm_backward_weight(grad, x, bounds),
    }
    with emulation.emulated_cuda():
        found = {
            name: [launches_beside_products(lambda c=call, b=b: c(b)) for b in (offsets, ends)]
            for name, call in calls.items()
        }
    assert found == {
        "rows": [(1, 1), (0, 0)],
        "biased": [(1, 1), (1, 0)],
        "weight": [(1, 1), (1, 0)],
    }


@pytest.mark.parametrize("needed", ["x", "weight", "bias"])
def test_only_the_needed_gradient_is_computed(device, needed):
    tensors = dict(zip(("x", "weight", "bias"), make(20)[:3], strict=True))
    offsets = make_offsets(20, 5)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == needed)
    y = ops.grouped_mm(tensors["x"], tensors["weight"], offsets, bias_EM=tensors["bias"])
    with torch.profiler.profile() as profile:
        y.sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [needed]
    products = {
        "x": "moe_ext::grouped_mm",
        "weight": "moe_ext::_grouped_mm_backward_weight",
        "bias": "moe_ext::_grouped_mm_backward_bias",
    }
    calls = {event.key: event.count for event in profile.key_averages()}
    ours = {name: count for name, count in calls.items() if name.startswith("moe_ext::")}
    assert ours == {products[needed]: 1}


def test_gradcheck_twice(device):
    x, weight, bias, offsets = make(
        13, num_experts=4, k=3, m=2, dtype=torch.float64, head=1, tail=2
    )

    def f(x, weight, bias):
        return ops.grouped_mm(x, weight, offsets, bias_EM=bias)

    assert emulation.gradcheck(f, (x, weight, bias))
    assert emulation.gradgradcheck(f, (x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_and_returns_gradients_in_the_parameters_dtype(device, dtype):
    x, weight, bias, offsets = make(20)
    with torch.autocast(device.type, dtype=dtype):
        y = ops.grouped_mm(x, weight, offsets, bias_EM=bias)
    expected = ops.grouped_mm(x.to(dtype), weight.to(dtype), offsets, bias_EM=bias.to(dtype))
    assert y.dtype == dtype and torch.equal(y, expected)
    y.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (x, weight, bias))
    mixed = ops.grouped_mm
    with torch.autocast(device.type, dtype=dtype):
        assert mixed(x.to(dtype), weight, offsets).dtype == dtype
        assert mixed(x.double(), weight.double(), offsets).dtype == torch.float64


def test_shapes_on_the_meta_device():
    x, weight, bias, offsets = (
        t.detach().to("meta").requires_grad_(t.is_floating_point()) for t in make(20)
    )
    y = ops.grouped_mm(x, weight, offsets, bias_EM=bias)
    y.sum().backward()
    assert y.shape == (20, 17)
    assert all(t.grad.shape == t.shape for t in (x, weight, bias))


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_to_one_graph(device, autocast):
    x, weight, bias, offsets = make(20)

    def step(x, weight, bias, offsets):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            return ops.grouped_mm(x, weight, offsets, bias_EM=bias)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        y = function(x, weight, bias, offsets)
        results.append((y, *torch.autograd.grad(y.float().sum(), (x, weight, bias))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Shapes at which the own threading of the libraries changes the order of a sum.
@pytest.mark.parametrize(
    "sizes", [(300, 512, 1000, 2), (1000, 1000, 1, 1), (1, 4096, 64, 1), (1300, 64, 700, 3)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_any_number_of_threads(num_threads, dtype, sizes):
    num_rows, in_dim, out_dim, num_experts = sizes
    x = torch.randn(num_rows, in_dim).to(dtype).requires_grad_()
    weight = torch.randn(num_experts, out_dim, in_dim).to(dtype).requires_grad_()
    bias = torch.randn(num_experts, out_dim).to(dtype).requires_grad_()
    grad = torch.randn(num_rows, out_dim).to(dtype)
    offsets = make_offsets(num_rows, num_experts)
    results = []
    for threads in (1, 2, 3, 5):
        num_threads(threads)
        y = ops.grouped_mm(x, weight, offsets, bias_EM=bias)
        plain = ops.grouped_mm(x, weight, offsets)
        results.append((y, plain, *torch.autograd.grad(y, (x, weight, bias), grad)))
        assert torch.get_num_threads() == threads, "the limit of a worker outlived its products"
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_saves_only_its_arguments(device):
    x, weight, bias, offsets = make(20)
    saved = saved_by(lambda: ops.grouped_mm(x, weight, offsets, bias_EM=bias))
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, weight, offsets)}
    saved = saved_by(lambda: ops.grouped_mm(x, weight.detach(), offsets))
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (weight, offsets)}


REFUSED = {
    "grouped_mm": [
        {
            "x_NK": torch.ones(4, 3),
            "weight_EMK": torch.ones(2, 5, 3),
            "expert_offsets": torch.tensor([0, 1, 4]),
        },
        ({"x_NK": torch.ones(4, 3).long()}, "x to be float32, .* got Long"),
        ({"weight_EMK": torch.ones(2, 5, 3).double()}, "weight to be Float as x, got Double"),
        ({"x_NK": torch.ones(4, 3, 1)}, r"x to be a 2-D tensor \[N, K\], got shape \[4, 3, 1\]"),
        (
            {"weight_EMK": torch.ones(5, 3)},
            r"weight to be a 3-D tensor \[E, M, K\], got shape \[5, 3\]",
        ),
        (
            {"weight_EMK": torch.ones(2, 5, 4)},
            r"weight to be of size 3 in dim 2 \(the columns of x\), got shape \[2, 5, 4\]",
        ),
        (
            {"expert_offsets": torch.tensor([0.0, 1.0, 2.0])},
            "expert_offsets to be int32 or int64, got Float",
        ),
        (
            {"expert_offsets": torch.tensor([0, 1, 2]).int()},
            r"expert_offsets to be of size 2 in dim 0 \(the experts of weight, of which",
        ),
        (
            {"expert_offsets": torch.tensor(0)},
            r"expert_offsets to be a 1-D tensor \[E \+ 1\], got shape \[\]",
        ),
        (
            {"expert_offsets": torch.tensor([0, 1])},
            r"expert_offsets to be of size 3 in dim 0 \(the experts of weight \+ 1\), got",
        ),
        ({"bias_EM": torch.ones(2, 5).bfloat16()}, "bias to be Float as x, got BFloat16"),
        ({"bias_EM": torch.ones(5)}, r"bias to be a 2-D tensor \[E, M\], got shape \[5\]"),
        ({"bias_EM": torch.ones(3, 5)}, r"bias to be of size 2 in dim 0 .*, got shape \[3, 5\]"),
        ({"bias_EM": torch.ones(2, 4)}, r"bias to be of size 5 in dim 1 .*, got shape \[2, 4\]"),
    ],
    "_grouped_mm_backward_weight": [
        {
            "grad": torch.ones(4, 5),
            "x": torch.ones(4, 3),
            "expert_offsets": torch.tensor([0, 1, 4]),
        },
        ({"x": torch.ones(3, 3)}, r"x to be of size 4 in dim 0 \(the rows of grad\)"),
        ({"x": torch.ones(4, 3).double()}, "x to be Float as grad, got Double"),
    ],
}
test_refuses = refusals.test_on_devices(REFUSED)


@pytest.mark.parametrize(
    ("name", "offsets", "message"),
    [
        ("grouped_mm", [-1, 1, 2], "start at 0 or later, got -1"),
        ("grouped_mm", [0, 3, 2], "be non-decreasing, got 3 then 2 at expert 1"),
        ("grouped_mm", [0, 1, 5], "end within the 4 rows, got 5"),
        ("_grouped_mm_backward_weight", [0, 1, 5], "end within the 4 rows, got 5"),
    ],
)
def test_refuses_offsets(name, offsets, message):
    """On CPU alone: CUDA operators do not look at values."""
    given = REFUSED[name][0] | {"expert_offsets": torch.tensor(offsets)}
    refusals.check(name, given, "expert_offsets to " + message)


def test_only_16_bit_rows_on_cpu_are_aligned_and_only_where_experts_have_many():
    for dtype in DTYPES:
        many = 8 if dtype in (torch.bfloat16, torch.float16) else 1
        assert row_alignment(torch.empty(0, dtype=dtype), 64, 4) == many
        assert row_alignment(torch.empty(0, dtype=dtype), 63, 4) == 1
        assert row_alignment(torch.empty(0, dtype=dtype, device="meta"), 64, 4) == 1


@examples(40)
@given(st.data())
def test_any_offsets_give_each_row_the_product_of_its_expert(device, data):
    num_rows = data.draw(st.integers(0, 40))
    bounds = data.draw(st.lists(st.integers(0, num_rows), min_size=2, max_size=9).map(sorted))
    num_experts = len(bounds) - 1
    # Small integers: every product and sum is exact, whatever the order.
    x = torch.randint(-4, 5, (num_rows, 6)).float().requires_grad_()
    weight = torch.randint(-4, 5, (num_experts, 3, 6)).float().requires_grad_()
    bias = torch.randint(-4, 5, (num_experts, 3)).float().requires_grad_()
    grad = torch.randint(-4, 5, (num_rows, 3)).float()
    results = []
    for function in (ops.grouped_mm, reference.grouped_mm):
        y = function(x, weight, torch.tensor(bounds), bias_EM=bias)
        grads = torch.autograd.grad(y, (x, weight, bias), grad, materialize_grads=True)
        results.append((y, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
