"""gate_weights against the reference and against the gate that made the choice."""

import math

import emulation
import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_helpers import DTYPES, NUM_TOKENS
from test_gating import NUM_EXPERTS, OPTIONS, TOP_K, assert_close_gates, make, random_grads

from moe_ext import ops, reference

# What does not take part in the choice.
FORMULAS = {
    name: {k: v for k, v in OPTIONS[name].items() if k in ("score_fn", "renormalize", "scale")}
    for name in (
        "softmax",
        "softmax_plain",
        "topk_softmax",
        "sigmoid",
        "sigmoid_plain",
        "sqrtsoftplus",
        "sqrtsoftplus_plain",
    )
}


def random_choice(num_tokens, num_experts=NUM_EXPERTS, top_k=TOP_K, absent=0.25):
    """Distinct experts in any order, with holes and rows without an expert."""
    idx = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k]
    return idx.masked_fill(torch.rand(num_tokens, top_k) < absent, -1)


def weigh_with_grad(module, logits, idx, options, grads):
    leaf = logits.clone().requires_grad_()
    out = module.gate_weights(leaf, idx, **options)
    (grad,) = torch.autograd.grad((out.topk_weights, out.score_sum), leaf, grads)
    return out, grad


def assert_equals_reference(logits, idx, options):
    grads = random_grads(logits, idx.shape[1])
    found, expected = (
        weigh_with_grad(module, logits, idx, options, grads) for module in (ops, reference)
    )
    assert found[0].topk_idx is idx
    assert_close_gates(found, expected, logits, grads, options.get("scale", 1.0))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", FORMULAS)
def test_equals_the_reference(backend, option, dtype):
    logits, _ = make(257, option, dtype=dtype)
    assert_equals_reference(logits, random_choice(257), FORMULAS[option])


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("option", FORMULAS)
def test_any_number_of_tokens(device, option, num_tokens):
    logits, _ = make(num_tokens, option)
    assert_equals_reference(logits, random_choice(num_tokens), FORMULAS[option])


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (7, 3), (33, 33), (64, 8), (257, 40)])
def test_any_number_of_experts(backend, num_experts, top_k):
    for option in ("softmax", "sigmoid_plain"):
        logits, _ = make(35, option, num_experts=num_experts)
        idx = random_choice(35, num_experts, top_k)
        assert_equals_reference(logits, idx, FORMULAS[option])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_has_the_bits_of_the_gate_that_chose(backend, option, dtype):
    logits, options = make(257, option, dtype=dtype)
    gate = ops.topk_gate(logits, TOP_K, token_mask=torch.rand(257) > 0.3, **options)
    formula = {k: v for k, v in options.items() if k in ("score_fn", "renormalize", "scale")}
    out = ops.gate_weights(logits, gate.topk_idx, **formula)
    assert all(torch.equal(a, b) for a, b in zip(out, gate, strict=True))


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_order_of_the_columns_moves_weights_and_nothing_else(data):
    num_experts = data.draw(st.integers(1, 20))
    top_k = data.draw(st.integers(1, num_experts))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(9, num_experts, dtype=torch.float64)
    idx = random_choice(9, num_experts, top_k)
    order = torch.randperm(top_k)
    options = FORMULAS[data.draw(st.sampled_from(sorted(FORMULAS)))]
    out, moved = (ops.gate_weights(logits, i, **options) for i in (idx, idx[:, order]))
    torch.testing.assert_close(moved.topk_weights, out.topk_weights[:, order])
    assert torch.equal(moved.num_tokens_per_expert, out.num_tokens_per_expert)
    assert torch.equal(moved.score_sum, out.score_sum)
    assert int(out.num_tokens_per_expert.sum()) == int((idx >= 0).sum())


def test_drifted_logits_cannot_make_zero_over_zero(device):
    logits = torch.tensor([[0.0, -200.0, -300.0, 0.0]], requires_grad=True)
    out = ops.gate_weights(logits, torch.tensor([[1, 2]]))
    assert out.topk_weights.tolist() == [[1.0, 0.0]]
    out.topk_weights.square().sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("option", FORMULAS)
def test_gradcheck(backend, option):
    # Two calls for each number; of an emulated kernel, these take milliseconds.
    num_tokens = 3 if emulation.is_active() else 11
    logits, _ = make(num_tokens, option, dtype=torch.float64)
    idx = random_choice(num_tokens)

    def weigh(logits):
        out = ops.gate_weights(logits, idx, **FORMULAS[option])
        return out.topk_weights, out.score_sum

    assert emulation.gradcheck(weigh, (logits.requires_grad_(),))
    for output in ("topk_weights", "score_sum"):
        assert emulation.gradcheck(
            lambda x, name=output: getattr(ops.gate_weights(x, idx, **FORMULAS[option]), name),
            (logits,),
        )


LOGITS = torch.zeros(4, 6)
IDX = torch.tensor([[0, 1]] * 4)


def with_row(row):
    return torch.cat([IDX[:2], torch.tensor([row]), IDX[3:]])


REFUSED = {
    "gate_weights": [
        {"logits_TE": LOGITS, "topk_idx_TK": IDX},
        ({"logits_TE": LOGITS[0]}, r"logits to be a 2-D tensor \[T, E\], got shape \[6\]"),
        ({"logits_TE": LOGITS.int()}, "logits to be float32, .* got Int"),
        ({"topk_idx_TK": IDX.int()}, "topk_idx to be Long, got Int"),
        ({"topk_idx_TK": IDX[0]}, r"topk_idx to be a 2-D tensor \[T, K\]"),
        ({"topk_idx_TK": IDX[:3]}, "topk_idx to be of size 4 in dim 0"),
        ({"topk_idx_TK": IDX[:, :0]}, "topk_idx to have at least 1 column"),
        (
            {"topk_idx_TK": IDX[:, [0] * 7]},
            r"topk_idx to have at most 6 columns, .* got shape \[4, 7\]",
        ),
        ({"score_fn": "tanh"}, "score_fn to be softmax, .* got tanh"),
        ({"scale": math.nan}, "scale to be finite, got nan"),
        (
            {"topk_idx_TK": with_row([0, 6])},
            r"topk_idx to be in \[0, 6\) or -1, got 6 at token 2, choice 1",
        ),
        ({"topk_idx_TK": with_row([-2, 0])}, "got -2 at token 2, choice 0"),
        (
            {"topk_idx_TK": with_row([3, 3])},
            "topk_idx to hold an expert once a token, got 3 again at token 2, choice 1",
        ),
    ],
}
test_refuses = refusals.test_on_devices(REFUSED)


@pytest.mark.parametrize("score_fn", ["softmax", "topk_softmax", "sigmoid"])
def test_refuses_values_by_token(isa, score_fn):
    logits = torch.randn(600, 9)
    idx = random_choice(600, 9, 3, absent=0.0)
    for value, name in ((math.nan, "nan"), (math.inf, "inf")):
        bad = logits.clone()
        bad[580, 0] = bad[301, 7] = value
        with pytest.raises(RuntimeError, match=rf"got {name} at token 301, expert 7$"):
            ops.gate_weights(bad, idx, score_fn=score_fn)
        masked = idx.clone()
        masked[[301, 580]] = -1
        ops.gate_weights(bad, masked, score_fn=score_fn)
    logits[302, idx[302, 1]] = -math.inf
    message = rf"logits to be above -inf .* got -inf at token 302, expert {int(idx[302, 1])}$"
    with pytest.raises(RuntimeError, match=message):
        ops.gate_weights(logits, idx, score_fn=score_fn)


@pytest.mark.parametrize("option", FORMULAS)
def test_an_expert_named_twice_gets_both_gradients(device, option, request):
    # CUDA cannot refuse it without waiting for the device.
    logits, idx = torch.randn(33, 6), torch.tensor([[1, 4, 1], [2, 2, 2], [5, -1, 5]]).repeat(11, 1)
    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(RuntimeError, match="an expert once a token, got 1 again at token 0"):
            ops.gate_weights(logits, idx, **FORMULAS[option])
        return
    assert_equals_reference(logits, idx, FORMULAS[option])
