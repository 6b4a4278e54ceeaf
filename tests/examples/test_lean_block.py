"""A block without softmax and inputs of layer norms: results, bytes kept, and peaks of memory."""

import lean_block
import pytest
import torch
from lean_block import Block, kept_bytes
from peak_memory import peak_bytes

B, S, D, H = 2, 48, 32, 4


def blocks(dtype=torch.float64):
    torch.manual_seed(0)
    plain, lean = (Block(D, H, lean=lean).to(dtype) for lean in (False, True))
    for norm in plain.norms:
        torch.nn.init.normal_(norm.weight, 1.0, 0.2)
        torch.nn.init.normal_(norm.bias)
    lean.load_state_dict(plain.state_dict())
    return plain, lean, torch.randn(B, S, D, dtype=dtype, requires_grad=True)


def test_equals_a_plain_block():
    plain, lean, x = blocks()
    found = []
    for block in (plain, lean):
        y = block(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
        found.append([y, *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_norms_have_their_own_epsilon():
    plain, lean, x = blocks()
    found = []
    for block in (plain, lean):
        for norm, eps in zip(block.norms, (0.5, 0.02), strict=True):
            norm.eps = eps
        y = block(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_bytes_kept():
    plain, lean, x = blocks()
    kept = [kept_bytes(lambda b=b: b(x), b) for b in (plain, lean)]
    element, rows = 8, B * S
    # Inputs of two norms with their means, softmax and the mask; instead of these the sums of
    # softmax, and what attention gave, before its heads are put beside each other.
    dropped = element * (2 * rows * D + 2 * rows + B * H * S * S) + S * S
    assert kept[0] - kept[1] == dropped - element * (B * H * S + rows * D)
    assert kept[1] < 0.7 * kept[0]


def peak(attention, length):
    """Most bytes of tensors alive at once in forward and backward, beside the inputs."""
    leaves = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 2, length, 16)
    return peak_bytes(lambda: torch.autograd.grad(attention(*leaves), leaves, grad))


def test_peak_memory_grows_with_the_length_alone():
    # From 1024 rows on: below, what is at work at once grows with the length, too.
    lean = [peak(lean_block.lean_attention, length) for length in (1024, 2048)]
    plain = [peak(lean_block.plain_attention, length) for length in (512, 1024)]
    assert lean[1] < 1.05 * 2 * lean[0]
    assert plain[1] > 3.9 * plain[0]
    assert lean[0] < 0.12 * plain[1]


def test_refuses_a_norm_without_an_inverse():
    _, lean, x = blocks()
    torch.nn.init.zeros_(lean.norms[0].weight)
    with pytest.raises(ValueError, match="LayerNorm: expected weight to have no zeros"):
        lean(x)
