"""REINFORCE: a policy of placements is drawn from, and moved towards what was quick.

Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning"
(arXiv:1706.04972)
Class: learned; the paper's recurrent policy is an independent softmax for each operator here
Complexity: `draws` costs a step
"""

from __future__ import annotations

import torch

from planner_searches.problem import Choice, Problem


def search(
    problem: Problem, *, steps: int = 100, draws: int = 16, rate: float = 0.3, seed: int = 0
) -> Choice:
    """The best placement drawn.

    Args:
        problem: whose operators have equally many options; each has to fit.
        steps: of the policy.
        draws: placements a step; the mean of their costs over time is the baseline.
        rate: of learning.
        seed: of the draws.

    Raises:
        ValueError: operators have unlike numbers of options.
    """
    draw = torch.Generator().manual_seed(seed)
    logits = torch.zeros(len(problem.seconds), problem.num_options)
    best, baseline = problem.choice([0] * len(logits)), None
    for _ in range(steps):
        policy = logits.softmax(1)
        drawn = torch.multinomial(policy, draws, True, generator=draw).T
        costs = [problem.cost(row) for row in drawn.tolist()]
        i = costs.index(min(costs))
        if costs[i] < best.cost:
            best = Choice(tuple(drawn[i].tolist()), costs[i])
        # A choice that does not fit counts as twice the best.
        cost = torch.tensor(costs).clamp(max=2 * best.cost)
        baseline = cost.mean() if baseline is None else 0.9 * baseline + 0.1 * cost.mean()
        advantage = (baseline - cost) / best.cost
        towards = torch.nn.functional.one_hot(drawn, logits.shape[1]) - policy
        logits += rate * (advantage[:, None, None] * towards).sum(0)
    return best
