"""A rank that is lost while gradients are reduced."""

import os

import pytest
from fsdp_checks import assert_same, backward, loss_of, mesh, wrapped

from moe_ext.compression import zero_plus_plus
from moe_ext.distributed import RankFailureError
from moe_ext.testing import spawn_ranks


def lose_a_rank(rank):
    # Gathered weights stay, so that the backward pass sends gradients alone.
    model = wrapped(mesh(), reshard_after_forward=False)
    compression = zero_plus_plus(model, zero_quantized_gradients=True, error_feedback=True)
    backward(model, 0)
    before = compression.state_dict(sharded=False)["residuals"]
    assert any(part for part in before.values())
    loss = loss_of(model, 1)
    if rank == 1:
        os._exit(1)
    with pytest.raises(RankFailureError, match="rank 1"):
        loss.backward()
    after = compression.state_dict(sharded=False)["residuals"]
    for name, part in before.items():
        assert_same(after[name], part)
    return True


def test_a_lost_rank_is_named_and_residuals_stay():
    assert spawn_ranks(lose_a_rank, 2, may_die=(1,), group_timeout=10.0) == [True, None]
