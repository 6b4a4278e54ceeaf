"""Parameters, gradients and comparisons that tests of optimizers share, over ranks or not."""

import functools
import inspect

import torch
import torch.distributed as dist
from rank_checks import of_ranks
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_ext import optim

BLOCK = 64
MAKERS = {
    "OneBitAdam": functools.partial(
        optim.OneBitAdam, freeze_step=3, block=BLOCK, variance_interval=1
    ),
    "OneBitLamb": functools.partial(optim.OneBitLamb, freeze_step=3, block=BLOCK),
    "ZeroOneAdam": functools.partial(
        optim.ZeroOneAdam,
        var_freeze_step=5,
        var_update_scaler=2,
        local_step_scaler=3,
        local_step_clipper=4,
        block=BLOCK,
    ),
}
# All of the package, by name.
OPTIMIZERS = {
    name: cls
    for name, cls in vars(optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
}
SHAPES = [(9, 20), (70,), (3, 5, 64), (0, 3), (1,)]


def muon(params, **kw):
    """Muon for matrices and stacks of them; vectors take the steps of AdamW."""
    groups = [
        {"params": [p for p in params if (p.dim() > 1) == is_matrix], "use_muon": is_matrix}
        for is_matrix in (True, False)
    ]
    return optim.Muon(groups, lr=0.05, **kw)


def drawn_parameters(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


parameters = functools.partial(drawn_parameters, SHAPES)


# Every rank has the whole tensor: no message is needed.
spread = functools.partial(distribute_tensor, src_data_rank=None)


def placed(mesh, place, params):
    """DTensors of the values of parameters, placed as a function says of each."""
    return [nn.Parameter(spread(p.detach(), mesh, place(p))) for p in params]


def as_parameter(grad, p):
    """A whole gradient as the parameter is placed."""
    return spread(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def rank_gradient(shape, step, rank, index):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(shape, generator=generator)


def give(params, step, rank):
    for index, p in enumerate(params):
        p.grad = rank_gradient(p.shape, step, rank, index).to(p.dtype)


def run(optimizer, params, steps, rank=None):
    for step in steps:
        give(params, step, dist.get_rank() if rank is None else rank)
        optimizer.step()


def assert_equal_on_ranks(params, group=None):
    for p in params:
        first, *others = of_ranks(p, group)
        assert all(torch.equal(first, other) for other in others)


def total(tensor, group=None):
    return torch.stack(of_ranks(tensor.double(), group)).sum(0)


def owed(optimizer):
    """What this rank owes, over all parameters in a row."""
    return torch.cat([mean.errors() for mean in optimizer._means])
