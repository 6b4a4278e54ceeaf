"""What the random operators and the noisy gates refuse, and how they say it."""

import math

import refusals
import torch
from noisy_cases import make_state

STATE = make_state()
LOGITS = torch.zeros(4, 6)


REFUSED = {
    "routing_uniform": [
        {"rng_state": STATE, "num_tokens": 1, "num_columns": 1, "stream": 0},
        ({"rng_state": STATE.int()}, "rng_state to be Long, got Int"),
        (
            {"rng_state": STATE[:3]},
            r"rng_state to be of size 4 in dim 0 \(seed, layer, .*\), got shape \[3\]",
        ),
        ({"rng_state": STATE[None]}, r"rng_state to be a 1-D tensor \[4\], got shape \[1, 4\]"),
        ({"num_tokens": -1}, "num_tokens to be at least 0"),
        ({"num_columns": -1}, "num_columns to be at least 0"),
        ({"stream": 256}, r"stream to be in \[0, 256\), got 256"),
        (
            {"num_tokens": 3, "token_idx": STATE},
            r"token_idx to be of size 3 in dim 0 \(the number of tokens\), got shape \[4\]",
        ),
        ({"num_tokens": 4, "token_idx": STATE.int()}, "token_idx to be Long, got Int"),
    ],
    "routing_jitter": [
        {"x_TD": LOGITS, "rng_state": STATE, "eps": 0.1},
        ({"x_TD": LOGITS.long()}, "x to be float32, .* got Long"),
        ({"x_TD": LOGITS[0]}, r"x to be a 2-D tensor \[T, D\]"),
        ({"eps": 1.0}, r"eps to be in \[0, 1\), got 1"),
        ({"eps": -0.1}, r"eps to be in \[0, 1\), got -0.1"),
    ],
    "gshard_gate": [
        {"logits_TE": LOGITS},
        ({"logits_TE": LOGITS[:, :1]}, r"logits to have at least 2 experts, got shape \[4, 1\]"),
        ({"logits_TE": LOGITS.int()}, "logits to be float32, .* got Int"),
        ({"scale": math.inf}, "scale to be finite, got inf"),
        (
            {"token_mask": LOGITS[0].bool()},
            r"token_mask to be of size 4 in dim 0 \(the number of tokens\)",
        ),
        ({"rng_state": STATE[:2]}, "rng_state to be of size 4"),
    ],
    "noisy_topk_gate": [
        {"clean_logits_TE": LOGITS, "noise_logits_TE": None, "rng_state": None, "top_k": 2},
        ({"noise_logits_TE": LOGITS}, "both or neither, got noise_logits alone"),
        (
            {"rng_state": STATE},
            "noise_logits and rng_state to be given both or neither, got rng_state alone",
        ),
        (
            {"noise_logits_TE": LOGITS.double(), "rng_state": STATE},
            "noise_logits to be Float, got Double",
        ),
        (
            {"noise_logits_TE": LOGITS[:3], "rng_state": STATE},
            r"noise_logits to be of size 4 in dim 0 \(the tokens of clean_logits\)",
        ),
        (
            {"noise_logits_TE": LOGITS[:, :3], "rng_state": STATE},
            r"noise_logits to be of size 6 in dim 1 \(the experts of clean_logits\)",
        ),
        ({"top_k": 7}, r"top_k to be in \[1, 6\], the experts of clean_logits, got 7"),
        ({"top_k": 0}, r"top_k to be in \[1, 6\]"),
        ({"noise_epsilon": -1.0}, "noise_epsilon to be finite and at least 0, got -1"),
        ({"token_mask": LOGITS[:, 0]}, "token_mask to be Bool, got Float"),
    ],
    "_gshard_gate_backward": [
        {
            "grad_weights": None,
            "grad_score_sum": None,
            "logits": LOGITS,
            "topk_idx": LOGITS[:, :2].long(),
            "scale": 1.0,
        },
        (
            {"topk_idx": torch.zeros(4, 3).long()},
            r"topk_idx to be of size 2 in dim 1 \(two choices\)",
        ),
        (
            {"grad_weights": LOGITS},
            r"grad_weights to be of size 2 in dim 1 \(the columns of topk_idx\)",
        ),
        ({"grad_score_sum": LOGITS[0].double()}, "grad_score_sum to be Float, got Double"),
    ],
    "_noisy_topk_gate_backward": [
        {
            "grad_weights": None,
            "grad_importance": None,
            "grad_load": LOGITS[0, :5],
            "clean_logits": LOGITS,
            "noise_logits": None,
            "rng_state": None,
            "topk_idx": LOGITS[:, :2].long(),
            "noise_epsilon": 0.0,
            "scale": 1.0,
            "token_idx": None,
        },
        ({}, "grad_load to be of size 6 in dim 0"),
        (
            {"grad_load": None, "topk_idx": LOGITS[:, :0].long()},
            r"topk_idx to have 1 to 6 columns, .* got shape \[4, 0\]",
        ),
    ],
}
test_refuses = refusals.test_on_devices(REFUSED)
