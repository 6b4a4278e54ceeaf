"""topk_gate against the reference, and what must hold for any logits."""

import math

import emulation
import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import (
    DTYPES,
    GRAD_ULP,
    NUM_TOKENS,
    UNIT,
    acc_dtype,
    examples,
    tolerance,
)

from moe_ext import ops, reference

NUM_EXPERTS = 24
TOP_K = 4
OPTIONS = {
    "softmax": {},
    "softmax_plain": {"renormalize": False},
    "topk_softmax": {"score_fn": "topk_softmax", "renormalize": False},
    "sigmoid": {"score_fn": "sigmoid", "scale": 2.5},
    "sigmoid_plain": {"score_fn": "sigmoid", "renormalize": False},
    "softmax_biased": {"selection_bias": True},
    "softmax_plain_biased": {"selection_bias": True, "renormalize": False, "scale": 16.0},
    "topk_softmax_biased": {"score_fn": "topk_softmax", "selection_bias": True},
    "groups_by_largest": {"num_groups": 6, "top_groups": 2, "renormalize": False},
    "sigmoid_groups_by_largest": {"score_fn": "sigmoid", "num_groups": 4, "top_groups": 2},
    "groups_by_two_largest": {
        "score_fn": "sigmoid",
        "num_groups": 8,
        "top_groups": 3,
        "selection_bias": True,
        "scale": 2.5,
    },
    "sqrtsoftplus": {"score_fn": "sqrtsoftplus", "selection_bias": True, "scale": 1.5},
    "sqrtsoftplus_plain": {"score_fn": "sqrtsoftplus", "renormalize": False},
    "groups_by_two_scores": {"num_groups": 3, "top_groups": 1, "group_score": "top2"},
    "groups_by_topk": {
        "score_fn": "sqrtsoftplus",
        "num_groups": 3,
        "top_groups": 1,
        "group_score": "topk",
    },
    "biased_groups_by_largest": {
        "score_fn": "sigmoid",
        "num_groups": 6,
        "top_groups": 2,
        "selection_bias": True,
        "group_score": "max",
    },
    "groups_of_one": {"num_groups": 24, "top_groups": 7, "selection_bias": True},
}


def make(num_tokens, option, *, dtype=torch.float32, num_experts=NUM_EXPERTS):
    logits = (2 * torch.randn(num_tokens, num_experts)).to(dtype)
    options = dict(OPTIONS[option])
    if options.get("selection_bias"):
        options["selection_bias"] = torch.randn(num_experts) / 4
    return logits, options


def gate_with_grad(module, logits, top_k, options, grads):
    leaf = logits.clone().requires_grad_()
    out = module.topk_gate(leaf, top_k, **options)
    (grad,) = torch.autograd.grad((out.topk_weights, out.score_sum), leaf, grads)
    return out, grad


def random_grads(logits, top_k):
    dtype = acc_dtype(logits.dtype)
    return torch.randn(logits.shape[0], top_k, dtype=dtype), torch.randn(
        logits.shape[1], dtype=dtype
    )


def assert_close_gates(found, expected, logits, grads, scale):
    """Counts, weights, sums of scores and gradients, within the roundings of the logits' dtype."""
    (out, grad), (wanted, wanted_grad) = found, expected
    assert torch.equal(out.num_tokens_per_expert, wanted.num_tokens_per_expert)
    dtype, (num_tokens, num_experts) = logits.dtype, logits.shape
    assert out.topk_weights.dtype == out.score_sum.dtype == acc_dtype(dtype)
    assert grad.dtype == dtype
    rtol = tolerance(dtype, num_experts)
    # Scores of order 1e-30 are flushed or not: far below any weight that matters.
    torch.testing.assert_close(out.topk_weights, wanted.topk_weights, rtol=rtol, atol=1e-30)
    rtol_sum = tolerance(dtype, num_experts + num_tokens)
    torch.testing.assert_close(out.score_sum, wanted.score_sum, rtol=rtol_sum, atol=1e-30)
    # A gradient is a score times a difference of numbers up to the largest incoming gradient.
    magnitude = scale * sum(g.abs().max().item() if g.numel() else 0 for g in grads)
    torch.testing.assert_close(
        grad,
        wanted_grad,
        rtol=GRAD_ULP.get(dtype, rtol),
        # Half's smallest step is 2^-24.
        atol=4 * out.topk_idx.shape[1] * magnitude * rtol + 2.0**-24 * (dtype == torch.float16),
    )


def assert_equals_reference(logits, top_k, options):
    grads = random_grads(logits, top_k)
    found, expected = (
        gate_with_grad(module, logits, top_k, options, grads) for module in (ops, reference)
    )
    assert torch.equal(found[0].topk_idx, expected[0].topk_idx)
    assert_close_gates(found, expected, logits, grads, options.get("scale", 1.0))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_gate_equals_the_reference(backend, option, dtype):
    logits, options = make(257, option, dtype=dtype)
    assert_equals_reference(logits, TOP_K, options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("option", OPTIONS)
def test_gate_of_any_number_of_tokens(device, option, num_tokens, masked):
    logits, options = make(num_tokens, option)
    if masked:
        options["token_mask"] = torch.rand(num_tokens) > 0.4
    assert_equals_reference(logits, TOP_K, options)


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(1, 1), (2, 2), (7, 3), (8, 8), (16, 6), (33, 5), (64, 8), (64, 64), (160, 6), (257, 9)],
)
def test_any_number_of_experts(backend, num_experts, top_k):
    for option in ("softmax", "sigmoid_plain"):
        logits, options = make(35, option, num_experts=num_experts)
        assert_equals_reference(logits, top_k, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lower_index(backend, dtype):
    out = ops.topk_gate(torch.zeros(40, 20, dtype=dtype), 5)
    assert torch.equal(out.topk_idx, torch.arange(5).expand(40, 5))
    # Few distinct logits, so that every row has ties at the edge of the choice.
    num_tokens = 33 if emulation.is_active() else 257
    logits = torch.randint(0, 3, (num_tokens, NUM_EXPERTS)).to(dtype)
    for option in OPTIONS:
        options = make(0, option)[1]
        if "selection_bias" in options:
            options["selection_bias"] = torch.zeros(NUM_EXPERTS)
        for top_k in (1, 2, 5, 7):
            actual = ops.topk_gate(logits, top_k, **options).topk_idx
            assert torch.equal(actual, reference.topk_gate(logits, top_k, **options).topk_idx)


def test_experts_are_told_apart_where_their_scores_are_equal(device):
    logits = torch.tensor([[0.0, -300.0, -200.0], [500.0, 400.0, 600.0]])
    assert ops.topk_gate(logits, 3).topk_idx.tolist() == [[0, 2, 1], [2, 0, 1]]
    sigmoid = ops.topk_gate(logits, 3, score_fn="sigmoid")
    assert sigmoid.topk_idx.tolist() == [[0, 2, 1], [2, 0, 1]]


def test_sqrtsoftplus_over_the_range_of_its_logits(backend):
    # Its tail is exp(x / 2), its head sqrt(x); in float32 exp(x) is 0 from -104 on.
    logits = torch.linspace(-170, 170, 1021).repeat(2, 1)
    logits[0, :4] = torch.tensor([-80.0, -20.0, -16.9, -17.1])
    leaf = logits.clone().requires_grad_()
    out = ops.topk_gate(leaf, 1021, score_fn="sqrtsoftplus", renormalize=False)
    (grad,) = torch.autograd.grad(out.topk_weights.sum(), leaf)
    wide = logits.double().requires_grad_()
    expected = torch.where(wide < -40, (wide / 2).exp(), torch.nn.functional.softplus(wide).sqrt())
    (expected_grad,) = torch.autograd.grad(expected.sum(), wide)
    # x / 2 of up to 85 is rounded before the exponential: 85 units; ten more roundings.
    rtol = 95 * UNIT[torch.float32]
    actual = torch.zeros_like(logits).scatter(1, out.topk_idx, out.topk_weights.detach())
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=rtol, atol=0)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=rtol, atol=0)


def test_group_scores_are_those_of_their_models(device):
    # Of two groups of three experts the first has the largest score, the second the larger sums.
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.7, 0.6, 0.1]], dtype=torch.float64)
    options = {"score_fn": "sigmoid", "num_groups": 2, "top_groups": 1}
    zeros = torch.zeros(6, dtype=torch.float64)
    for bias in (None, zeros):
        for group_score, top_k, group in (
            ("max", 2, 0),  # DeepSeek-V2
            ("top2", 2, 1),  # DeepSeek-V3
            ("top2", 1, 1),
            ("topk", 1, 0),  # Megatron-LM: top_k // top_groups keys
            ("topk", 2, 1),
            (None, 2, 0 if bias is None else 1),
        ):
            gate = ops.topk_gate(
                scores.logit(), top_k, selection_bias=bias, group_score=group_score, **options
            )
            assert (gate.topk_idx // 3 == group).all(), (group_score, top_k, bias)


def test_extreme_logits_stay_finite(backend):
    big = torch.finfo(torch.float32).max
    logits = torch.tensor(
        [[big, -big, 0.0, -math.inf], [-big, -big, -big, -big], [-300.0, -300.0, -400.0, -300.0]]
    )
    for score_fn in ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"):
        for renormalize in (True, False):
            for bias in (None, torch.tensor([-2.0, 1.0, 1.0, 1.0])):
                leaf = logits.clone().requires_grad_()
                out = ops.topk_gate(
                    leaf, 2, score_fn=score_fn, renormalize=renormalize, selection_bias=bias
                )
                (out.topk_weights.square().sum() + out.score_sum.square().sum()).backward()
                assert out.topk_weights.isfinite().all()
                assert out.score_sum.isfinite().all()
                assert leaf.grad.isfinite().all()


def test_a_denominator_of_zero_gives_zero_weights(device):
    leaf = torch.full((1, 4), -500.0, requires_grad=True)
    out = ops.topk_gate(leaf, 2, score_fn="sigmoid")
    out.topk_weights.sum().backward()
    assert out.topk_weights.tolist() == [[0.0, 0.0]]
    assert leaf.grad.abs().sum() == 0


def test_an_expert_of_minus_infinity_is_never_chosen(device):
    logits = torch.zeros(3, 4)
    logits[:, 1] = -math.inf
    bias = torch.tensor([0.0, 100.0, 0.0, 0.0])
    for options in ({}, {"selection_bias": bias}, {"selection_bias": bias, "score_fn": "sigmoid"}):
        out = ops.topk_gate(logits, 3, **options)
        assert out.topk_idx.tolist() == [[0, 2, 3]] * 3
        assert out.score_sum[1] == 0
    # Alone in its group, expert 0 leaves -inf out of the group's sum and wins it.
    logits[:, 0] = 1.0
    out = ops.topk_gate(
        logits, 1, num_groups=2, top_groups=1, selection_bias=torch.tensor([1.0, 0.0, 0.2, 0.2])
    )
    assert out.topk_idx.tolist() == [[0]] * 3


def test_bias_changes_the_choice_and_not_the_weights(device):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-5.0, 0.0, 0.0, 5.0], requires_grad=True)
    out = ops.topk_gate(
        logits, 2, score_fn="sigmoid", renormalize=False, selection_bias=bias, scale=2.0
    )
    assert out.topk_idx.tolist() == [[3, 1]]
    expected = 2 * logits.sigmoid()[:, [3, 1]]
    torch.testing.assert_close(out.topk_weights, expected, rtol=8 * 2.0**-24, atol=0)
    assert not out.topk_weights.requires_grad


@pytest.mark.parametrize("option", OPTIONS)
def test_gradcheck(backend, option):
    # Two calls for each number; of an emulated kernel, these take milliseconds.
    num_tokens = 3 if emulation.is_active() else 11
    logits, options = make(num_tokens, option, dtype=torch.float64)
    options["token_mask"] = torch.arange(num_tokens) % 3 != 1

    def gate(logits):
        out = ops.topk_gate(logits, TOP_K, **options)
        return out.topk_weights, out.score_sum

    assert emulation.gradcheck(gate, (logits.requires_grad_(),))


@pytest.mark.parametrize("option", ["softmax", "softmax_plain", "sigmoid"])
@pytest.mark.parametrize("output", ["topk_weights", "score_sum"])
def test_gradient_of_one_output_alone(device, option, output):
    logits, options = make(3 if emulation.is_active() else 9, option, dtype=torch.float64)

    def gate(logits):
        return getattr(ops.topk_gate(logits, TOP_K, **options), output)

    assert emulation.gradcheck(gate, (logits.requires_grad_(),))
    # The gradient of a sum is expanded from one number.
    gate(logits).sum().backward()
    expected = torch.autograd.grad(gate(logits), logits, torch.ones_like(gate(logits)))[0]
    assert torch.equal(logits.grad, expected)


def test_integer_outputs_have_no_gradient(device):
    out = ops.topk_gate(torch.randn(4, 8, requires_grad=True), 2)
    assert out.topk_weights.requires_grad and out.score_sum.requires_grad
    assert not out.topk_idx.requires_grad and not out.num_tokens_per_expert.requires_grad


@examples(60)
@given(
    num_tokens=st.integers(0, 60),
    num_groups=st.integers(1, 5),
    group_size=st.integers(1, 6),
    score_fn=st.sampled_from(["softmax", "topk_softmax", "sigmoid"]),
    biased=st.booleans(),
    levels=st.sampled_from([2, 5, 1000]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_invariants(
    device, num_tokens, num_groups, group_size, score_fn, biased, levels, seed, data
):
    top_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, top_groups * group_size))
    num_experts = num_groups * group_size
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randint(0, levels, (num_tokens, num_experts), generator=generator) * 5 / levels
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    bias = torch.randn(num_experts, generator=generator) if biased else None
    options = dict(
        score_fn=score_fn, selection_bias=bias, num_groups=num_groups, top_groups=top_groups
    )
    out = ops.topk_gate(logits, top_k, scale=3.0, token_mask=mask, **options)
    num_real = int(mask.sum())
    assert out.num_tokens_per_expert.sum() == num_real * top_k
    assert (out.topk_idx[~mask] == -1).all() and (out.topk_weights[~mask] == 0).all()
    chosen = out.topk_idx[mask]
    assert torch.equal(
        out.num_tokens_per_expert, torch.bincount(chosen.flatten(), minlength=num_experts)
    )
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    assert all(len({e // group_size for e in row}) <= top_groups for row in chosen.tolist())
    rtol = (num_experts + 16) * 2.0**-23
    torch.testing.assert_close(
        out.topk_weights[mask].sum(dim=1), torch.full((num_real,), 3.0), rtol=rtol, atol=0
    )
    torch.testing.assert_close(
        out.score_sum.sum(), torch.tensor(float(num_real)), rtol=rtol, atol=0
    )
    # A permutation of the tokens permutes the output: no token sees another.
    order = torch.randperm(num_tokens, generator=generator)
    moved = ops.topk_gate(logits[order], top_k, scale=3.0, token_mask=mask[order], **options)
    assert torch.equal(moved.topk_idx, out.topk_idx[order])
    assert torch.equal(moved.topk_weights, out.topk_weights[order])


def test_compiles_as_one_graph_for_any_number_of_tokens(device):
    def losses(logits, mask):
        out = ops.topk_gate(logits, TOP_K, token_mask=mask)
        balance = ops.load_balance_loss(out.score_sum, out.num_tokens_per_expert, TOP_K)
        z_loss = ops.router_z_loss(logits, token_mask=mask)
        return out.topk_weights.square().sum() + balance + z_loss

    compiled = torch.compile(losses, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (64, 65, 130):
        logits = torch.randn(num_tokens, NUM_EXPERTS, requires_grad=True)
        mask = torch.rand(num_tokens) > 0.3
        actual, expected = compiled(logits, mask), losses(logits, mask)
        assert torch.equal(actual, expected)
        grads = [torch.autograd.grad(loss, logits)[0] for loss in (actual, expected)]
        torch.testing.assert_close(*grads, rtol=0, atol=8 * 2.0**-24)


LOGITS = torch.zeros(4, 6)


REFUSED = {
    "topk_gate": [
        {"logits_TE": LOGITS, "top_k": 2},
        ({"logits_TE": LOGITS.int()}, "logits to be float32, .* got Int"),
        ({"logits_TE": LOGITS[0]}, r"logits to be a 2-D tensor \[T, E\], got shape \[6\]"),
        ({"logits_TE": LOGITS[:, :0]}, r"logits to have at least 1 expert, got shape \[4, 0\]"),
        ({"top_k": 0}, r"top_k to be in \[1, 6\], the experts of logits, got 0"),
        ({"top_k": 7}, r"top_k to be in \[1, 6\], the experts of logits, got 7"),
        ({"score_fn": "tanh"}, "topk_softmax, sigmoid or sqrtsoftplus, got tanh"),
        ({"group_score": "mean"}, "group_score to be max, top2 or topk, got mean"),
        (
            {"top_k": 1, "num_groups": 3, "top_groups": 2, "group_score": "topk"},
            "top_k to be at least top_groups = 2 with group_score topk, got 1",
        ),
        ({"scale": math.nan}, "scale to be finite, got nan"),
        ({"num_groups": 4}, "num_groups to be a divisor of the 6 experts, got 4"),
        ({"num_groups": 0}, "num_groups to be a divisor of the 6 experts, got 0"),
        ({"num_groups": 2, "top_groups": 3}, r"top_groups to be in \[1, 2\].* got 3"),
        ({"top_groups": 0}, r"top_groups to be in \[1, 1\].* got 0"),
        ({"top_k": 5, "num_groups": 3, "top_groups": 2}, "top_k to be at most 4, .* got 5"),
        ({"selection_bias": LOGITS[0].int()}, "selection_bias to be float32, .* Int"),
        ({"selection_bias": LOGITS}, r"selection_bias to be a 1-D tensor \[E\]"),
        ({"selection_bias": LOGITS[:, 0]}, "selection_bias to be of size 6 in dim 0"),
        (
            {"selection_bias": torch.tensor([0, 0, math.inf, 0, 0, 0])},
            "selection_bias to be finite, got inf at expert 2",
        ),
        ({"token_mask": LOGITS[:, 0]}, "token_mask to be Bool, got Float"),
        ({"token_mask": LOGITS.bool()}, r"token_mask to be a 1-D tensor \[T\]"),
        ({"token_mask": LOGITS[0].bool()}, "token_mask to be of size 4 in dim 0"),
    ],
    "_topk_gate_backward": [
        {
            **{"grad_weights": torch.zeros(1, 2), "grad_score_sum": None, "logits": LOGITS[:1]},
            **{"score_fn": "softmax", "renormalize": True, "scale": 1.0},
        },
        *(
            ({"topk_idx": torch.tensor([row])}, rf"topk_idx to be in \[0, 6\) or -1, got {got}")
            for row, got in (
                ([0, 6], "6 at token 0, choice 1"),
                ([-2, 0], "-2 at token 0, choice 0"),
                ([0, -3], "-3 at token 0, choice 1"),
            )
        ),
    ],
}
test_refuses = refusals.test_on_devices(REFUSED)


# Sums and differences of the two extremes wrap around; 300 tokens are two blocks with a short tile.
@pytest.mark.parametrize("bad", [5, 2**63 - 1, -(2**63), -2])
@pytest.mark.parametrize("token", [0, 17, 255, 299])
def test_gate_backward_names_the_first_token_with_an_index_outside(isa, bad, token):
    idx = torch.zeros(300, 3, dtype=torch.int64)
    idx[token:, 1] = bad
    with pytest.raises(RuntimeError, match=f"got {bad} at token {token}, choice 1$"):
        torch.ops.moe_ext._topk_gate_backward(
            torch.ones(300, 3), None, torch.zeros(300, 5), idx, "softmax", True, 1.0
        )
