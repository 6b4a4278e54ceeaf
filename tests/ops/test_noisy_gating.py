"""The noisy gates against the reference, and what must hold for any logits."""

import math

import emulation
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noisy_cases import NUM_EXPERTS, make_state, random_logits
from ops_helpers import DTYPES, GRAD_ULP, NUM_TOKENS, UNIT, acc_dtype, examples, tolerance

from moe_ext import ops, reference

SIZES = [(1, 1), (2, 2), (7, 3), (16, 2), (33, 8), (64, 64)]


def run_with_grads(gate, logits, outputs, grads):
    """The results, and the gradients of every logit from those of the named results."""
    leaves = [x.clone().requires_grad_() for x in logits]
    out = gate(*leaves)
    results = [getattr(out, name) for name in outputs]
    return out, torch.autograd.grad(results, leaves, grads)


def gshard(module, state, **options):
    return lambda x: module.gshard_gate(x, state, **options)


def noisy(module, state, top_k, **options):
    return lambda c, n: module.noisy_topk_gate(c, n, state, top_k, **options)


def random_grads(out, names):
    return [torch.randn_like(getattr(out, name)) for name in names]


def assert_grads_close(actual, expected, dtype, rtol, magnitude):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(
            a,
            b,
            rtol=GRAD_ULP.get(dtype, rtol),
            atol=magnitude * rtol + 2.0**-24 * (dtype == torch.float16),
        )


def assert_gshard_equals_reference(logits, state, **options):
    names = ("topk_weights", "score_sum")
    dtype, (num_tokens, num_experts) = logits.dtype, logits.shape
    expected = reference.gshard_gate(logits, state, **options)
    grads = random_grads(expected, names)
    out, grad = run_with_grads(gshard(ops, state, **options), [logits], names, grads)
    _, expected_grad = run_with_grads(gshard(reference, state, **options), [logits], names, grads)
    for name in ("topk_idx", "num_tokens_per_expert", "num_first_choices"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    rtol = tolerance(dtype, num_experts, 64)
    assert out.topk_weights.dtype == out.score_sum.dtype == acc_dtype(dtype)
    torch.testing.assert_close(out.topk_weights, expected.topk_weights, rtol=rtol, atol=1e-30)
    rtol_sum = tolerance(dtype, num_experts + num_tokens, 64)
    torch.testing.assert_close(out.score_sum, expected.score_sum, rtol=rtol_sum, atol=1e-30)
    assert_grads_close(grad, expected_grad, dtype, rtol, 20)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("random", [False, True])
def test_gshard_equals_the_reference(backend, random, dtype):
    logits = random_logits(257, NUM_EXPERTS, dtype)
    assert_gshard_equals_reference(logits, make_state() if random else None, scale=1.5)


@pytest.mark.parametrize("num_experts", [2, 3, 16, 33, 160])
def test_gshard_of_any_number_of_experts(backend, num_experts):
    assert_gshard_equals_reference(random_logits(35, num_experts, torch.float32), make_state())


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_gshard_of_any_number_of_tokens(device, num_tokens):
    mask = torch.rand(num_tokens) > 0.4
    token_idx = torch.randperm(num_tokens) + 2**33
    logits = random_logits(num_tokens, NUM_EXPERTS, torch.float32)
    assert_gshard_equals_reference(logits, make_state(), token_mask=mask, token_idx=token_idx)


def test_gshard_keeps_the_second_expert_as_often_as_it_matters(device):
    # Equal logits in pairs: g2 is 1 / (1 + exp(gap)).
    for gap, probability in ((0.0, 1.0), (1.0, 2 / (1 + math.e)), (3.0, 2 / (1 + math.exp(3)))):
        logits = torch.tensor([[gap, 0.0, -50.0]]).expand(4000, 3)
        kept = (ops.gshard_gate(logits, make_state()).topk_idx[:, 1] == 1).double().mean()
        assert abs(kept - probability) <= 5 * math.sqrt(probability * (1 - probability) / 4000)


def assert_noisy_equals_reference(logits, state, top_k, **options):
    names = ("topk_weights", "importance", "load")
    dtype, (num_tokens, num_experts) = logits[0].dtype, logits[0].shape
    expected = reference.noisy_topk_gate(*logits, state, top_k, **options)
    grads = random_grads(expected, names)
    out, grad = run_with_grads(noisy(ops, state, top_k, **options), logits, names, grads)
    _, expected_grad = run_with_grads(
        noisy(reference, state, top_k, **options), logits, names, grads
    )
    assert torch.equal(out.topk_idx, expected.topk_idx)
    assert torch.equal(out.num_tokens_per_expert, expected.num_tokens_per_expert)
    # The normals are of float32 for every dtype, to some ten units, and up to 5.77 times larger;
    # the deviations are up to 10, and h goes into an exponential.
    noise_error = 64 * UNIT[torch.float32]
    rtol = tolerance(dtype, num_experts, 64) + 10 * noise_error
    torch.testing.assert_close(out.topk_weights, expected.topk_weights, rtol=rtol, atol=1e-7)
    rtol_sum = tolerance(dtype, num_experts + num_tokens, 64) + 10 * noise_error
    torch.testing.assert_close(out.importance, expected.importance, rtol=rtol_sum, atol=1e-6)
    # Phi's slope is below 0.4 / deviation, deviations here are above 0.1.
    torch.testing.assert_close(
        out.load, expected.load, rtol=rtol_sum, atol=4 * noise_error * (1 + num_tokens) ** 0.5
    )
    assert_grads_close(grad, expected_grad, dtype, rtol, 400)


def noisy_logits(num_tokens, num_experts, dtype):
    # Noise logits above -2: deviations above 0.12.
    noise = torch.randn(num_tokens, num_experts).clamp(min=-2).to(dtype)
    return [random_logits(num_tokens, num_experts, dtype, 1.0), noise]


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 4])
def test_noisy_equals_the_reference(backend, top_k, dtype):
    logits = noisy_logits(257, NUM_EXPERTS, dtype)
    assert_noisy_equals_reference(logits, make_state(), top_k, noise_epsilon=0.01, scale=1.5)


@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
def test_noisy_of_any_number_of_experts(backend, num_experts, top_k):
    logits = noisy_logits(35, num_experts, torch.float32)
    assert_noisy_equals_reference(logits, make_state(), top_k)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_noisy_of_any_number_of_tokens(device, num_tokens):
    mask = torch.rand(num_tokens) > 0.4
    token_idx = torch.randperm(num_tokens) + 2**33
    logits = noisy_logits(num_tokens, NUM_EXPERTS, torch.float32)
    assert_noisy_equals_reference(logits, make_state(), 3, token_mask=mask, token_idx=token_idx)


def test_noisy_without_noise_is_the_plain_gate(backend):
    logits = random_logits(257, NUM_EXPERTS, torch.float32).requires_grad_()
    out = ops.noisy_topk_gate(logits, None, None, 3)
    plain = ops.topk_gate(logits, 3, score_fn="topk_softmax")
    assert torch.equal(out.topk_idx, plain.topk_idx)
    torch.testing.assert_close(out.topk_weights, plain.topk_weights, rtol=1e-6, atol=1e-7)
    assert torch.equal(out.load, out.num_tokens_per_expert.float())
    assert not out.load.requires_grad and out.importance.requires_grad
    grad = torch.randn(257, 3)
    grads = [torch.autograd.grad(o.topk_weights, logits, grad)[0] for o in (out, plain)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_load_is_the_chance_of_being_chosen_again(device):
    """Eq. 8, by drawing: the noise of one expert anew, the others kept."""
    num_experts, top_k, column = 6, 2, 3
    clean, noise = (x[:1] for x in noisy_logits(1, num_experts, torch.float64))
    state = make_state()
    normal = reference.noisy_gating.routing_normal(state, 1, num_experts, stream=2)
    h = (clean + normal * torch.nn.functional.softplus(noise)).squeeze(0)
    draws = torch.randn(20000, dtype=torch.float64)
    again = h.expand(20000, num_experts).clone()
    deviation = torch.nn.functional.softplus(noise[0, column])
    again[:, column] = clean[0, column] + draws * deviation
    chosen = (again.topk(top_k).indices == column).any(dim=1).double().mean()
    load = ops.noisy_topk_gate(clean, noise, state, top_k).load[column]
    assert abs(load - chosen) < 5 * math.sqrt(0.25 / 20000)


@pytest.mark.parametrize("random", [False, True])
def test_gshard_gradcheck(backend, random):
    logits = random_logits(9, 7, torch.float64).requires_grad_()
    mask = torch.rand(9) > 0.3
    state = make_state() if random else None

    def gate(logits):
        out = ops.gshard_gate(logits, state, token_mask=mask, scale=1.5)
        return out.topk_weights, out.score_sum

    assert emulation.gradcheck(gate, (logits,))
    for output in (0, 1):
        assert emulation.gradcheck(lambda x, o=output: gate(x)[o], (logits,))


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_noisy_gradcheck(backend, top_k):
    num_tokens = 4 if emulation.is_active() else 9
    clean, noise = (x.requires_grad_() for x in noisy_logits(num_tokens, 7, torch.float64))
    mask = torch.arange(num_tokens) % 4 != 2

    def gate(clean, noise):
        out = ops.noisy_topk_gate(
            clean, noise, make_state(), top_k, noise_epsilon=0.1, token_mask=mask, scale=1.5
        )
        return out.topk_weights, out.importance, out.load

    assert emulation.gradcheck(gate, (clean, noise))
    for output in range(3):
        assert emulation.gradcheck(lambda c, n, o=output: gate(c, n)[o], (clean, noise))


def test_squared_variation(device):
    x = torch.rand(9, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(ops.squared_variation(x), reference.squared_variation(x))
    assert emulation.gradcheck(ops.squared_variation, (x,))
    assert ops.squared_variation(torch.full((8,), 3.0)) == 0
    one = torch.zeros(8)
    one[3] = 5.0
    torch.testing.assert_close(ops.squared_variation(one), torch.tensor(7.0))
    zeros = torch.zeros(8, requires_grad=True)
    ops.squared_variation(zeros).backward()
    assert zeros.grad.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lower_index(backend, dtype):
    logits = torch.randint(0, 3, (257, NUM_EXPERTS)).to(dtype)
    for top_k in (1, 2, 5):
        actual = ops.noisy_topk_gate(logits, None, None, top_k).topk_idx
        expected = reference.noisy_topk_gate(logits, None, None, top_k).topk_idx
        assert torch.equal(actual, expected)
    actual, expected = ops.gshard_gate(logits), reference.gshard_gate(logits)
    assert torch.equal(actual.topk_idx, expected.topk_idx)


def test_extreme_logits_stay_finite(backend):
    big = torch.finfo(torch.float32).max / 4
    clean = torch.tensor([[big, -big, 0.0, -math.inf], [-300.0, -300.0, -400.0, -300.0]])
    noise = torch.tensor([[-1e4, 1e4, -100.0, 0.0], [-200.0, 80.0, -80.0, 0.0]])
    leaves = [clean.requires_grad_(), noise.requires_grad_()]
    for gate in (
        lambda: ops.noisy_topk_gate(*leaves, make_state(), 2),
        lambda: ops.gshard_gate(leaves[0], make_state()),
    ):
        out = gate()
        # The gradient of a load may be as large as 1 / deviation; here that of the gates counts.
        loss = out.topk_weights.square().sum() + out[3].square().sum()
        loss.backward()
        assert all(t.isfinite().all() for t in out)
        assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves)


@examples(40)
@given(
    num_tokens=st.integers(0, 50),
    num_experts=st.integers(2, 20),
    levels=st.sampled_from([2, 5, 1000]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_invariants(device, num_tokens, num_experts, levels, seed, data):
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator(device).manual_seed(seed)
    shape = (num_tokens, num_experts)
    logits = torch.randint(0, levels, shape, generator=generator) * 5 / levels
    noise = torch.randn(shape, generator=generator)
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    state = torch.tensor([seed, 1, 2, 3])
    out = ops.noisy_topk_gate(logits, noise, state, top_k, token_mask=mask)
    one = ops.gshard_gate(logits, state, token_mask=mask)
    num_real = int(mask.sum())
    for gate in (out, one):
        chosen = gate.topk_idx[gate.topk_idx >= 0]
        counts = torch.bincount(chosen, minlength=num_experts)
        assert torch.equal(gate.num_tokens_per_expert, counts)
        assert (gate.topk_idx[~mask] == -1).all()
        assert torch.equal(gate.topk_weights != 0, gate.topk_idx >= 0) or levels == 1000
    rtol = (num_experts + 64) * 2.0**-23
    ones = torch.ones(num_real)
    torch.testing.assert_close(out.topk_weights[mask].sum(dim=1), ones, rtol=rtol, atol=0)
    assert all(len(set(row)) == top_k for row in out.topk_idx[mask].tolist())
    torch.testing.assert_close(
        out.importance.sum(), torch.tensor(float(num_real)), rtol=rtol, atol=0
    )
    assert (out.load >= 0).all() and (out.load <= num_real * (1 + rtol)).all()
    assert one.num_first_choices.sum() == num_real
    assert (one.num_first_choices <= one.num_tokens_per_expert).all()
    # A first choice without its second keeps its weight.
    assert torch.equal(
        one.topk_weights[:, 0], ops.gshard_gate(logits, token_mask=mask).topk_weights[:, 0]
    )
