"""Capacity limits, one slot after the other.

Shape suffixes: T tokens, E experts, K top-k, R ranked experts.
"""

import torch
from torch import Tensor


def limit_capacity(
    topk_idx_TK: Tensor,
    num_experts: int,
    capacity: int,
    *,
    topk_weights: Tensor | None = None,
    policy: str = "position",
    priority: Tensor | None = None,
    num_groups: int = 1,
    ranked_idx: Tensor | None = None,
    overflow: str = "drop",
) -> tuple[Tensor, Tensor]:
    """Same as `moe_ext.ops.limit_capacity`."""
    num_tokens, top_k = topk_idx_TK.shape
    keys = priority if policy == "random" else topk_weights
    key = [[0.0] * top_k] * num_tokens if keys is None else keys.tolist()

    def place(slot: tuple[int, int]) -> tuple[float, ...]:
        t, k = slot
        if policy == "choice":
            return k, t
        if policy == "batch_prioritized":
            return k, -max(key[t]), t
        return (t, k) if policy == "position" else (-key[t][k], t, k)

    out: list[list[int]] = topk_idx_TK.tolist()
    dropped = 0
    group_size = -(-num_tokens // num_groups)
    for group in range(num_groups):
        tokens = range(group * group_size, min((group + 1) * group_size, num_tokens))
        slots = sorted(((t, k) for t in tokens for k in range(top_k)), key=place)
        room = [capacity] * num_experts
        refused = []
        for t, k in slots:
            expert = out[t][k]
            if expert < 0:
                continue
            if room[expert] > 0:
                room[expert] -= 1
            else:
                out[t][k] = -1
                refused.append((t, k))
        for t, k in refused:
            ranked = [] if ranked_idx is None or overflow == "drop" else ranked_idx[t].tolist()
            free = [e for e in ranked if e >= 0 and room[e] > 0 and e not in out[t]]
            if free:
                out[t][k] = free[0]
                room[free[0]] -= 1
            else:
                dropped += 1
    return topk_idx_TK.new_tensor(out).view(topk_idx_TK.shape), torch.tensor(
        dropped, device=topk_idx_TK.device
    )
