"""Optimizers: parameters and state after some steps."""

import torch
from golden.cases import case, gradient, numbers
from torch import nn

from moe_ext import ops, optim

SHAPES = [(9, 20), (70,), (3, 5, 64), (1,)]


def run(make, steps, rank=0):
    params = [nn.Parameter(numbers(("p", i), *shape)) for i, shape in enumerate(SHAPES)]
    optimizer, found = make(params), {}
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = gradient((i, step, rank), *p.shape)
        optimizer.step()
        found[f"step_{step}"] = [p.detach().clone() for p in params]
    found["state"] = getattr(optimizer, "rank_state_dict", optimizer.state_dict)()["state"]
    if hasattr(optimizer, "flush"):
        optimizer.flush()
        found["flushed"] = params
    return found


def experts_apart(params, kind, **options):
    groups = [
        {"params": [p for p in params if p.dim() < 3], "weight_decay": 0.0},
        {"params": [p for p in params if p.dim() == 3], "per_expert": True},
    ]
    return kind(groups, **options)


LOCAL = {
    "lamb": lambda p: optim.LAMB(p, lr=0.05),
    "lamb_by_expert": lambda p: experts_apart(p, optim.LAMB, lr=0.05, weight_decay=0.1),
    "lamb_plain": lambda p: optim.LAMB(
        p, lr=0.05, adapt=False, bias_correction=False, maximize=True
    ),
    "lars": lambda p: optim.LARS(p, lr=0.5, weight_decay=0.01),
    "lars_by_expert": lambda p: experts_apart(p, optim.LARS, lr=0.5, nesterov=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "adafactor_by_expert": lambda p: experts_apart(p, optim.Adafactor, lr=0.05, foreach=True),
}


@case(("float32", None), ("bfloat16", "bfloat16"), ("float16", "float16"), exact=True)
def adam_step(kind, copied):
    param, m, v = numbers("adam", 1000), torch.zeros(1000), torch.zeros(1000)
    copy = torch.empty(1000, dtype=getattr(torch, copied)) if copied else None
    for step in (1, 2, 3):
        grad = gradient(("adam", step), 1000, dtype=getattr(torch, kind))
        ops.adam_step_(param, grad, m, v, step=step, lr=0.05, grad_scale=0.7, copy=copy)
    return param, m, v, copy


@case(*[(name,) for name in LOCAL])
def optimizer(name):
    return run(LOCAL[name], 5)


ONE_BIT = {
    "one_bit_adam": lambda p: optim.OneBitAdam(
        p, lr=0.05, freeze_step=2, block=64, variance_interval=2, weight_decay=0.1
    ),
    "one_bit_adam_bf16": lambda p: optim.OneBitAdam(
        p, lr=0.05, freeze_step=3, block=64, communication_data_type=torch.bfloat16
    ),
    "one_bit_lamb": lambda p: optim.OneBitLamb(p, lr=0.05, freeze_step=3, block=64),
    "zero_one_adam": lambda p: optim.ZeroOneAdam(
        p, lr=0.05, var_freeze_step=4, var_update_scaler=2, local_step_scaler=3,
        local_step_clipper=4, block=64,
    ),
}  # fmt: skip


@case(*[(name,) for name in ONE_BIT], ranks=(2,))
def one_bit_optimizer(name):
    return run(ONE_BIT[name], 9, torch.distributed.get_rank())


@case(("one_bit_adam",), ("one_bit_lamb",), ranks=(3,))
def one_bit_optimizer_of_three(name):
    return run(ONE_BIT[name], 6, torch.distributed.get_rank())
