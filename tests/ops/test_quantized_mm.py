"""Products with packed weights against float64, on every instruction set, and what they refuse."""

import contextlib

import emulation
import pytest
import torch

from moe_ext import ops, reference

# Of a result summed in float32 over K products of about 1, and rounded once to the dtype.
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def tolerance(x, weight, dtype):
    magnitudes = x.double().abs() @ weight.double().abs().T
    return magnitudes * 2.0**-24 * 40 + EPS[dtype] * magnitudes


def quantized(bits, dtype, num_rows=37, dim=256, count=11):
    torch.manual_seed(bits)
    codes, scales = ops.quantize_blockwise(torch.randn(num_rows, dim), bits=bits, block=64)
    inner = torch.randint(0, count + 1, (num_rows - 1,)).sort().values
    offsets = torch.cat([torch.tensor([0]), inner, torch.tensor([count])])
    columns = torch.randint(0, dim, (count,)).int()
    outliers = (10 * torch.randn(count)).to(dtype)
    return codes.view(num_rows, -1), scales.view(num_rows, -1), outliers, columns, offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 6])
@pytest.mark.every_isa
def test_codes_equal_the_reference(backend, num_tokens, bits, dtype):
    x = torch.randn(num_tokens, 256).to(backend, dtype)
    packed = [part.to(backend) for part in quantized(bits, dtype)]
    found = ops.quantized_mm(x, *packed, bits=bits)
    want = reference.quantized_mm(x, *packed, bits=bits)
    whole = reference.quantized_mm(torch.eye(256, device=backend), *packed, bits=bits).T
    assert found.dtype == dtype
    assert ((found.double() - want).abs() <= tolerance(x, whole, dtype)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5])
@pytest.mark.parametrize("dim", [8, 200])
@pytest.mark.every_isa
def test_masks_equal_the_reference(backend, num_tokens, density, dtype, dim):
    torch.manual_seed(dim)
    weight = torch.randn(35, dim).to(backend, dtype)
    mask = torch.rand(35, dim).to(backend) < density
    x = torch.randn(num_tokens, dim).to(backend, dtype)
    packed = weight[mask], ops.pack_bits(mask).view(35, -1)
    found, want = ops.masked_mm(x, *packed), reference.masked_mm(x, *packed)
    assert ((found.double() - want).abs() <= tolerance(x, weight * mask, dtype)).all()


@pytest.mark.every_isa
def test_what_is_not_kept_is_not_looked_at(backend):
    mask = torch.zeros(2, 64, dtype=torch.bool, device=backend)
    mask[:, ::3] = True
    x = torch.where(mask[:1], 1.0, float("inf"))
    values = torch.ones(int(mask.sum()), device=backend)
    found = ops.masked_mm(x, values, ops.pack_bits(mask).view(2, -1))
    assert torch.equal(found.cpu(), torch.full((1, 2), 22.0))


def test_all_instruction_sets_and_cuda_give_the_same_bits():
    before, found = torch.ops.moe_ext._cpu_isa(), []
    names = [
        name
        for name in ("portable", "avx2", "avx512")
        if torch.ops.moe_ext._cpu_isa_supported(name)
    ]
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        mask, x = torch.rand(9, 264) < 0.5, torch.randn(13, 264).to(dtype)
        packed = torch.randn(int(mask.sum())).to(dtype), ops.pack_bits(mask).view(9, -1)
        cases.append((x, packed, [(quantized(bits, dtype), bits) for bits in (8, 4)]))
    for name in [*names, *(["simt"] if emulation.is_built() else [])]:
        if name != "simt":
            torch.ops.moe_ext._set_cpu_isa(name)
        with emulation.emulated_cuda() if name == "simt" else contextlib.nullcontext():
            products = []
            for x, packed, codes in cases:
                whole = x[:, :256].contiguous()
                products += [ops.quantized_mm(whole, *code, bits=bits) for code, bits in codes]
                products.append(ops.masked_mm(x, *packed))
        found.append(torch.cat([product.flatten().float() for product in products]))
    torch.ops.moe_ext._set_cpu_isa(before)
    assert all(torch.equal(other, found[0]) for other in found)


OFFSETS = [[0, 0, 5, 6], [1, 3, 3, 4]]


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["codes", "mask"])
def test_tokens_meet_the_weight_of_their_expert(device, kind, dtype, offsets, ends):
    """With the bits of a product an expert; a token of no expert gets zeros."""
    if ends and offsets[0] > 0:
        pytest.skip("ends have all rows in front of them")
    num_rows, x = 36, torch.randn(6, 256).to(device, dtype)
    rows = [slice(e * 12, (e + 1) * 12) for e in range(3)]
    if kind == "codes":
        codes, scales, outliers, columns, places = (
            part.to(device) for part in quantized(8, dtype, num_rows)
        )
        parts = [
            (codes[r], scales[r], outliers, columns, places[r.start : r.stop + 1]) for r in rows
        ]
        whole, product = (codes, scales, outliers, columns, places), ops.quantized_mm
    else:
        mask, weight = torch.rand(num_rows, 256).to(device) < 0.4, torch.randn(num_rows, 256)
        weight, bits = weight.to(device, dtype), ops.pack_bits(mask).view(num_rows, -1)
        parts = [(weight[r][mask[r]], bits[r]) for r in rows]
        whole, product = (weight[mask], bits), ops.masked_mm
    want = torch.zeros(6, 12).to(device, dtype)
    for e, part in enumerate(parts):
        mine = slice(offsets[e], offsets[e + 1])
        want[mine] = product(x[mine], *part)
    given = torch.tensor(offsets).to(device)
    found = product(x, *whole, expert_offsets=given[1:].int() if ends else given)
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(2, 256).double(), "x to be float32 or bfloat16"),
        (1, torch.zeros(37, 255, dtype=torch.uint8), "codes"),
        (2, torch.zeros(37, 3), "blocks of a multiple of 32 columns"),
        (3, torch.zeros(11).bfloat16(), "expected outliers to be Float"),
        (4, torch.full((11,), 256).int(), r"outlier_columns to be in \[0, 256\), got 256 at 0"),
        (5, torch.full((38,), 12), r"outlier_offsets to be in \[0, 11\], got 12 to 12"),
        (7, torch.zeros(5).int(), r"as many rows for each of the 5 experts, got shape \[37, 256\]"),
        (7, torch.zeros(2), "expert_offsets to be int32 or int64"),
        (7, torch.tensor([0, 3]), "expert_offsets to end within the 2 rows, got 3"),
        (6, 3, "bits to be 8 or 4, got 3"),
    ],
)
def test_refuses(place, value, message):
    args = [torch.zeros(2, 256), *quantized(8, torch.float32), 8, None]
    args[place] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.moe_ext.quantized_mm(*args)


def test_refuses_masks_that_do_not_fit():
    x, bitmap = torch.zeros(2, 16), torch.full((3, 2), 255, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="an element for each of the 48 bits that are set"):
        ops.masked_mm(x, torch.zeros(47), bitmap)
    with pytest.raises(RuntimeError, match="K to be a multiple of 8, got 12"):
        ops.masked_mm(torch.zeros(2, 12), torch.zeros(48), bitmap)
    with pytest.raises(RuntimeError, match="the bytes of a bit for each column"):
        ops.masked_mm(x, torch.zeros(48), bitmap[:, :1])
