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
    assert_same,
    backward,
    is_compressed,
    local_gradients,
    poisoned_backward,
    whole,
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


def gradients(model):
    """Those of all experts."""
    return whole((name, parameter.grad) for name, parameter in model.named_parameters())


def owed(compression):
    found = {}
    for tensors in compression.state_dict()["residuals"].values():
        found.update(whole(tensors.items()))
    return found


def of_one_process(steps):
    """Sum over steps of the mean over ranks."""
    total = {}
    for step in steps:
        for rank in range(4):
            for name, grad in local_gradients(step, rank).items():
                total[name] = total.get(name, 0) + grad.double() / 4
    return total


@CHECKS((2, 2), (1, 4))
def without_a_format_nothing_changes(dp, ep):
    plain, model = wrapped(dp, ep), wrapped(dp, ep)
    zero_plus_plus(
        model,
        zero_quantized_weights=True,
        zero_quantized_gradients=True,
        weight_format="none",
        gradient_format="none",
    )
    for one in (plain, model):
        backward(one, 0)
    assert_same(gradients(model), gradients(plain))


def train(model, compression, steps):
    applied = {}
    for step in steps:
        backward(model, step)
        assert compression.finite()
        for name, grad in gradients(model).items():
            applied[name] = applied.get(name, 0) + grad.double()
    return applied


@CHECKS((2, 2), (1, 4))
def nothing_is_lost(dp, ep):
    model = wrapped(dp, ep)
    compression = zero_plus_plus(model, zero_quantized_gradients=True, error_feedback=True)
    applied, left = train(model, compression, range(2)), owed(compression)
    want = of_one_process(range(2))
    # One rank sends nothing that could be rounded.
    assert left.keys() == {n for n in want if is_compressed(n) and (dp > 1 or "experts" not in n)}
    for name, total in want.items():
        found = applied[name] + left.get(name, 0)
        # float32: sums of some hundred terms.
        assert (found - total).abs().max() <= 1e-6 * (1 + total.abs().max()), name
        if name in left:
            assert (applied[name] - total).abs().max() > 1e-5 * total.abs().max(), name


@CHECKS()
def what_is_not_finite_is_told_to_all():
    model = wrapped(2, 2)
    compression = zero_plus_plus(model, zero_quantized_gradients=True, error_feedback=True)
    backward(model, 0)
    assert compression.finite()
    before = owed(compression)
    poisoned_backward(model, 1, 3, math.inf)
    assert not compression.finite()
    assert_same(owed(compression), before)


@CHECKS()
def nodes_are_refused():
    with pytest.raises(ValueError, match="expected node_group to be None where experts are spread"):
        zero_plus_plus(wrapped(2, 2), node_group=dist.group.WORLD)


@pytest.mark.parametrize("name", CHECKS)
def test_over_four_ranks(name):
    CHECKS.assert_passed(4, name)


def coded(dp, ep, each_a_module):
    model = wrapped(dp, ep, each_a_module)
    return model, zero_plus_plus(model, zero_quantized_gradients=True, error_feedback=True)


def save(rank, folder, each_a_module):
    model, compression = coded(2, 2, each_a_module)
    train(model, compression, range(2))
    checkpoint.save(compression.state_dict()["residuals"], checkpoint_id=folder)
    return owed(compression)


def load(rank, folder, dp, ep, each_a_module):
    model, compression = coded(dp, ep, each_a_module)
    backward(model, 0)
    state = compression.state_dict()
    checkpoint.load(state["residuals"], checkpoint_id=folder)
    compression.load_state_dict(state)
    return owed(compression)


@pytest.mark.parametrize("each_a_module", [False, True])
def test_what_is_owed_on_another_number_of_ranks(tmp_path, each_a_module):
    saved = spawn_ranks(save, 4, tmp_path, each_a_module)
    # Experts that are a module each have names of their own on the ranks that hold them.
    want = functools.reduce(operator.or_, saved)
    assert (len(saved[0]) < len(want)) == each_a_module
    for found in spawn_ranks(load, 2, tmp_path, 2, 1, each_a_module):
        assert found.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=0)
