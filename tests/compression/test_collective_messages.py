"""Messages that travel while others are computed, and reductions in pieces made of them."""

import functools
import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist
from collective_checks import (
    PATHS,
    ChecksOfSizes,
    assert_same_on_all_ranks,
    of_rank,
    quantized_reference,
    skip_unless_built,
)

from moe_ext.comm import workers
from moe_ext.compression import (
    Quantize,
    quantized_all_gather,
    quantized_all_reduce_,
    quantized_reduce_scatter,
    shard_numel,
)
from moe_ext.compression.collectives import quantized
from moe_ext.distributed import RankFailureError, count_traffic
from moe_ext.testing import spawn_ranks

check = ChecksOfSizes()


def in_pieces():
    """From here on short shards travel in pieces, too."""
    quantized._LEAST_BYTES = 1024


@check(2, 3, 4)
def messages_may_be_awaited_in_any_order(rank, size):
    numel = 300_000
    given = torch.full((numel,), float(rank))
    row, sent = given.view(torch.uint8), []
    messages = workers.Messages(dist.group.WORLD, lambda *told: sent.append(told))
    gathered = [messages.ask(4 * numel, row) for _ in range(3)]
    exchanged = messages.ask(4 * numel // size, row)
    messages.all_to_all(exchanged, row)
    for message in gathered:
        messages.all_gather(message, row)
    half = given[: numel // 2].clone()
    messages.all_reduce(half)
    ranks = torch.arange(size).float()
    for message in reversed(gathered):
        assert torch.equal(message.wait().view(torch.float32), ranks.repeat_interleave(numel))
    assert torch.equal(exchanged.wait().view(torch.float32), ranks.repeat_interleave(numel // size))
    assert (half == ranks.sum()).all()
    others = 4 * numel * (size - 1)
    assert sent == [
        ("all_to_all", others // size),
        *3 * [("all_gather", others)],
        ("all_reduce", others // size),
    ]


@check(2)
def no_memory_is_new_in_a_second_step(rank, size):
    module = workers._compiled()
    if module is None:
        return
    x, residual = of_rank(rank, 100_000), torch.zeros(100_000)
    found = []
    for _ in range(3):
        quantized_all_reduce_(x, residual=residual)
        found.append(module.pooled_bytes())
    assert 0 < found[0] == found[1] == found[2] <= 2**27


@check(1, 2, 3, 4)
def pieces_are_the_whole(rank, size):
    in_pieces()
    block = 64
    for numel, format in itertools.product((1, 9000, 70_001), ("int8", "int4", "fp8", "sign")):
        shard = shard_numel(numel, size, block)
        wanted = quantized_reference(size, numel, format, block, True)
        for elsewhere in (False, True):
            x, owed = of_rank(rank, numel), [torch.zeros(numel), torch.full((numel,), 7.0)]
            server = [torch.zeros(shard), torch.full((shard,), 7.0)]
            old = (owed[0], server[0]) if elsewhere else (None, None)
            new = (owed[elsewhere], server[elsewhere])
            with count_traffic() as traffic:
                quantized_all_reduce_(
                    x,
                    format=format,
                    block=block,
                    residual=new[0],
                    server_residual=new[1],
                    residual_in=old[0],
                    server_residual_in=old[1],
                )
            if size == 1:
                assert torch.equal(x, of_rank(rank, numel))
                assert not new[0].any()
                continue
            assert torch.equal(x, wanted[0])
            assert torch.equal(new[0], wanted[1][rank])
            assert torch.equal(new[1], wanted[2][rank])
            assert old[0] is None or not (old[0].any() or old[1].any())
            sent = Quantize(format, block).sent_bytes(numel, size)
            assert traffic.total_bytes == sent


@check(2, 3)
def halves_in_pieces(rank, size):
    found = []
    for least in (1024, 1 << 30):
        quantized._LEAST_BYTES = least
        shard = 20_001
        x, owed = of_rank(rank, size * shard), [torch.zeros(size * shard), torch.empty(0)]
        owed[1] = torch.full_like(owed[0], 7.0)
        output, everything = torch.empty(shard), torch.empty(size * shard)
        state = torch.tensor([5, 6, 7, rank])
        quantized_reduce_scatter(output, x, residual=owed[1], residual_in=owed[0], rng_state=state)
        quantized_all_gather(everything, output, format="int4", rng_state=state)
        assert_same_on_all_ranks(everything)
        found.append((output, everything, owed[1]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@check(1)
def nothing_may_be_owed_for_nothing(rank, size):
    """Empty tensors are in no memory at all."""
    x, old, new = (torch.zeros(0) for _ in range(3))
    assert quantized_all_reduce_(x, residual=new, residual_in=old) is x


@check(1)
def a_residual_in_must_be_elsewhere(rank, size):
    x, owed = torch.zeros(64), torch.zeros(64)
    for given, message in (
        ({"residual_in": owed}, "residual to be given with residual_in"),
        ({"residual_in": owed, "residual": owed}, "residual_in to be in memory of its own"),
        ({"residual_in": owed[1:], "residual": x.clone()}, "residual_in to be contiguous float32"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_all_reduce_(x, **given)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("size", "name"), check.cases())
def test_over_ranks(size, name, path):
    check.assert_passed(size, name, path)


def dying(rank, path, async_op):
    os.environ["MOE_EXT_RUNTIME"] = PATHS[path]
    in_pieces()
    numel, size = 60_000, dist.get_world_size()
    x, owed = of_rank(rank, numel), of_rank(rank, numel, salt=1)
    server = of_rank(rank, shard_numel(numel, size), salt=2)
    call = functools.partial(
        quantized_all_reduce_, x, residual=owed, server_residual=server, async_op=async_op
    )
    done = call()
    if async_op:
        done.wait()
    before = [tensor.clone() for tensor in (x, owed, server)]
    sent = []

    def killing(kind, num_bytes):
        sent.append(kind)
        if sent.count("all_gather") == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        workers.record_traffic = killing
    try:
        with count_traffic():
            done = call(validate=False)
            if async_op:
                done.wait()
    except RankFailureError as error:
        same = [torch.equal(*pair) for pair in zip((x, owed, server), before, strict=True)]
        return "rank 1 died" in str(error), same
    return "no error"


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_dies_between_pieces_changes_nothing(path, async_op):
    skip_unless_built(path)
    found = spawn_ranks(dying, 3, path, async_op, may_die=[1], store="tcp")
    for rank in (0, 2):
        assert found[rank] == (True, [True, True, True])
