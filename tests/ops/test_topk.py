"""Gradient selection against sorting, and what must hold for any gradient."""

import contextlib

import emulation
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ext import ops, reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Around a vector, a block and a segment of the loops, and beyond: there the bound is sampled.
SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 16383, 16384, 16385, 40000]
FIXTURES = [HealthCheck.function_scoped_fixture]


def state_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def make(numel, dtype=torch.float32, *, levels=None):
    """A gradient, a residual and a velocity; with `levels`, of few different magnitudes."""
    draw = (lambda: torch.randint(-levels, levels + 1, (numel,)) / 4) if levels else None
    grad, residual, velocity = (draw() if draw else torch.randn(numel) for _ in range(3))
    return grad.to(dtype), residual.to(state_dtype(dtype)), velocity.to(state_dtype(dtype))


def assert_same(name, state, *args, velocity=None, **options):
    """The operator and the reference on copies of the state: equal bits."""
    results = []
    for module in (ops, reference):
        grad, residual = state[0], state[1].clone()
        u = None if velocity is None else velocity.clone()
        copied = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        out = getattr(module, name)(grad, residual, *copied, velocity=u, **options)
        results.append([*out, residual, *([] if u is None else [u]), *copied])
    for actual, expected in zip(*results, strict=True):
        if isinstance(actual, torch.Tensor):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
        else:
            assert actual == expected
    return results[0]


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_topk_equals_the_reference(backend, numel, dtype):
    grad, residual, velocity = make(numel, dtype)
    for k in sorted({0, min(1, numel), numel // 100, numel // 2, numel}):
        assert_same("topk_compress_", (grad, residual), k)
    for check_finite in (True, False):
        assert_same(
            "topk_compress_",
            (grad, residual),
            numel // 10,
            velocity=velocity,
            momentum=0.7,
            residual_scale=0.3,
            check_finite=check_finite,
        )


@pytest.mark.parametrize("numel", [257, 40000])
@pytest.mark.parametrize("levels", [1, 3])
def test_topk_breaks_ties_by_index(backend, numel, levels):
    grad, residual, velocity = make(numel, levels=levels)
    for k in (1, numel // 10, numel // 2, numel - 1, numel):
        assert_same("topk_compress_", (grad, residual), k)
        assert_same("topk_compress_", (grad, residual), k, velocity=velocity, momentum=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_in_scopes(backend, dtype):
    grad, residual, velocity = make(3 * 5 * 40, dtype)
    shaped = [x.view(3, 5, 40) for x in (grad, residual)]
    for scope in ("tensor", "row", "expert", 1, 7, 128, 599, 600, 601):
        for k in (0, 1, 3):
            if scope != 1 or k < 2:
                assert_same(
                    "topk_compress_", shaped, k, scope=scope, velocity=velocity.view(3, 5, 40)
                )


def test_topk_in_large_scopes(backend):
    grad, residual, _ = make(3 * 20000)
    grad[20000:40000] = residual[20000:40000] = 0  # an expert without tokens
    for k in (1, 200, 19999):
        assert_same("topk_compress_", (grad.view(3, -1), residual.view(3, -1)), k, scope="expert")
    assert_same("topk_compress_", (grad, residual), 300, scope=17000)


@pytest.mark.parametrize("numel", [40, 40000])
def test_topk_fills_up_with_the_first_zeros(backend, numel):
    zeros = torch.zeros(numel)
    out = ops.topk_compress_(zeros, zeros.clone(), 30)
    assert torch.equal(out.indices, torch.arange(30)) and out.num_selected == 0
    grad = torch.zeros(numel)
    grad[[3, 7, numel - 1]] = torch.tensor([-1.0, 1e-45, 2.0])
    residual = torch.zeros(numel)
    out = ops.topk_compress_(grad, residual, 6)
    assert out.indices.tolist() == [0, 1, 2, 3, 7, numel - 1]
    assert torch.equal(out.values, grad[out.indices]) and out.num_selected == 3
    assert not residual.any()
    for k in (10, 20000):
        if k < numel:
            grad = torch.zeros(numel)
            grad[torch.randperm(numel)[: k // 2]] = 1.0
            assert_same("topk_compress_", (grad, torch.zeros(numel)), k)
            assert_same("topk_compress_", (grad, torch.zeros(numel)), k, check_finite=False)


@pytest.mark.parametrize(
    "make_grad",
    [
        lambda n: torch.full((n,), -0.5),
        lambda n: torch.full((n,), 1e-42),
        lambda n: torch.arange(n) * 1e-45,
        lambda n: torch.arange(n, 0, -1).float(),
        # Large numbers where no sample falls: the first bound is too low or too high.
        lambda n: torch.where(torch.arange(n) % 1024 < 16, 1e-3, torch.rand(n)),
        lambda n: torch.where(torch.arange(n) < n // 50, 100.0, 1e-3) * torch.rand(n),
        lambda n: torch.rand(n).double().pow(-3).clamp(max=1e38).float(),
    ],
)
def test_topk_of_inputs_that_defeat_a_sample(backend, make_grad):
    for numel in (20000, 40000 if emulation.is_active() else 70000):
        for k in (1, numel // 100, numel // 3):
            state = (make_grad(numel), torch.zeros(numel))
            assert_same("topk_compress_", state, k)
            assert_same("topk_compress_", state, k, velocity=state[1], check_finite=False)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_threshold_equals_the_reference(backend, numel, dtype):
    grad, residual, velocity = make(numel, dtype)
    for threshold in (0.0, 1.5, 4.0, 1e30):
        for capacity in (0, numel // 10, numel):
            bound = torch.tensor(threshold, dtype=residual.dtype)
            assert_same("threshold_compress_", (grad, residual), bound, capacity, target=100)
            assert_same("threshold_compress_", (grad, residual), bound, capacity, velocity=velocity)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_in_scopes(backend, dtype):
    grad, residual, velocity = make(3 * 5 * 40, dtype)
    shaped = [x.view(3, 5, 40) for x in (grad, residual)]
    for scope, size in (("row", 40), ("expert", 200), (1, 1), (7, 7), (128, 128), (601, 601)):
        bound = torch.rand(-(-600 // size), dtype=residual.dtype) * 2
        for capacity in (0, 1, min(5, size), size):
            out = assert_same(
                "threshold_compress_",
                shaped,
                bound,
                capacity,
                target=3,
                scope=scope,
                velocity=velocity.view(3, 5, 40),
            )
            assert out[2].shape == bound.shape and len(out[0]) == len(bound) * capacity
    assert_same("threshold_compress_", shaped, 1.0, 3, scope="row")
    empty = torch.zeros(0, dtype=dtype), torch.zeros(0, dtype=residual.dtype)
    assert_same("threshold_compress_", empty, 1.0, 3, scope=7)


def test_threshold_in_large_scopes(backend):
    grad, residual, velocity = make(3 * 20000)
    grad[20000:40000] = residual[20000:40000] = 0  # an expert without tokens
    bound = torch.tensor([3.0, 1.0, 0.1])  # the last one overflows
    for u in (None, velocity.view(3, -1)):
        state = (grad.view(3, -1), residual.view(3, -1))
        assert_same("threshold_compress_", state, bound, 900, scope="expert", target=9, velocity=u)


@pytest.mark.parametrize("make_grad", ["equal", "few", "sorted", "huge"])
def test_overflow_of_many_times_the_capacity(backend, make_grad):
    numel = 40000 if emulation.is_active() else 100000
    grad = {
        "equal": torch.full((numel,), -0.5),
        "few": torch.randint(-3, 4, (numel,)) / 4,
        "sorted": torch.arange(1, numel + 1) / 100,
        "huge": torch.where(torch.arange(numel) == 37777, 1e38, 1.0),
    }[make_grad]
    _, residual, velocity = make(numel, levels=2)
    for start in (torch.zeros(numel), residual):
        for capacity in (0, 1, 100, 30000):
            for check_finite in (True, False):
                assert_same(
                    "threshold_compress_",
                    (grad, start),
                    torch.tensor(1e-9),
                    capacity,
                    target=5,
                    velocity=velocity,
                    momentum=0.5,
                    check_finite=check_finite,
                )


def test_threshold_never_selects_zeros(backend):
    grad = torch.zeros(300)
    grad[5] = 1e-45
    out = ops.threshold_compress_(grad, torch.zeros(300), 0.0, 10)
    assert out.count == 1 and out.indices.tolist() == [5] + [299] * 9
    assert_same("threshold_compress_", make(300, levels=1)[:2], 0.0, 300)


def test_overflow_keeps_the_largest_and_the_state_of_the_rest(backend):
    grad, residual, velocity = make(50000, levels=3)
    for capacity in (1, 1000):
        results = assert_same(
            "threshold_compress_", (grad, residual), 0.25, capacity, velocity=velocity, momentum=0.5
        )
        assert results[2] == capacity


def test_a_carried_threshold_finds_its_target():
    threshold, residual = torch.tensor(1.0), torch.zeros(50000)
    for _ in range(60):
        ops.threshold_compress_(torch.randn(50000), residual, threshold, 50000, target=500)
    out = ops.threshold_compress_(torch.randn(50000), residual, threshold, 50000, target=500)
    assert 250 < out.count < 1000
    ops.threshold_compress_(torch.zeros(9), torch.zeros(9), threshold.fill_(8.0), 9, target=3)
    assert threshold == 4.0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_same_bits_for_any_number_of_threads(num_threads, threads):
    grad, residual, velocity = make(200000, levels=40)
    num_threads(threads)
    assert_same("topk_compress_", (grad, residual), 5000, velocity=velocity, momentum=0.5)
    assert_same("topk_compress_", (grad, residual), 5000, check_finite=False)
    assert_same("topk_compress_", (grad, residual), 3, scope=100)
    assert_same("threshold_compress_", (grad, residual), 6.0, 2000, velocity=velocity, momentum=0.5)


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
@given(
    numel=st.integers(1, 600),
    steps=st.integers(1, 4),
    share=st.floats(0, 1),
    scope=st.one_of(st.just("tensor"), st.integers(1, 700)),
    seed=st.integers(0, 2**31),
)
def test_nothing_is_lost(backend, numel, steps, share, scope, seed):
    """Whole numbers are added exactly: what was sent plus the residual is the sum of gradients."""
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randint(-9, 10, (steps, numel), generator=generator).float()
    for threshold in (False, True):
        residual, sent = torch.zeros(numel), torch.zeros(numel)
        for grad in grads:
            size = numel if scope == "tensor" else scope
            before = grad.clone()
            if threshold:
                out = ops.threshold_compress_(
                    grad, residual, 10 * share, int(share * size), scope=scope
                )
            else:
                out = ops.topk_compress_(grad, residual, int(share * size), scope=scope)
            assert torch.equal(grad, before)
            sent.index_add_(0, out.indices, out.values)
        assert torch.equal(sent + residual, grads.sum(dim=0))


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
@given(
    numel=st.one_of(st.integers(1, 400), st.integers(16000, 70000)),
    dtype=st.sampled_from(DTYPES),
    kept=st.floats(0, 1),
    parts=st.sampled_from([1, 1, 2, 30]),
    with_velocity=st.booleans(),
    scale=st.sampled_from([1.0, 0.9, 1e-3, 0.0]),
    exponent=st.sampled_from([0, -40, -148]),
    check_finite=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_what_is_sent_and_what_stays_is_what_was_owed(
    isa, numel, dtype, kept, parts, with_velocity, scale, exponent, check_finite, seed
):
    """Of any numbers, bit for bit."""
    torch.manual_seed(seed)
    grad, residual, velocity = (x * 2.0**exponent for x in make(numel, dtype))
    size = -(-numel // parts)
    options = {
        "scope": size,
        "residual_scale": scale,
        "momentum": 0.9,
        "check_finite": check_finite,
    }
    moved = grad.to(residual.dtype)
    if with_velocity:
        moved = velocity * 0.9 + moved
    owed = residual * scale + moved
    for threshold in (False, True):
        e, u = residual.clone(), velocity.clone() if with_velocity else None
        if threshold:
            count = int(kept * size / 2)
            bound = float(owed.abs().median())
            out = ops.threshold_compress_(grad, e, bound, count, velocity=u, **options)
        else:
            out = ops.topk_compress_(grad, e, int(kept * size), velocity=u, **options)
        chosen = out.indices[out.values != 0] if threshold else out.indices
        assert not e[chosen].any()
        sent = torch.zeros_like(e).index_add_(0, out.indices, out.values)
        assert torch.equal(sent + e, owed)
        if u is not None:
            assert torch.equal(u, moved.index_fill(0, chosen, 0.0))


def test_strided_gradients(backend):
    grad = torch.randn(40, 30).t()
    residual = torch.randn(30, 40)
    assert_same("topk_compress_", (grad, residual), 17)
    assert_same("threshold_compress_", (grad, residual), 1.0, 100)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("numel", [300, 40000])
def test_refuses_what_is_not_finite_and_changes_nothing(isa, bad, numel):
    for where in (0, numel - 1):
        for poisoned in (0, 1, 2):
            state = make(numel)
            state[poisoned][where] = bad
            grad, residual, velocity = (x.clone() for x in state)
            message = (
                rf"expected grad plus residual to be finite, got (nan|inf) at element {where} "
            )
            calls = [
                lambda s: ops.topk_compress_(s[0], s[1], 20, velocity=s[2]),
                lambda s: ops.topk_compress_(s[0], s[1], 2, scope=64, velocity=s[2]),
                lambda s: ops.topk_compress_(s[0], s[1], 2, scope=numel // 2 + 1, velocity=s[2]),
                lambda s: ops.threshold_compress_(s[0], s[1], 1.0, 20, velocity=s[2]),
            ]
            for call in calls:
                with pytest.raises(RuntimeError, match=message):
                    call((grad, residual, velocity))
                for after, before in zip((grad, residual, velocity), state, strict=True):
                    assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0))


def same_bits(a, b):
    integer = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.view(integer), b.view(integer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.9, 0.0])
def test_a_refused_call_is_undone_bit_for_bit(isa, dtype, scale):
    numel = 9 * 16384 + 5
    grad, residual, velocity = make(numel, dtype)
    tiny, residual[7] = torch.finfo(residual.dtype).tiny, -0.0
    # Residuals that the feed taken backwards finds, some that it does not, and subnormal ones.
    residual[40000:90000] *= 1e-5
    residual[90000:99000] *= tiny
    grad[-3] = float("nan")
    bound = torch.ones((), dtype=residual.dtype)
    for u in (None, velocity):
        options = {"velocity": None if u is None else u.clone(), "residual_scale": scale}
        for capacity in (None, 9999, 9):
            state = residual.clone()
            with pytest.raises(RuntimeError, match=f"got nan at element {numel - 3} "):
                if capacity is None:
                    ops.topk_compress_(grad, state, 999, **options)
                else:
                    ops.threshold_compress_(grad, state, bound, capacity, target=9, **options)
            assert same_bits(state, residual) and bound == 1
            assert u is None or same_bits(options["velocity"], u)


def test_the_sum_of_finite_numbers_may_be_infinite():
    with pytest.raises(
        RuntimeError, match=r"got inf at element 2 \(grad 3e\+38, residual 3e\+38\)"
    ):
        ops.topk_compress_(torch.tensor([0, 0, 3e38]), torch.tensor([0, 0, 3e38]), 1)


@pytest.mark.parametrize("numel", [300, 3000, 40000])
def test_cuda_leaves_the_state_where_something_is_not_finite(device, numel):
    """No error without a synchronisation: it travels, and the emulation traps it."""
    traps = emulation.is_active()
    if device.type == "cpu" and not traps:
        pytest.skip("the CPU refuses it")
    for bad in (float("nan"), float("inf")):
        state = make(numel)
        state[0][numel // 2] = bad
        grad, residual, velocity = (x.clone() for x in state)
        threshold = torch.tensor(1.0)
        for call in (
            lambda s: ops.topk_compress_(s[0], s[1], 20, velocity=s[2]),
            lambda s, t=threshold: ops.threshold_compress_(*s[:2], t, 20, target=5, velocity=s[2]),
        ):
            with pytest.raises(RuntimeError, match="trap") if traps else contextlib.nullcontext():
                out = call((grad, residual, velocity))
                assert not out.values.isfinite().all()
            assert torch.equal(residual, state[1]) and torch.equal(velocity, state[2])
        assert threshold == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_address(backend, dtype):
    for numel in (100, 900, 9000):
        grad, residual, velocity = (x[1:] for x in make(numel + 1, dtype))
        assert_same("topk_compress_", (grad, residual), 30, velocity=velocity, momentum=0.5)


def test_unchecked_nan_is_selected():
    grad = torch.zeros(40)
    grad[7] = float("nan")
    out = ops.threshold_compress_(grad, torch.zeros(40), 1.0, 3, check_finite=False)
    assert out.count == 1 and out.indices[0] == 7 and out.values[0].isnan()
    for numel in (40, 40000):
        grad = torch.zeros(numel)
        grad[7] = float("nan")
        selected = ops.topk_compress_(grad, torch.zeros(numel), 2, check_finite=False)
        assert selected.indices.tolist() == [0, 7] and selected.values[1].isnan()


def test_opcheck():
    grad, residual, velocity = make(300)
    op = torch.ops.moe_ext
    torch.library.opcheck(op.topk_compress_.default, (grad, residual.clone(), 7))
    torch.library.opcheck(
        op.topk_compress_.default, (grad, residual.clone(), 7, 64, velocity.clone(), 0.5, 0.9)
    )
    arguments = (grad, residual.clone(), torch.tensor(1.0), 30, 20, velocity.clone(), 0.5)
    torch.library.opcheck(op.threshold_compress_.default, arguments)
    in_scopes = (grad, residual.clone(), torch.ones(5), 30, 20, None, 0.0, 1.0, True, 64)
    torch.library.opcheck(op.threshold_compress_.default, in_scopes)


def test_compiles_without_a_break():
    def step(grad, residual):
        return ops.topk_compress_(grad, residual, 9, scope=50)

    grad, residual, _ = make(333)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    states = [residual.clone(), residual.clone()]
    for actual, expected in zip(compiled(grad, states[0]), step(grad, states[1]), strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(*states)
