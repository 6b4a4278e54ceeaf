"""Gradient selection against sorting, in place and beside it, and what holds for any gradient."""

import contextlib
import functools
import itertools
import sys

import emulation
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, examples
from pairwise import pairs

from moe_ext import ops, reference

# Around a vector, a block and a segment of the loops, and beyond: there the bound is sampled.
SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 16383, 16384, 16385, 40000]
# Emulated instead: around what a block of threads takes alone, and two blocks, one in part.
EMULATED = {16383: 8191, 16384: 8192, 16385: 8193, 40000: 16500}


def sized(numel):
    return EMULATED.get(numel, numel) if emulation.is_active() else numel


def state_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def make(numel, dtype=torch.float32, *, levels=None):
    """A gradient, a residual and a velocity; with `levels`, of few different magnitudes."""
    draw = (lambda: torch.randint(-levels, levels + 1, (numel,)) / 4) if levels else None
    grad, residual, velocity = (draw() if draw else torch.randn(numel) for _ in range(3))
    return grad.to(dtype), residual.to(state_dtype(dtype)), velocity.to(state_dtype(dtype))


def litter(x):
    """Numbers that nobody may read."""
    return None if x is None else torch.full_like(x, float("nan"))


def copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def buffers(residual, velocity, elsewhere):
    """Where a call leaves the state, and by which arguments it reads the state from elsewhere."""
    if elsewhere:
        return (
            litter(residual),
            litter(velocity),
            {"residual_in": residual, "velocity_in": velocity},
        )
    return copied(residual), copied(velocity), {}


def outcome(module, elsewhere, name, grad, residual, *args, velocity=None, **options):
    """Results and state of one call, which has changed nothing that it only reads."""
    before = [copied(x) for x in (grad, residual, velocity)]
    e, u, sources = buffers(residual, velocity, elsewhere)
    args = [copied(a) for a in args]
    out = getattr(module, name)(grad, e, *args, velocity=u, **sources, **options)
    for now, old in zip((grad, residual, velocity), before, strict=True):
        assert now is None or torch.equal(now, old)
    return [*out, e, *([] if u is None else [u]), *args]


def assert_same(name, state, *args, others=((reference, False), (ops, True)), **options):
    """The operator in place, the reference, and the operator that reads elsewhere: equal bits."""
    results = outcome(ops, False, name, *state[:2], *args, **options)
    for module, elsewhere in others:
        found = outcome(module, elsewhere, name, *state[:2], *args, **options)
        for actual, expected in zip(found, results, strict=True):
            if isinstance(actual, torch.Tensor):
                assert actual.dtype == expected.dtype
                assert torch.equal(actual, expected)
            else:
                assert actual == expected
    return results


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_topk_equals_the_reference(backend, numel, dtype):
    numel = sized(numel)
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
    numel = sized(numel)
    grad, residual, velocity = make(numel, levels=levels)
    for k in (1, numel // 10, numel // 2, numel - 1, numel):
        assert_same("topk_compress_", (grad, residual), k)
        assert_same("topk_compress_", (grad, residual), k, velocity=velocity, momentum=0.5)


def in_scopes(state, size):
    """State of three experts of five rows; a warp for each small scope takes the emulation long."""
    shaped = [x.view(3, 5, 40) for x in state]
    return [x[:1] for x in shaped] if emulation.is_active() and size < 40 else shaped


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_in_scopes(backend, dtype):
    state = make(3 * 5 * 40, dtype)
    for scope in ("tensor", "row", "expert", 1, 7, 128, 599, 600, 601, sys.maxsize):
        *shaped, velocity = in_scopes(state, scope if isinstance(scope, int) else 40)
        for k in (0, 1, 3):
            if scope != 1 or k < 2:
                assert_same("topk_compress_", shaped, k, scope=scope, velocity=velocity)


def test_topk_in_large_scopes(backend):
    grad, residual, _ = make(3 * 17000)
    grad[17000:34000] = residual[17000:34000] = 0  # an expert without tokens
    for k in (1, 200, 16999):
        assert_same("topk_compress_", (grad.view(3, -1), residual.view(3, -1)), k, scope="expert")
    assert_same("topk_compress_", (grad, residual), 300, scope=16500)


@pytest.mark.parametrize("numel", [40, 40000])
def test_topk_fills_up_with_the_first_zeros(backend, numel):
    numel = sized(numel)
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
    for k in (10, numel // 2):
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
    for numel in (sized(40000),) if emulation.is_active() else (20000, 70000):
        for k in (1, numel // 100, numel // 3):
            state = (make_grad(numel), torch.zeros(numel))
            assert_same("topk_compress_", state, k)
            assert_same("topk_compress_", state, k, velocity=state[1], check_finite=False)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_threshold_equals_the_reference(backend, numel, dtype):
    numel = sized(numel)
    grad, residual, velocity = make(numel, dtype)
    ways = ({"target": 100}, {"velocity": velocity})
    for threshold, capacity, options in pairs((0.0, 1.5, 4.0, 1e30), (0, numel // 10, numel), ways):
        bound = torch.tensor(threshold, dtype=residual.dtype)
        assert_same("threshold_compress_", (grad, residual), bound, capacity, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_in_scopes(backend, dtype):
    state = make(3 * 5 * 40, dtype)
    for scope, size in (("row", 40), ("expert", 200), (1, 1), (7, 7), (128, 128), (601, 601)):
        *shaped, velocity = in_scopes(state, size)
        bound = torch.rand(-(-shaped[0].numel() // size), dtype=shaped[1].dtype) * 2
        for capacity in sorted({0, 1, min(5, size), size}):
            options = {"target": 3, "scope": scope, "velocity": velocity}
            out = assert_same("threshold_compress_", shaped, bound, capacity, **options)
            assert out[2].shape == bound.shape and len(out[0]) == len(bound) * capacity
    assert_same("threshold_compress_", shaped, 1.0, 3, scope="row")
    empty = torch.zeros(0, dtype=dtype), torch.zeros(0, dtype=shaped[1].dtype)
    assert_same("threshold_compress_", empty, 1.0, 3, scope=7)


def test_threshold_in_large_scopes(backend):
    grad, residual, velocity = make(3 * 17000)
    grad[17000:34000] = residual[17000:34000] = 0  # an expert without tokens
    bound = torch.tensor([3.0, 1.0, 0.1])  # the last one overflows
    for u in (None, velocity.view(3, -1)):
        state = (grad.view(3, -1), residual.view(3, -1))
        assert_same("threshold_compress_", state, bound, 900, scope="expert", target=9, velocity=u)


@pytest.mark.parametrize("make_grad", ["equal", "few", "sorted", "huge"])
def test_overflow_of_many_times_the_capacity(backend, make_grad):
    numel = sized(40000) if emulation.is_active() else 100000
    grad = {
        "equal": torch.full((numel,), -0.5),
        "few": torch.randint(-3, 4, (numel,)) / 4,
        "sorted": torch.arange(1, numel + 1) / 100,
        "huge": torch.where(torch.arange(numel) == numel - 23, 1e38, 1.0),
    }[make_grad]
    _, residual, velocity = make(numel, levels=2)
    starts = (torch.zeros(numel), residual)
    for start, capacity, check_finite in pairs(starts, (0, 1, 100, numel // 4), (True, False)):
        options = {"velocity": velocity, "momentum": 0.5, "check_finite": check_finite}
        bound = torch.tensor(1e-9)
        assert_same("threshold_compress_", (grad, start), bound, capacity, target=5, **options)


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


@examples(60)
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


@examples(60)
@given(
    numel=st.one_of(st.integers(1, 400), st.integers(16000, 70000)),
    dtype=st.sampled_from(DTYPES),
    kept=st.floats(0, 1),
    parts=st.sampled_from([1, 1, 2, 30]),
    with_velocity=st.booleans(),
    scale=st.sampled_from([1.0, 0.9, 1e-3, 0.0]),
    exponent=st.sampled_from([0, -40, -148]),
    check_finite=st.booleans(),
    elsewhere=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_what_is_sent_and_what_stays_is_what_was_owed(
    isa, numel, dtype, kept, parts, with_velocity, scale, exponent, check_finite, elsewhere, seed
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
        e, u, sources = buffers(residual, velocity if with_velocity else None, elsewhere)
        if threshold:
            count = int(kept * size / 2)
            bound = float(owed.abs().median())
            out = ops.threshold_compress_(grad, e, bound, count, velocity=u, **sources, **options)
        else:
            out = ops.topk_compress_(grad, e, int(kept * size), velocity=u, **sources, **options)
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


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("numel", [300, 40000])
def test_refuses_what_is_not_finite_and_changes_nothing(isa, bad, numel, elsewhere):
    half = numel // 2 + 1
    bounds = [torch.tensor(1.0), torch.ones(-(-numel // 64)), torch.ones(2), torch.ones(1)]
    for where, poisoned in itertools.product((0, numel - 1), (0, 1, 2)):
        state = make(numel)
        state[poisoned][where] = bad
        grad, residual, velocity = (x.clone() for x in state)
        e, u, sources = buffers(residual, velocity, elsewhere)
        options = {"velocity": u, **sources}
        calls = [
            lambda g=grad, e=e, o=options: ops.topk_compress_(g, e, 20, **o),
            lambda g=grad, e=e, o=options: ops.topk_compress_(g, e, 2, scope=64, **o),
            lambda g=grad, e=e, o=options: ops.topk_compress_(g, e, 2, scope=half, **o),
            lambda g=grad, e=e, o=options: ops.topk_compress_(g, e, 2, scope=10**6, **o),
        ] + [
            lambda g=grad, e=e, b=bound, o=options | {"scope": scope}: ops.threshold_compress_(
                g, e, b, 2, target=1, **o
            )
            for bound, scope in zip(bounds, ("tensor", 64, half, 10**6), strict=True)
        ]
        message = rf"expected grad plus residual to be finite, got (nan|inf) at element {where} "
        for call in calls:
            with pytest.raises(RuntimeError, match=message):
                call()
            kept = (grad, residual, velocity) if elsewhere else (grad, e, u)
            assert all(same_bits(now, old) for now, old in zip(kept, state, strict=True))
    assert all((bound == 1).all() for bound in bounds)


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


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("numel", [9, 40000])
def test_refuses_a_sum_of_finite_numbers_that_is_infinite(isa, numel, elsewhere):
    grad, residual = torch.zeros(numel), torch.zeros(numel)
    grad[-2] = residual[-2] = 3e38
    message = rf"got inf at element {numel - 2} \(grad 3e\+38, residual 3e\+38\)"
    for scope in ("tensor", 3, 17000):
        e, _, sources = buffers(residual, None, elsewhere)
        with pytest.raises(RuntimeError, match=message):
            ops.topk_compress_(grad, e, 1, scope=scope, **sources)
        assert (residual if elsewhere else e)[-2] == torch.tensor(3e38)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("numel", [300, 3000, 40000])
def test_cuda_leaves_the_state_where_something_is_not_finite(device, numel, elsewhere):
    """No error without a synchronisation: it travels, and the emulation traps it."""
    traps = emulation.is_active()
    if device.type == "cpu" and not traps:
        pytest.skip("the CPU refuses it")
    for bad in (float("nan"), float("inf")):
        state = make(numel)
        state[0][numel // 2] = bad
        grad, residual, velocity = (x.clone() for x in state)
        e, u, sources = buffers(residual, velocity, elsewhere)
        threshold, options = torch.tensor(1.0), {"velocity": u, **sources}
        for call in (
            lambda g=grad, e=e, o=options: ops.topk_compress_(g, e, 20, **o),
            lambda g=grad, e=e, t=threshold, o=options: ops.threshold_compress_(
                g, e, t, 20, target=5, **o
            ),
        ):
            with pytest.raises(RuntimeError, match="trap") if traps else contextlib.nullcontext():
                assert not call().values.isfinite().all()
            kept = (residual, velocity) if elsewhere else (e, u)
            assert all(torch.equal(now, old) for now, old in zip(kept, state[1:], strict=True))
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


def test_compiles_without_a_break():
    def step(grad, residual, there):
        out = ops.topk_compress_(grad, there, 9, scope=50, residual_in=residual)
        return *out, *ops.topk_compress_(grad, residual, 9, scope=50)

    grad, residual, _ = make(333)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    states = [(residual.clone(), torch.zeros(333)) for _ in range(2)]
    for actual, expected in zip(compiled(grad, *states[0]), step(grad, *states[1]), strict=True):
        assert torch.equal(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_the_reference_reads_elsewhere(device):
    for velocity in (None, make(600)[2]):
        options = {"scope": 70, "velocity": velocity, "others": ((reference, True),)}
        assert_same("topk_compress_", make(600), 30, **options)
        assert_same("threshold_compress_", make(600), torch.ones(9), 9, **options)


large = functools.cache(make)


@pytest.mark.parametrize("first", [0, 1])
def test_results_that_go_past_the_caches(isa, num_threads, first):
    """From 8 MiB on, and only where lines begin."""
    num_threads(2)
    grad, residual, velocity = (x[first:] for x in large(2**21 + 40000))
    beside = {"others": ((ops, True),)}
    state = (grad, residual)
    assert_same("topk_compress_", state, 20000, **beside)
    assert_same("topk_compress_", state, 20000, velocity=velocity, residual_scale=0.5, **beside)
    assert_same("topk_compress_", state, 3, scope=300, velocity=velocity, **beside)
    assert_same("threshold_compress_", state, 3.5, 2**21, velocity=velocity, **beside)
    for levels in (grad.round(), torch.zeros_like(grad)):
        state = (levels, torch.zeros_like(residual))
        assert_same("topk_compress_", state, 9999, **beside)
        assert_same("threshold_compress_", state, 1.0, 99, **beside)
