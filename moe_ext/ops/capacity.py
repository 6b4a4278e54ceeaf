"""Capacity: drops or reroutes choices that an expert has no room for, before tokens move.

Shape suffixes: T tokens, E experts, K top-k, G groups, S tokens of a group, R ranked experts.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ext._checks import check_choice

_POLICIES = ("position", "choice", "score", "random", "batch_prioritized")
_OVERFLOWS = ("drop", "reroute")


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
    """Drops or reroutes the choices beyond an expert's capacity.

    The slots (token t, choice k) of a group are served one after the other, and an expert takes the
    first ``capacity`` slots that chose it. ``policy`` is the order:

    =====================  ==================================================================
    ``position``           by token, then by choice: the earliest tokens are kept
    ``choice``             by choice, then by token: no second choice before all first ones
    ``score``              by ``topk_weights``, the largest first
    ``random``             by ``priority``, the largest first
    ``batch_prioritized``  by choice, then by the largest weight of the token, the largest first
    =====================  ==================================================================

    Equal numbers are served by position; NaN counts as the largest.

    With ``overflow="reroute"`` the slots that found no room are served once more, in the same
    order. Each goes to the first expert of ``ranked_idx`` that still has room and is in no other
    slot of its token, or else is dropped. The weight of a slot whose expert changed has to be
    computed anew, see `gate_weights`.

    `permute_tokens` can drop slots itself, by position or score over all tokens. The result is that
    of permuting the choices that `limit_capacity` returns for the same ``capacity``. Other orders,
    groups and rerouting need `limit_capacity`.

    Args:
        topk_idx_TK (Tensor[T, K]): int64 expert of each slot, -1 for none.
        num_experts (int): E, >= 1.
        capacity (int): slots that an expert takes from each group, >= 1.
        topk_weights (Tensor[T, K]): numbers by which "score" and "batch_prioritized" order.
        policy (str): see above.
        priority (Tensor[T, K]): numbers by which "random" orders, such as uniform random numbers.
        num_groups (int): G groups of ceil(T / G) neighbouring tokens that share nothing; the last
            groups may be smaller.
        ranked_idx (Tensor[T, R]): int64 experts of each token, best first, -1 for none; for
            "reroute".
        overflow (str): "drop" or "reroute".

    Returns:
        tuple[Tensor[T, K], Tensor[]]: the choices, -1 where a slot was dropped, and the number of
        dropped slots, int64.

    Raises:
        ValueError: the policy or overflow is unknown, or an argument that it needs is missing or
            has another shape.
        RuntimeError: an argument has the wrong device, dtype, shape or value; on CPU, an index is
            out of range. On CUDA such a slot counts as not routed.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    On CUDA rerouting serves the slots of a group one by one.

    Reference: Lepikhin et al., GShard, 2020 (arXiv 2006.16668), algorithm 1 (choice, groups);
    Riquelme et al., V-MoE, 2021 (arXiv 2106.05974), section 2.4 (batch_prioritized);
    Rajbhandari et al., DeepSpeed-MoE, 2022 (arXiv 2201.05596) (random).
    """
    check_choice("limit_capacity", "policy", policy, _POLICIES)
    check_choice("limit_capacity", "overflow", overflow, _OVERFLOWS)
    if overflow == "reroute" and ranked_idx is None:
        raise ValueError("limit_capacity: expected ranked_idx to be given to reroute, got None")
    keys_TK = priority if policy == "random" else topk_weights
    order = None
    # The operator refuses choices of another shape than [T, K], and those without a column.
    if policy != "position" and topk_idx_TK.dim() == 2 and topk_idx_TK.shape[1] > 0:
        _check_keys(topk_idx_TK, keys_TK, policy)
        order = _service_order(topk_idx_TK, keys_TK, policy, max(num_groups, 1))
    return torch.ops.moe_ext.limit_capacity(
        topk_idx_TK,
        num_experts,
        capacity,
        order,
        num_groups,
        ranked_idx if overflow == "reroute" else None,
    )


def _check_keys(topk_idx_TK: Tensor, keys_TK: Tensor | None, policy: str) -> None:
    name = "priority" if policy == "random" else "topk_weights"
    if policy == "choice":
        return
    if keys_TK is None:
        raise ValueError(
            f"limit_capacity: expected {name} to be given with policy {policy!r}, got None"
        )
    if keys_TK.shape != topk_idx_TK.shape:
        raise ValueError(
            f"limit_capacity: expected {name} to be of shape {tuple(topk_idx_TK.shape)}, that of "
            f"topk_idx, got {tuple(keys_TK.shape)}"
        )


def _service_order(
    topk_idx_TK: Tensor, keys_TK: Tensor | None, policy: str, num_groups: int
) -> Tensor:
    """Return slots `t * K + k` in the order in which they are served, group by group."""
    num_tokens, top_k = topk_idx_TK.shape
    if num_groups > 1 and num_tokens % num_groups != 0:
        # The whole groups have one size, and the rest is a smaller group.
        size = -(-num_tokens // num_groups)
        whole = num_tokens // size
        cut = whole * size
        even, rest = (None, None) if keys_TK is None else (keys_TK[:cut], keys_TK[cut:])
        first = _service_order(topk_idx_TK[:cut], even, policy, whole)
        last = _service_order(topk_idx_TK[cut:], rest, policy, 1)
        return torch.cat([first, last + cut * top_k])
    shape = (num_groups, num_tokens // num_groups, top_k)
    slots_GSK = torch.arange(num_tokens * top_k, device=topk_idx_TK.device).view(shape)
    if policy == "choice" or keys_TK is None:
        return slots_GSK.transpose(1, 2).reshape(-1)
    keys_GSK = keys_TK.detach().reshape(shape)
    if policy == "batch_prioritized":
        token_GS = keys_GSK.amax(dim=2).argsort(dim=1, descending=True, stable=True)
        slots_GSK = slots_GSK.gather(1, token_GS[:, :, None].expand(-1, -1, top_k))
        return slots_GSK.transpose(1, 2).reshape(-1)
    order_GN = keys_GSK.flatten(1).argsort(dim=1, descending=True, stable=True)
    return slots_GSK.flatten(1).gather(1, order_GN).view(-1)


@torch.library.register_fake("moe_ext::limit_capacity")
def _(topk_idx: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return topk_idx.new_empty(topk_idx.shape), topk_idx.new_empty(())
