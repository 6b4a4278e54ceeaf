"""Uneven loads of experts: the workloads W0 to W7 of NVIDIA/Megatron-LM pull request 7488.

Shapes: T tokens, E experts, K top-k.
"""

import hashlib

import torch
from torch import Tensor

LOADS = (
    "W0_balanced",
    "W1_hot_expert_set",
    "W2_hot_rank",
    "W3_spread_hot_experts",
    "W4_source_ragged",
    "W5_zero_expert_rank",
    "W6_rotating_hotspot",
    "W7_burst",
)


def tokens_of(load: str, num_tokens: int, rank: int, num_ranks: int) -> int:
    """Tokens of a rank: T, or as many on average where the sources are uneven."""
    if load != "W4_source_ragged":
        return num_tokens
    return 2 * num_tokens * (rank + 1) // (num_ranks + 1)


def pool_of(load: str, step: int, token: int, num_experts: int, top_k: int) -> list[int]:
    """The experts that a token's are drawn from."""
    everyone = list(range(num_experts))
    hot = max(top_k, num_experts // 4)
    if load == "W5_zero_expert_rank":
        return everyone[num_experts // 2 :]
    if load == "W7_burst":
        return everyone[:hot] if step % 4 == 3 and token % 2 == 0 else everyone
    if load == "W4_source_ragged" or token % 4 == 0:
        return everyone
    if load == "W3_spread_hot_experts":
        return everyone[::2]
    first = step // 3 * hot if load == "W6_rotating_hotspot" else 0
    return [(first + i) % num_experts for i in range(hot)]


def routing(
    load: str, seed: int, step: int, num_tokens: int, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Experts `[T, K]` of every token and their weights: those of (load, seed, step) alone.

    Args:
        load: one of `LOADS`.
        seed: of the workload.
        step: of the training.
        num_tokens: T.
        num_experts: E.
        top_k: K, at most half of E.
    """
    digest = hashlib.sha256(f"{load}|{seed}|{step}".encode()).hexdigest()
    generator = torch.Generator().manual_seed(int(digest[:8], 16))
    if load == "W0_balanced":
        idx_TK = torch.arange(num_tokens * top_k).view(num_tokens, top_k) % num_experts
    else:
        rows = []
        for token in range(num_tokens):
            pool = pool_of(load, step, token, num_experts, top_k)
            drawn = torch.randperm(len(pool), generator=generator)[:top_k]
            rows.append(sorted(pool[i] for i in drawn.tolist()))
        idx_TK = torch.tensor(rows)
    weights_TK = torch.rand((num_tokens, top_k), generator=generator) * 0.5 + 0.5
    return idx_TK, weights_TK / weights_TK.sum(1, keepdim=True)
