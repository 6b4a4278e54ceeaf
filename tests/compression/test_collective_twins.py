"""Collectives in Python, run for all ranks in one process; regions; payloads."""

from functools import partial

import pytest
import torch
from collective_checks import of_rank, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ext import reference
from moe_ext.compression import (
    SplitRegions,
    quantized_all_reduce_,
    sparse_all_reduce,
)
from moe_ext.compression.collectives.coding import PAIR_CODECS, PairCoding
from moe_ext.compression.collectives.sparse import SparseLayout, _all_gather_sum, _split_sum
from moe_ext.ops import dequantize_blockwise, quantize_blockwise, topk_compress_

EPS = torch.finfo(torch.float32).eps


def split_of(layout, values, indices, residual, bounds, step):
    """What a rank runs, and where its result will be."""
    out = torch.empty(layout.numel)
    more = (layout.slots.count, layout.kept.count, step, layout.world_size)
    args = (out, values, indices, residual, torch.tensor(bounds), layout.value_codec, *more)
    return partial(_split_sum, *args), out


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(2, 8),
    numel=st.integers(600, 3000),
    density=st.floats(0.001, 1.0),
    codec=st.sampled_from(["fp32", "bf16", "int8"]),
    skew=st.floats(0.0, 1.0),
    seed=st.integers(0, 10**6),
)
def test_split_conserves_over_steps(size, numel, density, codec, skew, seed):
    count = max(int(numel * density), 1)
    layout, regions = SparseLayout(count, numel, size, codec), SplitRegions(numel, size)
    residuals = [torch.zeros(numel) for _ in range(size)]
    applied, given_sum = torch.zeros(numel).double(), torch.zeros(numel).double()
    bound = torch.zeros(numel).double()
    for step in range(3):
        twins = []
        for rank, residual in enumerate(residuals):
            gradient = of_rank(rank, numel, salt=seed + step)
            gradient[int(skew * numel) :] *= 0.01
            given_sum += gradient.double()
            values, indices = topk_compress_(gradient, residual, count)
            twins.append(split_of(layout, values, indices, residual, regions.bounds, regions.step))
        found = simulate([twin for twin, _ in twins])
        outs = [out for _, out in twins]
        for other, out in zip(found[1:], outs[1:], strict=True):
            for mine, theirs in zip((*other, out), (*found[0], outs[0]), strict=True):
                assert torch.equal(mine, theirs)
        assert int(outs[0].count_nonzero()) <= size * layout.kept.count
        applied += size * outs[0].double()
        bound += sum(r.double().abs() for r in residuals) + applied.abs() + given_sum.abs() + 1
        regions.update(*found[0])
        assert list(regions.bounds) == sorted(set(regions.bounds))
    kept = applied + sum(residual.double() for residual in residuals)
    assert ((kept - given_sum).abs() <= 16 * size * EPS * bound).all()


def test_every_element_of_a_full_region_gets_its_turn():
    # One region wants five times its slots, and values are all alike: none may starve.
    size, numel, count = 2, 4000, 400
    layout, residuals = SparseLayout(count, numel, size), [torch.zeros(numel) for _ in range(2)]
    sent = torch.zeros(numel)
    for step in range(8):
        twins = []
        for rank in range(size):
            gradient = torch.zeros(numel)
            gradient[: 2 * count : 2] = 1
            values, indices = topk_compress_(gradient, residuals[rank], count)
            bounds = (0, 2000, 4000)
            twins.append(split_of(layout, values, indices, residuals[rank], bounds, step))
        simulate([twin for twin, _ in twins])
        sent += twins[0][1]
    assert (sent[: 2 * count : 2] > 0).all()


def decoded(values, codec, block=128):
    """What the other end reads of values."""
    if codec in ("fp32", "bf16"):
        return values.to(torch.bfloat16 if codec == "bf16" else torch.float32).float()
    codes, scales = quantize_blockwise(values, format=codec, block=block)
    return dequantize_blockwise(codes, scales, len(values), format=codec, block=block)


@pytest.mark.parametrize("codec", PAIR_CODECS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 255, 70_000])
@pytest.mark.parametrize("numel", [70_000, 2**33])
def test_pairs_come_back(count, numel, codec):
    generator = torch.Generator().manual_seed(count)
    indices = torch.randint(numel, (count,), generator=generator).sort().values
    values = torch.randn(count, generator=generator)
    coding = PairCoding(count, numel, codec)
    payload = coding.encode(values, indices)
    assert payload.numel() == coding.num_bytes
    assert torch.equal(coding.values(payload), decoded(values, codec))
    assert torch.equal(coding.indices(payload), indices)
    assert torch.equal(payload[coding.value_bytes :], reference.pack_indices(indices, numel))


@pytest.mark.parametrize("codec", PAIR_CODECS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
# Indices in runs, and whole ones.
@pytest.mark.parametrize("numel", [3000, 900_000])
def test_gathered_pairs_have_the_bits_of_index_add(size, numel, codec):
    count = 25
    twins, found, want = [], [], torch.zeros(numel)
    owed, wanted = [], []
    for rank in range(size):
        values, indices = topk_compress_(of_rank(rank, numel), torch.zeros(numel), count)
        # Unused slots, as a threshold leaves them.
        values[-3:], indices[-3:] = 0, numel - 1
        found.append(torch.full((numel,), float("nan")))
        owed.append(torch.zeros(numel))
        twins.append(partial(_all_gather_sum, found[-1], values, indices, owed[-1], codec, size))
        sent = decoded(values, codec)
        want.index_add_(0, indices, sent / size)
        wanted.append(torch.zeros(numel).index_add_(0, indices, values - sent))
    simulate(twins)
    for out in found:
        assert torch.equal(out, want)
    for kept, lost in zip(owed, wanted, strict=True):
        assert torch.equal(kept, lost)


@pytest.mark.parametrize("count", [3, 500])
def test_a_foreign_payload_stays_in_range(count):
    coding = PairCoding(count, 70_001)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        payload = torch.randint(256, (coding.num_bytes,), dtype=torch.uint8, generator=generator)
        room = torch.zeros(300)
        coding.decode_add_(room[100:200], payload, start=100, divisor=3)
        assert not room[:100].any() and not room[200:].any() and bool(room[100:200].any())


def test_bytes_of_a_split():
    for size in range(2, 9):
        layout = SparseLayout(65_536, 25 * 2**18, size)
        assert layout.sent_bytes("split") < 6 * 4 * layout.count
        assert layout.sent_bytes("split") < 14 * layout.count * (size - 1) // size + 2000 * size
        assert layout.sent_bytes("all_gather") >= (size - 1) * 6 * layout.count


def test_auto_takes_what_sends_least():
    assert SparseLayout(1000, 100_000, 2).choose("auto", may_split=True) == "all_gather"
    # Half the bytes are not worth the second round; a third are.
    assert SparseLayout(1000, 100_000, 4).choose("auto", may_split=True) == "all_gather"
    assert SparseLayout(1000, 100_000, 8).choose("auto", may_split=True) == "split"
    assert SparseLayout(1000, 100_000, 8).choose("auto", may_split=False) == "all_gather"
    # The union fills the tensor.
    assert SparseLayout(60_000, 100_000, 8).choose("auto", may_split=False) == "dense"
    assert SparseLayout(100_000, 100_000, 8).choose("auto", may_split=True) == "dense"
    # Too short to be split.
    assert SparseLayout(10, 100, 8).choose("split", may_split=True) == "all_gather"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values_K": torch.zeros(3, dtype=torch.float64)}, "values to be a vector of float32"),
        ({"indices_K": torch.zeros(2, dtype=torch.int64)}, "indices to be int64 of shape"),
        ({"indices_K": torch.tensor([0, 5, 5])}, "indices to be all different, got 5 twice"),
        ({"indices_K": torch.tensor([0, 6, 5])}, "indices to be ascending"),
        ({"indices_K": torch.tensor([0, 5, 10])}, r"indices to be in \[0, 10\), got 10"),
        ({"indices_K": torch.tensor([-1, 5, 6])}, r"indices to be in \[0, 10\), got -1"),
        ({"values_K": torch.tensor([0.0, float("inf"), 1.0])}, "values to be finite"),
        ({"numel": 2}, r"values to be at most numel \(2\), got 3"),
        ({"algorithm": "tree"}, "algorithm to be one of"),
        ({"value_codec": "sign"}, "value_codec to be one of"),
        ({"algorithm": "split"}, "residual to be given"),
        ({"residual": torch.zeros(9)}, "residual to be contiguous float32 of 10 elements"),
        ({"out": torch.zeros(10).double()}, "out to be contiguous float32 of 10 elements"),
        ({"regions": SplitRegions(10, 2)}, "regions to be those of 10 elements and 1 ranks"),
    ],
)
def test_bad_arguments_of_sparse_all_reduce(change, message):
    call = {"values_K": torch.ones(3), "indices_K": torch.tensor([1, 5, 6]), "numel": 10}
    assert sparse_all_reduce(**call).count_nonzero() == 3
    with pytest.raises(ValueError, match=f"^sparse_all_reduce: expected {message}"):
        sparse_all_reduce(**{**call, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(8, 8).t()[1:]}, "x to be contiguous float32, bfloat16 or float16"),
        ({"x": torch.zeros(64).double()}, "x to be contiguous float32, bfloat16 or float16"),
        ({"format": "int5"}, "format to be one of"),
        ({"block": 100}, "block to be None or a power of two from 64 to 1024, got 100"),
        ({"format": "sign", "block": None}, "block to be a number for signs"),
        ({"residual": torch.zeros(63)}, "residual to be contiguous float32 of 64 elements"),
        ({"server_residual": torch.zeros(64)}, "server_residual to be .* of 256 elements"),
        ({"rng_state": torch.zeros(3)}, r"rng_state to be int64 of shape \(4,\)"),
        (
            {"format": "sign", "rng_state": torch.zeros(4, dtype=torch.int64)},
            "rng_state to be None for signs",
        ),
        ({"x": torch.full((64,), float("nan"))}, "x to be finite"),
    ],
)
def test_bad_arguments_of_quantized_all_reduce(change, message):
    with pytest.raises(ValueError, match=f"^quantized_all_reduce_: expected {message}"):
        quantized_all_reduce_(**{"x": torch.zeros(64), **change})


def test_one_rank_owes_nothing():
    x, residual, server = torch.ones(300), torch.full((300,), 0.5), torch.full((512,), 0.25)
    quantized_all_reduce_(x, residual=residual, server_residual=server)
    assert torch.equal(x, torch.full((300,), 1.75))
    assert not residual.any()
    assert not server.any()
