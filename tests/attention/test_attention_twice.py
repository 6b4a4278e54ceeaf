"""A second derivative would lose the terms that come by saved tensors: it is refused."""

import functools

import pytest
import torch

from moe_ext.attention import SequenceParallelMLP, ring_attention, ring_self_attention

REFUSED = "expected the result to be differentiated once, got a second derivative"


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("function", [ring_attention, ring_self_attention])
def test_attention(function, which):
    inputs = [torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
    wanted = inputs[which].requires_grad_()
    out = functools.partial(function, group=None)(*inputs)
    (grad,) = torch.autograd.grad(out.sum(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{function.__name__}: {REFUSED}"):
        torch.autograd.grad(grad.square().sum(), wanted)


def test_sequence_parallel_mlp():
    module = SequenceParallelMLP(6, 8, group=None)
    x = torch.randn(2, 3, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"SequenceParallelMLP: {REFUSED}"):
        grad.square().sum().backward()


def test_first_derivatives_with_a_graph_are_right():
    inputs = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    out = ring_attention(*inputs, group=None, is_causal=True)
    plain = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    found = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
