"""Compressed messages of FSDP2 for models whose experts are spread over ranks."""

import functools
import math
import operator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from fsdp_checks import (
    Model,
    assert_a_pass_is_not_finite,
    assert_nothing_is_lost,
    backward,
    is_compressed,
    owed,
)
from rank_checks import Checks
from torch import nn
from torch.distributed.fsdp import fully_shard

import moe_ext
from moe_ext import distributed as md
from moe_ext.compression.fsdp import zero_plus_plus
from moe_ext.testing import spawn_ranks

CHECKS = Checks()


def wrapped(dp, ep, each_a_module=False):
    mesh = md.MoEMesh(dp=dp, ep=ep)
    model = Model(ep_group=mesh.ep_group)
    if each_a_module:
        for block in model.blocks:
            experts = [nn.Linear(64, 64) for _ in range(4 // ep)]
            block.moe.experts = moe_ext.nn.ModuleExperts(experts, ep_group=mesh.ep_group)
    for block in model.blocks:
        if ep == 1:
            # Residuals are saved by the modules that are wrapped.
            fully_shard(block.moe.experts, mesh=mesh.replica_mesh)
        md.fully_shard(block, mesh)
    return md.fully_shard(model, mesh)


def coded(dp, ep, each_a_module=False):
    model = wrapped(dp, ep, each_a_module)
    return model, zero_plus_plus(model, zero_quantized_gradients=True, error_feedback=True)


@CHECKS((2, 2), (1, 4))
def nothing_is_lost(dp, ep):
    # One rank sends nothing that could be rounded.
    def is_owed(name):
        return is_compressed(name) and (dp > 1 or "experts" not in name)

    assert_nothing_is_lost(*coded(dp, ep), is_owed=is_owed)


@CHECKS()
def what_is_not_finite_is_told_to_all():
    model, compression = coded(2, 2)
    backward(model, 0)
    assert compression.finite()
    assert_a_pass_is_not_finite(model, compression, 1, 3, math.inf)


@CHECKS()
def nodes_are_refused():
    with pytest.raises(ValueError, match="expected node_group to be None where experts are spread"):
        zero_plus_plus(wrapped(2, 2), node_group=dist.group.WORLD)


test_over_four_ranks = CHECKS.test(4)


def save(rank, folder):
    found = []
    for each_a_module in (False, True):
        model, compression = coded(2, 2, each_a_module)
        backward(model, 0)
        saved = {"compression": compression.state_dict()}
        checkpoint.save(saved, checkpoint_id=folder / str(each_a_module))
        found.append(owed(compression))
    return found


def load(rank, folder):
    found = []
    for each_a_module in (False, True):
        model, compression = coded(2, 1, each_a_module)
        backward(model, 0)
        state = compression.state_dict()
        checkpoint.load({"compression": state}, checkpoint_id=folder / str(each_a_module))
        compression.load_state_dict(state)
        found.append(owed(compression))
    return found


def test_what_is_owed_on_another_number_of_ranks(tmp_path):
    """Experts are stacked, or a module each."""
    saved, loaded = spawn_ranks(save, 4, tmp_path), spawn_ranks(load, 2, tmp_path)
    for each_a_module in (False, True):
        of_ranks = [rank[each_a_module] for rank in saved]
        # Experts that are a module each have names of their own on the ranks that hold them.
        want = functools.reduce(operator.or_, of_ranks)
        assert (len(of_ranks[0]) < len(want)) == each_a_module
        for found in loaded:
            assert found[each_a_module].keys() == want.keys()
            for name, tensor in want.items():
                torch.testing.assert_close(found[each_a_module][name], tensor, rtol=1e-6, atol=0)
