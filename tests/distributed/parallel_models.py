"""A model with expert-parallel layers, and its gradients in one process."""

import functools

import torch
import torch.distributed as dist
from rank_checks import full
from torch import nn

import moe_ext
from moe_ext import distributed as md

E = 8
TIGHT = {"rtol": 1e-11, "atol": 1e-13}


class Model(nn.Module):
    """Two MoE layers between dense ones, a branch for odd ranks, and one that nobody uses."""

    def __init__(self, ep_group, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(6, 8)
        self.first = moe_ext.MoELayer(8, 6, E, 2, ep_group=ep_group, shared_expert=4, bias=True)
        self.second = moe_ext.MoELayer(
            8, 6, E, 1, ep_group=ep_group, balance=moe_ext.nn.Balance(z_coef=0.1)
        )
        self.out = nn.Linear(8, 3)
        self.branch = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)
        self.double()

    def forward(self, x, branch=False):
        h = self.second(self.first(self.inp(x)))
        return self.out(h) + self.branch(h) if branch else self.out(h)


@functools.cache
def mesh(ep):
    return md.MoEMesh(dp=dist.get_world_size() // ep, ep=ep)


def batches(steps=1):
    """Uneven batches, `[step][rank]`."""
    generator = torch.Generator().manual_seed(11)
    ranks = dist.get_world_size()
    return [
        [torch.randn(3 + 2 * r, 6, dtype=torch.float64, generator=generator) for r in range(ranks)]
        for _ in range(steps)
    ]


def loss_of(model, x, branch=False):
    return model(x, branch).square().mean()


def one_process(steps=1, branch=False):
    """Gradients of the mean over ranks and steps of the local losses, in one process."""
    model = Model(None)
    for parameter, grad in zip(model.parameters(), _gradients(steps, branch), strict=True):
        parameter.grad = None if grad is None else grad.clone()
    return model


@functools.cache
def _gradients(steps, branch):
    model = Model(None)
    ranks = dist.get_world_size()
    moe_ext.nn.set_loss_scale(model, 1.0 / (ranks * steps))
    for step in batches(steps):
        for rank, x in enumerate(step):
            (loss_of(model, x, branch and rank % 2 == 1) / (ranks * steps)).backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_same_gradients(model, want, ep):
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
            continue
        found = full(p.grad)
        torch.testing.assert_close(found, q.grad, msg=lambda m, n=name: f"{n}: {m}", **TIGHT)


def run_steps(model, steps=1, branch=False):
    moe_ext.nn.set_loss_scale(model, 1.0 / steps)
    rank = dist.get_rank()
    for step in batches(steps):
        (loss_of(model, step[rank], branch and rank % 2 == 1) / steps).backward()
