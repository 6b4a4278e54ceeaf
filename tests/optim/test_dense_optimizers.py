import copy
import functools

import pytest
import torch
from one_bit_formulas import lamb_by_formula
from one_bit_ranks import drawn_parameters, muon
from torch import nn

import moe_ext
from moe_ext import optim

TIGHT = {"rtol": 1e-12, "atol": 1e-14}
CLOSE = {"rtol": 2e-6, "atol": 1e-7}
MAKERS = {
    "LAMB": lambda params, **kw: optim.LAMB(params, lr=0.05, weight_decay=0.1, **kw),
    "LARS": lambda params, **kw: optim.LARS(params, lr=0.05, weight_decay=0.1, **kw),
    "Adafactor": lambda params, **kw: optim.Adafactor(params, lr=0.05, weight_decay=0.1, **kw),
}
each_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


with_muon = pytest.mark.parametrize("make", [*MAKERS.values(), muon], ids=[*MAKERS, "Muon"])


SHAPES = [(4, 3), (5,), (2, 3, 4), (1, 1), (0, 3)]
parameters = functools.partial(drawn_parameters, SHAPES, dtype=torch.float64)


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def lars_by_formula(w, grads, *, lr, momentum, decay, eta, eps=1e-8, nesterov=False):
    u = torch.zeros_like(w)
    for g in grads:
        norms = w.norm().item(), g.norm().item()
        ratio = eta * norms[0] / (norms[1] + decay * norms[0] + eps) if min(norms) > 0 else 1.0
        step = lr * ratio * (g + decay * w)
        u = momentum * u + step
        w = w - (momentum * u + step if nesterov else u)
    return w


def after_steps(optimizer, params, steps=4):
    """The gradients of each parameter, once the optimizer has taken them."""
    seen = []
    for step in range(steps):
        give_gradients(params, step)
        seen.append([p.grad.clone() for p in params])
        optimizer.step()
    return list(zip(*seen, strict=True))


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("bounds", [(0.01, 10.0), (0.9, 1.1), (0.0, 0.2)])
def test_lamb_is_the_formula(corrected, bounds):
    params, options = parameters(), {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-5}
    before = [p.detach().clone() for p in params]
    low, high = bounds
    optimizer = optim.LAMB(
        params,
        weight_decay=0.1,
        bias_correction=corrected,
        min_coeff=low,
        max_coeff=high,
        **options,
    )
    for w, p, grads in zip(before, params, after_steps(optimizer, params), strict=True):
        of_ranks = [[grad] for grad in grads]
        how = {"freeze": len(grads), "bounds": bounds, "corrected": corrected, "decay": 0.1}
        after = {"beta3": 0.0, "factors": bounds, "threshold": 0.0}
        want, _ = lamb_by_formula(w, of_ranks, **how, **after, **options)
        torch.testing.assert_close(p.detach(), want, **TIGHT)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_lars_is_the_formula(momentum, nesterov):
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = optim.LARS(params, 0.5, momentum, 0.1, 0.02, nesterov=nesterov)
    for w, p, grads in zip(before, params, after_steps(optimizer, params), strict=True):
        want = lars_by_formula(
            w, grads, lr=0.5, momentum=momentum, decay=0.1, eta=0.02, nesterov=nesterov
        )
        torch.testing.assert_close(p.detach(), want, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.3, "weight_decay": 0.1},
        {"maximize": True, "eps": (1e-3, 0.1)},
        {"d": 2.0, "beta2_decay": -0.5},
        {"eps": (0.5, 1e-3)},  # above the root of some means of squares
    ],
    ids=repr,
)
def test_adafactor_is_that_of_torch(options, dtype):
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    after_steps(optim.Adafactor(ours, **options), ours)
    # torch divides by the number of elements of an empty tensor, which it leaves as it is.
    after_steps(torch.optim.Adafactor(theirs[:-1], **options), theirs[:-1])
    torch.testing.assert_close(ours, theirs, **CLOSE)


@with_muon
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_take_the_steps_of_float32(make, dtype):
    """Gradients whose squares are zero in 16 bits; a state of 16 bits goes on in 32, and back."""
    ours = parameters(dtype=dtype)
    twins = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer, exact = make(ours), make(twins)
    for step in range(10):
        give_gradients(ours, step)
        for p, q in zip(ours, twins, strict=True):
            p.grad = p.grad * 1e-4
            q.data, q.grad = p.detach().float(), p.grad.float()
        optimizer.step()
        exact.step()
        assert all(torch.equal(p, q.to(dtype)) for p, q in zip(ours, twins, strict=True))
    saved = optimizer.state_dict()
    kinds = {k: v.dtype for k, v in saved["state"][0].items() if k != "step"}
    assert set(kinds.values()) == {torch.float32}
    short = make(ours, float32_state=False)
    short.load_state_dict(saved)
    after_steps(short, ours, 1)
    halves = short.state_dict()
    assert {halves["state"][0][name].dtype for name in kinds} == {dtype}
    for group in halves["param_groups"]:
        group.pop("float32_state")  # as it was saved before there was a choice
    optimizer.load_state_dict(halves)
    assert all(
        torch.equal(optimizer.state[p][name], short.state[p][name].float())
        for p in ours
        for name in kinds.keys() & optimizer.state[p].keys()
    )
    after_steps(optimizer, ours, 1)
    assert all(bool(p.isfinite().all()) for p in ours)


def test_without_ratio_lamb_is_adamw():
    ours, theirs = parameters(dtype=torch.float32), parameters(dtype=torch.float32)
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    after_steps(optim.LAMB(ours, adapt=False, **options), ours)
    after_steps(torch.optim.AdamW(theirs, **options), theirs)
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_without_ratio_lars_is_sgd():
    ours, theirs = parameters(dtype=torch.float32), parameters(dtype=torch.float32)
    after_steps(optim.LARS(ours, 0.05, weight_decay=0.1, adapt=False, nesterov=True), ours)
    sgd = torch.optim.SGD(theirs, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True)
    after_steps(sgd, theirs)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@each_optimizer
def test_per_expert_steps_are_those_of_separate_tensors(make):
    stacked = parameters()[2:3] + [nn.Parameter(torch.randn(2, 5, dtype=torch.float64))]
    with torch.no_grad():
        for p in stacked:
            p[1] *= 50  # a ratio over both would be far from that of either
    apart = [nn.Parameter(p[e].detach().clone()) for p in stacked for e in range(2)]
    whole = make(stacked, per_expert=True)
    separate = make(apart)
    for step in range(3):
        give_gradients(stacked, step)
        for index, p in enumerate(apart):
            p.grad = stacked[index // 2].grad[index % 2].clone()
        whole.step()
        separate.step()
    for index, p in enumerate(apart):
        torch.testing.assert_close(stacked[index // 2][index % 2], p, **TIGHT)
    other = make(copy.deepcopy(stacked))
    give_gradients(other.param_groups[0]["params"], 7)
    give_gradients(stacked, 7)
    whole.step()
    other.step()
    assert not torch.allclose(stacked[0], other.param_groups[0]["params"][0])


@each_optimizer
def test_zero_weights_and_zero_gradients_have_ratio_one(make):
    zero, still = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))
    zero.grad, still.grad = torch.ones(3, 3), torch.zeros(3, 3)
    make([zero, still]).step()
    assert bool(torch.isfinite(zero).all() and torch.isfinite(still).all())
    assert bool((zero < 0).all())


def named(params):
    return [(f"layer.{i}", p) for i, p in enumerate(params)]


@each_optimizer
def test_a_state_goes_by_names(make):
    params = parameters()
    optimizer = make([{"params": named(params)[:1], "lr": 0.02}, {"params": named(params)[1:]}])
    after_steps(optimizer, params, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    theirs = named(copies)
    resumed = make([{"params": theirs[:1]}, {"params": theirs[:0:-1]}])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 0.02
    assert resumed.param_groups[1]["param_names"] == [name for name, _ in theirs[:0:-1]]
    after_steps(optimizer, params, 2)
    after_steps(resumed, copies, 2)
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
    other = make([("strange", copies[0]), *theirs[1:]])
    state = make(theirs).state_dict()
    with pytest.raises(ValueError, match="names of these, got one without strange"):
        other.load_state_dict(state)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="saved with the same options, got lr=0.02 and lr="):
        make(theirs[::-1]).load_state_dict(state)
    # Ranks with DTensors of several meshes have more groups than one process.
    state["param_groups"][1]["lr"] = 0.02
    joined = make(theirs[::-1])
    joined.load_state_dict(copy.deepcopy(state))
    apart = make([{"params": theirs[2:]}, {"params": theirs[:2], "lr": 0.7}])
    apart.load_state_dict(copy.deepcopy(joined.state_dict()))
    assert [group["lr"] for group in (*joined.param_groups, *apart.param_groups)] == [0.02] * 3
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(apart.state[q], optimizer.state[p], rtol=0, atol=0)


@with_muon
def test_frozen_parameters_stay_and_the_closure_is_called(make):
    params = parameters()
    params[2].requires_grad_(False)
    optimizer = make(params)

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum() + params[1].square().sum()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in params]
    assert optimizer.step(closure) > optimizer.step(closure)
    moved = [not torch.equal(p, b) for p, b in zip(params, before, strict=True)]
    assert moved == [True, True, False, False, False]
    assert set(optimizer.state) == {params[0], params[1]}
    optimizer.zero_grad()
    before = [p.detach().clone() for p in params]
    assert optimizer.step() is None
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@with_muon
def test_maximize_is_a_step_down_the_negative(make):
    up, down = parameters(), parameters()
    a, b = make(up, maximize=True), make(down)
    for step in range(3):
        give_gradients(up, step)
        for p, q in zip(up, down, strict=True):
            q.grad = -p.grad
        a.step()
        b.step()
    torch.testing.assert_close(up, down, rtol=0, atol=0)


@each_optimizer
def test_a_schedule_and_groups_set_the_rate(make):
    params = parameters()
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "lr": 0.0}])
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    before = [p.detach().clone() for p in params]
    after_steps(optimizer, params, 1)
    assert not torch.equal(params[0], before[0])
    assert all(torch.equal(p, b) for p, b in zip(params[1:], before[1:], strict=True))
    rates.step()
    # A buffer of momentum holds rates of the past.
    if not isinstance(optimizer, optim.LARS):
        before = params[0].detach().clone()
        after_steps(optimizer, params, 1)
        assert torch.equal(params[0], before)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.moe = moe_ext.MoELayer(8, 4, 4, 2, bias=True)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)


def test_param_groups_tell_matrices_vectors_and_stacked_experts():
    model = Mixed()
    groups = {group["name"]: group for group in optim.param_groups(model)}
    names = {name: [n for n, _ in group["params"]] for name, group in groups.items()}
    assert names == {
        "dense": ["inp.weight", "moe.router.weight"],
        "dense vectors": ["inp.bias", "norm.weight", "norm.bias"],
        "stacked experts": ["moe.experts.gate_up_proj", "moe.experts.down_proj"],
        "stacked experts vectors": [
            "moe.experts.gate_up_proj_bias",
            "moe.experts.down_proj_bias",
        ],
    }
    assert [g.get("per_expert") for g in groups.values()] == [None, None, True, True]
    assert [g.get("adapt") for g in groups.values()] == [None, False, None, False]
    assert "weight_decay" not in groups["dense"]
    for make in MAKERS.values():
        optimizer = make(optim.param_groups(model))
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        assert decays == [0.1, 0.0, 0.1, 0.0]
        assert optimizer.param_groups[2]["param_names"] == names["stacked experts"]


@each_optimizer
def test_what_cannot_be_trained_is_named(make):
    p, q = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.ones(2))
    optimizer = make([{"params": [q]}, {"params": [p]}])
    q.grad, p.grad = torch.ones(2), torch.ones(4, 3).to_sparse()
    with pytest.raises(TypeError, match=r"gradients to be dense, got torch.sparse_coo for para"):
        optimizer.step()
    assert torch.equal(q, torch.ones(2))
    optimizer = make([("emb.weight", p)])
    with pytest.raises(TypeError, match="for 'emb.weight'"):
        optimizer.step()
    z = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    z.grad = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="real floating-point tensors, got torch.complex64 for par"):
        make([z]).step()
    with pytest.raises(ValueError, match=r"first dimension of experts, got shape \(\) for param"):
        make([nn.Parameter(torch.tensor(1.0))], per_expert=True)
