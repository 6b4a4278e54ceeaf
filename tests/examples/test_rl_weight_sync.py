"""The rollout worker of examples/rl_weight_sync.py follows its trainer, by few bytes."""

import pytest
import rl_weight_sync

from moe_ext.testing import spawn_ranks


def run(rank):
    return rl_weight_sync.train(3, 1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_workers_follow(num_ranks):
    """The example compares outputs at each step; a dense update has 394 KB."""
    trainer, *workers = spawn_ranks(run, num_ranks)
    assert workers == [trainer] * (num_ranks - 1) and len(trainer) == 3
    assert all(0 < sent < 394_000 / 50 for sent in trainer)
