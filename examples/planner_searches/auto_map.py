"""Auto-MAP: deep Q-learning of options, one operator after the other.

Paper: Wang et al., "Auto-MAP" (arXiv:2007.04069)
Class: learned; the paper's groups of linked operators are left out
Complexity: n passes of a small network an episode, and one step of learning
"""

from __future__ import annotations

import copy
import random

import torch
from torch import nn

from planner_searches.problem import Choice, Problem


def search(problem: Problem, *, episodes: int = 100, seed: int = 0) -> Choice:
    """The best choice of all episodes, the last of which follows the network alone.

    Args:
        problem: of shardings, with equally many options of each operator; what a choice adds to
            the cost is what it loses. No look at memory.
        episodes: of choosing for all operators; random choices become fewer.
        seed: of the network and of the choices.

    Raises:
        ValueError: operators have unlike numbers of options.
    """
    num_nodes, num_options = len(problem.seconds), problem.num_options
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(num_nodes * (num_options + 1), 32), nn.ReLU(), nn.Linear(32, num_options)
        )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    # A state: which operator has which option, and which is next.
    states = torch.zeros(episodes, num_nodes + 1, num_nodes, num_options + 1)
    actions = torch.zeros(episodes, num_nodes, dtype=torch.int64)
    rewards = torch.zeros(episodes, num_nodes)
    best, target = problem.choice([0] * num_nodes), copy.deepcopy(network)
    scale = sum(map(max, problem.seconds)) / num_nodes
    for episode in range(episodes):
        epsilon = 1.0 - (episode + 1) / episodes
        state = states[episode]
        for i in range(num_nodes):
            state[i, i, num_options] = 1.0
            with torch.no_grad():
                greedy = int(network(state[i].flatten()).argmax())
            action = draw.randrange(num_options) if draw.random() < epsilon else greedy
            actions[episode, i] = action
            edges = (table[actions[episode, j]][action] for j, table in problem.inputs[i])
            rewards[episode, i] = -(problem.seconds[i][action] + sum(edges)) / scale
            state[i + 1 :, i, action] = 1.0
        found = problem.choice(actions[episode].tolist())
        best = min(best, found, key=lambda choice: choice.cost)
        if episode % 10 == 0:
            target = copy.deepcopy(network)
        batch = [draw.randrange(episode + 1) for _ in range(min(16, episode + 1))]
        with torch.no_grad():
            goal = rewards[batch]
            goal[:, :-1] += target(states[batch, 1:num_nodes].flatten(2)).amax(-1)
        value = network(states[batch, :num_nodes].flatten(2))
        loss = nn.functional.mse_loss(value.gather(2, actions[batch][..., None])[..., 0], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return best
