"""Token permutation written with loops and indexing.

Shape suffixes: T tokens, D model, E experts, K top-k, N permuted rows.
"""

import torch
from torch import Tensor

from moe_ext.ops.permutation import Permutation


def permute_tokens(
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    num_experts: int,
    *,
    topk_weights: Tensor | None = None,
    capacity: int | None = None,
    drop_policy: str = "position",
    align: int = 1,
) -> tuple[Tensor, Permutation]:
    """Same as `moe_ext.ops.permute_tokens`, one slot after another."""
    experts = topk_idx_TK.reshape(-1).tolist()
    num_slots, top_k = len(experts), topk_idx_TK.shape[1]
    kept_num_rows = num_slots if capacity is None else min(num_slots, num_experts * capacity)
    slot_of_row = torch.full((kept_num_rows + num_experts * (align - 1),), -1, dtype=torch.int64)
    row_of_slot = torch.full((num_slots,), -1, dtype=torch.int64)
    offsets, counts, num_dropped = [0], [], 0
    for expert in range(num_experts):
        slots = [slot for slot in range(num_slots) if experts[slot] == expert]
        kept = slots
        if capacity is not None and drop_policy == "score":
            assert topk_weights is not None
            weight_of_slot = topk_weights.reshape(-1).tolist()
            kept = sorted(sorted(slots, key=lambda slot: (-weight_of_slot[slot], slot))[:capacity])
        elif capacity is not None:
            kept = slots[:capacity]
        for rank, slot in enumerate(kept):
            slot_of_row[offsets[-1] + rank] = slot
            row_of_slot[slot] = offsets[-1] + rank
        counts.append(len(kept))
        num_dropped += len(slots) - len(kept)
        offsets.append(offsets[-1] + -(-len(kept) // align) * align)
    permutation = Permutation(
        slot_of_row=slot_of_row.to(x_TD.device),
        row_of_slot=row_of_slot.to(x_TD.device),
        expert_offsets=torch.tensor(offsets, device=x_TD.device),
        num_tokens_per_expert=torch.tensor(counts, device=x_TD.device),
        num_dropped=torch.tensor(num_dropped, device=x_TD.device),
        top_k=top_k,
    )
    has_slot = permutation.slot_of_row >= 0
    rows_ND = x_TD.new_zeros((slot_of_row.shape[0], x_TD.shape[1]))
    if has_slot.any():
        token_of_row = permutation.slot_of_row.clamp(min=0) // top_k
        rows_ND = torch.where(has_slot[:, None], x_TD[token_of_row], rows_ND)
    return rows_ND, permutation


def unpermute_tokens(
    rows_ND: Tensor, permutation: Permutation, topk_weights_TK: Tensor | None = None
) -> Tensor:
    """Same as `moe_ext.ops.unpermute_tokens`: gather, weigh, sum over k."""
    acc = torch.float64 if rows_ND.dtype == torch.float64 else torch.float32
    row_TK = permutation.row_of_slot.reshape(-1, permutation.top_k)
    padded = torch.cat([rows_ND.to(acc), rows_ND.new_zeros((1, rows_ND.shape[1]), dtype=acc)])
    rows_TKD = padded[row_TK]
    if topk_weights_TK is not None:
        rows_TKD = rows_TKD * topk_weights_TK.to(acc)[:, :, None]
    return rows_TKD.sum(dim=1).to(rows_ND.dtype)
