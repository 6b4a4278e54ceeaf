"""What the random operators and the noisy gates refuse, and how they say it."""

import math

import pytest
import torch
from noisy_cases import DTYPES, make_state

from moe_ext import ops

STATE = make_state()
LOGITS = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.routing_uniform(STATE.int(), 1, 1, stream=0),
            r"^routing_uniform: expected rng_state to be Long, got Int",
        ),
        (
            lambda: ops.routing_uniform(STATE[:3], 1, 1, stream=0),
            r"rng_state to be of size 4 in dim 0 \(seed, layer, .*\), got shape \[3\]",
        ),
        (
            lambda: ops.routing_uniform(STATE[None], 1, 1, stream=0),
            r"rng_state to be a 1-D tensor \[4\], got shape \[1, 4\]",
        ),
        (lambda: ops.routing_uniform(STATE, -1, 1, stream=0), r"num_tokens to be at least 0"),
        (lambda: ops.routing_uniform(STATE, 1, -1, stream=0), r"num_columns to be at least 0"),
        (
            lambda: ops.routing_uniform(STATE, 1, 1, stream=256),
            r"expected stream to be in \[0, 256\), got 256",
        ),
        (
            lambda: ops.routing_uniform(STATE, 3, 1, stream=0, token_idx=STATE),
            r"token_idx to be of size 3 in dim 0 \(the number of tokens\), got shape \[4\]",
        ),
        (
            lambda: ops.routing_uniform(STATE, 4, 1, stream=0, token_idx=STATE.int()),
            r"expected token_idx to be Long, got Int",
        ),
        (
            lambda: ops.routing_jitter(LOGITS.long(), STATE, 0.1),
            r"^routing_jitter: expected x to be float32, .* got Long",
        ),
        (lambda: ops.routing_jitter(LOGITS[0], STATE, 0.1), r"x to be a 2-D tensor \[T, D\]"),
        (lambda: ops.routing_jitter(LOGITS, STATE, 1.0), r"eps to be in \[0, 1\), got 1"),
        (lambda: ops.routing_jitter(LOGITS, STATE, -0.1), r"eps to be in \[0, 1\), got -0.1"),
        (
            lambda: ops.gshard_gate(LOGITS[:, :1]),
            r"^gshard_gate: expected logits to have at least 2 experts, got shape \[4, 1\]",
        ),
        (lambda: ops.gshard_gate(LOGITS.int()), r"expected logits to be float32, .* got Int"),
        (lambda: ops.gshard_gate(LOGITS, scale=math.inf), r"scale to be finite, got inf"),
        (
            lambda: ops.gshard_gate(LOGITS, token_mask=LOGITS[0].bool()),
            r"token_mask to be of size 4 in dim 0 \(the number of tokens\)",
        ),
        (lambda: ops.gshard_gate(LOGITS, STATE[:2]), r"expected rng_state to be of size 4"),
        (
            lambda: ops.noisy_topk_gate(LOGITS, LOGITS, None, 2),
            r"^noisy_topk_gate: .* both or neither, got noise_logits alone",
        ),
        (
            lambda: ops.noisy_topk_gate(LOGITS, None, STATE, 2),
            r"noise_logits and rng_state to be given both or neither, got rng_state alone",
        ),
        (
            lambda: ops.noisy_topk_gate(LOGITS, LOGITS.double(), STATE, 2),
            r"expected noise_logits to be Float, got Double",
        ),
        (
            lambda: ops.noisy_topk_gate(LOGITS, LOGITS[:3], STATE, 2),
            r"noise_logits to be of size 4 in dim 0 \(the tokens of clean_logits\)",
        ),
        (
            lambda: ops.noisy_topk_gate(LOGITS, LOGITS[:, :3], STATE, 2),
            r"noise_logits to be of size 6 in dim 1 \(the experts of clean_logits\)",
        ),
        (
            lambda: ops.noisy_topk_gate(LOGITS, None, None, 7),
            r"top_k to be in \[1, 6\], the experts of clean_logits, got 7",
        ),
        (lambda: ops.noisy_topk_gate(LOGITS, None, None, 0), r"top_k to be in \[1, 6\]"),
        (
            lambda: ops.noisy_topk_gate(LOGITS, None, None, 2, noise_epsilon=-1.0),
            r"noise_epsilon to be finite and at least 0, got -1",
        ),
        (
            lambda: ops.noisy_topk_gate(LOGITS, None, None, 2, token_mask=LOGITS[:, 0]),
            r"expected token_mask to be Bool, got Float",
        ),
    ],
)
def test_refuses(device, call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda op: op._gshard_gate_backward(None, None, LOGITS, torch.zeros(4, 3).long(), 1.0),
            r"^_gshard_gate_backward: expected topk_idx to be of size 2 in dim 1 \(two choices\)",
        ),
        (
            lambda op: op._gshard_gate_backward(LOGITS, None, LOGITS, LOGITS[:, :2].long(), 1.0),
            r"grad_weights to be of size 2 in dim 1 \(the columns of topk_idx\)",
        ),
        (
            lambda op: op._gshard_gate_backward(
                None, LOGITS[0].double(), LOGITS, LOGITS[:, :2].long(), 1.0
            ),
            r"expected grad_score_sum to be Float, got Double",
        ),
        (
            lambda op: op._noisy_topk_gate_backward(
                None, None, LOGITS[0, :5], LOGITS, None, None, LOGITS[:, :2].long(), 0.0, 1.0, None
            ),
            r"^_noisy_topk_gate_backward: expected grad_load to be of size 6 in dim 0",
        ),
        (
            lambda op: op._noisy_topk_gate_backward(
                None, None, None, LOGITS, None, None, LOGITS[:, :0].long(), 0.0, 1.0, None
            ),
            r"expected topk_idx to have 1 to 6 columns, .* got shape \[4, 0\]",
        ),
    ],
)
def test_backward_refuses(device, call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.moe_ext)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("value", "name"), [(math.nan, "nan"), (math.inf, "inf")])
def test_refuses_logits_by_token_and_expert(isa, value, name, dtype):
    bad = torch.randn(600, 9).to(dtype)
    bad[580, 0] = bad[301, 7] = value
    good = torch.randn(600, 9).to(dtype)
    where = rf"got {name} at token 301, expert 7$"
    with pytest.raises(RuntimeError, match=r"^gshard_gate: expected logits to be .*" + where):
        ops.gshard_gate(bad)
    with pytest.raises(RuntimeError, match=r"expected clean_logits to be free of .*" + where):
        ops.noisy_topk_gate(bad, good, STATE, 2)
    with pytest.raises(RuntimeError, match=r"expected noise_logits to be finite, " + where):
        ops.noisy_topk_gate(good, bad, STATE, 2)


def test_refuses_rows_with_too_few_experts(isa):
    logits = torch.randn(70, 9)
    logits[33, 1:] = -math.inf
    message = r"at least top_k = 2 experts .* got token 33 with 1 logits above -inf among 9"
    with pytest.raises(RuntimeError, match=message):
        ops.gshard_gate(logits)
    with pytest.raises(RuntimeError, match=message):
        ops.noisy_topk_gate(logits, None, None, 2)
