"""The rollout worker of examples/rl_weight_sync.py follows its trainer, by few bytes."""

import rl_weight_sync

from moe_ext.testing import spawn_ranks


def run(rank):
    return rl_weight_sync.train(3, 1e-6)


def test_the_worker_follows():
    """The example compares outputs at each step; a dense update has 394 KB."""
    trainer, worker = spawn_ranks(run, 2)
    assert trainer == worker and len(trainer) == 3
    assert all(0 < sent < 394_000 / 50 for sent in trainer)
