"""Expert choice, Sinkhorn and balanced assignment against the reference; what always holds."""

import itertools
import math

import emulation
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, GRAD_ULP, acc_dtype, examples, tolerance

from moe_ext import ops, reference

NUM_TOKENS = [0, 1, 31, 32, 33, 257]
NUM_EXPERTS = 12


def make(num_tokens, *, dtype=torch.float32, num_experts=NUM_EXPERTS, masked=False):
    logits = (2 * torch.randn(num_tokens, num_experts)).to(dtype)
    return logits, torch.rand(num_tokens) > 0.4 if masked else None


def with_grad(gate, logits, grads):
    leaf = logits.clone().requires_grad_()
    out = gate(leaf)
    (grad,) = torch.autograd.grad((out.topk_weights, out.score_sum), leaf, grads)
    return out, grad


def random_grads(gate, logits):
    out = gate(logits)
    return torch.randn_like(out.topk_weights), torch.randn_like(out.score_sum)


def choice_of(scores_TE, capacity, mask):
    """Tokens of each expert by a stable sort of given scores."""
    key_TE = scores_TE if mask is None else scores_TE.masked_fill(~mask[:, None], -1)
    taken = min(capacity, len(scores_TE) if mask is None else int(mask.sum()))
    token_CE = key_TE.sort(dim=0, descending=True, stable=True).indices[:taken]
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter(0, token_CE, True)


def assert_expert_choice(logits, capacity, mask):
    dtype = logits.dtype
    num_tokens, num_experts = logits.shape
    rtol = tolerance(dtype, num_experts)
    # With room for all, the weights are the scores that every choice is made by.
    scores = ops.expert_choice_gate(logits, max(1, num_tokens), token_mask=mask).topk_weights
    every = reference.expert_choice_gate(logits, max(1, num_tokens), token_mask=mask)
    torch.testing.assert_close(scores, every.topk_weights, rtol=rtol, atol=1e-30)
    out = ops.expert_choice_gate(logits, capacity, token_mask=mask)
    taken = choice_of(scores, capacity, mask)
    assert torch.equal(out.topk_idx, torch.where(taken, torch.arange(num_experts), -1))
    assert torch.equal(out.topk_weights, scores * taken)
    assert torch.equal(out.num_tokens_per_expert, taken.sum(dim=0))
    assert out.score_sum.dtype == acc_dtype(dtype)
    rtol_sum = tolerance(dtype, num_experts + num_tokens)
    torch.testing.assert_close(out.score_sum, every.score_sum, rtol=rtol_sum, atol=1e-30)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [1, 40, 300])
def test_expert_choice_equals_the_reference(backend, dtype, capacity):
    assert_expert_choice(make(257, dtype=dtype)[0], capacity, None)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_expert_choice_of_any_number_of_tokens(device, num_tokens, masked):
    logits, mask = make(num_tokens, masked=masked)
    assert_expert_choice(logits, 9, mask)
    # Few distinct logits: the last place of every expert is tied.
    assert_expert_choice(logits.round() / 2, 9, mask)


@pytest.mark.parametrize("num_experts", [1, 2, 16, 33, 70])
def test_expert_choice_of_any_number_of_experts(backend, num_experts):
    assert_expert_choice(make(35, num_experts=num_experts)[0], 5, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_expert_choice_gradient_equals_the_reference(backend, dtype, masked):
    logits, mask = make(67, dtype=dtype, masked=masked)
    taken = ops.expert_choice_gate(logits, 9, token_mask=mask).topk_idx >= 0

    def formula(leaf):
        every = reference.expert_choice_gate(leaf, 67, token_mask=mask)
        return every._replace(topk_weights=every.topk_weights * taken)

    grads = random_grads(formula, logits)
    _, grad = with_grad(lambda x: ops.expert_choice_gate(x, 9, token_mask=mask), logits, grads)
    _, expected = with_grad(formula, logits, grads)
    rtol = tolerance(dtype, NUM_EXPERTS)
    torch.testing.assert_close(
        grad,
        expected,
        rtol=GRAD_ULP.get(dtype, rtol),
        atol=16 * rtol + 2.0**-24 * (dtype == torch.float16),
    )


def test_expert_choice_gradcheck(backend):
    logits, mask = make(7, dtype=torch.float64, num_experts=4, masked=True)

    def gate(logits):
        out = ops.expert_choice_gate(logits, 2, token_mask=mask)
        return out.topk_weights, out.score_sum

    assert emulation.gradcheck(gate, (logits.requires_grad_(),))
    # The gradient of one output alone.
    for output, other in ((0, 1), (1, 0)):
        grads = [torch.randn_like(gate(logits)[output]), torch.zeros_like(gate(logits)[other])]
        (alone,) = torch.autograd.grad(gate(logits)[output], logits, grads[0])
        both = torch.autograd.grad([gate(logits)[output], gate(logits)[other]], logits, grads)[0]
        assert torch.equal(alone, both)


def test_expert_choice_gives_equal_scores_to_the_earlier_token(backend):
    logits = torch.zeros(600, 3)
    logits[7, 1] = 1.0
    idx = ops.expert_choice_gate(logits, 4).topk_idx
    assert (idx[:, 0] >= 0).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert (idx[:, 1] >= 0).nonzero().flatten().tolist() == [0, 1, 2, 7]


def test_expert_choice_without_a_real_token(device):
    logits = torch.randn(5, 3, requires_grad=True)
    out = ops.expert_choice_gate(logits, 2, token_mask=torch.zeros(5, dtype=torch.bool))
    assert (out.topk_idx == -1).all() and out.num_tokens_per_expert.tolist() == [0, 0, 0]
    (out.topk_weights.sum() + out.score_sum.sum()).backward()
    assert (logits.grad == 0).all()


@examples(40)
@given(
    num_tokens=st.integers(0, 60),
    num_experts=st.integers(1, 20),
    capacity=st.integers(1, 70),
    levels=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 2**31),
)
def test_every_expert_takes_exactly_its_capacity(
    device, num_tokens, num_experts, capacity, levels, seed
):
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randint(0, levels, (num_tokens, num_experts), generator=generator) * 5 / levels
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    out = ops.expert_choice_gate(logits, capacity, token_mask=mask)
    taken = out.topk_idx >= 0
    expected = min(capacity, int(mask.sum()))
    assert (taken.sum(dim=0) == expected).all() and (out.num_tokens_per_expert == expected).all()
    assert not taken[~mask].any()
    assert ((out.topk_weights > 0) <= taken).all()


def megatron_sinkhorn(logits, tolerance=1e-4):
    """The published function, in the words of its formula."""
    cost = logits.exp()
    rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(cost.shape[1])
    change = math.inf
    while change > tolerance:
        rows = 1 / (len(rows) * ((columns * cost).sum(1) + 1e-8))
        former, columns = columns, 1 / (len(columns) * ((rows[:, None] * cost).sum(0) + 1e-8))
        change = (columns - former).abs().mean()
    return columns * cost * rows[:, None]


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_sinkhorn_chooses_as_megatron(backend, top_k):
    logits = (torch.randn(300, 16) + 2 * torch.randn(16)).double()
    out = ops.sinkhorn_gate(logits, top_k)
    expected_idx = megatron_sinkhorn(logits).topk(top_k, dim=1).indices
    assert torch.equal(out.topk_idx, expected_idx)
    scores = logits.sigmoid() if top_k == 1 else logits.softmax(1)
    torch.testing.assert_close(out.topk_weights, scores.gather(1, expected_idx))
    counts = torch.bincount(expected_idx.flatten(), minlength=16)
    assert torch.equal(out.num_tokens_per_expert, counts)
    unbalanced = ops.topk_gate(logits, top_k).num_tokens_per_expert
    assert counts.double().std() < unbalanced.double().std() / 2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("top_k", [1, 3])
def test_sinkhorn_equals_the_reference(device, top_k, num_tokens, masked):
    logits, mask = make(num_tokens, dtype=torch.float64, masked=masked)
    options = {"num_iters": 9, "tolerance": 1e-3, "token_mask": mask}
    grads = random_grads(lambda x: reference.sinkhorn_gate(x, top_k, **options), logits)
    out, grad = with_grad(lambda x: ops.sinkhorn_gate(x, top_k, **options), logits, grads)
    expected, expected_grad = with_grad(
        lambda x: reference.sinkhorn_gate(x, top_k, **options), logits, grads
    )
    assert torch.equal(out.topk_idx, expected.topk_idx)
    assert torch.equal(out.num_tokens_per_expert, expected.num_tokens_per_expert)
    torch.testing.assert_close(out.topk_weights, expected.topk_weights)
    torch.testing.assert_close(out.score_sum, expected.score_sum)
    # A token without a choice and a masked one are the same to gate_weights; here none is.
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinkhorn_factors_in_any_dtype(backend, dtype):
    logits = make(257, dtype=dtype)[0]
    for num_iters, tolerance_ in ((1, 0.0), (4, 0.0), (100, 1e-4)):
        scale = torch.ops.moe_ext._sinkhorn_scale(logits, num_iters, tolerance_)
        assert scale.dtype == acc_dtype(dtype)
        expected = reference.assignment.sinkhorn_scale(logits.double(), num_iters, tolerance_)
        rtol = 8 * tolerance(dtype, 257 + NUM_EXPERTS)
        torch.testing.assert_close(scale.double(), expected.log(), rtol=rtol, atol=rtol)


def test_sinkhorn_of_logits_that_overflow(device):
    logits = torch.tensor([[1000.0, 999.0], [998.0, 1000.0], [-1000.0, -math.inf]])
    out = ops.sinkhorn_gate(logits, 1)
    # The last token can only go to expert 0, and makes it dear.
    assert out.topk_idx.flatten().tolist() == [1, 1, 0]
    assert torch.equal(out.topk_idx, reference.sinkhorn_gate(logits, 1).topk_idx)
    assert out.topk_weights.isfinite().all()


def test_sinkhorn_gradcheck(device):
    logits, mask = make(5, dtype=torch.float64, num_experts=4, masked=True)
    for top_k in (1, 2):

        def gate(logits, top_k=top_k):
            out = ops.sinkhorn_gate(logits, top_k, token_mask=mask)
            return out.topk_weights, out.score_sum

        assert emulation.gradcheck(gate, (logits.requires_grad_(),))


def total(scores, expert_T):
    rows = (expert_T >= 0).nonzero().flatten()
    return scores.double()[rows, expert_T[rows]].sum().item()


def assert_balanced(expert_T, num_experts, mask):
    real = expert_T if mask is None else expert_T[mask]
    assert mask is None or (expert_T[~mask] == -1).all()
    counts = torch.bincount(real, minlength=num_experts)
    assert counts.min() >= len(real) // num_experts
    assert counts.max() <= -(-len(real) // num_experts)


def test_balanced_assignment_against_all_assignments(device):
    for num_tokens, num_experts in ((1, 3), (4, 2), (5, 2), (6, 3), (7, 3), (3, 4)):
        scores = torch.randn(num_tokens, num_experts)
        even, rest = divmod(num_tokens, num_experts)
        best = -math.inf
        for experts in itertools.product(range(num_experts), repeat=num_tokens):
            counts = [experts.count(e) for e in range(num_experts)]
            if min(counts) >= even and sum(c > even for c in counts) <= rest:
                best = max(best, total(scores, torch.tensor(experts)))
        expert_T = ops.balanced_assignment(scores)
        assert_balanced(expert_T, num_experts, None)
        assert total(scores, expert_T) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("num_experts", [1, 3, 4, 8])
def test_balanced_assignment_equals_the_reference(device, num_experts, num_tokens, masked):
    scores, mask = make(num_tokens, num_experts=num_experts, masked=masked)
    expert_T = ops.balanced_assignment(scores, token_mask=mask)
    expected = reference.balanced_assignment(scores, token_mask=mask)
    assert_balanced(expert_T, num_experts, mask)
    assert_balanced(expected, num_experts, mask)
    bound = num_tokens * 2.0**-22 * 12
    assert total(scores, expert_T) == pytest.approx(total(scores, expected), abs=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_balanced_assignment_in_any_dtype(backend, dtype):
    scores = torch.randn(60, 5).to(dtype)
    expert_T = ops.balanced_assignment(scores)
    expected = reference.balanced_assignment(scores)
    assert_balanced(expert_T, 5, None)
    assert total(scores, expert_T) == pytest.approx(total(scores, expected), abs=1e-3)


def test_balanced_assignment_is_the_same_on_every_device(isa, num_threads):
    # Ties everywhere, and a number of tokens that does not divide.
    scores = torch.randn(40, 6).round()
    mask = torch.rand(40) > 0.2
    results = []
    for threads in (1, 2, 3):
        num_threads(threads)
        results.append(ops.balanced_assignment(scores, token_mask=mask))
    if emulation.is_built():
        with emulation.emulated_cuda():
            results.append(ops.balanced_assignment(scores, token_mask=mask))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_balanced_assignment_of_equal_and_extreme_scores(device):
    assert_balanced(ops.balanced_assignment(torch.zeros(37, 5)), 5, None)
    # All want the same two experts.
    scores = torch.zeros(24, 4)
    scores[:, :2] = 10.0
    expert_T = ops.balanced_assignment(scores)
    assert_balanced(expert_T, 4, None)
    assert total(scores, expert_T) == 120.0
    big = torch.finfo(torch.float64).max
    scores = torch.tensor([[big, -big], [0.0, -big]], dtype=torch.float64)
    assert ops.balanced_assignment(scores).tolist() == [0, 1]


@examples(40)
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 7),
    levels=st.sampled_from([1, 2, 1000]),
    seed=st.integers(0, 2**31),
)
def test_no_swap_of_two_tokens_is_better(device, num_tokens, num_experts, levels, seed):
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.randint(0, levels, (num_tokens, num_experts), generator=generator).float()
    expert_T = ops.balanced_assignment(scores)
    assert_balanced(expert_T, num_experts, None)
    own_T = scores[torch.arange(num_tokens), expert_T]
    swapped_TT = scores[:, expert_T] + scores[:, expert_T].t()
    assert (swapped_TT <= own_T[:, None] + own_T + levels * 2.0**-20).all()


LOGITS = torch.zeros(4, 6)
MASK = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("op", "args", "options", "message"),
    [
        (ops.expert_choice_gate, (LOGITS.int(), 1), {}, r"^expert_choice_gate: .* got Int"),
        (ops.expert_choice_gate, (LOGITS[0], 1), {}, r"logits to be a 2-D tensor \[T, E\]"),
        (ops.expert_choice_gate, (LOGITS[:, :0], 1), {}, r"logits to have at least 1 expert"),
        (ops.expert_choice_gate, (LOGITS, 0), {}, r"capacity to be at least 1, got 0"),
        (ops.expert_choice_gate, (LOGITS, 1), {"token_mask": LOGITS[:, 0]}, r"mask to be Bool"),
        (ops.expert_choice_gate, (LOGITS, 1), {"token_mask": MASK[:2]}, r"mask to be of size 4"),
        (ops.sinkhorn_gate, (LOGITS[0], 1), {}, r"^sinkhorn_gate: .* 2-D tensor"),
        (ops.sinkhorn_gate, (LOGITS, 1), {"num_iters": 0}, r"num_iters to be at least 1, got 0"),
        (ops.sinkhorn_gate, (LOGITS, 1), {"tolerance": -1.0}, r"tolerance to be .* got -1"),
        (ops.sinkhorn_gate, (LOGITS, 1), {"tolerance": math.nan}, r"tolerance to be .* got nan"),
        (ops.sinkhorn_gate, (LOGITS, 7), {}, r"top_k to be in \[1, 6\]"),
        (ops.balanced_assignment, (LOGITS.int(),), {}, r"^balanced_assignment: .* got Int"),
        (ops.balanced_assignment, (LOGITS[0],), {}, r"scores to be a 2-D tensor \[T, E\]"),
        (ops.balanced_assignment, (LOGITS[:, :0],), {}, r"scores to have at least 1 expert"),
        (ops.balanced_assignment, (LOGITS,), {"token_mask": MASK[None]}, r"mask to be a 1-D"),
    ],
)
def test_refuses(moved, op, args, options, message):
    with pytest.raises(RuntimeError, match=message):
        op(*moved(args), **moved(options))
