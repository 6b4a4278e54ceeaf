"""Our registration of autograd formulas, which must do what torch's own does."""

import pytest
import torch

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
