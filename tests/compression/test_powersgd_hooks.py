"""PowerSGD behind the hook of DDP and in a loop, with the policy's exceptions."""

import copy
import math

import pytest
import torch
from fsdp_checks import Model, is_compressed, local_gradients, loss_of
from torch.nn.parallel import DistributedDataParallel

from moe_ext.compression import CompressionState, compress_gradients, compress_hook
from moe_ext.compression.powersgd import PowerSGD
from moe_ext.testing import spawn_ranks


def made(model):
    return CompressionState(model=model, codec=PowerSGD(2), nonfinite="propagate")


def conserve_behind_ddp():
    model = Model()
    ddp, state = DistributedDataParallel(model, bucket_cap_mb=0.05), made(model)
    ddp.register_comm_hook(state, compress_hook)
    applied, want = {}, {}
    for step in range(4):
        model.zero_grad()
        # Buckets are built anew after the first step.
        loss_of(ddp, step).backward()
        if step == 2:
            before = state.state_dict()["memory"]["residual"]
            model.zero_grad()
            (loss_of(ddp, step) * math.nan).backward()
            after = state.state_dict()["memory"]["residual"]
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
            continue
        for name, p in model.named_parameters():
            applied[name] = applied.get(name, 0) + p.grad.double()
            grads = [local_gradients(step, rank)[name].double() for rank in range(2)]
            want[name] = want.get(name, 0) + sum(grads) / 2
    return applied, want, state.state_dict()["memory"]["residual"]


def resume_in_a_loop():
    def steps(model, state, numbers):
        for step in numbers:
            model.zero_grad()
            loss_of(model, step).backward()
            compress_gradients(model, state)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad

    model = Model()
    state = made(model)
    steps(model, state, range(3))
    other, saved = copy.deepcopy(model), copy.deepcopy(state.state_dict())
    resumed = made(other)
    resumed.load_state_dict(saved)
    steps(model, state, range(3, 5))
    steps(other, resumed, range(3, 5))
    return all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def both(rank):
    return conserve_behind_ddp(), resume_in_a_loop()


def test_powersgd_behind_hooks():
    found = spawn_ranks(both, 2)
    (applied, want, residual), _ = found[0]
    other = found[1][0][2]
    for name, total in want.items():
        owed = (residual[name] + other[name]).double() / 2 if name in residual else 0
        # The gradients of the step that was NaN were dropped; those before it were applied.
        assert torch.equal(applied[name], found[1][0][0][name]), name
        if not is_compressed(name):
            assert (applied[name] - total).abs().max() < 1e-5, name
        else:
            assert torch.as_tensor(owed).abs().max() > 0, name
    assert found[0][1] and found[1][1]


def test_names():
    assert CompressionState(codec="powersgd") is not None
    with pytest.raises(ValueError, match="expected rank to be at least 1"):
        PowerSGD(0)
