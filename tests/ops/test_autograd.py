"""Our registrations of gradients, which must do what torch's own does."""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo import compiled_autograd

from moe_ext import _runtime_library
from moe_ext.ops import autograd

SCHEMA = "(Tensor x, float factor=2.0, Tensor? bias=None) -> (Tensor, Tensor)"


def forward(x, factor=2.0, bias=None):
    y = x * factor if bias is None else x * factor + bias
    return y, y.argmax()


def setup_context(ctx, inputs, output):
    x, ctx.factor, bias = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x)
    ctx.setup_needs = ctx.needs_input_grad


def backward(ctx, grad, _):
    (x,) = ctx.saved_tensors
    backward.seen = (ctx.needs_input_grad, x)
    return grad * ctx.factor, None, grad if any(ctx.needs_input_grad[2:]) else None


@pytest.fixture(scope="module")
def operators():
    """The same formula under our registration and under torch's."""
    library = torch.library.Library("moe_ext", "FRAGMENT")
    for name in ("_test_ours", "_test_torch"):
        library.define(name + SCHEMA)
        library.impl(name, forward, "CompositeExplicitAutograd")
    autograd.register_autograd("moe_ext::_test_ours", backward, setup_context=setup_context)
    torch.library.register_autograd(
        "moe_ext::_test_torch", backward, setup_context=setup_context, lib=library
    )
    yield torch.ops.moe_ext._test_ours, torch.ops.moe_ext._test_torch
    library._destroy()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_ours_gives_what_torchs_gives(operators, factor, with_bias):
    found = []
    for operator in operators:
        x = torch.arange(4.0, requires_grad=True)
        bias = torch.ones(4, requires_grad=True) if with_bias else None
        y, index = operator(x, factor, bias)
        assert y.requires_grad
        assert not index.requires_grad
        y.sum().backward()
        needs, saved = backward.seen
        assert saved is x
        grads = [t.grad.tolist() for t in (x, bias) if t is not None]
        found.append((y.tolist(), index.item(), grads, needs))
    assert found[0] == found[1]


def test_arguments_left_out_reach_the_formula_as_defaults(operators):
    x = torch.arange(4.0, requires_grad=True)
    operators[0](x)[0].sum().backward()
    assert x.grad.tolist() == [2.0] * 4


def test_nothing_is_recorded_where_no_gradient_is_wanted(operators):
    x = torch.arange(4.0, requires_grad=True)
    with torch.no_grad():
        assert not operators[0](x)[0].requires_grad
    assert not operators[0](x.detach())[0].requires_grad


def test_torchs_helper_serves_where_a_private_function_is_gone(monkeypatch):
    calls = []
    monkeypatch.setattr(autograd, "_PRIVATE", ("_function_that_torch_never_had",))
    monkeypatch.setattr(torch.library, "register_autograd", lambda *a, **k: calls.append((a, k)))
    autograd.register_autograd("moe_ext::topk_gate", backward, setup_context=setup_context)
    assert calls == [(("moe_ext::topk_gate", backward), {"setup_context": setup_context})]


# Derivatives, in C++ and in Python.

WAYS = ["C++", "Python"] if _runtime_library.load() is not None else ["Python"]
SCALED = "(Tensor x, Tensor w, float factor=2.0, Tensor? bias=None) -> (Tensor y, Tensor index)"


def scaled(x, w, factor=2.0, bias=None):
    y = factor * x @ w if bias is None else factor * x @ w + bias
    return y, y.argmax()


def x_setup_context(ctx, inputs, output):
    ctx.factor = inputs[2]
    ctx.save_for_backward(inputs[1])


@pytest.fixture(scope="module")
def by_derivatives():
    """One operator by its derivatives, in each way."""
    library = torch.library.Library("moe_ext", "FRAGMENT")
    functions = {
        "_test_x(Tensor grad, Tensor w, float factor) -> Tensor": lambda g, w, f: f * g @ w.T,
        "_test_w(Tensor grad, Tensor x, float factor) -> Tensor": lambda g, x, f: f * x.T @ g,
        "_test_bias(Tensor? grad, ScalarType dtype) -> Tensor": lambda g, dtype: g.sum(0).to(dtype),
    }
    for schema, function in functions.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    # Of the three, this one can be differentiated again.
    autograd.register_autograd(
        "moe_ext::_test_x",
        lambda ctx, grad: (ctx.factor * grad @ ctx.saved_tensors[0], None, None),
        setup_context=x_setup_context,
    )
    both = {"x": "_test_x(contiguous(grad_y), w, factor)", "w": "_test_w(grad_y, x, factor)"}
    operators = {}
    for name in WAYS:
        operator = f"_test_by_{name.replace('+', 'p')}"
        library.define(operator + SCALED)
        library.impl(operator, scaled, "CompositeExplicitAutograd")
        operators[name] = getattr(torch.ops.moe_ext, operator)
        with pytest.MonkeyPatch.context() as patch:
            if name == "Python":
                patch.setattr(_runtime_library, "load", lambda: None)
            given = {**both, "bias": "_test_bias(grad_y, dtype(bias))"}
            autograd.register_derivatives(operator, both, given=("bias", given))
    yield operators
    library._destroy()


def arguments(needs):
    """x, w and bias; those that are named need a gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (3, 4), "w": (4, 2), "bias": (2,)}
    drawn = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return [drawn[name].requires_grad_(name in needs) for name in sizes]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("needs", ["x", "w", "bias", "x w", "x w bias"])
def test_derivatives_give_the_gradients_of_the_formula(by_derivatives, way, needs):
    found = []
    for function in (by_derivatives[way], scaled):
        x, w, bias = arguments(needs.split())
        for args in ((x, w), (x, w, 4.0, bias)):  # no rounding in a factor that is a power of two
            y, index = function(*args)
            assert not index.requires_grad
            if y.requires_grad:
                y.sum().backward()  # an expanded gradient
        found.append([None if t.grad is None else t.grad.tolist() for t in (x, w, bias)])
    assert found[0] == found[1]


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_keep_what_they_read(by_derivatives, way):
    for needs, expected in (("x", "w"), ("w", "x"), ("bias", ""), ("x w", "xw")):
        x, w, bias = arguments(needs.split())
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t), id):
            by_derivatives[way](x, w, 2.0, bias)
        names = {id(x): "x", id(w): "w"}
        assert sorted(names[id(t)] for t in kept) == sorted(expected)


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_of_derivatives(by_derivatives, way):
    x, w, _ = arguments(["x", "w"])
    (gradient,) = torch.autograd.grad(
        by_derivatives[way](x, w)[0].square().sum(), x, create_graph=True
    )
    gradient.sum().backward(inputs=[x])
    torch.testing.assert_close(x.grad, 8 * (w @ w.T).sum(0).expand(3, 4), rtol=1e-5, atol=1e-6)
    x, w, _ = arguments(["x", "w"])
    (gradient,) = torch.autograd.grad(
        by_derivatives[way](x, w)[0].square().sum(), w, create_graph=True
    )
    with pytest.raises(RuntimeError, match="expected the result to be differentiated once, got"):
        gradient.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_in_odd_graphs(by_derivatives, way):
    operator = by_derivatives[way]
    x, w, _ = arguments(["x", "w"])
    y, _ = operator(x, w)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    doubled = x * 2
    y, _ = operator(doubled, w)
    doubled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward(inputs=[w])

    class Nothing(torch.autograd.Function):
        forward = staticmethod(lambda ctx, t: t.clone())
        backward = staticmethod(lambda ctx, grad: None)

    x, w, bias = arguments(["x", "w", "bias"])
    Nothing.apply(operator(x, w, 2.0, bias)[0]).sum().backward()
    assert x.grad is None or not x.grad.any()
    with torch.no_grad():
        assert not operator(x, w)[0].requires_grad


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_under_compiled_autograd(by_derivatives, way):
    found = []
    for compiled in (False, True):
        x, w, bias = arguments(["x", "w", "bias"])
        # Two in a graph, of unlike sizes.
        y = torch.cat([by_derivatives[way](part, w, 3.0, bias)[0] for part in (x, x[:2])])
        if compiled:
            with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
                y.square().sum().backward()
        else:
            y.square().sum().backward()
        found.append([t.grad.tolist() for t in (x, w, bias)])
    assert found[0] == found[1]


@pytest.mark.skipif("C++" not in WAYS, reason="there is no _runtime for this torch")
def test_functions_of_torch_func_are_served_or_refused(by_derivatives):
    x, w, _ = arguments([])
    operator = by_derivatives["C++"]
    gradient = torch.func.grad(lambda t: operator(t, w)[0].sum())(x)
    assert torch.equal(gradient, 2 * torch.ones(3, 2) @ w.T)
    with pytest.raises(NotImplementedError, match="expected reverse-mode gradients alone, got a"):
        torch.func.jvp(lambda t: operator(t, w)[0], (x,), (x,))


LAYER = """
import hashlib, torch, moe_ext
torch.manual_seed(0)
B = moe_ext.nn.Balance(z_coef=1e-3)
layer = moe_ext.MoELayer(8, 12, 4, 2, bias=True, activation="gelu", balance=B)
x = torch.randn(2, 9, 8, requires_grad=True)
(layer(x).square().sum() + moe_ext.nn.collect_losses(layer)).backward()
grads = [x.grad, *[p.grad for p in layer.parameters()]]
digest = hashlib.sha256(b"".join(g.numpy().tobytes() for g in grads)).hexdigest()
"""


@pytest.mark.skipif("C++" not in WAYS, reason="there is no _runtime for this torch")
def test_both_ways_give_the_same_bits():
    found = {}
    exec(LAYER, found)
    result = subprocess.run(
        [sys.executable, "-c", LAYER + "print(digest)"],
        env={**os.environ, "MOE_EXT_RUNTIME": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == found["digest"]
