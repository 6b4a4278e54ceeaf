"""A `SequenceParallelMLP` on pairs of ranks, each pair with data of its own."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_ext.attention import SequenceParallelMLP, shard_sequence
from moe_ext.distributed import clip_grad_norm_, data_parallel, sync_gradients
from moe_ext.testing import spawn_ranks

DIM, FFN, SEQ_LEN, STEPS, RANKS = 6, 8, 7, 2, 4


class Model(nn.Module):
    """Layers that every rank holds on both sides of the block."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(5)
        self.inp = nn.Linear(DIM, DIM)
        options = {"activation": "swiglu", "grad_reduction": "mean"}
        self.mlp = SequenceParallelMLP(DIM, FFN, group=group, **options)
        self.out = nn.Linear(DIM, DIM)
        self.double()

    def forward(self, x):
        x = self.inp(x)
        return self.out(x + self.mlp(x, seq_len=SEQ_LEN))


def batches():
    """`[steps, pairs, B, S, D]`."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, 2, 3, SEQ_LEN, DIM, generator=generator, dtype=torch.float64)


def check_pairs(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for wrapped in (False, True):
        check_gradients(rank, pairs, wrapped)
    return True


def check_gradients(rank, pairs, wrapped):
    pair, where = rank // 2, {"layout": "contiguous", "dim": 1}
    whole, model = Model(None), Model(pairs[pair])
    used = data_parallel(model) if wrapped else model
    data = batches()
    for step in range(STEPS):
        for batch in data[step]:
            (whole(batch).square().sum() / RANKS).backward()
        last = step == STEPS - 1
        part = shard_sequence(data[step, pair], group=pairs[pair], **where)
        with used.no_sync() if wrapped and not last else contextlib.nullcontext():
            used(part).square().sum().backward()
    sync_gradients(used)
    norm = clip_grad_norm_(used, 1e9)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 1e9))
    # The gradients of the parts, put together as the parts are.
    with torch.no_grad():
        for parameter in (*model.parameters(), *whole.parameters()):
            parameter.copy_(parameter.grad)
    expected = whole.mlp.state_dict()
    for name, found in model.mlp.whole_state_dict().items():
        torch.testing.assert_close(found, expected[name], msg=lambda m, n=name: f"{n}: {m}")
    for name in ("inp.weight", "out.bias"):
        torch.testing.assert_close(model.state_dict()[name], whole.state_dict()[name])


def test_accumulated_gradients_are_those_of_one_process():
    assert all(spawn_ranks(check_pairs, RANKS))


def check_module_of_another_library(rank):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for layer in (module, other):
        layer.tp_group = dist.group.WORLD
        nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    module(torch.full((1, 2), rank + 1.0)).sum().backward()
    sync_gradients(module)
    torch.testing.assert_close(module.weight.grad, torch.full((2, 2), 1.5))
    # The exclusive or of four equal numbers is 0 on both ranks.
    nn.init.constant_(other.weight, rank)
    other(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="the values of the dense parameters at the first call"):
        sync_gradients(other)
    return True


def test_a_module_of_another_library_is_taken_as_dense():
    assert all(spawn_ranks(check_module_of_another_library, 2))
