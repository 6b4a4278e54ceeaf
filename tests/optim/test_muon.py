"""Muon in one process, beside torch's and beside its formula in float64."""

import copy

import pytest
import torch
from torch import nn

import moe_ext
from moe_ext import optim

TIGHT = {"rtol": 1e-11, "atol": 1e-13}
EXACT = {"ns_dtype": torch.float64}
COEFFICIENTS = (3.4445, -4.775, 2.0315)


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parameter(*shape, seed=0, dtype=torch.float64):
    return nn.Parameter(draw(*shape, seed=seed, dtype=dtype))


def take_steps(optimizer, params, steps=3, first=0):
    for step in range(first, first + steps):
        for index, p in enumerate(params):
            p.grad = draw(*p.shape, seed=100 * step + index, dtype=p.dtype)
        optimizer.step()


def newton_schulz(x, steps=5):
    a, b, c = COEFFICIENTS
    x = x.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def by_formula(w, grads, *, lr, decay=0.1, mu=0.95, scale=1.0, nesterov=True):
    """The steps of one matrix."""
    m = torch.zeros_like(w)
    for g in grads:
        m = mu * m + (1 - mu) * g
        o = newton_schulz((1 - mu) * g + mu * m if nesterov else m)
        o = o.T if o.shape != w.shape else o
        w = (1 - lr * decay) * w - lr * scale * o
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "ns_steps": 3},
        {"adjust_lr_fn": "original", "momentum": 0.4, "ns_coefficients": (2.0, -1.5, 0.5)},
    ],
    ids=repr,
)
def test_matrices_have_the_bits_of_torch(options, dtype):
    shapes = [(8, 5), (5, 8), (1, 7), (33, 33), (64, 17)]
    ours = [parameter(*shape, dtype=dtype) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    # Momenta in the type of the parameter, as torch has them.
    mine = optim.Muon(ours, lr=0.05, float32_state=False, **options)
    want = torch.optim.Muon(theirs, lr=0.05, **options)
    take_steps(mine, ours)
    take_steps(want, theirs)
    for first, (loads, saves) in ((3, (mine, want)), (4, (want, mine))):
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
        # Each goes on from the other's state.
        loads.load_state_dict(copy.deepcopy(saves.state_dict()))
        take_steps(mine, ours, 1, first)
        take_steps(want, theirs, 1, first)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert mine.param_groups[0]["ns_dtype"] == "bfloat16"


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("shape", "rms"), [((3, 8, 5), 8), ((4, 5, 8), 8), ((1, 6, 6), 6)])
def test_a_stack_is_the_formula_for_each_expert(shape, rms, nesterov):
    p = parameter(*shape)
    with torch.no_grad():
        p[0] *= 1e3  # a norm over all experts would be that of the first
    before = p.detach().clone()
    options = {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw", "nesterov": nesterov, **EXACT}
    take_steps(optim.Muon([p], **options), [p])
    grads = [draw(*shape, seed=100 * step) for step in range(3)]
    for e in range(shape[0]):
        scale = 0.2 * rms**0.5
        want = by_formula(before[e], [g[e] for g in grads], lr=0.05, scale=scale, nesterov=nesterov)
        torch.testing.assert_close(p[e].detach(), want, **TIGHT)


def test_a_stack_in_bfloat16_is_as_near_as_torch_is():
    """Products of a batch may be rounded otherwise than those of one matrix, but no worse."""
    shape = (6, 48, 32)
    p = parameter(*shape, dtype=torch.float32)
    apart = [nn.Parameter(p[e].detach().clone()) for e in range(shape[0])]
    before = p.detach().clone()
    take_steps(optim.Muon([p], lr=1.0, weight_decay=0.0), [p], 1)
    theirs = torch.optim.Muon(apart, lr=1.0, weight_decay=0.0)
    for e, q in enumerate(apart):
        q.grad = p.grad[e].clone()
    theirs.step()
    for e, q in enumerate(apart):
        want = by_formula(
            before[e].double(), [p.grad[e].double()], lr=1.0, decay=0.0, scale=1.5**0.5
        )
        error = (p[e].detach().double() - want).norm()
        assert error <= 2 * (q.detach().double() - want).norm()
        assert error < 0.05 * (want - before[e]).norm()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_matrices_in_one_parameter_are_orthogonalised_apart(interleaved, transposed):
    gate, up = parameter(3, 4, 5, seed=1), parameter(3, 4, 5, seed=2)

    def joined(pair):
        both = torch.stack(pair, 2 if interleaved else 1).flatten(1, 2)
        return (both.mT if transposed else both).contiguous()

    whole = nn.Parameter(joined([gate.detach(), up.detach()]))
    options = {"lr": 0.05, "adjust_lr_fn": "original", **EXACT}
    apart = optim.Muon([gate, up], **options)
    both = optim.Muon([whole], fused=2, interleaved=interleaved, transposed=transposed, **options)
    for step in range(3):
        gate.grad, up.grad = draw(3, 4, 5, seed=step), draw(3, 4, 5, seed=9 + step)
        whole.grad = joined([gate.grad, up.grad])
        apart.step()
        both.step()
    torch.testing.assert_close(whole.detach(), joined([gate.detach(), up.detach()]), **TIGHT)


def test_other_parameters_take_the_steps_of_adamw():
    shapes = [(3,), (4, 6), (2, 3, 1, 5)]
    ours = [parameter(*shape, dtype=torch.float32) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    matrix = parameter(4, 4, dtype=torch.float32)
    groups = [{"params": [matrix]}, {"params": ours, "use_muon": False, "lr": 0.01}]
    want = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for maximize in (False, True):
        for group in (groups[1], *want.param_groups):
            group["maximize"] = maximize
        take_steps(optim.Muon(groups, lr=0.05), ours)
        take_steps(want, theirs)
        # Quotients of two roots in float32, a few roundings apart, times the rate.
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
        want.state.clear()


def mixed_groups():
    params = [parameter(2, 4, 3), parameter(5, 3), parameter(0, 3), parameter(7), parameter(3, 3)]
    params[4].requires_grad_(False)
    return params, [{"params": params[:3]}, {"params": params[3:], "use_muon": False}]


def test_a_step_that_overflows_is_left_out():
    params, groups = mixed_groups()
    model = nn.ParameterList(params)
    optimizer = optim.Muon(groups, lr=0.05)
    take_steps(optimizer, params[:4], 1)
    before = [p.detach().clone() for p in params]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for p in params[:4]:
        p.grad = torch.full_like(p, 4.0)
    params[0].grad[1, 0, 0] = torch.inf
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="expected the norm of the gradients to be finite"):
        moe_ext.distributed.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert scaler.get_scale() == 2.0
    # Without a look at it, an expert keeps to itself what it got.
    optimizer.step()
    assert params[0][1].isnan().all() and params[0][0].isfinite().all()


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.conv = nn.Conv1d(8, 8, 3, groups=8)
        self.moe = moe_ext.MoELayer(
            8, 4, 4, 2, experts=moe_ext.nn.GroupedExperts(4, 8, 4, **options)
        )
        self.head = nn.Linear(8, 9)
        self.tied = nn.Linear(8, 9, bias=False)
        self.tied.weight = self.embedding.weight


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
def test_groups_say_what_is_for_muon(layout, transposed):
    model = Model(bias=True, layout=layout, transposed=transposed)
    groups = optim.param_groups(model, muon=True, adamw=[model.head])
    found = {
        name: {k: v for k, v in group.items() if k not in ("params", "name")}
        for group in groups
        for name, _ in group["params"]
    }
    adamw = {"use_muon": False}
    vector = {"use_muon": False, "weight_decay": 0.0, "adapt": False}
    experts = {"use_muon": True, "per_expert": True}
    experts |= {"transposed": True} if transposed else {}
    gates = experts | {"fused": 2} | ({"interleaved": True} if layout == "interleaved" else {})
    assert found == {
        "embedding.weight": adamw,
        "conv.weight": adamw,
        "conv.bias": vector,
        "moe.router.weight": {"use_muon": True},
        "moe.experts.gate_up_proj": gates,
        "moe.experts.down_proj": experts,
        "moe.experts.gate_up_proj_bias": vector | {"per_expert": True},
        "moe.experts.down_proj_bias": vector | {"per_expert": True},
        "head.weight": adamw,
        "head.bias": vector,
    }
    optim.Muon(groups)
    model.get_output_embeddings = lambda: model.head
    assert len(optim.param_groups(model, muon=True)) == len(groups)
    plain = optim.param_groups(Model(activation="relu"), muon=True)
    assert not any("fused" in group for group in plain)


BAD = [
    ((3,), {}, r"matrices or stacks .*; give others to AdamW, .*use_muon=False, .*\(3,\) for 'w'"),
    ((2, 3, 1, 3), {}, r"matrices or stacks of matrices \[E, M, N\]; give others to AdamW"),
    ((2, 3), {"per_expert": True}, r"stacks of matrices \[E, M, N\] with per_expert=True"),
    ((2, 3, 4), {"fused": 2}, r"fused=2 matrices of equal size in a parameter, got shape \(2, 3,"),
    ((4, 3), {"fused": 2, "transposed": True}, "fused=2 matrices of equal size"),
    ((2, 2), {"fused": 0}, "fused to be an integer of at least 1, got 0"),
    ((2, 2), {"lr": -1.0}, "lr to be at least 0 and finite, got -1.0"),
    ((2, 2), {"momentum": 1.0}, r"momentum to be in \[0, 1\), got 1.0"),
    ((2, 2), {"ns_steps": -1}, "ns_steps to be at least 0, got -1"),
    ((2, 2), {"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients to be three numbers, got \(1.0"),
    ((2, 2), {"adjust_lr_fn": "moonlight"}, "adjust_lr_fn to be one of .*, got 'moonlight'"),
    ((2, 2), {"ns_dtype": "bf16"}, "ns_dtype to be a floating-point type, got bf16"),
    ((2, 2), {"ns_dtype": torch.int8}, "ns_dtype to be a floating-point type, got torch.int8"),
    ((2, 2), {"adamw_betas": (1.0, 0.9)}, "betas to be two numbers"),
]


@pytest.mark.parametrize(("shape", "options", "message"), BAD)
def test_what_is_not_for_muon_is_named(shape, options, message):
    with pytest.raises(ValueError, match=f"Muon: expected .*{message}"):
        optim.Muon([("w", parameter(*shape))], **options)
    optimizer = optim.Muon([("first", parameter(2, 2))])
    with pytest.raises(ValueError, match="Muon: expected"):
        optimizer.add_param_group({"params": [("w", parameter(*shape))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.LAMB, optim.Muon, optim.OneBitAdam])
def test_a_compiled_step_is_the_step(kind):
    ours, theirs = (
        [parameter(*shape, dtype=torch.float32) for shape in ((2, 4, 3), (5, 3))] for _ in range(2)
    )
    one, other = kind(ours), kind(theirs)
    step = torch.compile(other.step, backend="eager")
    for index in range(3):
        for p in (*ours, *theirs):
            p.grad = draw(*p.shape, seed=index, dtype=torch.float32)
        one.step()
        step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
