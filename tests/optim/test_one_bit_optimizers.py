"""The optimizers that communicate themselves, on one rank: their formulas and their messages."""

import copy
import functools
import re

import pytest
import torch
from one_bit_formulas import adam_by_formula, lamb_by_formula, zero_one_by_formula
from one_bit_ranks import MAKERS, drawn_parameters
from torch import nn

from moe_ext import optim

CLOSE = {"rtol": 2e-5, "atol": 2e-6}
each_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


parameters = functools.partial(drawn_parameters, [(4, 3), (5,), (2, 3, 4), (0, 3)])


def gradients(step, params):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def run(optimizer, params, steps):
    seen = []
    for step in steps:
        for p, grad in zip(params, gradients(step, params), strict=True):
            p.grad = grad
        seen.append([[p.grad.double()] for p in params])
        optimizer.step()
    return list(zip(*seen, strict=True))


def assert_formula(optimizer, params, steps, formula, **options):
    """Assert that parameters are those of a formula after steps."""
    before = [p.detach().double() for p in params]
    for w, p, grads in zip(before, params, run(optimizer, params, steps), strict=True):
        want = formula(w, grads, **options)
        torch.testing.assert_close(p.detach().double(), want, **CLOSE)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_one_bit_adam_alone_is_the_formula(corrected, inside):
    params, betas = parameters(), (0.8, 0.95)
    optimizer = optim.OneBitAdam(params, 0.05, 3, corrected, betas, 1e-3, inside, weight_decay=0.1)
    options = {"lr": 0.05, "betas": betas, "eps": 1e-3, "decay": 0.1, "freeze": 3}
    options |= {"corrected": corrected, "inside": inside}
    assert_formula(optimizer, params, range(7), adam_by_formula, **options)


BOUNDED, FREE = (0.6, 1.7, 0.1), (1e-6, 1e6, 1e6)


@pytest.mark.parametrize(
    ("growth", "decay", "corrected", "bounds"),
    [
        (0.6, 0.0, True, BOUNDED),
        (2.5, 0.0, False, BOUNDED),
        (2.5, 0.7, True, BOUNDED),
        (0.6, 0.7, False, FREE),
        (1.0, 0.7, True, FREE),
        (1.0, 0.1, False, (0.8, 1.7, 0.5)),
    ],
)
def test_one_bit_lamb_follows_gradients_that_shrink_or_grow(growth, decay, corrected, bounds):
    """By a factor a step after the freeze: the factor meets its bounds, and that on its change."""
    low, high, threshold = bounds
    params = [*parameters()[:3], nn.Parameter(torch.zeros(6))]
    options = {"lr": 0.05, "betas": (0.8, 0.6), "eps": 1e-3}
    optimizer = optim.OneBitLamb(
        params,
        freeze_step=3,
        bias_correction=corrected,
        weight_decay=decay,
        coeff_beta=0.6,
        factor_max=high,
        factor_min=low,
        factor_threshold=threshold,
        **options,
    )
    before, taken = [p.detach().double() for p in params], [[] for _ in params]
    coefficients = []
    for step in range(14):
        for p, grad, seen in zip(params, gradients(step, params), taken, strict=True):
            p.grad = grad * growth ** max(0, step - 2)
            seen.append([p.grad.double()])
        optimizer.step()
        coefficients.append(optimizer.get_lamb_coeffs())
    for index, (w, p, grads) in enumerate(zip(before, params, taken, strict=True)):
        formula = functools.partial(
            lamb_by_formula,
            w,
            grads,
            decay=decay,
            freeze=3,
            beta3=0.6,
            corrected=corrected,
            **options,
        )
        want, of_steps = formula(factors=(low, high), threshold=threshold)
        torch.testing.assert_close(p.detach().double(), want, **CLOSE)
        assert [c[index] for c in coefficients] == pytest.approx(of_steps, rel=1e-4)
        if index == 0 and bounds is BOUNDED:
            # Each bound says something here: without it the coefficients are others.
            for free in (
                formula(factors=FREE[:2], threshold=0.1),
                formula(factors=(low, high), threshold=1e6),
            ):
                assert of_steps != pytest.approx(free[1], rel=1e-2)


def test_one_bit_lamb_per_expert_is_that_of_separate_tensors():
    stacked = [nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(2, 5))]
    with torch.no_grad():
        for p in stacked:
            p[1] *= 50
    apart = [nn.Parameter(p[e].detach().clone()) for p in stacked for e in range(2)]
    options = {"lr": 0.05, "freeze_step": 2, "weight_decay": 0.1, "coeff_beta": 0.5}
    whole = optim.OneBitLamb([{"params": stacked, "per_expert": True}], **options)
    separate = optim.OneBitLamb(apart, **options)
    for step in range(6):
        for p, grad in zip(stacked, gradients(step, stacked), strict=True):
            p.grad = grad
        for index, p in enumerate(apart):
            p.grad = stacked[index // 2].grad[index % 2].clone()
        whole.step()
        separate.step()
    for index, p in enumerate(apart):
        torch.testing.assert_close(stacked[index // 2][index % 2], p, **CLOSE)
    flat = [c for entry in whole.get_lamb_coeffs() for c in entry]
    assert flat == pytest.approx(separate.get_lamb_coeffs(), rel=1e-4)


def test_without_ratio_one_bit_lamb_is_one_bit_adam_without_decay():
    ours, theirs = parameters(), parameters()
    groups = [{"params": ours, "adapt": False}]
    run(optim.OneBitLamb(groups, lr=0.05, freeze_step=2), ours, range(5))
    run(optim.OneBitAdam(theirs, lr=0.05, freeze_step=2), theirs, range(5))
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_zero_one_adam_alone_is_the_formula():
    params = parameters()[:3]
    common = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3}
    optimizer = optim.ZeroOneAdam(
        params,
        weight_decay=0.1,
        var_freeze_step=9,
        var_update_scaler=2,
        local_step_scaler=4,
        local_step_clipper=4,
        **common,
    )
    before, taken = [p.detach().double() for p in params], [()] * len(params)
    options = {"decay": 0.1, "freeze": 9, "kappa": 2, "scaler": 4, "clipper": 4}
    for step in range(29):  # past where the interval would double beyond its bound
        seen = run(optimizer, params, [step])
        taken = [(*grads, *more) for grads, more in zip(taken, seen, strict=True)]
        for w, p, grads in zip(before, params, taken, strict=True):
            want = zero_one_by_formula(w, grads, **options, **common)
            torch.testing.assert_close(p.detach().double(), want, **CLOSE)


def test_zero_one_adam_counts_the_rates_of_a_parameters_own_steps():
    p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    optimizer = optim.ZeroOneAdam(
        [p, q],
        0.1,
        bias_correction=False,
        betas=(0.0, 0.0),
        var_freeze_step=1,
        local_step_scaler=1,
        local_step_clipper=4,
    )
    for step in range(1, 9):  # synchronised after 1, 2, 4 and 8
        p.grad = torch.ones(4)
        q.grad = torch.ones(4) if step < 7 else None
        optimizer.step()
    for parameter, steps in ((p, 8), (q, 6)):
        state = optimizer.state[parameter]
        torch.testing.assert_close(state["exp_avg"], torch.ones(4))
        torch.testing.assert_close(parameter.detach(), torch.full((4,), -0.1 * steps))


def test_it_goes_on_from_a_state_of_torch_bit_for_bit():
    ours, theirs = parameters(), parameters()
    options = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}
    theirs_adam = torch.optim.AdamW(theirs, foreach=True, **options)
    run(theirs_adam, theirs, range(3))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    optimizer = optim.OneBitAdam(ours, freeze_step=6)
    optimizer.load_state_dict(copy.deepcopy(theirs_adam.state_dict()))
    assert optimizer.steps_taken == 3
    run(theirs_adam, theirs, range(3, 6))
    run(optimizer, ours, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    run(optimizer, ours, range(6, 8))
    assert not any(torch.equal(p, q) for p, q in zip(ours[:3], theirs[:3], strict=True))


@each_optimizer
def test_closure_missing_gradients_and_frozen_parameters(make):
    params = parameters()
    params[1].requires_grad_(False)
    optimizer = make(params, lr=0.05, weight_decay=0.1)

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in params]
    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert all(torch.equal(p, b) for p, b in zip(params[1:], before[1:], strict=True))
    assert params[1] not in optimizer.state
    losses = [optimizer.step(closure).item() for _ in range(8)]
    assert losses[0] > losses[-1]
    assert torch.equal(params[1], before[1])


@each_optimizer
def test_large_finite_gradients_are_taken(make):
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = make([p])
    p.grad = torch.full((2, 3), 3e30)  # the squares are infinite
    optimizer.step()
    assert bool(torch.isfinite(p).all())


def test_masks_hold_zeros_as_in_deepspeed_and_are_not_saved():
    p = nn.Parameter(torch.ones(2, 3))
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    optimizer = optim.OneBitAdam([{"params": [p], "exp_avg_mask": mask}], freeze_step=1)
    run(optimizer, [p], range(3))
    state = optimizer.rank_state_dict()
    assert "exp_avg_mask" not in state["param_groups"][0]
    assert optimizer.param_groups[0]["exp_avg_mask"] is mask
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["exp_avg_mask"] is mask


def test_max_grad_norm_bounds_all_gradients():
    ours, theirs = parameters()[:3], parameters()[:3]
    optimizer = optim.OneBitAdam(ours, 0.05, max_grad_norm=0.5)
    other = torch.optim.AdamW(theirs, 0.05, weight_decay=0.0)
    for step in range(3):
        for params in (ours, theirs):
            for p, grad in zip(params, gradients(step, params), strict=True):
                p.grad = grad
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        kept = [p.grad.clone() for p in ours]
        optimizer.step()
        other.step()
        assert all(torch.equal(p.grad, k) for p, k in zip(ours, kept, strict=True))
    torch.testing.assert_close(ours, theirs, **CLOSE)


@each_optimizer
@pytest.mark.parametrize("steps", [2, 8])
def test_parameters_that_are_thawed_are_not_left_behind(make, steps):
    params = [parameters()[0], nn.Parameter(torch.ones(5, 3))]
    params[1].requires_grad_(False)
    optimizer = make([("w", params[0]), ("b", params[1])], lr=0.05)
    run(optimizer, params[:1], range(steps))
    params[1].requires_grad_(True)
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        ValueError, match="expected parameters to require gradients from .* for 'b'"
    ):
        run(optimizer, params, [2])
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    optimizer.flush()
    optimizer.load_state_dict(optimizer.rank_state_dict())
    run(optimizer, params, range(2, 8))
    assert not torch.equal(params[1], before[1])
    # Over a variance of zero a step would be a million.
    assert (params[1] - before[1]).abs().max() < 100


def test_a_state_that_is_refused_changes_nothing():
    params = parameters()[:1]
    optimizer = optim.OneBitAdam(params, 0.05, freeze_step=1)
    run(optimizer, params, range(3))
    kept, bad = (
        copy.deepcopy(optimizer.rank_state_dict()),
        copy.deepcopy(optimizer.rank_state_dict()),
    )
    bad["compression"]["block"] = 64
    bad["state"][0]["worker_error"] += 1
    bad["state"][0]["exp_avg"].zero_()
    bad["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match="expected a state of blocks of 256"):
        optimizer.load_state_dict(bad)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], kept["state"][0]["exp_avg"])
    assert optimizer.steps_taken == 3
    run(optimizer, params, [3])


def test_a_group_has_no_bound_on_the_norm_of_its_own():
    groups = [{"params": parameters()[:1], "max_grad_norm": 0.0}]
    message = r"expected max_grad_norm of a group to be that of the optimizer \(1.0\), got 0.0"
    with pytest.raises(ValueError, match=message):
        optim.OneBitAdam(groups, max_grad_norm=1.0)


def test_a_reduction_that_fails_leaves_what_is_not_compressed_as_it_was(monkeypatch):
    p, q = parameters()[:2]
    groups = [{"params": [p]}, {"params": [q], "non_freeze": True}]
    optimizer = optim.ZeroOneAdam(groups, 0.05, var_freeze_step=2)
    run(optimizer, [p, q], range(4))
    monkeypatch.setattr("moe_ext.optim.zero_one_adam.reduce_all", lambda *_: 1 / 0)
    before = [p.detach().clone(), q.detach().clone(), copy.deepcopy(optimizer.rank_state_dict())]
    with pytest.raises(ZeroDivisionError):
        run(optimizer, [p, q], [4])
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])
    state = optimizer.rank_state_dict()["state"][1]
    assert all(torch.equal(state[n], before[2]["state"][1][n]) for n in ("exp_avg", "exp_avg_sq"))


W = nn.Parameter(torch.zeros(3))


@each_optimizer
def test_what_cannot_be_trained_is_named(make):
    p, q = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = torch.ones(4, 3).to_sparse()
    name = type(make([p])).__name__
    with pytest.raises(TypeError, match=f"{name}: expected gradients to be dense, got a sparse on"):
        make([p]).step()
    q.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match="to be float32, bfloat16 or float16, got another type for"):
        make([q]).step()
    with pytest.raises(TypeError, match="expected group to be None or a ProcessGroup"):
        make([p], group=3)
    with pytest.raises(TypeError, match="expected process_group to be None or a ProcessGroup"):
        make([{"params": [p], "process_group": 3}])
    with pytest.raises(ValueError, match="expected max_grad_norm to be 0 with a process_group"):
        make([{"params": [p], "process_group": "self"}], max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"first dimension of experts, got shape \(\)"):
        make([{"params": [nn.Parameter(torch.tensor(1.0))], "per_expert": True}])
    optimizer = make([W])
    W.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ValueError, match="expected all groups to be added before the first step"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@each_optimizer
def test_arguments_of_deepspeed_are_taken_with_a_warning(make):
    name = type(make([W])).__name__
    for options, text in (
        ({"deepspeed": object()}, f"{name}: deepspeed is ignored"),
        ({"cuda_aware": True}, f"{name}: cuda_aware is ignored"),
        ({"comm_backend_name": "what"}, f"{name}: comm_backend_name='what' is ignored"),
    ):
        with pytest.warns(UserWarning, match=re.escape(text)):
            make([W], **options)


def test_a_training_of_nothing_does_nothing():
    for make in MAKERS.values():
        p = nn.Parameter(torch.zeros(2), requires_grad=False)
        optimizer = make([p])
        optimizer.step()
        optimizer.flush()
        assert optimizer.steps_taken == 0
