"""Compressed collectives over ranks, compiled and in Python, against one process."""

import functools
import itertools
from unittest import mock

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
    sums_of_ranks,
    total,
    whole_numbers,
)
from pairwise import pairs

from moe_ext.comm import workers
from moe_ext.comm.traffic import count_traffic
from moe_ext.compression import (
    Quantize,
    Reduction,
    SplitRegions,
    block_sparse_all_reduce_,
    hierarchical_all_reduce_,
    masked_all_reduce_,
    quantized_all_gather,
    quantized_all_reduce_,
    quantized_reduce_scatter,
    row_sparse_all_reduce,
    shard_numel,
    sparse_all_reduce,
)
from moe_ext.compression.collectives import quantized
from moe_ext.compression.collectives.coding import QuantizedCoding
from moe_ext.compression.collectives.quantized import (
    States,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from moe_ext.compression.collectives.sparse import SparseLayout, start_gather_sum
from moe_ext.ops import (
    nonzero_blocks,
    threshold_compress_,
    topk_compress_,
)
from moe_ext.ops.quantize import CODE_BITS

EPS = torch.finfo(torch.float32).eps
# The other integers differ in the operators alone.
FORMATS = ("int8", "int4", "int3", "fp8", "sign")
SIZES = (0, 1, 3, 1000, 70_001)
check = ChecksOfSizes()


def pieces_of(num_bytes):
    """Has shards travel in pieces, which are at least so long."""
    return mock.patch.object(quantized, "_LEAST_BYTES", num_bytes)


@functools.cache
def _selected(rank, numel, k):
    residual = torch.zeros(numel)
    values, indices = topk_compress_(of_rank(rank, numel), residual, k)
    return values, indices, residual


def selected(rank, numel, k):
    """(values, indices, residual) of a rank."""
    return tuple(found.clone() for found in _selected(rank, numel, k))


def owing(numel, size, block=256):
    """Both residuals of a rank that owes nothing."""
    shard = shard_numel(numel, size, block)
    return {"residual": torch.zeros(numel), "server_residual": torch.zeros(shard)}


def owed_by(rank, size, residual, server_residual):
    """The debt of a rank for each element, by both residuals."""
    shards = torch.zeros(size, len(server_residual))
    shards[rank] = server_residual
    return torch.stack([residual, shards.view(-1)[: len(residual)]])


def sizes_and_counts(size):
    """Eight ranks, of which "auto" may split, meet regions that are too small and large ones."""
    for numel in SIZES if size < 8 else (3, 20_001):
        for k in sorted({0, 1, numel // 100, numel // 7, numel}):
            if k <= numel:
                yield numel, k


@check(1, 2, 3)
def all_gather_adds_in_rank_order(rank, size):
    for numel, k in sizes_and_counts(size):
        for average in (True, False):
            expected = torch.zeros(numel)
            for other in range(size):
                values, indices, _ = selected(other, numel, k)
                expected.index_add_(0, indices, values / size if average else values)
            values, indices, _ = selected(rank, numel, k)
            found = sparse_all_reduce(
                values, indices, numel, algorithm="all_gather", average=average
            )
            assert torch.equal(found, expected), (numel, k)


@check(1, 2, 3, 8)
def nothing_is_lost_by_any_algorithm_and_value_codec(rank, size):
    codecs = ("fp32", "bf16", "int8") if size < 3 else ("fp32",)
    # Over eight ranks "auto" takes each of the others.
    algorithms = ("all_gather", "split", "dense", "auto") if size < 8 else ("split", "auto")
    for (numel, k), codec, algorithm in pairs(sizes_and_counts(size), codecs, algorithms):
        gradient, magnitudes = sums_of_ranks(size, numel)
        bound = (2 * size * EPS * magnitudes).clamp(min=1e-30)
        values, indices, residual = selected(rank, numel, k)
        found = sparse_all_reduce(
            values, indices, numel, algorithm=algorithm, value_codec=codec, residual=residual
        )
        assert_same_on_all_ranks(found)
        kept = size * found.double() + total(residual)
        assert ((kept - gradient).abs() <= bound).all(), (numel, k, codec, algorithm)


@check(2, 3, 8)
def split_sends_less_than_six_values_for_each_that_is_selected(rank, size):
    numel, k = 70_001, 2100
    values, indices, residual = selected(rank, numel, k)
    with count_traffic() as traffic:
        sparse_all_reduce(values, indices, numel, algorithm="split", residual=residual)
    layout = SparseLayout(k, numel, size)
    assert traffic.total_bytes == layout.sent_bytes("split")
    assert traffic.total_bytes < 6 * k * 4
    assert dict(traffic.calls) == {"all_to_all": 1, "all_gather": 1}
    with count_traffic() as traffic:
        sparse_all_reduce(values, indices, numel, algorithm="all_gather")
        sparse_all_reduce(values, indices, numel, algorithm="dense")
    assert traffic.sent_bytes["all_gather"] == layout.sent_bytes("all_gather")
    assert traffic.sent_bytes["all_reduce"] == layout.sent_bytes("dense")


@check(2, 4)
def regions_follow_where_the_pairs_are(rank, size):
    numel, k = 20_000, 800
    regions = SplitRegions(numel, size)
    residual = torch.zeros(numel)
    for step in range(4):
        gradient = of_rank(rank, numel, salt=step) * 0.01
        # Nine of ten pairs are in the first tenth.
        gradient[: numel // 10] *= 50
        values, indices = topk_compress_(gradient, residual, k)
        sparse_all_reduce(
            values, indices, numel, algorithm="split", residual=residual, regions=regions
        )
        if step == 0:
            assert max(regions.loads) > 0.9 * size * k
    assert regions.step == 4
    assert regions.bounds[1] < numel // 10
    assert max(regions.loads) < 1.3 * k
    assert_same_on_all_ranks(torch.tensor(regions.bounds))


@check(2, 3)
def unused_slots_of_a_threshold_change_nothing(rank, size):
    numel, capacity = 5000, 600
    residual = torch.zeros(numel)
    gradient = of_rank(rank, numel)
    values, indices, count = threshold_compress_(gradient, residual, 2.0, capacity)
    assert int(count) < capacity
    for algorithm in ("all_gather", "split"):
        owed = residual.clone()
        found = sparse_all_reduce(values, indices, numel, algorithm=algorithm, residual=owed)
        kept = size * found.double() + total(owed)
        torch.testing.assert_close(kept, total(gradient), rtol=0, atol=1e-5)


@check(2, 3)
def result_goes_where_it_is_wanted(rank, size):
    values, indices, _ = selected(rank, 1000, 50)
    out = torch.full((1000,), 7.0)
    found = sparse_all_reduce(values, indices, 1000, out=out)
    assert found is out
    assert torch.equal(out, sparse_all_reduce(values, indices, 1000))


@check(1, 2, 3)
def quantized_all_reduce_is_that_of_one_process(rank, size):
    """As a whole and in pieces, with what was owed in place and elsewhere."""
    ways = ((True, False), (False, True), (1024, 1 << 30))
    for numel, format, average, elsewhere, least in pairs((1, 77, 70_001), FORMATS, *ways):
        block = 64 if average else None if format == "int3" else 256
        x, owed, old = of_rank(rank, numel), owing(numel, size, block), {}
        if elsewhere:
            old = {f"{name}_in": x.clone() for name, x in owed.items()}
            for new in owed.values():
                new.fill_(torch.nan)
        how = {"format": format, "block": block, "average": average}
        with count_traffic() as traffic, pieces_of(least):
            assert quantized_all_reduce_(x, **how, **owed, **old) is x
        sent = Quantize(format, block).sent_bytes(numel, size)
        assert traffic.total_bytes == sent
        if size == 1:
            assert torch.equal(x, of_rank(rank, numel)) and not owed["residual"].any()
            continue
        wanted = quantized_reference(size, numel, format, block, average)
        assert torch.equal(x, wanted[0]), (numel, format, block)
        assert torch.equal(owed["residual"], wanted[1][rank])
        assert torch.equal(owed["server_residual"], wanted[2][rank])
        assert not any(x.any() for x in old.values())
        if block is None:
            bits = CODE_BITS[format]
            shard_bytes = -(-shard_numel(numel, size, None) * bits // 128) * 16
            assert sent == 2 * (size - 1) * (shard_bytes + 16)


@check(2, 3)
def low_precision_tensors(rank, size):
    for dtype, numel in itertools.product((torch.bfloat16, torch.float16), (5, 3000)):
        x = of_rank(rank, numel, dtype=dtype)
        mean = total(x) / size
        quantized_all_reduce_(x, format="int8")
        assert_same_on_all_ranks(x)
        assert (x.double() - mean).abs().max() < 0.05


@check(1, 2, 3)
def reduce_scatter_and_all_gather_of_codes(rank, size):
    for shard, format in itertools.product((0, 1, 77, 3000), FORMATS):
        x, residual = of_rank(rank, size * shard), torch.zeros(size * shard)
        output = torch.full((shard,), 9.0)
        mean = sums_of_ranks(size, size * shard)[0][rank * shard : (rank + 1) * shard] / size
        with count_traffic() as traffic:
            quantized_reduce_scatter(output, x, format=format, residual=residual)
        sent = (size - 1) * QuantizedCoding(format, 256).payload_bytes(shard) if shard else 0
        assert traffic.total_bytes == sent
        owed = total(residual)[rank * shard : (rank + 1) * shard] / size
        torch.testing.assert_close(output.double() + owed, mean, rtol=0, atol=1e-5)
        everything = torch.empty(size * shard)
        quantized_all_gather(everything, output, format=format)
        assert_same_on_all_ranks(everything)
        if format == "int8":
            own = everything[rank * shard : (rank + 1) * shard]
            torch.testing.assert_close(own, output, rtol=0, atol=0.02)


class Halves:
    """A coding from outside, in plain torch: float16."""

    align, native = 5, None

    def payload_bytes(self, numel):
        return 2 * numel

    def encode(self, x, residual=None, residual_in=None):
        owed = residual if residual_in is None else residual_in
        whole = x.float() if owed is None else x + owed
        if residual is not None:
            residual.copy_(whole - whole.half())
        return whole.half().view(torch.uint8)

    def decode_add_(self, out, payload, *, divisor=1, overwrite=False):
        values = payload.view(torch.float16).to(out.dtype) / divisor
        out.copy_(values) if overwrite else out.add_(values)


@check(1, 2, 3)
def any_coding_goes_by_either_pattern(rank, size):
    coding, name = Halves(), "halves"
    for numel, async_op in itertools.product((1, 7, 1000), (False, True)):
        shard, owed = shard_numel(numel, size, coding.align), owing(numel, size, coding.align)
        states = States(**owed)
        x, group, how = of_rank(rank, numel), dist.group.WORLD, {"async_op": async_op}
        gradient = total(x)
        with count_traffic() as traffic:
            start_all_reduce(x, coding, states, group, True, operation=name, **how).wait()
        assert traffic.total_bytes == 4 * (size - 1) * shard
        assert_same_on_all_ranks(x)
        kept = size * x.double() + total(owed_by(rank, size, **owed)).sum(0)
        torch.testing.assert_close(kept, gradient, rtol=0, atol=1e-5)
        out, residual = torch.empty(numel), torch.zeros(numel)
        payload = coding.encode(of_rank(rank, numel), residual)
        start_gather_sum(payload, out, coding, group, False, operation=name).wait()
        torch.testing.assert_close(out.double() + total(residual), gradient, rtol=0, atol=1e-5)
        part, whole = torch.empty(numel), torch.empty(size * numel)
        given = of_rank(rank, size * numel)
        mean = total(given)[rank * numel : (rank + 1) * numel] / size
        how["operation"] = name
        start_reduce_scatter(part, given, coding, States(), group, True, **how).wait()
        torch.testing.assert_close(part.double(), mean, rtol=0, atol=0.01)
        start_all_gather(whole, part, coding, None, group, **how).wait()
        assert_same_on_all_ranks(whole)
        own = whole[rank * numel : (rank + 1) * numel]
        assert torch.equal(own, part.half().float()) or size == 1


@check(1, 2, 3)
def block_sparse_is_exact(rank, size):
    for numel, dtype in itertools.product((0, 1, 1000, 5001), (torch.float32, torch.bfloat16)):
        x = whole_numbers(rank, numel, dtype=dtype)
        x[: numel // 3] = 0
        x[numel // 2 : numel // 2 + 64 * rank] = 0
        wanted = x.clone()
        dist.all_reduce(wanted)
        given = x.clone()
        with count_traffic() as traffic:
            assert block_sparse_all_reduce_(x, block=64, average=False) is x
        assert torch.equal(x, wanted)
        block_sparse_all_reduce_(
            given, block=64, average=False, bitmap=nonzero_blocks(given, block=64)
        )
        assert torch.equal(given, wanted)
        if numel == 5001 and size > 1:
            union = (nonzero_blocks(wanted, block=64)[:, None] >> torch.arange(8)) & 1
            assert traffic.sent_bytes["all_gather"] == (size - 1) * 10
            packed = int(union.sum()) * 64 * x.element_size()
            assert traffic.sent_bytes["all_reduce"] >= 2 * (size - 1) * packed // size
            assert traffic.sent_bytes["all_reduce"] < 2 * (size - 1) * x.nbytes // size


@check(2, 3)
def nan_reaches_every_rank_by_the_exact_ways(rank, size):
    x = torch.zeros(1000)
    if rank == 1:
        x[700] = float("nan")
    block_sparse_all_reduce_(x)
    assert x[700].isnan()
    assert x.isnan().sum() == 1


@check(2, 3)
def zeros_keep_their_sign_in_blocks_that_are_left_out(rank, size):
    x = torch.zeros(1000)
    x[10] = -0.0 if rank == 1 else 0.0
    x[700] = 1.0
    block_sparse_all_reduce_(x)
    assert x[10] == 0.0 and x[10].signbit() == (rank == 1) and x[700] == 1.0


@check(1, 2, 3, 4)
def masked_is_exact_and_leaves_the_others(rank, size):
    for numel in (1, 1000):
        mask = torch.arange(numel) % 3 == 0
        start = whole_numbers(rank, numel)
        wanted = start.clone()
        dist.all_reduce(wanted)
        wanted = torch.where(mask, wanted / size, start)
        for given in (mask, mask.nonzero().view(-1)):
            x = start.clone()
            with count_traffic() as traffic:
                assert masked_all_reduce_(x, given) is x
            assert torch.equal(x, wanted)
            count = int(mask.sum())
            assert traffic.total_bytes == 2 * (size - 1) * 4 * count // size


@check(1, 2, 3, 4)
def rows_of_an_embedding(rank, size):
    # Rank 1 has an empty batch; rows repeat, and on rank 0 they cancel.
    rows = {0: [3, 7, 3, 3], 1: []}.get(rank, [rank, 3, 49])
    values = whole_numbers(rank, len(rows) * 4).view(-1, 4)
    if rank == 0:
        values[3] = -values[0] - values[2]
    grad = torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, (50, 4), check_invariants=True
    )
    wanted = grad.to_dense()
    dist.all_reduce(wanted)
    found = row_sparse_all_reduce(grad)
    assert found.is_coalesced()
    assert torch.equal(found.to_dense(), wanted / size)
    assert 3 in found.indices()[0]
    assert_same_on_all_ranks(found.values())
    empty = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (50, 4), check_invariants=True
    )
    assert row_sparse_all_reduce(empty)._nnz() == 0


@check(4)
def nodes_first(rank, size):
    local = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    nodes = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    groups = {"local_group": local, "node_group": nodes}
    for numel in (1, 77, 1000):
        x = whole_numbers(rank, numel)
        wanted = x.clone()
        dist.all_reduce(wanted)
        assert hierarchical_all_reduce_(x, reduce=block_sparse_all_reduce_, **groups) is x
        assert torch.equal(x, wanted / size)
        x = of_rank(rank, numel)
        mean = total(x) / size
        residual = torch.zeros(shard_numel(numel, 2, 1))
        reduce = functools.partial(quantized_all_reduce_, residual=residual)
        hierarchical_all_reduce_(x, reduce=reduce, **groups)
        assert_same_on_all_ranks(x)
        assert (x.double() - mean).abs().max() < 0.05
    # Only the ranks of one node see it by themselves.
    for odd in (torch.zeros(7), torch.zeros(8, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"hierarchical_all_reduce_: expected .* rank 3"):
            given = odd if rank == 3 else torch.zeros(8)
            hierarchical_all_reduce_(given, reduce=block_sparse_all_reduce_, **groups)


@check(1, 2, 3)
def several_underway_end_in_order_and_leave_the_group_free(rank, size):
    numel = 30_000
    expected, handles, tensors = [], [], []
    for salt in range(6):
        x = of_rank(rank, numel, salt=salt)
        y = x.clone()
        quantized_all_reduce_(y)
        expected.append(y)
        tensors.append(x)
        handles.append(quantized_all_reduce_(x, async_op=True))
        # The caller's own messages do not meet those of the worker.
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one == size
    assert all(isinstance(handle, Reduction) for handle in handles)
    for handle, x, y in reversed(list(zip(handles, tensors, expected, strict=True))):
        assert handle.wait() is x
        assert handle.is_completed()
        assert torch.equal(x, y)
    future = quantized_all_reduce_(tensors[0], async_op=True).get_future()
    assert future.wait() is tensors[0]
    chained = sparse_all_reduce(*selected(rank, 1000, 10)[:2], 1000, async_op=True).get_future()
    doubled = chained.then(lambda done: done.value() * 2)
    direct = sparse_all_reduce(*selected(rank, 1000, 10)[:2], 1000)
    assert torch.equal(doubled.wait(), 2 * direct)


@check(2)
def calls_of_inference_mode_and_others_take_turns(rank, size):
    numel = 400_000  # the first call of that size
    given = whole_numbers(rank, numel)
    for reduce, async_op in itertools.product(
        (quantized_all_reduce_, block_sparse_all_reduce_), (False, True)
    ):
        found = []
        for enabled in (True, False, True):
            with torch.inference_mode(enabled):
                x = given.clone()
                done = reduce(x, async_op=async_op)
                assert (done.wait() if async_op else done) is x
                found.append(x)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@check(2, 3)
def async_counts_bytes_and_updates_regions_once(rank, size):
    numel, k = 20_000, 500
    regions = SplitRegions(numel, size)
    values, indices, residual = selected(rank, numel, k)
    with count_traffic() as traffic:
        how = {"algorithm": "split", "residual": residual, "regions": regions}
        handle = sparse_all_reduce(values, indices, numel, **how, async_op=True)
        future = handle.get_future()
        assert future.wait() is handle.wait()
    assert regions.step == 1
    assert traffic.total_bytes == SparseLayout(k, numel, size).sent_bytes("split")


@check(2, 3)
def callers_that_differ_are_told_on_every_rank(rank, size):
    values, indices, residual = selected(rank, 1000, 10)
    other = rank == 1
    with pytest.raises(ValueError, match=r"number of values .* got 10 on rank 0, 9 on rank 1"):
        cut = 9 if other else 10
        sparse_all_reduce(values[:cut], indices[:cut], 1000)
    with pytest.raises(ValueError, match="dtype .* got torch.float32 on rank 0, torch.bfloat16 on"):
        quantized_all_reduce_(torch.zeros(8, dtype=torch.bfloat16 if other else torch.float32))
    with pytest.raises(ValueError, match="the operation to be equal on every rank"):
        (quantized_all_reduce_ if other else block_sparse_all_reduce_)(torch.zeros(8))
    with pytest.raises(ValueError, match="checksum of the mask"):
        masked_all_reduce_(torch.zeros(8), torch.tensor([1, 3 + other]))
    twice = torch.tensor([4, 4]) if other else torch.tensor([3, 4])
    with pytest.raises(ValueError, match="indices to be all different, got 4 twice on rank 1"):
        sparse_all_reduce(torch.ones(2), twice, 10)
    with pytest.raises(ValueError, match="x to be finite, got NaN or infinity on rank 1"):
        quantized_all_reduce_(torch.full((8,), float("nan") if other else 1.0))
    with pytest.raises(ValueError, match="shape to be equal on every rank"):
        empty = torch.zeros(1, 0, dtype=torch.int64)
        row_sparse_all_reduce(
            torch.sparse_coo_tensor(
                empty, torch.zeros(0, 4), (50 + other, 4), check_invariants=True
            )
        )
    # Everyone is still there.
    block_sparse_all_reduce_(torch.ones(8))


@check(2)
def both_paths_give_the_same_bits(rank, size):
    found = {}
    for path in PATHS:
        skip_unless_built("compiled")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOE_EXT_RUNTIME", PATHS[path])
            results = []
            for async_op, algorithm in itertools.product((False, True), ("all_gather", "split")):
                values, indices, residual = selected(rank, 9000, 300)
                how = {"algorithm": algorithm, "value_codec": "int8", "async_op": async_op}
                out = sparse_all_reduce(values, indices, 9000, residual=residual, **how)
                results += [out.wait() if async_op else out, residual]
            for format, async_op in itertools.product(FORMATS, (False, True)):
                x, residual = of_rank(rank, 9000), torch.zeros(9000)
                state = None if format == "sign" else torch.tensor([5, 6, 7, rank])
                how = {"residual": residual, "rng_state": state, "async_op": async_op}
                handle = quantized_all_reduce_(x, format=format, **how)
                if async_op:
                    handle.wait()
                results += [x, residual]
            x = of_rank(rank, 9000)
            x[:4000] = 0
            results.append(block_sparse_all_reduce_(x))
            found[path] = results
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other)


@check(2, 3)
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


@check(2, 3)
def halves_in_pieces(rank, size):
    found, shard = [], 20_001
    for least, format in itertools.product((1024, 1 << 30), ("int8", "int4", "fp8")):
        x, owed = of_rank(rank, size * shard), torch.zeros(size * shard)
        output, everything, summed = torch.empty(shard), torch.empty(size * shard), x.clone()
        new, states = torch.full_like(owed, 7.0), owing(size * shard, size)
        how = {"format": format, "rng_state": torch.tensor([5, 6, 7, rank])}
        with pieces_of(least):
            quantized_reduce_scatter(output, x, residual=new, residual_in=owed, **how)
            quantized_all_gather(everything, output, **how)
            quantized_all_reduce_(summed, **states, **how)
        assert_same_on_all_ranks(everything)
        found.append((output, everything, new, summed, *states.values()))
    for in_pieces, whole in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, in_pieces, whole))


@check(1, 2, 3)
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
