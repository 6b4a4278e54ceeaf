"""Lossless collectives and their codec: the bits of uncompressed messages, in fewer bytes."""

import contextlib
from dataclasses import replace
from unittest import mock

import emulation
import pytest
import torch
import torch.distributed as dist
from collective_checks import ChecksOfSizes, assert_same_on_all_ranks, of_rank
from fsdp_checks import assert_same, train, weights, wrapped
from hook_models import sent_by

from moe_ext import ops
from moe_ext.comm import rates
from moe_ext.comm.link import Link
from moe_ext.comm.rates import CodecRate, CostTable
from moe_ext.compression import (
    CompressionState,
    Dense,
    Lossless,
    codec_of,
    compress_gradients,
    lossless_all_gather,
    lossless_all_reduce_,
    lossless_reduce_scatter,
)
from moe_ext.compression.cost_model import CostModel
from moe_ext.compression.fsdp import zero_plus_plus
from moe_ext.distributed import count_traffic

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A rank alone, fewer elements than ranks, shards of unequal length, several blocks.
SIZES = (0, 1, 5, 1001, 40_003)
check = ChecksOfSizes()


def same_bits(x, y):
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def in_rank_order(tensors):
    """The mean as it is promised: scaled, added in float32 by rank, rounded once."""
    found = torch.zeros(tensors[0].numel())
    for x in tensors:
        found.add_(x, alpha=1 / len(tensors))
    return found.to(tensors[0].dtype)


@check(1, 2, 3)
def all_reduces_to_the_bits_that_are_promised(rank, size):
    for dtype in DTYPES:
        for numel in SIZES:
            x = of_rank(rank, numel, dtype=dtype)
            wanted = in_rank_order([of_rank(r, numel, dtype=dtype) for r in range(size)])
            assert lossless_all_reduce_(x) is x
            assert same_bits(x, wanted)
            assert_same_on_all_ranks(x)
    x = of_rank(rank, 1000)
    dense = x / size
    dist.all_reduce(dense)
    lossless_all_reduce_(x, async_op=True).wait()
    if size < 3:
        assert same_bits(x, dense)


@check(2, 3)
def gathers_and_scatters_every_bit(rank, size):
    for dtype in DTYPES:
        own = torch.arange(65536).roll(rank).to(torch.int16).view(torch.bfloat16)
        own = own if dtype == torch.bfloat16 else own.view(torch.float16).to(dtype)
        whole, wanted = own.new_empty(size * own.numel()), own.new_empty(size * own.numel())
        assert lossless_all_gather(whole, own) is whole
        dist.all_gather_into_tensor(wanted, own)
        assert same_bits(whole, wanted)
        given = [of_rank(r, size * 9000, dtype=dtype) for r in range(size)]
        part = own.new_empty(9000)
        assert lossless_reduce_scatter(part, given[rank]) is part
        assert same_bits(part, in_rank_order(given)[rank * 9000 : (rank + 1) * 9000])


@check(2, 3)
def kernels_of_a_gpu_send_the_same_bytes(rank, size):
    """Nothing but the lengths and the mark of damage is read on the host."""
    if not emulation.is_built():
        return
    for dtype in DTYPES:
        for numel in (1, 20_003):
            x, whole = of_rank(rank, numel, dtype=dtype), torch.empty(size * numel, dtype=dtype)
            part, mine = torch.empty(numel, dtype=dtype), x.clone()
            found = []
            for where in (contextlib.nullcontext(), emulation.emulated_cuda()):
                with count_traffic() as traffic, where, no_payload_is_decoded_on_the_host():
                    lossless_all_reduce_(mine.copy_(x), async_op=True).wait()
                    lossless_all_gather(whole, x)
                    lossless_reduce_scatter(part, whole)
                found.append((mine.clone(), whole.clone(), part.clone(), traffic.total_bytes))
            assert all(same_bits(a, b) for a, b in zip(found[0][:3], found[1][:3], strict=True))
            assert found[0][3] == found[1][3]
    assert emulation.num_launches() > 0


@contextlib.contextmanager
def no_payload_is_decoded_on_the_host():
    def refuse(*_):
        raise AssertionError("a size of a payload was read back")

    with mock.patch.multiple(ops, encode_exponents=refuse, decode_exponents_=refuse):
        yield


@check(2)
def damage_is_told_by_the_rank_that_it_reached(rank, size):
    encode = ops.encode_exponent_rows

    def damaged(*args, **options):
        rows, num_bytes = encode(*args, **options)
        rows[:, 0] += rank
        return rows, num_bytes

    for call in (
        lambda x: lossless_all_reduce_(x, async_op=True).wait(),
        lambda x: lossless_reduce_scatter(x[:50], x.clone()),
        lambda x: lossless_all_gather(x.clone(), x[:50].clone()),
    ):
        with mock.patch.object(ops, "encode_exponent_rows", damaged):
            if rank == 0:
                with pytest.raises(
                    RuntimeError, match="lossless_.*as they were sent, got a damaged"
                ):
                    call(of_rank(rank, 100))
            else:
                call(of_rank(rank, 100))


@check(2)
def sends_fewer_bytes(rank, size):
    for dtype, least in zip(DTYPES, (1.18, 1.45, 1.14), strict=True):
        x = of_rank(rank, 2**18, dtype=dtype)
        with count_traffic() as traffic:
            lossless_all_reduce_(x)
        assert x.nbytes / traffic.total_bytes > least


@check(2)
def trains_like_dense(rank, size):
    grads = []
    for codec in ("none", "lossless"):
        model = torch.nn.Linear(64, 64)
        for i, p in enumerate(model.parameters()):
            p.grad = of_rank(rank, p.numel(), salt=i + 1).view_as(p)
        compress_gradients(model, CompressionState(model=model, codec=codec))
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert same_bits(*grads)
    codec, grad = Lossless(), of_rank(rank, 70_000)
    _, sent = sent_by(codec, grad)
    assert sent == pytest.approx(codec.sent_bytes(70_000, size), rel=0.02)


@check(2)
def gathers_the_weights_of_fsdp(rank, size):
    found, sent = [], []
    for kind in ("none", "lossless"):
        model = wrapped()
        zero_plus_plus(model, zero_quantized_weights=True, weight_format=kind)
        with count_traffic() as traffic:
            train(model, range(2))
        found.append(weights(model))
        sent.append(traffic.sent_bytes["all_gather"])
    assert_same(found[1], found[0])
    assert sent[1] < 0.95 * sent[0]


@check(2)
def refuses_alike(rank, size):
    x = torch.zeros(4, dtype=torch.float64 if rank else torch.float32)
    with pytest.raises(ValueError, match="lossless_all_reduce_: .*expected x to be contiguous flo"):
        lossless_all_reduce_(x)
    with pytest.raises(ValueError, match=r"expected input to be contiguous torch.float32 of 1/2 "):
        lossless_all_gather(torch.zeros(4), torch.zeros(3))


@pytest.mark.parametrize(("size", "name"), check.cases())
def test_over_ranks(size, name):
    check.assert_passed(size, name, "python")


@pytest.mark.parametrize(("gigabits", "name"), [(0.1, "lossless"), (40, "none")])
def test_auto_takes_it_where_it_wins(gigabits, name):
    # A nanosecond an element to encode and decode, without a clock.
    codecs = {
        name: tuple(CodecRate(n, 4 * n, 3 * n, each * n, each * n) for n in rates.SIZES)
        for name, each in (("none", 0.0), ("lossless", 0.5e-9))
    }
    costs = replace(CostTable.of_process(), codecs=codecs)
    model = CostModel(link=Link.of_rate(gigabits * 1e9), num_ranks=4, costs=costs)
    codecs = [codec_of("none"), codec_of("lossless")]
    for _ in range(14):
        found = model.choose(2**22, codecs, bucket=0)
    assert found.name == name
    assert Dense().sent_bytes(2**22, 4) > Lossless().sent_bytes(2**22, 4)
