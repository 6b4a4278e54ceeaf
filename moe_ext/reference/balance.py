"""Plans of balance in plain Python.

Shape suffixes: P ranks, E experts, S = 2 E / P slots of a rank.
"""

import torch
from torch import Tensor

from moe_ext.ops.balance import BalancePlan


def plan_balance(num_tokens_per_expert_E: Tensor, num_ranks: int) -> BalancePlan:
    """Same as `moe_ext.ops.plan_balance`."""
    load = num_tokens_per_expert_E.tolist()
    num_experts, num_rows = len(load), sum(load)
    at_home = num_experts // num_ranks
    home = [e // at_home for e in range(num_experts)]
    share = [num_rows // num_ranks + (p < num_rows % num_ranks) for p in range(num_ranks)]
    capacity = [
        share[home[e]] // at_home + (e % at_home < share[home[e]] % at_home)
        for e in range(num_experts)
    ]
    excess = [load[e] - capacity[e] for e in range(num_experts)]
    of_rank = [sum(excess[p * at_home : (p + 1) * at_home]) for p in range(num_ranks)]
    table: list[dict[int, int]] = [{e: load[e]} for e in range(num_experts)]

    def fill(low: list[int], high: list[int]) -> None:
        # Experts are taken from the front of both lists.
        while low and high:
            to, source = low.pop(0), high[0]
            amount = -excess[to]
            table[to][source] = amount
            table[source][source] -= amount
            excess[to], excess[source] = 0, excess[source] - amount
            if excess[source] <= 0:
                high.pop(0)
            if excess[source] < 0:
                low.insert(0, source)

    lows: list[int] = []
    highs: list[int] = []
    for rank in range(num_ranks):
        own = range(rank * at_home, (rank + 1) * at_home)
        low, high = [e for e in own if excess[e] < 0], [e for e in own if excess[e] > 0]
        fill(low, high)
        lows += low
        highs += high
    highs.sort(key=lambda e: (-of_rank[home[e]], home[e], -excess[e], e))
    fill(lows, highs)
    slot_expert = torch.full((num_ranks, 2 * at_home), -1)
    slot_rows = torch.zeros((num_ranks, 2 * at_home), dtype=torch.int64)
    for rank in range(num_ranks):
        own = range(rank * at_home, (rank + 1) * at_home)
        found = dict.fromkeys(own, 0)
        for column in own:
            for e, amount in table[column].items():
                found[e] = found.get(e, 0) + amount
        experts = [*own, *sorted(e for e in found if e not in own)]
        slot_expert[rank, : len(experts)] = torch.tensor(experts)
        slot_rows[rank, : len(experts)] = torch.tensor([found[e] for e in experts])
    return BalancePlan(slot_expert, slot_rows)


def split_rows(counts_PE: Tensor, plan: BalancePlan) -> Tensor:
    """Same as `moe_ext.ops.split_rows`."""
    num_ranks, num_experts = counts_PE.shape
    num_slots = plan.slot_expert.shape[1]
    expert, planned = plan.slot_expert.flatten().tolist(), plan.slot_rows.flatten().tolist()
    rows = torch.zeros((num_ranks, num_ranks * num_slots), dtype=torch.int64)
    for e in range(num_experts):
        places = [place for place in range(len(expert)) if expert[place] == e]
        left, total = counts_PE[:, e].tolist(), int(counts_PE[:, e].sum())
        whole = sum(planned[place] for place in places)
        upto, room = [0], {}
        for place in places:
            upto.append(upto[-1] + planned[place])
            room[place] = upto[-1] * total // max(1, whole) - upto[-2] * total // max(1, whole)
        if whole == 0 and places:
            room[places[0]] = total
        pairs = [(place // num_slots, place) for place in places]
        pairs += [(rank, place) for rank in range(num_ranks) for place in places]
        for rank, place in pairs:
            sent = min(left[rank], room[place])
            rows[rank, place] += sent
            left[rank] -= sent
            room[place] -= sent
    return rows
