"""Gradient selection that reads what was owed from elsewhere: the bits of the form in place."""

import emulation
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ext import ops, reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [0, 1, 17, 256, 16383, 16385, 40000]


def make(numel, dtype=torch.float32):
    """A gradient, a residual and a velocity."""
    state = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(numel).to(dtype), *(torch.randn(numel, dtype=state) for _ in range(2))


def litter(x):
    """What nobody may read."""
    return None if x is None else torch.full_like(x, float("nan"))


def outcome(call, grad, residual, velocity, *args, elsewhere, module=ops, **options):
    """Results and state of one call; what it must not change has not changed."""
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    kept = [grad.clone(), residual.clone(), None if velocity is None else velocity.clone()]
    if elsewhere:
        e, u = litter(residual), litter(velocity)
        options |= {"residual_in": residual, "velocity_in": velocity}
    else:
        e, u = residual.clone(), None if velocity is None else velocity.clone()
    out = getattr(module, call)(grad, e, *args, velocity=u, **options)
    for now, before in zip((grad, residual, velocity), kept, strict=True):
        assert now is None or torch.equal(now, before)
    return [*out, e, *([] if u is None else [u]), *args]


def assert_same(call, *args, **options):
    """Here and elsewhere: equal bits."""
    module = options.pop("against", ops)
    expected = outcome(call, *args, elsewhere=False, module=module, **options)
    actual = outcome(call, *args, elsewhere=True, **options)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_equals_the_form_in_place(backend, numel, dtype):
    grad, residual, velocity = make(numel, dtype)
    bound = torch.tensor(1.5, dtype=residual.dtype)
    for u in (None, velocity):
        for options in ({}, {"residual_scale": 0.3, "momentum": 0.7, "check_finite": False}):
            state = (grad, residual, u)
            for k in {0, numel // 100, numel // 2}:
                assert_same("topk_compress_", *state, k, **options)
            for capacity in (0, numel // 20, numel):
                assert_same("threshold_compress_", *state, bound, capacity, target=9, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_form_in_place_in_scopes(backend, dtype):
    whole = [x.view(3, 5, 40) for x in make(3 * 5 * 40, dtype)]
    for scope, size in (("row", 40), ("expert", 200), (1, 1), (7, 7), (601, 601)):
        # A warp for each scope takes the emulation long.
        shaped = [x[:1] if emulation.is_active() and size < 40 else x for x in whole]
        bound = torch.rand(-(-shaped[0].numel() // size), dtype=shaped[1].dtype) * 2
        for k in {0, 1, min(3, size)}:
            assert_same("topk_compress_", *shaped, k, scope=scope)
            assert_same("threshold_compress_", *shaped, bound, k, scope=scope, target=3)


def test_the_reference_does_the_same():
    state = make(600)
    for u in (None, state[2]):
        for module in (ops, reference):
            assert_same("topk_compress_", *state[:2], u, 30, scope=70, against=module)
            assert_same("threshold_compress_", *state[:2], u, 1.0, 90, against=module)
    grad, residual, _ = state
    there = torch.empty_like(residual)
    out = reference.topk_compress_(grad, there, 30, residual_in=residual)
    expected = ops.topk_compress_(grad, residual, 30)
    assert torch.equal(out.values, expected.values) and torch.equal(there, residual)


def test_large_scopes(backend):
    grad, residual, velocity = (x.view(3, -1) for x in make(3 * 20000))
    grad[1] = residual[1] = velocity[1] = 0
    bound = torch.tensor([3.0, 1.0, 0.1])  # the last one overflows
    for u in (None, velocity):
        for k in (1, 900):
            assert_same("topk_compress_", grad, residual, u, k, scope="expert")
            assert_same(
                "threshold_compress_", grad, residual, u, bound, k, scope="expert", target=9
            )


@pytest.mark.parametrize("first", [0, 1])
def test_results_that_go_past_the_caches(isa, num_threads, first):
    """From 8 MiB on, and only where lines begin."""
    num_threads(2)
    grad, residual, velocity = (x[first:] for x in make(2**21 + 40000))
    assert_same("topk_compress_", grad, residual, None, 20000)
    assert_same("topk_compress_", grad, residual, velocity, 20000, residual_scale=0.5)
    assert_same("topk_compress_", grad, residual, velocity, 3, scope=300)
    assert_same("threshold_compress_", grad, residual, velocity, 3.5, 2**21)
    for levels in (grad.round(), torch.zeros_like(grad)):
        assert_same("topk_compress_", levels, torch.zeros_like(residual), None, 9999)
        assert_same("threshold_compress_", levels, torch.zeros_like(residual), None, 1.0, 99)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    numel=st.one_of(st.integers(1, 400), st.integers(16000, 50000)),
    dtype=st.sampled_from(DTYPES),
    kept=st.floats(0, 1),
    parts=st.sampled_from([1, 1, 2, 30]),
    with_velocity=st.booleans(),
    scale=st.sampled_from([1.0, 0.9, 0.0]),
    exponent=st.sampled_from([0, -40, -148]),
    steps=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_what_is_sent_and_what_stays_is_what_was_owed(
    isa, numel, dtype, kept, parts, with_velocity, scale, exponent, steps, seed
):
    """Of any numbers, bit for bit, where two buffers take turns."""
    torch.manual_seed(seed)
    grad, residual, velocity = (x * 2.0**exponent for x in make(numel, dtype))
    u = velocity if with_velocity else None
    size = -(-numel // parts)
    for _ in range(steps):
        moved = grad.to(residual.dtype) if u is None else u * 0.9 + grad
        owed = residual * scale + moved
        e, v = litter(residual), litter(u)
        out = ops.topk_compress_(
            grad,
            e,
            int(kept * size),
            scope=size,
            velocity=v,
            residual_scale=scale,
            residual_in=residual,
            velocity_in=u,
        )
        sent = torch.zeros_like(e).index_add_(0, out.indices, out.values)
        assert not e[out.indices].any() and torch.equal(sent + e, owed)
        if v is not None:
            assert torch.equal(v, moved.index_fill(0, out.indices, 0.0))
        residual, u = e, v


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("numel", [300, 40000])
def test_a_refused_call_leaves_what_it_reads(isa, bad, numel):
    for where in (0, numel - 1):
        for poisoned in (0, 1, 2):
            grad, residual, velocity = make(numel)
            (grad, residual, velocity)[poisoned][where] = bad
            before = [x.clone() for x in (grad, residual, velocity)]
            e, u = torch.empty_like(residual), torch.empty_like(velocity)
            options = {"velocity": u, "residual_in": residual, "velocity_in": velocity}
            calls = [
                lambda o=options, g=grad, e=e: ops.topk_compress_(g, e, 20, **o),
                lambda o=options, g=grad, e=e: ops.topk_compress_(g, e, 2, scope=64, **o),
                lambda o=options, g=grad, e=e, n=numel: ops.topk_compress_(
                    g, e, 2, scope=n // 2 + 1, **o
                ),
            ]
            bounds = [torch.tensor(1.0), torch.ones(-(-numel // 64)), torch.ones(2)]
            for bound, scope in zip(bounds, ("tensor", 64, numel // 2 + 1), strict=True):
                calls.append(
                    lambda o=options, g=grad, e=e, b=bound, s=scope: ops.threshold_compress_(
                        g, e, b, 2, target=1, scope=s, **o
                    )
                )
            for call in calls:
                with pytest.raises(RuntimeError, match=rf"got (nan|inf) at element {where} "):
                    call()
                for now, old in zip((grad, residual, velocity), before, strict=True):
                    assert torch.equal(now.view(torch.int32), old.view(torch.int32))
            assert all((bound == 1).all() for bound in bounds)


@pytest.mark.parametrize("numel", [9, 40000])
def test_refuses_a_sum_of_finite_numbers_that_is_infinite(isa, numel):
    grad, residual = torch.zeros(numel), torch.zeros(numel)
    grad[-2] = residual[-2] = 3e38
    for scope in ("tensor", 3, 17000):
        e = torch.zeros(numel)
        message = rf"got inf at element {numel - 2} \(grad 3e\+38, residual 3e\+38\)"
        with pytest.raises(RuntimeError, match=message):
            ops.topk_compress_(grad, e, 1, scope=scope, residual_in=residual)
        assert residual[-2] == torch.tensor(3e38)


@pytest.mark.parametrize("numel", [300, 3000, 40000])
def test_cuda_lets_it_travel(device, numel):
    """No error without a synchronisation: it is selected, and the emulation traps it."""
    traps = emulation.is_active()
    if device.type == "cpu" and not traps:
        pytest.skip("the CPU refuses it")
    grad, residual, velocity = make(numel)
    grad[numel // 2] = float("nan")
    before, threshold = [residual.clone(), velocity.clone()], torch.ones(())
    e, u = torch.empty_like(residual), torch.empty_like(velocity)
    options = {"velocity": u, "residual_in": residual, "velocity_in": velocity}
    for call in (
        lambda: ops.topk_compress_(grad, e, 20, **options),
        lambda: ops.threshold_compress_(grad, e, threshold, 20, target=5, **options),
    ):
        if traps:
            with pytest.raises(RuntimeError, match="trap"):
                call()
        else:
            assert not call().values.isfinite().all()
        assert torch.equal(residual, before[0]) and torch.equal(velocity, before[1])
    assert threshold == 1


def test_opcheck():
    grad, residual, velocity = make(300)
    e, u = residual.clone(), velocity.clone()
    op = torch.ops.moe_ext
    for k, scope in ((7, 0), (3, 64)):
        arguments = (grad, e, k, scope, u, 0.5, 0.9, True, residual, velocity)
        torch.library.opcheck(op.topk_compress_.default, arguments)
    arguments = (grad, e, torch.ones(5), 30, 20, None, 0.0, 1.0, True, 64, residual)
    torch.library.opcheck(op.threshold_compress_.default, arguments)


def test_compiles_without_a_break():
    def step(grad, residual, there):
        return ops.topk_compress_(grad, there, 9, scope=50, residual_in=residual)

    grad, residual, _ = make(333)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    there = [torch.zeros(333), torch.zeros(333)]
    for a, b in zip(
        compiled(grad, residual, there[0]), step(grad, residual, there[1]), strict=True
    ):
        assert torch.equal(a, b)
    assert torch.equal(*there)


GRAD = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            lambda e, u: {"residual_in": GRAD.double()},
            r"residual_in to be Float, got Double",
        ),
        (
            lambda e, u: {"residual_in": torch.zeros(24)},
            r"residual_in to be of shape \[4, 6\], that of grad, got shape \[24\]",
        ),
        (
            lambda e, u: {"residual_in": torch.zeros(6, 4).t()},
            r"residual_in to be contiguous, got a strided tensor of shape \[4, 6\]",
        ),
        (
            lambda e, u: {"residual_in": e},
            r"residual_in to be in memory of its own, got a part of residual's",
        ),
        (
            lambda e, u: {"residual_in": u, "velocity": u, "velocity_in": GRAD.clone()},
            r"residual_in to be in memory of its own, got a part of velocity's",
        ),
        (
            lambda e, u: {"residual_in": GRAD.clone(), "velocity": u, "velocity_in": u},
            r"velocity_in to be in memory of its own, got a part of velocity's",
        ),
        (
            lambda e, u: {"residual_in": GRAD.clone(), "velocity": u, "velocity_in": e},
            r"velocity_in to be in memory of its own, got a part of residual's",
        ),
        (
            lambda e, u: {
                "residual_in": GRAD.clone(),
                "velocity": u,
                "velocity_in": torch.zeros(4),
            },
            r"velocity_in to be of shape \[4, 6\]",
        ),
        (
            lambda e, u: {"residual_in": GRAD.clone(), "velocity": u},
            r"velocity_in to be given where residual_in and velocity are, .* got None",
        ),
        (
            lambda e, u: {"velocity": u, "velocity_in": GRAD.clone()},
            r"velocity_in to be given where residual_in and velocity are, .* got a tensor",
        ),
        (
            lambda e, u: {"residual_in": GRAD.clone(), "velocity_in": GRAD.clone()},
            r"velocity_in to be given where residual_in and velocity are, .* got a tensor",
        ),
    ],
)
def test_refuses(options, message):
    e, u = GRAD.clone(), GRAD.clone()
    for name, args in (("topk_compress_", (1,)), ("threshold_compress_", (1.0, 1))):
        with pytest.raises(RuntimeError, match=rf"^{name}: expected {message}"):
            getattr(ops, name)(GRAD, e, *args, **options(e, u))


@pytest.mark.parametrize("offset", [0, 12])
def test_refuses_memory_that_overlaps_in_part(offset):
    memory = torch.zeros(36)
    with pytest.raises(RuntimeError, match="residual_in to be in memory of its own"):
        ops.topk_compress_(
            GRAD.view(-1), memory[offset:][:24], 1, residual_in=memory[12 - offset :][:24]
        )
