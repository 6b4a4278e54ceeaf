"""Plans of even loads: exact shares, few moved experts, the oracle's plan."""

import refusals
import torch

from moe_ext import ops, reference
from moe_ext.ops import BalancePlan

CASES = 3_000


def random_counts(generator, num_ranks, num_experts):
    """Zipf loads, one hot expert, none, or ranks with different numbers of rows."""

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator)

    kind = int(draw(4, 1))
    weight = torch.ones(num_experts)
    if kind == 0:
        places = torch.randperm(num_experts, generator=generator)
        weight = 1 / (1.0 + places) ** float(draw(30, 1) / 10)
    elif kind == 1:
        weight = torch.nn.functional.one_hot(draw(num_experts, 1)[0], num_experts).float()
    rows = draw(200, num_ranks) * (draw(2, num_ranks) if kind == 2 else 1)
    counts = torch.zeros(num_ranks, num_experts, dtype=torch.int64)
    for rank, n in enumerate(rows.tolist() if kind != 3 or draw(2, 1) else []):
        chosen = torch.multinomial(weight, n, True, generator=generator) if n else torch.empty(0)
        counts[rank] = torch.bincount(chosen.long(), minlength=num_experts)
    return counts


def test_every_rank_takes_its_share():
    generator = torch.Generator().manual_seed(0)
    for case in range(CASES):
        num_ranks = 2 + case % 7
        at_home = 1 + case // 7 % 4
        num_experts = num_ranks * at_home
        counts = random_counts(generator, num_ranks, num_experts)
        plan = ops.plan_balance(counts.sum(0), num_ranks)
        n = int(counts.sum())
        share = torch.tensor([n // num_ranks + (p < n % num_ranks) for p in range(num_ranks)])
        assert torch.equal(plan.slot_rows.sum(1), share)
        assert (plan.slot_rows >= 0).all()
        home = torch.arange(num_experts).view(num_ranks, at_home)
        assert torch.equal(plan.slot_expert[:, :at_home], home)
        rows = ops.split_rows(counts, plan)
        assert torch.equal(rows.sum(0), plan.slot_rows.flatten())
        # Slots without an expert have no rows, so that their place in the sum is any.
        by_expert = torch.zeros_like(counts).index_add_(
            1, plan.slot_expert.flatten().clamp(min=0), rows
        )
        assert torch.equal(by_expert, counts)
        if case % 20 == 0:
            wanted = reference.plan_balance(counts.sum(0), num_ranks)
            assert all(map(torch.equal, plan, wanted))
            assert torch.equal(rows, reference.split_rows(counts, wanted))


def test_even_load_moves_nothing_and_rows_stay():
    plan = ops.plan_balance(torch.tensor([3, 5, 8, 0]), 2)
    assert torch.equal(plan.slot_expert[:, 2:], torch.full((2, 2), -1))
    # All rows of the hot expert are on rank 1, which keeps its share of them.
    counts = torch.tensor([[0, 0, 0, 0], [8, 0, 0, 0]])
    plan = ops.plan_balance(counts.sum(0), 2)
    assert plan.slot_expert.tolist() == [[0, 1, -1, -1], [2, 3, 0, -1]]
    assert ops.split_rows(counts, plan)[1].tolist() == [4, 0, 0, 0, 0, 0, 4, 0]


def test_counts_of_another_step_are_shared_in_proportion():
    generator = torch.Generator().manual_seed(1)
    for case in range(200):
        num_ranks = 2 + case % 3
        planned = random_counts(generator, num_ranks, 2 * num_ranks)
        plan = ops.plan_balance(planned.sum(0), num_ranks)
        counts = random_counts(generator, num_ranks, 2 * num_ranks)
        rows = ops.split_rows(counts, plan)
        assert torch.equal(rows, reference.split_rows(counts, plan))
        assert torch.equal(rows.sum(1), counts.sum(1))


REFUSED = {
    "plan_balance": [
        {"num_tokens_per_expert_E": torch.ones(4), "num_ranks": 2},
        ({}, "num_tokens_per_expert to be"),
        (
            {"num_tokens_per_expert_E": torch.ones(4, dtype=torch.int64), "num_ranks": 3},
            "num_ranks to be a divisor of the 4 experts, got 3",
        ),
        (
            {"num_tokens_per_expert_E": torch.tensor([1, -1])},
            "num_tokens_per_expert to be at least 0, got -1 at 1",
        ),
    ],
    "split_rows": [
        {
            "counts_PE": torch.ones(2, 2, dtype=torch.int64),
            "plan": BalancePlan(torch.full((2, 2), 0), torch.ones(2, 2, dtype=torch.int64)),
        },
        (
            {"plan": BalancePlan(torch.full((2, 2), 5), torch.ones(2, 2, dtype=torch.int64))},
            "slot_expert to be below 2, got 5",
        ),
        ({}, "slot_expert to name every expert with rows, got none for 1"),
        (
            {"counts_PE": torch.ones(2, 4, dtype=torch.int64)},
            "slot_expert to have two slots for each of the 4 experts",
        ),
    ],
}
test_errors = refusals.test(REFUSED)


def test_fakes():
    counts = torch.tensor([[1, 2], [3, 4]])
    torch.library.opcheck(torch.ops.moe_ext.plan_balance, (counts.sum(0), 2))
    torch.library.opcheck(
        torch.ops.moe_ext.split_rows, (counts, *ops.plan_balance(counts.sum(0), 2))
    )
