"""The largest of each chunk: payloads against formulas, what is owed, the cosine transform."""

import math

import pytest
import torch

from moe_ext.compression import ChunkedTopK


def decoded(codec, payload, numel):
    out = torch.zeros(numel)
    codec.decode_add_(out, payload)
    return out


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize(
    ("k", "chunk", "bits"), [(1, 64, 2), (8, 64, 32), (5, 100, 2), (64, 64, 32)]
)
@pytest.mark.parametrize("dct", [False, True])
def test_payload_and_what_is_left(numel, k, chunk, bits, dct):
    codec = ChunkedTopK(k, chunk, bits, dct)
    torch.manual_seed(numel)
    x, owed = torch.randn(numel), torch.randn(numel)
    total = x + owed
    payload = codec.encode(x, owed)
    chunks = math.ceil(numel / chunk)
    places = math.ceil(chunks * k * math.ceil(math.log2(chunk)) / 8)
    values = 4 * chunks * k if bits == 32 else math.ceil(chunks * k / 4) + 4 * chunks
    assert payload.numel() == codec.payload_bytes(numel) == places + values
    # Nothing is lost: what was sent and what is owed are what there was, but for one rounding.
    sent = decoded(codec, payload, numel)
    torch.testing.assert_close(sent + owed, total, rtol=0, atol=1e-5 * chunk**0.5)
    if bits == 32 and not dct:
        for part, got in zip(total.split(chunk), sent.split(chunk), strict=True):
            kept = part.abs().topk(min(k, part.numel())).indices
            want = torch.zeros_like(part)
            want[kept] = part[kept]
            assert torch.equal(got, want)


def test_two_bits_are_two_means_and_a_sign():
    codec = ChunkedTopK(4, 8, 2)
    x = torch.tensor([0.0, 1.0, -2.0, 0.1, 8.0, -6.0, 0.0, 0.2])
    sent = decoded(codec, codec.encode(x), 8)
    assert sent.tolist() == [0, 1.5, -1.5, 0, 7, -7, 0, 0]


def test_the_transform_is_scipys():
    fft = pytest.importorskip("scipy.fft")
    codec = ChunkedTopK(3, 16, 32, dct=True)
    x = torch.randn(16)
    coefficients = torch.from_numpy(fft.dct(x.double().numpy(), norm="ortho"))
    small = coefficients.abs().sort().indices[:-3]
    coefficients[small] = 0
    want = torch.from_numpy(fft.idct(coefficients.numpy(), norm="ortho")).float()
    torch.testing.assert_close(decoded(codec, codec.encode(x), 16), want, rtol=0, atol=1e-6)


def test_what_is_owed_decays():
    codec = ChunkedTopK(1, 4, 32, decay=0.5)
    owed = torch.zeros(4)
    codec.encode(torch.tensor([4.0, 2.0, 1.0, 0.0]), owed)
    assert owed.tolist() == [0, 2, 1, 0]
    codec.encode(torch.tensor([0.0, 0.0, 0.0, 3.0]), owed)
    assert owed.tolist() == [0, 1, 0.5, 0]


def test_bytes_of_another_rank_stay_inside():
    """Damaged places are written inside the chunk."""
    codec = ChunkedTopK(2, 5, 32)
    room = torch.zeros(40)
    codec.decode_add_(room[16:21], torch.full((codec.payload_bytes(5),), 255, dtype=torch.uint8))
    assert (room[:16] == 0).all() and (room[21:] == 0).all()
