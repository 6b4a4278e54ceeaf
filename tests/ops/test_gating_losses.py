"""router_z_loss and load_balance_loss against the reference, alone and behind the gate."""

import math

import emulation
import pytest
import refusals
import torch
from ops_helpers import DTYPES, GRAD_ULP, NUM_TOKENS, acc_dtype, tolerance

from moe_ext import ops, reference


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("num_experts", [1, 16, 33])
def test_z_loss_equals_the_reference(backend, num_experts, num_tokens, dtype):
    logits = (4 * torch.randn(num_tokens, num_experts)).to(dtype)
    mask = torch.rand(num_tokens) > 0.3
    results = []
    for module in (ops, reference):
        leaf = logits.clone().requires_grad_()
        loss = module.router_z_loss(leaf, token_mask=mask)
        assert loss.dtype == acc_dtype(dtype) and loss.shape == ()
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    (loss, grad), (expected_loss, expected_grad) = results
    # The sum over tokens is the reference's error; a square doubles that of its argument, which is
    # relative to the largest logit, not to a sum that may cancel it: four times 4.
    terms = num_experts + num_tokens
    rtol = tolerance(dtype, terms)
    torch.testing.assert_close(loss, expected_loss, rtol=rtol, atol=16 * rtol)
    torch.testing.assert_close(
        grad,
        expected_grad,
        rtol=GRAD_ULP.get(dtype, rtol),
        atol=32 * rtol / max(1, num_tokens) + 2.0**-24 * (dtype == torch.float16),
    )


def test_z_loss_of_infinite_logits(device):
    logits = torch.randn(20, 5)
    for value in (math.inf, -math.inf):
        logits[3] = value
        assert ops.router_z_loss(logits) == math.inf
    logits[3, 1] = math.nan
    assert ops.router_z_loss(logits).isnan()


def test_z_loss_gradcheck(device):
    logits = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(7) > 0.3
    assert emulation.gradcheck(ops.router_z_loss, (logits,))
    assert emulation.gradcheck(lambda logits: ops.router_z_loss(logits, token_mask=mask), (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_experts", [1, 8, 33])
def test_balance_loss_equals_the_reference(device, num_experts, index_dtype, dtype):
    counts = torch.randint(0, 50, (num_experts,)).to(index_dtype)
    score_sum = (20 * torch.rand(num_experts)).to(dtype)
    results = []
    for module in (ops, reference):
        leaf = score_sum.clone().requires_grad_()
        loss = module.load_balance_loss(leaf, counts, 3)
        assert loss.dtype == dtype and loss.shape == ()
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance(dtype, num_experts), atol=0)


def test_balance_loss_is_one_when_balanced_and_zero_without_tokens(device):
    logits = torch.zeros(16, 8)
    out = ops.topk_gate(logits, 2)
    assert ops.load_balance_loss(out.score_sum, torch.full((8,), 4), 2) == 1.0
    # Every token at the same two experts, with all of its probability there.
    logits[:, 2:4] = 100.0
    out = ops.topk_gate(logits, 2)
    loss = ops.load_balance_loss(out.score_sum, out.num_tokens_per_expert, 2)
    torch.testing.assert_close(loss, torch.tensor(4.0), rtol=tolerance(torch.float32, 24), atol=0)
    out = ops.topk_gate(logits[:0].requires_grad_(), 2)
    loss = ops.load_balance_loss(out.score_sum, out.num_tokens_per_expert, 2)
    assert loss == 0 and ops.router_z_loss(logits[:0]) == 0
    loss.backward()


def test_balance_loss_gradcheck(device):
    score_sum = torch.rand(9, dtype=torch.float64, requires_grad=True)
    counts = torch.randint(0, 9, (9,))
    assert emulation.gradcheck(
        lambda score_sum: ops.load_balance_loss(score_sum, counts, 2), (score_sum,)
    )


LOGITS = torch.zeros(4, 6)
COUNTS = torch.ones(6, dtype=torch.int64)


REFUSED = {
    "router_z_loss": [
        {"logits_TE": LOGITS},
        ({"logits_TE": LOGITS.long()}, "logits to be float32"),
        ({"logits_TE": LOGITS[0]}, r"logits to be a 2-D tensor \[T, E\]"),
        ({"logits_TE": LOGITS[:, :0]}, "logits to have at least 1 expert"),
        ({"token_mask": COUNTS[:4]}, "token_mask to be Bool, got Long"),
    ],
    "load_balance_loss": [
        {"score_sum_E": LOGITS[0], "num_tokens_per_expert_E": COUNTS, "top_k": 1},
        ({"score_sum_E": LOGITS[0].half()}, "score_sum to be float32 or float64, got Half"),
        (
            {"num_tokens_per_expert_E": COUNTS.float()},
            "num_tokens_per_expert to be int32 or int64, got Float",
        ),
        ({"score_sum_E": LOGITS}, r"score_sum to be a 1-D tensor \[E\]"),
        (
            {"num_tokens_per_expert_E": COUNTS[:5]},
            r"num_tokens_per_expert to be of size 6 in dim 0 \(the experts of score_sum\)",
        ),
        ({"top_k": 0}, "top_k to be at least 1, got 0"),
        (
            {"num_tokens_per_expert_E": -COUNTS},
            "num_tokens_per_expert to be at least 0, got -1 at expert 0",
        ),
    ],
}
test_losses_refuse = refusals.test(REFUSED)
