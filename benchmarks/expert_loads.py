"""Uneven loads of experts: the workloads W0 to W7 of NVIDIA/Megatron-LM pull request 7488.

Shapes: T tokens, E experts, K top-k.
"""

import hashlib

import torch
from torch import Tensor

from moe_ext.planner.expert_load import pool_of


def tokens_of(load: str, num_tokens: int, rank: int, num_ranks: int) -> int:
    """Tokens of a rank: T, or as many on average where the sources are uneven."""
    if load != "W4_source_ragged":
        return num_tokens
    return 2 * num_tokens * (rank + 1) // (num_ranks + 1)


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
