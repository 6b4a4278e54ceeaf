"""Recurrences and the causal convolution against a loop over positions."""

import functools

import emulation
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import examples

from moe_ext import ops, reference

OPERATORS = ("delta", "linear", "scan", "conv", "conv without bias")
# Lengths below, at and beyond a chunk of 64 and a stretch of 256 positions.
LENGTHS = (1, 2, 63, 64, 65, 130, 300)


def made(name, length, *, dtype=torch.float64, packed=None, batch=2, groups=2, heads=4, dim=5):
    """Positional arguments of an operator, the documents last."""
    random = functools.partial(torch.rand, dtype=torch.float64)
    normal = functools.partial(torch.randn, dtype=torch.float64)
    documents = None
    if name.startswith("conv"):
        weight, halo = normal(heads, 3), normal(batch, heads, 2)
        bias = normal(heads) if name == "conv" else None
        found = [normal(batch, heads, length), weight, bias, halo]
        length += 2
    elif name == "scan":
        found = [normal(batch, heads, length), random(batch, heads, length), -random(heads, dim)]
        found += [normal(batch, groups, length, dim) for _ in range(2)]
        found += [normal(batch, heads, dim)]
    else:
        k = torch.nn.functional.normalize(normal(batch, groups, length, dim), dim=-1)
        found = [normal(batch, groups, length, dim), k, normal(batch, heads, length, 3)]
        found += [-random(batch, heads, length)]
        found += [random(batch, heads, length) if name == "delta" else None]
        found += [normal(batch, heads, dim, 3)]
    if packed is not None:
        starts = torch.rand(packed, length).lt(0.1)
        documents = starts.cumsum(1)
    return [x if x is None else x.to(dtype) for x in found] + [documents]


def run(module, name, arguments, **options):
    """The results of an operator or its reference, as a tuple."""
    if name.startswith("conv"):
        return (module.causal_conv1d(*arguments, **options),)
    functions = {"scan": module.selective_scan}
    return functions.get(name, module.gated_delta_rule)(*arguments)


def with_grads(module, name, arguments, **options):
    """Results, and the gradients of all floating arguments."""
    leaves = [
        x.detach().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in arguments
    ]
    found = run(module, name, leaves, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in found]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    return [x.detach() for x in found], torch.autograd.grad(found, wanted, weights)


def assert_equal_numbers(found, expected, tolerance):
    for of_ours, of_formula in zip(found, expected, strict=True):
        for actual, wanted in zip(of_ours, of_formula, strict=True):
            assert actual.shape == wanted.shape
            error = (actual.double() - wanted.double()).abs().max()
            assert error <= tolerance * max(1.0, wanted.abs().max()), (error, wanted.abs().max())


@pytest.mark.every_isa
@pytest.mark.parametrize("packed", [None, 1, 2], ids=["whole", "packed", "packed by rows"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", OPERATORS)
def test_equals_the_formula(backend, name, length, packed):
    arguments = made(name, length, packed=packed)
    # Sums of at most 300 terms, each of which went through as many products.
    expected = with_grads(reference, name, arguments)
    assert_equal_numbers(with_grads(ops, name, arguments), expected, 300 * 2.0**-49)


@pytest.mark.parametrize("name", ["conv", "conv without bias"])
def test_the_activation_is_that_of_the_formula(backend, name):
    arguments = made(name, 70, packed=1)
    expected = with_grads(reference, name, arguments, silu=True)
    assert_equal_numbers(with_grads(ops, name, arguments, silu=True), expected, 1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_float32_is_near_float64(backend, name):
    arguments = made(name, 200, dtype=torch.float32)
    exact = [x if x is None else x.double() for x in arguments]
    assert_equal_numbers(with_grads(ops, name, arguments), with_grads(ops, name, exact), 2e-5)


@examples(25)
@given(
    name=st.sampled_from(OPERATORS),
    length=st.integers(1, 140),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 20),
    dim=st.integers(1, 9),
    packed=st.booleans(),
)
def test_random_sizes(backend, name, length, batch, groups, per_group, dim, packed):
    sizes = {"batch": batch, "groups": groups, "heads": groups * per_group, "dim": dim}
    arguments = made(name, length, packed=batch if packed else None, **sizes)
    expected = with_grads(reference, name, arguments)
    assert_equal_numbers(with_grads(ops, name, arguments), expected, 1e-11)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradcheck(device, name):
    *arguments, documents = made(name, 6, packed=1, batch=1, groups=1, heads=2, dim=2)
    leaves = [x.requires_grad_() for x in arguments if x is not None]

    def function(*tensors):
        given = iter(tensors)
        return run(ops, name, [x if x is None else next(given) for x in arguments] + [documents])

    assert emulation.gradcheck(function, leaves)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_positions(device, name):
    arguments = made(name, 0)
    found, grads = with_grads(ops, name, arguments)
    assert found[0].shape == arguments[2 if name in ("delta", "linear") else 0].shape
    if len(found) > 1:
        assert torch.equal(found[1], arguments[-2])
    given = [x for x in arguments if x is not None]
    assert [g.shape for g in grads] == [x.shape for x in given]


@pytest.mark.parametrize("name", OPERATORS)
def test_strided_arguments(device, name):
    arguments = made(name, 70, packed=1)
    views = [
        x if x is None or x.dim() < 2 else x.transpose(1, -1).contiguous().transpose(1, -1)
        for x in arguments
    ]
    expected = with_grads(ops, name, arguments)
    assert_equal_numbers(with_grads(ops, name, views), expected, 1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_number_of_a_document_reaches_another(device, name):
    """The second of three documents holds NaN; those around it have the numbers of zeros there."""
    *arguments, _ = made(name, 90)
    before = 2 if name.startswith("conv") else 0
    documents = torch.tensor([0] * (before + 30) + [1] * 30 + [2] * 30)[None]
    found = []
    for value in (0.0, float("nan")):
        given = [x if x is None else x.clone() for x in arguments]
        for x in given:
            if x is not None and 90 in x.shape:
                x.narrow(x.shape.index(90), 30, 30).fill_(value)
        found.append(run(ops, name, [*given, documents]))
    others = torch.tensor([*range(30), *range(60, 90)])
    for clean, spoiled in zip(*found, strict=True):
        if 90 in clean.shape:
            clean, spoiled = (x.index_select(2, others) for x in (clean, spoiled))
        assert torch.equal(clean, spoiled)


WRONG = {
    "dtype": ("delta", 2, lambda x: x.half(), "expected v to be float32 or float64"),
    "queries": ("delta", 0, lambda x: x[:, :, :-1], "expected q to be of size 70 in dim 2"),
    "keys": ("delta", 1, lambda x: x[..., :-1], "expected k to have the sizes of q"),
    "heads": ("delta", 2, lambda x: x[:, :3], "expected the heads of v to be a multiple of those"),
    "decays": ("linear", 3, lambda x: x[:, :1], "expected g to be of size 4 in dim 1"),
    "steps": ("delta", 4, lambda x: x[..., :-1], "expected beta to have the sizes of g"),
    "state": ("delta", 5, lambda x: x.mT, "expected state to be of size 5 in dim 2"),
    "numbers": ("delta", 6, lambda x: x.int(), "expected documents to be Long"),
    "rows": ("scan", 6, lambda x: x.repeat(3, 1), "expected documents to have one row or 2"),
    "places": ("conv", 4, lambda x: x[:, 1:], "expected documents to be of size 72 in dim 1"),
    "scan dtype": ("scan", 0, lambda x: x.bfloat16(), "expected x to be float32 or float64"),
    "dt": ("scan", 1, lambda x: x[:, :1], "expected dt to have the sizes of x"),
    "rates": ("scan", 2, lambda x: x[:1], "expected A to be of size 4 in dim 0"),
    "inputs": ("scan", 3, lambda x: x[..., 1:], "expected B to be of size 5 in dim 3"),
    "outputs": ("scan", 4, lambda x: x[:, :1], "expected C to have the sizes of B"),
    "scan state": ("scan", 5, lambda x: x[:1], "expected state to be of size 2 in dim 0"),
    "taps": ("conv", 1, lambda x: x[:, :0], "expected weight to have a tap or more"),
    "channels": ("conv", 1, lambda x: x[1:], "expected weight to be of size 4 in dim 0"),
    "bias": ("conv", 2, lambda x: x[1:], "expected bias to be of size 4 in dim 0"),
    "halo": ("conv", 3, lambda x: x[..., 1:], "expected halo to be of size 2 in dim 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_are_checked(device, case):
    name, at, change, message = WRONG[case]
    arguments = made(name, 70, packed=1)
    arguments[at] = change(arguments[at])
    with pytest.raises(RuntimeError, match=message):
        run(ops, name, arguments)
