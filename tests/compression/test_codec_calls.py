"""Codecs called directly: what no group means, and what several of one kind share of a memory."""

import torch
import torch.distributed as dist
from hook_models import opened, same_on_all_ranks
from rank_checks import Checks

from moe_ext.compression import (
    BlockSparse,
    Dense,
    OneBit,
    Quantize,
    Threshold,
    TopK,
)
from moe_ext.compression.codecs import Unsent
from moe_ext.compression.powersgd import PowerSGD
from moe_ext.distributed import count_traffic

two = Checks()
SHAPES = [torch.Size((48, 40)), torch.Size((80,))]
NUMEL = sum(shape.numel() for shape in SHAPES)
CODECS = {
    "dense": Dense(),
    "bf16": Dense("bf16"),
    "int8": Quantize("int8"),
    "onebit": OneBit(),
    "blocks": BlockSparse(),
    "topk": TopK(0.1),
    "everything": TopK(1.0),
    "threshold": Threshold(0.1),
    "powersgd": PowerSGD(2),
}


def gradient(rank):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def reduced(codec, rank, **kwargs):
    return codec.start(gradient(rank), opened(SHAPES), **kwargs).wait()


@two(*[(name,) for name in CODECS])
def no_group_is_the_default_group(name):
    rank = dist.get_rank()
    with count_traffic() as traffic:
        found = reduced(CODECS[name], rank)
    assert traffic.total_bytes > 0
    assert torch.equal(found, reduced(CODECS[name], rank, group=dist.group.WORLD))
    assert same_on_all_ranks(found)


@two()
def a_sum_that_half_precision_cannot_hold():
    for looks in ({}, {"on_nonfinite": list}):
        x = torch.tensor([4e4, -6e4, 1.0, 0.5]) * (1 + dist.get_rank())
        x[:2] /= 1 + dist.get_rank()
        found = Dense("fp16").start(x, opened(SHAPES), average=False, **looks).wait()
        assert found.tolist() == [8e4, -1.2e5, 3.0, 1.5]


@two()
def what_is_unsent_stays_here():
    rank, memory = dist.get_rank(), opened(SHAPES)
    memory.put("residual", torch.full((NUMEL,), 2.0))
    with count_traffic() as traffic:
        found = Quantize().alone().start(gradient(rank), memory, group=dist.group.WORLD).wait()
    memory.commit()
    assert traffic.total_bytes == 0
    assert torch.equal(found, gradient(rank) + 2.0)
    assert not memory.has("residual")


@two()
def powersgd_changes_its_rank():
    memory, applied, want = opened(SHAPES), 0, 0
    for step, codec in enumerate([PowerSGD(2), PowerSGD(4), PowerSGD(4), PowerSGD(2)]):
        memory.begin()
        found = codec.start(gradient(2 * step + dist.get_rank()), memory, step=step).wait()
        memory.commit()
        applied = applied + found.double()
        want = want + (gradient(2 * step) + gradient(2 * step + 1)).double() / 2
        assert memory.kept("powersgd").numel() == 40 * codec.rank
    factors = memory.copy_of("powersgd")
    memory.begin()
    PowerSGD(4).start(gradient(0), memory, step=4).wait()
    memory.rollback()
    assert torch.equal(memory.kept("powersgd"), factors)
    owed = memory.whole("residual").double()
    dist.all_reduce(owed)
    assert (applied + owed / 2 - want).abs().max() < 1e-5
    assert owed.abs().max() > 0.1


test_two_ranks = two.test(2)


def test_what_stands_in_for_a_codec_keeps_its_momentum():
    memory = opened(SHAPES)
    memory.put("velocity", torch.ones(NUMEL))
    found = TopK(0.1, momentum=0.5).alone().start(gradient(0), memory).wait()
    torch.testing.assert_close(found, gradient(0) + 0.5)
    assert OneBit().alone() == Unsent()
    assert (Unsent().name, Unsent().lossy, Unsent().feeds_back) == ("unsent", False, False)
    assert Unsent().sent_bytes(100, 4) == Unsent().num_rounds(4) == 0
    for call in Unsent().rehearsal(gradient(0), memory):
        call()
