"""The frozen variance of 1-bit Adam, on one rank: how it follows the size of gradients."""

import copy

import pytest
import torch
from torch import nn

from moe_ext import optim


def follow_by_formula(grads, block, interval, freeze, betas):
    """Denominators of one parameter after each step, on one rank."""
    (_, b2), v, s, looks = betas, torch.zeros_like(grads[0].view(-1)), 0, 0
    b_look, found = b2**interval, []
    for t, grad in enumerate(grads, 1):
        squares = grad.view(-1).square()
        if t <= freeze:
            v = b2 * v + (1 - b2) * squares
        if t % interval == 0:
            in_blocks = torch.stack([part.sum() for part in squares.split(block)])
            before, looks = s, looks + 1
            s = b_look * s + (1 - b_look) * in_blocks
            if t > freeze and looks > 8:
                growth = s / (1 - b_look**looks) / (before / (1 - b_look ** (looks - 1)))
                v = v * growth.repeat_interleave(block)[: len(v)]
        found.append((v / (1 - b2 ** min(t, freeze))).sqrt())
    return found


@pytest.mark.parametrize("interval", [1, 2])
def test_a_frozen_variance_follows_the_squares_of_gradients(interval):
    generator = torch.Generator().manual_seed(0)
    growing = torch.linspace(1, 3, 30).tolist()
    grads = [torch.randn(5, 30, generator=generator) * scale for scale in growing]
    for grad in grads:
        grad[2:] *= 0.01 * grad[2:].square()  # another size and another growth in block 2
    p = nn.Parameter(torch.zeros(5, 30))
    options = {"betas": (0.8, 0.95), "block": 64, "variance_interval": interval}
    optimizer = optim.OneBitAdam([p], 0.1, 10, eps=1e-12, **options)
    doubles = [grad.double() for grad in grads]
    want = follow_by_formula(doubles, 64, interval, 10, (0.8, 0.95))
    w, m = torch.zeros(150, dtype=torch.float64), 0
    for t, (grad, root) in enumerate(zip(grads, want, strict=True), 1):
        p.grad = grad
        optimizer.step()
        m = 0.8 * m + 0.2 * grad.double().view(-1)
        w -= 0.1 * m / (1 - 0.8**t) / (root + 1e-12)
        torch.testing.assert_close(p.detach().double().view(-1), w, rtol=1e-4, atol=1e-5)
    frozen = follow_by_formula(doubles, 64, 10**6, 10, (0.8, 0.95))
    assert bool((want[-1] > 1.3 * frozen[-1]).all())


@pytest.mark.parametrize("freeze", [3, 100])
def test_looks_bound_gradients_as_the_steps_do(freeze):
    p = nn.Parameter(torch.zeros(64))
    optimizer = optim.OneBitAdam([p], 0.1, freeze, max_grad_norm=2.0, variance_interval=1, block=64)
    for scale in (1e3, 1e5, 1e7, 1e9, 1e11):
        p.grad = torch.full((64,), scale)
        optimizer.step()
    state = optimizer.state[p]
    torch.testing.assert_close(state["block_sq"] / (1 - 0.999**5), torch.tensor([4.0]))


def test_a_flushed_state_goes_on_with_other_blocks():
    p = nn.Parameter(torch.zeros(1000))
    optimizer = optim.OneBitAdam([p], freeze_step=2, variance_interval=1)
    for _ in range(10):
        p.grad = torch.randn(1000)
        optimizer.step()
    optimizer.flush()
    other = optim.OneBitAdam([p], freeze_step=2, variance_interval=1, block=64)
    other.load_state_dict(optimizer.rank_state_dict())
    assert torch.equal(other.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
    p.grad = torch.randn(1000)
    other.step()
    assert other.state[p]["looks"] == 1
    assert len(other.state[p]["block_sq"]) == 16


def test_a_first_compressed_step_that_fails_leaves_the_variance(monkeypatch):
    params = [nn.Parameter(torch.zeros(n)) for n in (5, 64)]
    optimizer = optim.OneBitAdam(params, freeze_step=3)
    for step in range(3):
        for p in params:
            p.grad = torch.arange(len(p)) - 5.0 * step
            p.grad[0] = 0  # a variance of zero, which the freeze would fill
        optimizer.step()
    before = copy.deepcopy(optimizer.rank_state_dict())
    with monkeypatch.context() as patch:
        patch.setattr("moe_ext.optim.one_bit_adam.reduce_all", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    found = optimizer.rank_state_dict()
    assert found["compression"] == before["compression"]
    for index, state in before["state"].items():
        assert state.keys() == found["state"][index].keys()
        assert not bool(found["state"][index]["exp_avg_sq"][0])
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][index][name]), torch.as_tensor(value))
    optimizer.step()
    assert bool((optimizer.rank_state_dict()["state"][0]["exp_avg_sq"] > 0).all())
