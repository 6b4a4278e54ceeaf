"""Gates and losses alike: logits that they refuse, and tokens that they do not read."""

import math

import pytest
import torch
from noisy_cases import make_state
from ops_helpers import DTYPES, NUM_TOKENS

from moe_ext import ops

STATE = make_state()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("value", "name"), [(math.nan, "nan"), (math.inf, "inf")])
def test_refuses_logits_by_token_and_expert(isa, value, name, dtype):
    good, bad = torch.randn(2, 600, 9).to(dtype)
    bad[580, 0] = bad[301, 7] = bad[301, 8] = value
    idx = torch.zeros(600, 1, dtype=torch.int64)
    score_fns = ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus")
    for call, message in (
        *(
            (lambda f=f: ops.topk_gate(bad, 3, score_fn=f), "^topk_gate: expected logits to be .*")
            for f in score_fns
        ),
        (lambda: ops.expert_choice_gate(bad, 3), r"^expert_choice_gate: .* NaN and \+inf, "),
        (lambda: ops.sinkhorn_gate(bad, 3), r"^sinkhorn_gate: .* NaN and \+inf, "),
        (lambda: ops.sequence_load(bad, idx, 3), r"^sequence_load: .* NaN and \+inf, "),
        (lambda: ops.balanced_assignment(bad), "^balanced_assignment: .* finite, "),
        (lambda: ops.gshard_gate(bad), "^gshard_gate: expected logits to be .*"),
        (lambda: ops.noisy_topk_gate(bad, good, STATE, 2), "clean_logits to be free of .*"),
        (lambda: ops.noisy_topk_gate(good, bad, STATE, 2), "noise_logits to be finite, "),
    ):
        with pytest.raises(RuntimeError, match=f"{message}got -?{name} at token 301, expert 7$"):
            call()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("top_k", [2, 5])
def test_refuses_rows_with_too_few_experts(isa, top_k, biased):
    logits = torch.randn(300, 9)
    logits[33, 1:] = -math.inf
    logits[270] = -math.inf
    bias = torch.randn(9) if biased else None
    calls = [
        (lambda: ops.topk_gate(logits, top_k, selection_bias=bias), top_k),
        (lambda: ops.gshard_gate(logits), 2),
        (lambda: ops.noisy_topk_gate(logits, None, None, top_k), top_k),
    ]
    for call, least in calls:
        told = rf"at least top_k = {least} experts .* got token 33 with 1 logits above -inf among 9"
        with pytest.raises(RuntimeError, match=told):
            call()
    for call in (ops.expert_choice_gate, ops.sinkhorn_gate):
        with pytest.raises(RuntimeError, match="leave an expert above -inf, got none at token 270"):
            call(logits, 3)
    # The best group holds one expert above -inf.
    logits = torch.zeros(2, 4)
    logits[1] = torch.tensor([5.0, -math.inf, 0.0, 0.0])
    with pytest.raises(RuntimeError, match=r"got token 1 with 3 logits above -inf"):
        ops.topk_gate(logits, 2, num_groups=2, top_groups=1)


def masked_calls(idx):
    """By operator, a call with logits and a mask."""
    groups = {"num_groups": 4, "top_groups": 2, "score_fn": "sigmoid", "scale": 2.5}
    return {
        "topk_gate": lambda x, mask: ops.topk_gate(
            x, 4, selection_bias=x.new_ones(24).cumsum(0), token_mask=mask, **groups
        ),
        "expert_choice_gate": lambda x, mask: ops.expert_choice_gate(x, 9, token_mask=mask),
        "sequence_load": lambda x, mask: ops.sequence_load(x, idx, 1, token_mask=mask),
        "router_z_loss": lambda x, mask: (ops.router_z_loss(x, token_mask=mask),),
        "gshard_gate": lambda x, mask: ops.gshard_gate(x, STATE, token_mask=mask),
        "noisy_topk_gate": lambda x, mask: ops.noisy_topk_gate(
            *x.chunk(2, dim=1), STATE, 2, token_mask=mask
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_masked_tokens_are_not_looked_at(backend, num_tokens, dtype):
    logits, mask = torch.randn(num_tokens, 24).to(dtype), torch.rand(num_tokens) > 0.5
    poisoned = torch.where(mask[:, None], logits, torch.full_like(logits, math.nan))
    for name, call in masked_calls(torch.randint(24, (num_tokens, 2))).items():
        results = []
        for x in (logits, poisoned):
            leaf = x.clone().requires_grad_()
            out = call(leaf, mask)
            wanted = [t for t in out if t.requires_grad]
            torch.manual_seed(1)
            (grad,) = torch.autograd.grad(wanted, leaf, [torch.randn_like(t) for t in wanted])
            results.append([*out, grad])
            assert (grad[~mask] == 0).all(), name
            if "gate" in name:
                assert (out.topk_idx[~mask] == -1).all(), name
                assert (out.topk_weights[~mask] == 0).all(), name
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name
        assert all(x.isfinite().all() for x in results[1]), name
