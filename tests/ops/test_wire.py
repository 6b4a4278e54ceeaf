"""The wire format: what comes back, and that no payload whatever makes a decoder misbehave."""

import functools
import struct

import emulation
import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import examples

from moe_ext import ops

INDEX_CODECS = ["bitmap", "u16", "delta"]
VALUE_CODECS = ["fp32", "bf16", "fp8", "int8", "int4", "sign"]


def make(numel, count):
    indices = torch.randperm(numel)[:count].sort().values if numel < 10**7 else None
    if indices is None:
        indices = torch.randint(0, numel, (count,)).unique()
    return torch.randn(len(indices)), indices


def expected_values(values, codec, block=128):
    if codec in ("fp32", "bf16"):
        return values if codec == "fp32" else values.bfloat16().float()
    out = ops.quantize_blockwise(values, format=codec, block=block)
    return ops.dequantize_blockwise(*out, len(values), format=codec, block=block)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("value_codec", VALUE_CODECS)
@pytest.mark.parametrize("index_codec", INDEX_CODECS)
def test_what_is_encoded_comes_back(device, index_codec, value_codec, checksum):
    for numel, count in ((0, 0), (1, 0), (1, 1), (9, 4), (300, 300), (200000, 257), (131072, 2000)):
        values, indices = make(numel, count)
        if count > 1:
            indices[0], indices[-1] = 0, numel - 1
        payload = ops.encode_gradient(
            values,
            indices,
            numel,
            index_codec=index_codec,
            value_codec=value_codec,
            block=64,
            checksum=checksum,
        )
        assert payload.dtype == torch.uint8 and len(payload) % 16 == 0
        out = ops.decode_gradient(payload)
        assert out.numel == numel and torch.equal(out.indices, indices)
        assert torch.equal(out.values, expected_values(values, value_codec, 64))


@pytest.mark.parametrize("value_codec", VALUE_CODECS)
def test_dense(device, value_codec):
    for numel in (0, 1, 130):
        values = torch.randn(numel)
        payload = ops.encode_gradient(values, None, numel, value_codec=value_codec)
        out = ops.decode_gradient(payload)
        assert out.indices is None and out.numel == numel
        assert torch.equal(out.values, expected_values(values, value_codec))
        everything = ops.encode_gradient(
            values, torch.arange(numel), numel, value_codec=value_codec
        )
        assert torch.equal(everything, payload)


def test_indices_beyond_32_bits(device):
    numel = 2**40 + 5
    values, indices = torch.randn(4), torch.tensor([0, 2**24 + 1, 2**32 + 3, numel - 1])
    payload = ops.encode_gradient(values, indices, numel, index_codec="delta")
    out = ops.decode_gradient(payload)
    assert out.numel == numel and torch.equal(out.indices, indices)
    numel = 2**33
    indices = torch.tensor([2**24 + 1, 2**31, 2**32 + 3, numel - 1])
    out = ops.decode_gradient(ops.encode_gradient(values, indices, numel, index_codec="u16"))
    assert torch.equal(out.indices, indices)


def test_sizes():
    numel, count = 2**24, 2**24 // 100
    values, indices = make(numel, count)
    count = len(indices)
    sizes = {
        codec: len(
            ops.encode_gradient(values, indices, numel, index_codec=codec, value_codec="int8")
        )
        for codec in INDEX_CODECS
    }
    scales = 4 * -(-count // 128)
    assert abs(sizes["u16"] - (3 * count + 4 * 256 + scales)) <= 112
    assert abs(sizes["bitmap"] - (numel // 8 + count + scales)) <= 112
    # A gap of 128 or more takes two bytes: exp(-1.28) of them.
    assert abs(sizes["delta"] - (2.28 * count + scales)) < 0.02 * count
    assert ops.choose_index_codec(count, numel) == "u16"
    assert ops.choose_index_codec(numel // 8, numel) == "bitmap"
    assert ops.choose_index_codec(numel, numel) == "dense"


def test_the_first_version_stays_as_it_is(device):
    """Bytes that other versions and machines must be able to read."""
    payload = ops.encode_gradient(
        torch.tensor([1.0, -2.0]), torch.tensor([3, 200]), 300, index_codec="delta", checksum=True
    )
    header = struct.unpack("<HBBBBHQQQQQQII", bytes(payload[:64].tolist()))
    assert header[:12] == (0x584D, 1, 3, 0, 1, 0, 300, 2, 3, 8, 0, 96) and header[13] == 0
    assert payload[64:68].tolist() == [3, 196, 1, 0]
    assert bytes(payload[80:88].tolist()) == struct.pack("<2f", 1.0, -2.0)
    assert header[12] == crc32c(
        bytes(payload[:56].tolist()) + bytes(4) + bytes(payload[60:].tolist())
    )


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283


@functools.cache
def encoded(index_codec, value_codec, checksum, device):
    torch.manual_seed(0)
    values, indices = make(70000, 90)
    return ops.encode_gradient(
        values,
        indices,
        70000,
        index_codec=index_codec,
        value_codec=value_codec,
        block=64,
        checksum=checksum,
    )


def sample(index_codec="delta", value_codec="int8", checksum=False):
    """A copy of a payload, whose encoding takes the emulation long."""
    return encoded(index_codec, value_codec, checksum, torch.get_default_device()).clone()


@pytest.mark.parametrize("index_codec", INDEX_CODECS)
def test_every_truncation_is_refused(device, index_codec):
    payload = sample(index_codec)
    for size in [*range(0, 130), *range(130, len(payload), 61), len(payload) - 1]:
        with pytest.raises(RuntimeError, match=r"^decode_gradient: expected payload to have"):
            ops.decode_gradient(payload[:size])
    with pytest.raises(RuntimeError, match=r"expected payload to have the \d+ bytes that its head"):
        ops.decode_gradient(torch.cat([payload, payload[:1]]))


def test_every_flipped_bit_is_seen_with_a_checksum(device):
    payload = sample(checksum=True)
    step = 7 if device.type == "cuda" or emulation.is_active() else 1
    for position in range(0, len(payload), step):
        for bit in (0, 7) if position >= 64 else range(8):
            broken = payload.clone()
            broken[position] ^= 1 << bit
            with pytest.raises(RuntimeError, match="expected payload to"):
                ops.decode_gradient(broken)


def assert_decodes_or_refuses(payload):
    try:
        out = ops.decode_gradient(payload)
    except RuntimeError as error:
        assert "expected payload to" in str(error), error
        return
    count = out.numel if out.indices is None else len(out.indices)
    assert len(out.values) == count <= 8 * len(payload)
    if out.indices is not None and count:
        assert out.indices[0] >= 0 and out.indices[-1] < out.numel
        assert (out.indices.diff() > 0).all()


@examples(300)
@given(
    index_codec=st.sampled_from(INDEX_CODECS),
    value_codec=st.sampled_from(VALUE_CODECS),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
    header=st.booleans(),
)
def test_a_corrupted_payload_is_decoded_in_range_or_refused(
    device, index_codec, value_codec, edits, header
):
    payload = sample(index_codec, value_codec)
    for position, byte in edits:
        payload[position % (64 if header else len(payload))] = byte
    assert_decodes_or_refuses(payload)


@examples(300)
@given(
    fields=st.tuples(
        st.integers(0, 4), st.integers(0, 6), st.integers(0, 1), st.sampled_from([0, 63, 64, 128])
    ),
    sizes=st.lists(
        st.one_of(st.integers(0, 40), st.sampled_from([2**32, 2**62, 2**63, 2**64 - 1])),
        min_size=5,
        max_size=5,
    ),
    body=st.binary(max_size=200),
    honest=st.booleans(),
)
def test_a_foreign_header_is_refused(device, fields, sizes, body, honest):
    total = 64 + len(body) if honest else sizes[0]
    header = struct.pack("<HBBBBHQQQQQQII", 0x584D, 1, *fields, *sizes, total, 0, 0)
    assert_decodes_or_refuses(torch.tensor(list(header + body), dtype=torch.uint8))


@examples(100)
@given(body=st.binary(max_size=300))
def test_noise_is_refused(device, body):
    with pytest.raises(RuntimeError, match="expected payload to"):
        ops.decode_gradient(torch.tensor(list(body), dtype=torch.uint8))


VALUES, INDICES = torch.ones(3), torch.tensor([1, 5, 7])


OF = "^encode_gradient: expected "
REFUSED = {
    "encode_gradient": [
        {"values_K": VALUES, "indices_K": INDICES, "numel": 8},
        (
            {"indices_K": INDICES.flip(0)},
            "indices to be ascending and all different, got 5 after 7",
        ),
        (
            {"indices_K": INDICES * 0 + 4},
            "indices to be ascending and all different, got 4 after 4 at 1",
        ),
        ({"numel": 7}, r"indices to be in \[0, 7\), got 7 at 2"),
        ({"indices_K": INDICES - 2, "numel": 7}, "indices to be in .* got -1 at 0"),
        ({"indices_K": INDICES[:2]}, "indices to be of size 3 in dim 0"),
        ({"indices_K": INDICES.int()}, "indices to be Long, got Int"),
        ({"index_codec": "rle"}, "index_codec to be dense, bitmap, u16 or delta, got rle"),
        ({"index_codec": "dense"}, "count to be numel, 8, for dense, got 3"),
        ({"numel": 2}, r"count to be in \[0, 2\], got 3"),
        ({"numel": 2**62 + 1}, r"numel to be in \[0, 2\^62\]"),
        (
            {"value_codec": "int8", "block": 100},
            "^quantize_blockwise: expected "
            "block to be a power of two from 64 to 1024, or None .*, got 100",
        ),
    ],
    "_encode_payload": [
        {
            "indices": INDICES,
            "codes": torch.zeros(12).byte(),
            "scales": VALUES[:0],
            "numel": 8,
            "count": 3,
            "index_codec": "u16",
            "value_codec": "fp32",
            "value_block": 0,
        },
        (
            {"value_codec": "fp16"},
            OF + "value_codec to be fp32, bf16, fp8, int8, int4 or sign, got fp16",
        ),
        (
            {"codes": torch.zeros(11).byte()},
            OF + r"codes to be of size 12 in dim 0 \(the bytes of the values\), got shape \[11\]",
        ),
        (
            {"value_block": 64},
            OF + "value_block to be 0 for values without scales, got 64",
        ),
    ],
    "decode_gradient": [
        {"payload": VALUES},
        ({}, "payload to be Byte, got Float"),
        (
            {"payload": torch.zeros(64, dtype=torch.uint8)},
            "payload to begin with MX, got the bytes 0 and 0",
        ),
    ],
}
test_refuses = refusals.test(REFUSED)


def test_refuses_missing_indices():
    with pytest.raises(ValueError, match="expected indices to be given for 'u16', got None"):
        ops.encode_gradient(VALUES, None, 8, index_codec="u16")


@pytest.mark.parametrize("values", [VALUES.double(), VALUES[:, None]])
def test_refuses_values(values):
    with pytest.raises(ValueError, match=r"expected values to be a 1-D tensor of float32, got "):
        ops.encode_gradient(values, INDICES, 8)


def test_refuses_a_value_codec():
    with pytest.raises(ValueError, match=r"expected value_codec to be one of .*, got 'fp16'"):
        ops.encode_gradient(VALUES, INDICES, 8, value_codec="fp16")


@pytest.mark.parametrize("index_codec", INDEX_CODECS)
def test_any_address(device, index_codec):
    payload = sample(index_codec, checksum=True)
    moved = torch.cat([payload[:3], payload])[3:]
    for actual, expected in zip(
        ops.decode_gradient(moved), ops.decode_gradient(payload), strict=True
    ):
        assert actual == expected if isinstance(actual, int) else torch.equal(actual, expected)


def test_cuda_kernels_trap_indices_that_do_not_ascend():
    if not emulation.is_built():
        pytest.skip("no emulation of CUDA: build with MOE_EXT_TESTS=1")
    with emulation.emulated_cuda():
        for indices in (INDICES.flip(0), INDICES * 0, INDICES - 2, INDICES + 1):
            with pytest.raises(RuntimeError, match="trap"):
                ops.encode_gradient(VALUES, indices, 8)


def test_another_version_is_named(device):
    payload = sample()
    payload[2] = 9
    with pytest.raises(RuntimeError, match="payload to be of version 1, got 9"):
        ops.decode_gradient(payload)
