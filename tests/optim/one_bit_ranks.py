"""Parameters, gradients and comparisons that tests of optimizers share, over ranks or not."""

import functools

import torch
import torch.distributed as dist
from torch import nn

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


def gathered(tensor, group=None):
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.detach().contiguous(), group=group)
    return found


def assert_equal_on_ranks(params, group=None):
    for p in params:
        first, *others = gathered(p, group)
        assert all(torch.equal(first, other) for other in others)


def total(tensor, group=None):
    return torch.stack(gathered(tensor.double(), group)).sum(0)


def owed(optimizer):
    """What this rank owes, over all parameters in a row."""
    return torch.cat([mean.errors() for mean in optimizer._means])


def assert_same(a, b):
    """Nested values with tensors of the same bits."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), set(a) ^ set(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b
