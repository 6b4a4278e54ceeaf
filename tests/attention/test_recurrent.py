"""Recurrences of one process against a loop over positions, and against those of transformers."""

import importlib
import itertools

import pytest
import torch

from moe_ext import reference
from moe_ext.attention import causal_conv1d, gated_delta_rule, selective_scan
from moe_ext.attention.recurrent import local

KINDS = ("delta", "delta by element", "linear", "linear by element", "scan", "scan by element")
OFFSETS = {1: (0, 1), 2: (0, 1, 2), 64: (0, 3, 64), 65: (0, 64, 65), 130: (0, 0, 1, 70, 130)}


def made(kind, length, batch=2, heads=4, groups=2, dim=5, v_dim=3, seed=0):
    """Arguments of a recurrence by name, float64."""
    generator = torch.Generator().manual_seed(seed + length)

    def random(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = normal(batch, groups, length, dim), normal(batch, groups, length, dim)
    v, state = normal(batch, heads, length, v_dim), normal(batch, heads, dim, v_dim)
    if not kind.startswith("scan"):
        k = k / k.norm(dim=-1, keepdim=True)
        by_element = (dim,) if kind.endswith("by element") else ()
        found = {"q": q, "k": k, "v": v, "g": -random(batch, heads, length, *by_element)}
        found["beta"] = random(batch, heads, length) if kind.startswith("delta") else None
        return {**found, "initial_state": state}
    rates = -random(*((heads, dim) if kind == "scan by element" else (heads,)))
    found = {"x": v, "dt": random(batch, heads, length), "A": rates, "B": k, "C": q}
    return {**found, "D": normal(heads), "initial_state": state}


def run(kind, given, **options):
    function = selective_scan if kind.startswith("scan") else gated_delta_rule
    return function(**given, **options)


def by_formula(kind, given, documents):
    """(out, state) by a loop over positions."""
    if not kind.startswith("scan"):
        q = given["q"] * given["q"].shape[3] ** -0.5
        rest = [given[name] for name in ("k", "v", "g", "beta", "initial_state")]
        return reference.gated_delta_rule(q, *rest, documents)
    x, rates = given["x"], given["A"]
    heads, v_dim = x.shape[1], x.shape[3]
    if rates.dim() == 1:
        rates = rates[:, None].expand(-1, given["B"].shape[3])
    # Each column of x is a head.
    wide = [given["dt"].repeat_interleave(v_dim, 1), rates.repeat_interleave(v_dim, 0)]
    state = given["initial_state"].mT.flatten(1, 2)
    out, state = reference.selective_scan(
        x.mT.flatten(1, 2), *wide, given["B"], given["C"], state, documents
    )
    out, state = (t.unflatten(1, (heads, v_dim)).mT for t in (out, state))
    return out + given["D"][:, None, None] * x, state


def documents_of(offsets, length):
    edges = torch.tensor(offsets)
    return torch.bucketize(torch.arange(length), edges, right=True)[None] - 1


@pytest.fixture(params=["operators", "formulas"])
def by(request, monkeypatch):
    """The operators of the CPU, or the formulas of torch that other devices have."""
    if request.param == "formulas":
        monkeypatch.setattr(local, "_has_operators", lambda *_: False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", OFFSETS)
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_formula(by, kind, length, packed):
    given = {n: x if x is None else x.requires_grad_() for n, x in made(kind, length).items()}
    offsets = OFFSETS[length] if packed else None
    found = run(kind, given, cu_seqlens=offsets)
    wanted = by_formula(kind, given, documents_of(offsets, length) if packed else None)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    leaves, grads = [x for x in given.values() if x is not None], []
    for out, state in (found, wanted):
        loss = out.square().sum() + (state * state.detach().cos()).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-8)


# Documents meet only in windows of some widths and lengths, in operators and in formulas.
@pytest.mark.parametrize(("width", "length"), itertools.product((1, 2, 4), (1, 2, 7)))
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_equals_the_formula(by, width, length, activation):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, length).double(), torch.randn(3, width).double()
    bias = torch.randn(3).double()
    for offsets in (None, (0, min(2, length), length)):
        found = causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=offsets)
        halo, documents = torch.zeros(2, 3, width - 1).double(), None
        if offsets is not None:
            documents = torch.cat(
                [torch.full((1, width - 1), -1), documents_of(offsets, length)], 1
            )
        wanted = reference.causal_conv1d(x, weight, bias, halo, documents)
        wanted = wanted if activation is None else torch.nn.functional.silu(wanted)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


CHUNKS = "torch_chunk_gated_delta_rule"


@pytest.mark.parametrize(
    ("family", "function", "kind", "sizes"),
    [
        ("qwen3_next", CHUNKS, "delta", {"v_dim": 8}),
        ("qwen3_5", CHUNKS, "delta", {"v_dim": 8}),
        ("olmo_hybrid", CHUNKS, "delta", {"v_dim": 8}),
        ("kimi_linear", "chunk_kimi_delta_attention", "delta by element", {"groups": 4}),
    ],
)
def test_equals_that_of_transformers(family, function, kind, sizes):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    given = {n: x.float() for n, x in made(kind, 130, dim=16, **sizes).items()}
    found = gated_delta_rule(**given)
    turned = [given[name].transpose(1, 2) for name in ("q", "k", "v", "g", "beta")]
    out, last = getattr(module, function)(
        *turned, initial_state=given["initial_state"], output_final_state=True
    )
    # Float32: sums of 130 terms near one, by both.
    torch.testing.assert_close(found, (out.transpose(1, 2), last), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["delta by element", "linear by element"])
def test_decays_of_any_size_by_element(kind):
    """Some elements are kept and others forgotten at once, where factors overflow."""
    given = {n: x if x is None else x.float() for n, x in made(kind, 130).items()}
    given["g"] = given["g"] * torch.tensor([0.0, 1e-3, 1.0, 300.0, 1e4])
    exact = {n: x if x is None else x.double() for n, x in given.items()}
    leaves = [given["g"].requires_grad_(), given["k"].requires_grad_()]
    out, _ = gated_delta_rule(**given)
    wanted, _ = by_formula(kind, exact, None)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize(("length", "dim"), [(1, 5), (130, 5), (65, 1)])
def test_a_decay_may_be_to_nothing(by, kind, length, dim):
    given = made(kind, length, dim=dim)
    for place in (0, length // 2, length - 1):
        given["g"][:, 0, place] = -torch.inf
    leaves = [x.requires_grad_() for x in given.values() if x is not None]
    found, wanted = run(kind, given), by_formula(kind, given, None)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    grads = [torch.autograd.grad(out.sin().sum() + x.sum(), leaves) for out, x in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_float32(dtype):
    given = {n: x.to(dtype) for n, x in made("delta", 65).items()}
    out, state = gated_delta_rule(**given)
    exact, _ = gated_delta_rule(**{n: x.double() for n, x in given.items()})
    assert out.dtype == dtype and state.dtype == torch.float32
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < max(torch.finfo(dtype).eps, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_float32_under_autocast(by, kind):
    given = {n: x if x is None else x.float() for n, x in made(kind, 65).items()}
    exact = run(kind, given)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(kind, given)
    assert all(map(torch.equal, found, exact))


def test_a_convolution_sums_in_float32_under_autocast(by):
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    exact = causal_conv1d(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = causal_conv1d(x, weight)
    assert torch.equal(found, exact)


WRONG = {
    "q": (lambda g: {**g, "q": g["q"][..., :2]}, "k to be of shape"),
    "heads": (lambda g: {**g, "v": g["v"][:, :3], "g": g["g"][:, :3]}, "q to be of shape"),
    "g": (lambda g: {**g, "g": g["g"][:, :, :-1]}, "g to be of shape"),
    "g by element": (
        lambda g: {**g, "g": g["g"][..., None]},
        r"g to be of shape \(2, 4, 7, 5\), got \(2, 4, 7, 1\)",
    ),
    "g of heads": (lambda g: {**g, "g": g["g"][0]}, "g to be a tensor of 3 or 4 dimensions"),
    "beta": (lambda g: {**g, "beta": g["g"][..., None]}, "beta to be a tensor of 3 dimensions"),
    "state": (
        lambda g: {**g, "initial_state": g["initial_state"].mT},
        "initial_state to be of shape",
    ),
    "scheme": (lambda g: {**g, "scheme": "ring"}, "scheme to be one of"),
    "offsets": (lambda g: {**g, "cu_seqlens": (0, 5)}, "cu_seqlens to end at"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_are_checked(case):
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=f"gated_delta_rule: expected {message}"):
        gated_delta_rule(**change(made("delta", 7)))


def test_names_in_messages_are_those_of_the_call():
    given = made("scan", 7)
    with pytest.raises(ValueError, match="selective_scan: expected B to be of shape"):
        selective_scan(**{**given, "B": given["B"][..., :2]})
    with pytest.raises(ValueError, match=r"selective_scan: expected A to be of shape \(4,\)"):
        selective_scan(**{**given, "A": given["A"][:2]})
    with pytest.raises(ValueError, match="selective_scan: expected scheme to be one of"):
        selective_scan(**made("scan by element", 7), scheme="ring")
    with pytest.raises(ValueError, match="causal_conv1d: expected weight to be of shape"):
        causal_conv1d(torch.ones(1, 3, 4), torch.ones(2, 4))
