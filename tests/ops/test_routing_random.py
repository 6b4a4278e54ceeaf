"""Random numbers of the routers: their bits, and that nothing but their place decides them."""

import math

import emulation
import pytest
import torch
from noisy_cases import NUM_EXPERTS, make_state, random_logits
from ops_helpers import DTYPES, GRAD_ULP, UNIT, acc_dtype

from moe_ext import ops, reference


@pytest.mark.every_isa
@pytest.mark.parametrize("num_columns", [0, 1, 3, 4, 5, 64, 65, 257])
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 257])
def test_uniforms_have_the_bits_of_the_reference(backend, num_tokens, num_columns):
    state = make_state(first_token=2**32 - 5)
    for token_idx in (None, torch.randint(0, 2**40, (num_tokens,))):
        args = (state, num_tokens, num_columns)
        actual = ops.routing_uniform(*args, stream=3, token_idx=token_idx)
        expected = reference.routing_uniform(*args, stream=3, token_idx=token_idx)
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected)


def test_every_part_of_the_state_changes_the_numbers(device):
    state = make_state()
    base = ops.routing_uniform(state, 16, 8, stream=0)
    others = [ops.routing_uniform(state, 16, 8, stream=1)]
    for place, change in ((0, 1), (0, 2**32), (1, 1), (2, 1), (3, 100), (3, 2**32)):
        other = state.clone()
        other[place] += change
        others.append(ops.routing_uniform(other, 16, 8, stream=0))
    for i, one in enumerate([base, *others]):
        for two in others[i:]:
            # 128 numbers of 24 bits: a chance of 1e-3 that any pair agrees by accident.
            assert (one != two).float().mean() > 0.95


def test_uniforms_are_uniform(device):
    u = ops.routing_uniform(make_state(), 300, 300, stream=0).flatten().double()
    assert u.min() >= 0 and u.max() < 1
    # Five standard errors of the mean, of the variance and of the correlation of neighbours.
    error = 5 / math.sqrt(u.numel())
    assert abs(u.mean() - 0.5) < error * math.sqrt(1 / 12)
    assert abs((u - 0.5).square().mean() - 1 / 12) < error * math.sqrt(1 / 180)
    assert abs(((u[1:] - 0.5) * (u[:-1] - 0.5)).mean()) < error / 12


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (33, 7), (5, 64), (3, 65), (2, 257)])
def test_jitter_equals_the_reference(backend, shape, dtype):
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    leaf = x.clone().requires_grad_()
    actual = ops.routing_jitter(leaf, make_state(), 0.3)
    expected = reference.routing_jitter(x, make_state(), 0.3)
    assert actual.dtype == dtype
    ulp = GRAD_ULP.get(dtype, 4 * UNIT[acc_dtype(dtype)])
    torch.testing.assert_close(actual, expected, rtol=ulp, atol=1e-7)
    assert torch.equal(x, before)
    grad = torch.randn_like(x)
    (actual_grad,) = torch.autograd.grad(actual, leaf, grad)
    expected_grad = reference.routing_jitter(grad, make_state(), 0.3)
    torch.testing.assert_close(actual_grad, expected_grad, rtol=ulp, atol=1e-7)


def test_jitter_saves_its_state_and_nothing_else(device):
    saved = []
    x = torch.randn(64, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = ops.routing_jitter(x, make_state(), 0.1)
    assert [t.numel() for t in saved] == [4]
    assert y.sum().backward() is None


def test_the_next_step_may_be_set_before_the_backward_pass(device):
    state = make_state()
    x = torch.randn(20, 8, requires_grad=True)
    n = torch.randn(20, 8, requires_grad=True)

    def loss():
        out = ops.noisy_topk_gate(ops.routing_jitter(x, state, 0.2), n, state, 2)
        return out.topk_weights.square().sum() + out.load.square().sum()

    expected = torch.autograd.grad(loss(), (x, n))
    pending = loss()
    state[2] += 1
    for a, b in zip(torch.autograd.grad(pending, (x, n)), expected, strict=True):
        assert torch.equal(a, b)


def test_jitter_gradcheck(device):
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    jitter = lambda x: ops.routing_jitter(x, make_state(), 0.4)  # noqa: E731
    assert emulation.gradcheck(jitter, (x,))
    assert emulation.gradgradcheck(jitter, (x,))


def all_results(x, clean, noise, state, token_idx=None):
    leaves = [t.clone().requires_grad_() for t in (x, clean, noise)]
    jittered = ops.routing_jitter(leaves[0], state, 0.1, token_idx=token_idx)
    one = ops.gshard_gate(leaves[1], state, token_idx=token_idx)
    two = ops.noisy_topk_gate(leaves[1], leaves[2], state, 3, token_idx=token_idx)
    rows = [jittered, one.topk_weights, one.topk_idx, two.topk_weights, two.topk_idx]
    sums = [*one[2:], *two[2:]]
    loss = sum(r.double().square().sum() for r in (jittered, one.topk_weights, two.topk_weights))
    grads = torch.autograd.grad(loss + (two.load.double().sum()), leaves)
    return [t.detach() for t in (*rows, *grads)], [t.detach() for t in sums]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_same_bits_however_the_tokens_are_spread(backend, num_ranks):
    x, clean, noise = (random_logits(301, NUM_EXPERTS, torch.float32, 1.0) for _ in range(3))
    whole, whole_sums = all_results(x, clean, noise, make_state())
    bounds = [301 * rank // num_ranks for rank in range(num_ranks + 1)]
    parts, sums = [], []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        rows = slice(begin, end)
        state = make_state(first_token=begin)
        part, part_sums = all_results(x[rows], clean[rows], noise[rows], state)
        parts.append(part)
        sums.append(part_sums)
        # The same tokens by their indices.
        again, _ = all_results(
            x[rows], clean[rows], noise[rows], make_state(), torch.arange(begin, end)
        )
        assert all(torch.equal(a, b) for a, b in zip(part, again, strict=True))
    assert all(
        torch.equal(torch.cat(cut), one)
        for cut, one in zip(zip(*parts, strict=True), whole, strict=True)
    )
    for cut, one in zip(zip(*sums, strict=True), whole_sums, strict=True):
        torch.testing.assert_close(sum(cut), one, rtol=400 * UNIT[torch.float32], atol=1e-6)


def test_cpu_and_emulated_cuda_choose_alike():
    if not emulation.is_built():
        pytest.skip("no emulation of CUDA: build with MOE_EXT_TESTS=1")
    x, clean, noise = (random_logits(257, NUM_EXPERTS, torch.float32, 1.0) for _ in range(3))
    on_cpu, cpu_sums = all_results(x, clean, noise, make_state())
    with emulation.emulated_cuda():
        on_cuda, cuda_sums = all_results(x, clean, noise, make_state())
    for a, b in zip([*on_cpu, *cpu_sums], [*on_cuda, *cuda_sums], strict=True):
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(a, b)
