"""Replicas of experts for measured loads: the placement of DeepSeek's EPLB.

Shape suffixes: L layers, E experts, R replicas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._checks import check_rule


def rebalance_experts(
    weight: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts to replicate, and the places of replicas, for even loads of the GPUs.

    Groups of experts are packed to nodes. Experts with the largest load per replica are replicated
    within their node. The replicas are packed to the GPUs of the node. Packing takes the largest
    first, and puts each into the least loaded pack with room. If the number of nodes does not
    divide the number of groups, groups are ignored.

    Args:
        weight: `[L, E]` loads of the experts, such as sums of `num_tokens_per_expert`.
        num_replicas: R, a multiple of `num_gpus`.
        num_groups: number of groups of experts; a group stays on one node.
        num_nodes: number of nodes.
        num_gpus: number of GPUs, a multiple of `num_nodes`.

    Returns:
        `phy2log [L, R]` int64, the expert of each replica, in the order of GPUs; `log2phy [L, E,
        X]`, the replicas of each expert, then -1; `logcnt [L, E]`, the number of its replicas.

    Raises:
        ValueError: the numbers do not divide each other, or there are fewer replicas than experts.

    Determinism: ties of loads go to the lower index.

    Reference: EPLB, deepseek-ai/EPLB (2025), whose signature and results these are.
    """
    if weight.dim() != 2:
        raise ValueError(
            f"rebalance_experts: expected weight to be [L, E], got {tuple(weight.shape)}"
        )
    load_LE = weight.float().cpu()
    num_experts = load_LE.shape[1]
    if num_nodes < 1 or num_groups < 1 or num_groups % num_nodes:
        num_groups = num_nodes = 1
    for name, value, divisor in (
        ("weight.shape[1]", num_experts, num_groups),
        ("num_gpus", num_gpus, num_nodes),
        ("num_replicas", num_replicas, num_gpus),
    ):
        fits = divisor > 0 and value % divisor == 0
        check_rule("rebalance_experts", name, value, f"a multiple of {divisor}", fits)
    fits, rule = num_replicas >= num_experts, f"at least {num_experts}"
    check_rule("rebalance_experts", "num_replicas", num_replicas, rule, fits)
    # All tensors are made on the host, whatever torch's default device is.
    with torch.device("cpu"):
        return _placed(load_LE, num_replicas, num_groups, num_nodes, num_gpus)


def _placed(
    load_LE: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_layers, num_experts = load_LE.shape
    group_size = num_experts // num_groups
    order_LG = _pack(load_LE.unflatten(1, (num_groups, group_size)).sum(-1), num_nodes)
    within = torch.arange(group_size)
    # `order_LE` lists experts by node, and `experts_ME` has a row for each node of each layer.
    order_LE = (order_LG[:, :, None] * group_size + within).flatten(1)
    experts_ME = order_LE.view(num_layers * num_nodes, -1)
    load_ME = load_LE.gather(1, order_LE).view_as(experts_ME)
    choice_MR, nth_MR, count_ME = _replicate(load_ME, num_replicas // num_nodes)
    share_MR = (load_ME / count_ME).gather(1, choice_MR)
    order_MR = _pack(share_MR, num_gpus // num_nodes)
    phy2log = experts_ME.gather(1, choice_MR.gather(1, order_MR)).view(num_layers, -1)
    nth_LR = nth_MR.gather(1, order_MR).view(num_layers, -1)
    logcnt = torch.empty_like(order_LE).scatter_(1, order_LE, count_ME.view(num_layers, -1))
    most = int(logcnt.max()) if logcnt.numel() else 0
    log2phy = torch.full((num_layers, num_experts * most), -1)
    replicas_LR = torch.arange(num_replicas).expand(num_layers, -1)
    log2phy.scatter_(1, phy2log * most + nth_LR, replicas_LR)
    return phy2log, log2phy.view(num_layers, num_experts, most), logcnt


def _pack(load_XN: Tensor, num_packs: int) -> Tensor:
    """Pack items, largest first, each into the lightest pack with room; list them by pack."""
    size = load_XN.shape[1] // num_packs
    if size == 1:
        return torch.arange(num_packs).expand(load_XN.shape)
    order = torch.empty(load_XN.shape, dtype=torch.int64)
    for row, items in enumerate(load_XN.sort(-1, descending=True).indices.tolist()):
        packs: list[list[int]] = [[] for _ in range(num_packs)]
        # Sums are float32, like the loads. Sums of Python numbers could lead to other packs.
        sums = [load_XN.new_zeros(()) for _ in range(num_packs)]
        for item in items:
            free = [p for p in range(num_packs) if len(packs[p]) < size]
            lightest = min(free, key=sums.__getitem__)
            packs[lightest].append(item)
            sums[lightest] = sums[lightest] + load_XN[row, item]
        order[row] = torch.tensor([item for pack in packs for item in pack])
    return order


def _replicate(load_XN: Tensor, num_replicas: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the item of each replica, its index among those of the item, and their numbers."""
    num_rows, num_items = load_XN.shape
    count = torch.ones((num_rows, num_items), dtype=torch.int64)
    items = [torch.arange(num_items).expand(num_rows, -1)]
    nth = [torch.zeros((num_rows, num_items), dtype=torch.int64)]
    for _ in range(num_items, num_replicas):
        most = (load_XN / count).max(dim=1, keepdim=True).indices
        items.append(most)
        nth.append(count.gather(1, most))
        count.scatter_add_(1, most, torch.ones_like(most))
    return torch.cat(items, dim=1), torch.cat(nth, dim=1), count
