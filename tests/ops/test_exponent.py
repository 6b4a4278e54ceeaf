import math

import emulation
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ext import ops, reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def all_patterns(dtype):
    bits = torch.arange(65536).to(torch.int16)
    if dtype == torch.float32:
        bits = bits.int() << 16 | torch.arange(65536).int()
    return bits.view(dtype)


def assert_restored(x, decode=ops.decode_exponents_):
    payload = ops.encode_exponents(x)
    assert payload.numel() <= ops.most_exponent_bytes(x.numel(), x.dtype)
    out = torch.full_like(x, math.pi)
    decode(out, payload.clone())
    assert torch.equal(out.view(BITS[x.dtype]), x.view(BITS[x.dtype]))
    return payload


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_is_restored(device, dtype):
    x = all_patterns(dtype).to(device)
    assert_restored(x)
    assert_restored(x[torch.randperm(65536, device=device)].contiguous())


@pytest.mark.parametrize(
    ("dtype", "numel", "spread"),
    [
        (torch.bfloat16, 0, 1),
        (torch.bfloat16, 1, 1),
        (torch.float16, 63, 0),
        (torch.float32, 64, 2),
        (torch.float16, 257, 2),
        (torch.float32, 8191, 8),
        (torch.bfloat16, 8192, 8),
        (torch.bfloat16, 8193, 0),
        (torch.float16, 3 * 8192 + 65, 1),
        (torch.bfloat16, 70_001, 2),
        (torch.float32, 70_001, 2),
    ],
)
def test_the_oracle_reads_what_is_written(dtype, numel, spread):
    # From one exponent alone to more than any plan has codes for.
    scale = torch.exp(spread * torch.randn(numel)) if spread else torch.ones(numel)
    x = ((torch.rand(numel) + 1 if spread == 0 else torch.randn(numel)) * scale).to(dtype)
    payload = assert_restored(x, reference.decode_exponents_)
    assert_restored(x)
    if numel > 8192 and spread < 8:
        assert payload.numel() < x.nbytes


@pytest.mark.skipif(not emulation.is_built(), reason="no emulation of CUDA")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "power"), [(0, 1), (1, 1), (63, 2), (8193, 1), (20_000, 6)])
def test_cuda_gives_the_bytes_of_the_cpu(dtype, numel, power):
    x = (torch.randn(numel) ** power).to(dtype)
    payload, out = ops.encode_exponents(x), torch.empty_like(x)
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]
    with emulation.emulated_cuda():
        assert torch.equal(ops.encode_exponents(x), payload)
        for here in (payload, odd):
            ops.decode_exponents_(out.fill_(1), here)
            assert torch.equal(out.view(BITS[dtype]), x.view(BITS[dtype]))


SOUND = torch.iinfo(torch.int64).max


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "num_rows"), [(0, 2), (1, 3), (70_001, 1), (70_001, 4)])
def test_rows_hold_the_payloads_of_parts(device, dtype, numel, num_rows):
    x = torch.randn(numel).to(device, dtype)
    rows, num_bytes = ops.encode_exponent_rows(x, num_rows, left_out=num_rows - 2)
    each, damaged = -(-numel // num_rows), torch.full((1,), SOUND, device=device)
    for i, (row, size) in enumerate(zip(rows, num_bytes.tolist(), strict=True)):
        part = x[i * each : (i + 1) * each]
        if i == num_rows - 2:
            assert size == 0
            continue
        payload = ops.encode_exponents(part)
        assert torch.equal(row[:size], payload)
        # As it is, at an odd address, and followed by other bytes.
        odd = torch.cat([payload.new_zeros(1), payload, payload.new_full((9,), 7)])[1:]
        for here in (payload.clone(), odd, row):
            out = torch.full_like(part, 3)
            ops.decode_exponent_row_(out, here, damaged)
            assert torch.equal(out.view(BITS[dtype]), part.view(BITS[dtype]))
    assert damaged.item() == SOUND


def test_damage_of_a_row_is_told(device):
    x = torch.randn(20_000).to(device)
    rows, num_bytes = ops.encode_exponent_rows(x, 1)
    row, out = rows[0, : int(num_bytes)].clone(), torch.empty_like(x)

    def lowest(row):
        damaged = torch.full((1,), SOUND, device=device)
        ops.decode_exponent_row_(out, row, damaged)
        return damaged.item()

    assert lowest(row) == SOUND
    assert lowest(row[:-8]) == 2
    # Magic, number of elements, bytes of the first block, plan of the last.
    sizes = row[16:28].view(torch.int32).tolist()
    for place, block in ((0, 0), (8, 0), (16, 0), (32 + sum(sizes[:2]), 2)):
        other = row.clone()
        other[place] += 99
        assert lowest(other) == block
    with pytest.raises(RuntimeError, match="expected payload to hold 20000 elements, got 8 bytes"):
        ops.decode_exponent_row_(out, row[:8], torch.zeros(1).long())
    with pytest.raises(RuntimeError, match="damaged to be one number"):
        ops.decode_exponent_row_(out, row, torch.zeros(2).long())
    with pytest.raises(RuntimeError, match="num_rows to be at least 1, got 0"):
        torch.ops.moe_ext.encode_exponent_rows(x, 0)


def test_rows_wait_for_nothing():
    """Fake tensors have no values that could be read back."""
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(70_001, device="cuda")
        rows, num_bytes = ops.encode_exponent_rows(x, 4)
        assert rows.is_cuda and rows.shape == (4, ops.most_exponent_bytes(17_501, x.dtype))
        part = torch.empty(17_501, device="cuda")
        ops.decode_exponent_row_(part, rows.narrow(0, 1, 1).view(-1), num_bytes.narrow(0, 0, 1))


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=0, max_size=700), st.sampled_from(DTYPES), st.integers(1, 30))
def test_any_bytes_are_restored(raw, dtype, repeats):
    raw = (raw * repeats)[: len(raw) * repeats // dtype.itemsize * dtype.itemsize]
    x = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    assert_restored(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bits_grow_by_a_64th_at_most(dtype):
    x = torch.randint(0, 256, (2**18 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    assert assert_restored(x).numel() <= x.nbytes * (1 + 1 / 64)


def test_is_within_three_percent_of_the_entropy():
    for x in (torch.randn(2**18), torch.randn(2**18) ** 3, torch.rand(2**18), torch.zeros(2**18)):
        bits = x.bfloat16().view(torch.int16).int() & 0xFFFF
        share = torch.bincount(bits >> 7 & 0xFF) / bits.numel()
        entropy = -(share * share.clamp_min(1e-30).log2()).sum()
        coded = 8 * ops.encode_exponents(x.bfloat16()).numel() / x.numel()
        # Zeros take a bit of the 16 each where Shannon needs none.
        assert coded <= 1.03 * (8 + max(entropy, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_damage_is_refused_or_decoded_within_bounds(device, dtype):
    x = torch.randn(9000).to(device, dtype)
    payload, out = ops.encode_exponents(x), torch.empty_like(x)
    for size in (0, 8, 15, 16, 24, 25, 100, payload.numel() - 8, payload.numel() - 1):
        with pytest.raises(RuntimeError, match="decode_exponents_: expected payload to "):
            ops.decode_exponents_(out, payload[:size])
    generator = torch.Generator().manual_seed(0)
    refused, turns = 0, 60 if emulation.is_active() else 600
    for turn in range(turns):
        # Headers of payload and blocks half of the time, and anything.
        end = 56 if turn % 2 else payload.numel()
        wrong = payload.clone()
        place = torch.randint(end, (1 + turn % 5,), generator=generator, device="cpu")
        value = torch.randint(256, place.shape, generator=generator, device="cpu")
        wrong[place.to(device)] = value.to(device, torch.uint8)
        try:
            ops.decode_exponents_(out, wrong)
        except RuntimeError:
            refused += 1
    assert refused > turns / 6


def test_more_escapes_than_bytes_are_refused(device):
    payload = ops.encode_exponents(torch.randn(1000).to(device, torch.bfloat16))
    planes = 24 + 24 + 1000
    payload[planes : planes + 64] = 255
    with pytest.raises(RuntimeError, match="to be as encoded, got a damaged block 0"):
        ops.decode_exponents_(torch.empty(1000, dtype=torch.bfloat16, device=device), payload)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.encode_exponents(torch.zeros(3).double()), "expected x to be bfloat16, flo"),
        (lambda: ops.encode_exponents(torch.zeros(4, 4)[:, 1]), "expected x to be contiguous, go"),
        (
            lambda: ops.decode_exponents_(torch.empty(3), ops.encode_exponents(torch.zeros(2))),
            "expected payload to hold 3 elements of Float, got another number or dtype",
        ),
        (
            lambda: ops.decode_exponents_(torch.empty(3), torch.zeros(99).byte()),
            "expected payload to hold 3 elements of Float, got other bytes",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
