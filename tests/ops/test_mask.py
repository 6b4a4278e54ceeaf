"""Packing by mask against plain PyTorch, on every instruction set, and what it refuses."""

import pytest
import torch

from moe_ext import ops, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
SIZES = [0, 1, 8, 63, 64, 65, 257, 70000]


def example(numel, dtype, density):
    torch.manual_seed(numel)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype), torch.rand(numel) < density


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.every_isa
def test_equals_the_reference(backend, numel, dtype, density):
    x, mask = (part.to(backend) for part in example(numel, dtype, density))
    bitmap = ops.pack_bits(mask)
    assert torch.equal(bitmap, reference.pack_bits(mask))
    packed, want = x.new_empty(int(mask.sum())), x.new_empty(int(mask.sum()))
    ops.pack_masked_(packed, x, bitmap)
    reference.pack_masked_(want, x, bitmap)
    # As bytes: NaN among the numbers keeps its bits.
    assert torch.equal(packed.view(torch.uint8), want.view(torch.uint8))
    out, back = torch.ones_like(x), torch.ones_like(x)
    ops.unpack_masked_(out, packed, bitmap)
    reference.unpack_masked_(back, packed, bitmap)
    assert torch.equal(out.view(torch.uint8), back.view(torch.uint8))


@pytest.mark.every_isa
def test_minus_zero_is_kept(backend):
    x = torch.zeros(40, device=backend)
    x[3], x[39] = -0.0, float("nan")
    bitmap = ops.pack_bits(x)
    assert ops.block_indices(bitmap).tolist() == [3, 39]


@pytest.mark.every_isa
def test_what_lies_around_stays(backend):
    """Nothing is written before or behind the elements."""
    x, mask = (part.to(backend) for part in example(1000, torch.bfloat16, 0.4))
    bitmap, count = ops.pack_bits(mask), int(mask.sum())
    room = torch.full((count + 64,), 7, dtype=torch.int16, device=backend)
    ops.pack_masked_(room[32:-32], x.view(torch.int16), bitmap)
    assert (room[:32] == 7).all() and (room[-32:] == 7).all()
    large = torch.full((1064,), 7, dtype=torch.int16, device=backend)
    ops.unpack_masked_(large[32:-32], room[32:-32], bitmap)
    assert (large[:32] == 7).all() and (large[-32:] == 7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": torch.empty(3)}, "packed to have an element for each of the 4 bits"),
        ({"packed": torch.empty(4).double()}, "expected packed to be Float"),
        ({"bitmap": torch.tensor([15, 16], dtype=torch.uint8)}, "bits past the last element"),
        ({"bitmap": torch.tensor([15], dtype=torch.uint8)}, "bitmap"),
        ({"bitmap": torch.tensor([15, 0])}, "expected bitmap to be Byte"),
        ({"x": torch.empty(12, 2)[:, 0]}, "contiguous"),
    ],
)
def test_refuses(change, message):
    args = {
        "packed": torch.empty(4),
        "x": torch.empty(12),
        "bitmap": torch.tensor([15, 0], dtype=torch.uint8),
        **change,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.pack_masked_(args["packed"], args["x"], args["bitmap"])
    with pytest.raises(RuntimeError, match=message):
        ops.unpack_masked_(args["x"], args["packed"], args["bitmap"])


def test_one_tensor_is_refused_twice():
    x = torch.empty(8)
    with pytest.raises(RuntimeError, match="memory of its own"):
        ops.pack_masked_(x, x, torch.tensor([255], dtype=torch.uint8))
