"""sequence_load and sequence_balance_loss against the reference."""

import emulation
import pytest
import refusals
import torch
from ops_helpers import DTYPES, GRAD_ULP, tolerance

from moe_ext import ops, reference


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(
    ("num_sequences", "length", "num_experts"),
    [(0, 1, 3), (1, 0, 3), (1, 257, 9), (5, 1, 33), (3, 31, 1), (2, 300, 17)],
)
def test_equals_the_reference(backend, num_sequences, length, num_experts, score_fn, dtype):
    num_tokens = num_sequences * length
    logits = (2 * torch.randn(num_tokens, num_experts)).to(dtype)
    mask = torch.rand(num_tokens) > 0.3
    top_k = min(2, num_experts)
    idx = ops.topk_gate(logits, top_k, token_mask=mask).topk_idx
    idx[::5] = -1
    results = []
    grads = None
    for module in (ops, reference):
        leaf = logits.clone().requires_grad_()
        load = module.sequence_load(leaf, idx, num_sequences, score_fn=score_fn, token_mask=mask)
        grads = torch.randn_like(load.score_sum) if grads is None else grads
        (grad,) = torch.autograd.grad(load.score_sum, leaf, grads)
        results.append((*load, grad))
    (sums, counts, grad), (expected_sums, expected_counts, expected_grad) = results
    assert torch.equal(counts, expected_counts)
    rtol = tolerance(dtype, num_experts + length)
    torch.testing.assert_close(sums, expected_sums, rtol=rtol, atol=1e-30)
    torch.testing.assert_close(
        grad,
        expected_grad,
        rtol=GRAD_ULP.get(dtype, rtol),
        atol=16 * rtol + 2.0**-24 * (dtype == torch.float16),
    )


def test_sums_to_what_the_gate_returns(device):
    logits = torch.randn(64, 8, dtype=torch.float64)
    for score_fn in ("softmax", "sigmoid", "sqrtsoftplus"):
        gate = ops.topk_gate(logits, 2, score_fn=score_fn)
        load = ops.sequence_load(logits, gate.topk_idx, 4, score_fn=score_fn)
        torch.testing.assert_close(load.score_sum.sum(0), gate.score_sum)
        assert torch.equal(load.num_tokens_per_expert.sum(0), gate.num_tokens_per_expert)


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradcheck(backend, score_fn):
    logits = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(12) > 0.3
    idx = ops.topk_gate(logits.detach(), 2, token_mask=mask).topk_idx

    def loss(logits):
        load = ops.sequence_load(logits, idx, 3, score_fn=score_fn, token_mask=mask)
        return load.score_sum, ops.sequence_balance_loss(*load, 2)

    assert emulation.gradcheck(loss, (logits,))


def test_balance_loss_is_the_mean_of_those_of_the_sequences(device):
    logits = torch.randn(60, 6, dtype=torch.float64)
    mask = torch.rand(60) > 0.3
    mask[20:40] = False
    gate = ops.topk_gate(logits, 2, token_mask=mask)
    load = ops.sequence_load(logits, gate.topk_idx, 3, token_mask=mask)
    loss = ops.sequence_balance_loss(*load, 2)
    parts = [
        ops.load_balance_loss(load.score_sum[b], load.num_tokens_per_expert[b], 2) for b in (0, 2)
    ]
    torch.testing.assert_close(loss, torch.stack(parts).mean())
    torch.testing.assert_close(loss, reference.sequence_balance_loss(*load, 2))


def test_balance_loss_is_one_when_balanced_and_zero_without_tokens(device):
    logits = torch.zeros(16, 4)
    idx = torch.arange(16)[:, None] % 4
    load = ops.sequence_load(logits, idx, 4)
    assert ops.sequence_balance_loss(*load, 1) == 1.0
    load = ops.sequence_load(logits[:0], idx[:0], 0)
    assert load.score_sum.shape == (0, 4) and ops.sequence_balance_loss(*load, 1) == 0.0


LOGITS = torch.zeros(4, 6)
IDX = torch.zeros(4, 2, dtype=torch.int64)


REFUSED = {
    "sequence_load": [
        {"logits_TE": LOGITS, "topk_idx_TK": IDX, "num_sequences": 2},
        ({"logits_TE": LOGITS.int()}, "got Int"),
        ({"topk_idx_TK": IDX.int()}, "topk_idx to be Long, got Int"),
        ({"topk_idx_TK": IDX[0]}, r"topk_idx to be a 2-D tensor \[T, K\]"),
        ({"topk_idx_TK": IDX[:3]}, "topk_idx to be of size 4 in dim 0"),
        ({"num_sequences": 3}, "to be a divisor of the 4 tokens, got 3"),
        ({"num_sequences": 0}, "to be a divisor of the 4 tokens, got 0"),
        (
            {"score_fn": "topk_softmax"},
            "score_fn to be softmax, sigmoid or sqrtsoftplus, got topk_softmax",
        ),
        ({"token_mask": LOGITS[:, 0]}, "token_mask to be Bool"),
        (
            {"topk_idx_TK": torch.tensor([[0, 0], [0, 0], [0, 6], [0, 0]])},
            r"topk_idx to be in \[0, 6\) or -1, got 6 at token 2, choice 1",
        ),
    ],
}
test_refuses = refusals.test_on_devices(REFUSED)


def test_balance_loss_refuses():
    with pytest.raises(ValueError, match=r"of one shape \[B, E\], got \(2, 3\) and \(3,\)"):
        ops.sequence_balance_loss(torch.zeros(2, 3), torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"top_k to be at least 1, got 0"):
        ops.sequence_balance_loss(torch.zeros(2, 3), torch.zeros(2, 3), 0)
