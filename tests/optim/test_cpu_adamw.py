"""AdamW on the CPU against torch's in float64, its states, and what it refuses."""

import functools

import pytest
import torch
from one_bit_ranks import drawn_parameters
from torch import nn

from moe_ext import optim
from moe_ext.testing import spawn_ranks

OPTIONS = {"lr": 0.05, "betas": (0.8, 0.99), "weight_decay": 0.1}
parameters = functools.partial(drawn_parameters, [(4, 3), (5,), (2, 3, 4), (0, 3)])


def trained(optimizer, params, steps, factor=1.0, first=0, **options):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = factor * torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step(**options)
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch_in_float64(dtype):
    ours, theirs = parameters(dtype), [nn.Parameter(p.detach().double()) for p in parameters(dtype)]
    optimizer = optim.CPUAdamW(ours, **OPTIONS)
    # A factor of the gradients is taken inside the step: another one in each, or it would cancel.
    for step, factor in enumerate((4.0, 0.5, 16.0, 1.0)):
        trained(optimizer, ours, 1, factor=factor, first=step, grad_scale=1 / factor)
    generators = [torch.Generator().manual_seed(step) for step in range(4)]
    adamw = torch.optim.AdamW(theirs, **OPTIONS)
    for generator in generators:
        for p in theirs:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype).double()
        adamw.step()
    for p, q in zip(ours, theirs, strict=True):
        master = optimizer.state[p].get("master", p.detach())
        assert master.dtype == torch.float32
        # Four steps of some dozen roundings each, of numbers below 4.
        torch.testing.assert_close(master.double(), q.detach(), rtol=0, atol=4 * 12 * 4 * 2**-24)
        assert torch.equal(p.detach(), master.to(dtype))


def test_counts_its_steps_under_another_default_dtype():
    (p,) = drawn_parameters([(1,)], torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = optim.CPUAdamW([p], **OPTIONS)
        trained(optimizer, [p], 258)
    finally:
        torch.set_default_dtype(torch.float32)
    assert int(optimizer.state[p]["step"]) == 258  # bfloat16 has no number between 256 and 258


def test_goes_on_from_a_state_of_torch():
    params = parameters(torch.float32)
    theirs = torch.optim.AdamW(params, **OPTIONS, fused=True)
    trained(theirs, params, 2)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    ours = optim.CPUAdamW(others)
    ours.load_state_dict(theirs.state_dict())
    trained(theirs, params, 1, first=2)
    trained(ours, others, 1, first=2)
    torch.testing.assert_close(params, others, rtol=0, atol=12 * 4 * 2**-24)


def shards(rank):
    """Uneven ones of rows, whose steps are those of the whole tensors."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, whole = init_device_mesh("cpu", (2,)), parameters(torch.bfloat16)
    parts = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
    of_whole, of_parts = (optim.CPUAdamW(params, **OPTIONS) for params in (whole, parts))
    for step in range(2):
        trained(of_whole, whole, 1, first=step)
        for p, q in zip(whole, parts, strict=True):
            q.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
        of_parts.step()
    return all(torch.equal(p, q.full_tensor()) for p, q in zip(whole, parts, strict=True))


def test_shards():
    assert all(spawn_ranks(shards, 2))


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), r"got torch.float64 of strides \(1,\) for parameter"),
        (torch.zeros(3, 4).t(), r"expected parameters to be contiguous in .*strides \(1, 4\)"),
    ],
)
def test_refuses_parameters(parameter, message):
    optimizer = optim.CPUAdamW(parameters(torch.float32))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(parameter)]})
    assert len(optimizer.param_groups) == 1
