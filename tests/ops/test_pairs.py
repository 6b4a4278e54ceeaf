"""Packed indices and their sums against plain PyTorch, on damaged bytes, and what is refused."""

import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_helpers import examples

from moe_ext import ops, reference

# Indices in runs, whole ones, and both beside the border between them.
CASES = [
    (0, 0),
    (0, 5),
    (1, 1),
    (2, 70_001),
    (4, 70_001),
    (5, 70_001),
    (255, 65_536),
    (256, 65_536),
    (257, 65_537),
    (4000, 4000),
    (3000, 9_000_000),
    (5, 2**31),
    (0, 2**31 + 1),
    (5, 2**31 + 1),
    (70_000, 2**33),
]


def ascending(count, numel, *, unused=0, seed=0):
    """Different indices, the last of which repeats `unused` times."""
    generator = torch.Generator().manual_seed(seed)
    taken = min(count - unused, numel)
    if numel <= 4 * count:
        found = torch.randperm(numel, generator=generator)[:taken]
    else:
        found = torch.randint(numel, (2 * count + 8,), generator=generator).unique()[:taken]
    found = found.sort().values
    return torch.cat([found, found[-1:].expand(count - len(found))]) if count else found


@pytest.mark.parametrize(("count", "numel"), CASES)
def test_indices_come_back(device, count, numel):
    indices = ascending(count, numel, unused=count // 10).to(device)
    packed = ops.pack_indices(indices, numel)
    assert packed.dtype == torch.uint8
    assert packed.shape == (ops.packed_index_bytes(count, numel),)
    assert torch.equal(packed, reference.pack_indices(indices, numel))
    assert torch.equal(ops.unpack_indices(packed, count, numel), indices)
    assert torch.equal(reference.unpack_indices(packed, count, numel), indices)


def test_strided_indices(device):
    indices = ascending(300, 100_000).repeat_interleave(2).to(device)
    packed = ops.pack_indices(indices[::2], 100_000)
    assert torch.equal(ops.unpack_indices(packed, 300, 100_000), indices[::2])


def test_layout_of_the_bytes(device):
    found = ops.pack_indices(
        torch.tensor([1, 65_535, 65_536, 70_000, 70_000], device=device), 70_001
    )
    offsets = [1, 65_535, 0, 4464, 4464]
    numbers = [int.from_bytes(bytes(found.tolist()[at : at + 4]), "little") for at in (0, 4)]
    assert numbers == [2, 5]
    shorts = [
        int.from_bytes(bytes(found.tolist()[at : at + 2]), "little") for at in range(8, 32, 2)
    ]
    assert shorts == [*offsets, *[0] * 7]
    assert ops.pack_indices(torch.tensor([7, 65_537], device=device), 70_001).tolist() == [
        *[7, 0, 0, 0],
        *[1, 0, 1, 0],
        *[0] * 8,
    ]


@pytest.mark.parametrize(("count", "numel"), [(2, 40_000), (3000, 40_000), (3000, 200_000)])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7])
def test_sum_equals_that_of_torch(device, count, numel, divisor):
    unused = count // 5
    indices = ascending(count, numel, unused=unused)
    values = torch.randn(count)
    values[count - unused :] = 0
    values[::17] = 0
    packed = ops.pack_indices(indices.to(device), numel)
    for start, length in ((0, numel), (numel // 3, numel // 2), (numel - 1, 1)):
        out = torch.randn(length)
        inside = (indices >= start) & (indices < start + length)
        given = values * inside
        # What is done for each payload of bytes that are nobody's own.
        want = out.clone().index_add_(0, (indices[inside] - start), given[inside] / divisor)
        slow, found = out.clone().to(device), out.clone().to(device)
        how = {"start": start, "divisor": divisor}
        reference.add_pairs_(slow, given.to(device), packed, numel, **how)
        ops.add_pairs_(found, given.to(device), packed, numel, **how)
        assert torch.equal(found.cpu(), want)
        assert torch.equal(slow.cpu(), want)


def test_sum_of_strided_values_in_any_shape(device):
    indices, values = ascending(200, 600).to(device), torch.randn(400, device=device)
    out = torch.zeros(20, 30, device=device)
    ops.add_pairs_(out, values[::2], ops.pack_indices(indices, 600), 600)
    assert torch.equal(out.flatten()[indices], values[::2])
    assert int(out.count_nonzero()) == 200


def test_outside_counts_as_the_nearest(device):
    packed = ops.pack_indices(torch.tensor([1, 5, 9], device=device), 10)
    out = torch.zeros(3, device=device)
    ops.add_pairs_(out, torch.tensor([1.0, 2.0, 4.0], device=device), packed, 10, start=4)
    assert out.tolist() == [1, 2, 4]


def test_repeated_indices_add_in_their_order():
    values = torch.randn(3000)
    indices = torch.arange(3000) // 50
    out, want = torch.randn(60), torch.zeros(60)
    want.copy_(out)
    for i in range(3000):
        want[indices[i]] += values[i] / 3
    ops.add_pairs_(out, values, ops.pack_indices(indices, 60), 60, divisor=3)
    assert torch.equal(out, want)


@examples(60)
@given(
    count=st.integers(1, 400),
    numel=st.sampled_from([1, 300, 65_536, 70_001, 400_000, 2**31 + 5]),
    damaged=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_damaged_bytes_stay_inside(device, count, numel, damaged, seed):
    generator = torch.Generator().manual_seed(seed)
    packed = ops.pack_indices(ascending(count, numel, seed=seed).to(device), numel)
    where = torch.randint(len(packed), (damaged,), generator=generator)
    packed[where.to(device)] = torch.randint(
        256, (damaged,), dtype=torch.uint8, generator=generator
    ).to(device)
    found = ops.unpack_indices(packed, count, numel)
    assert found.min() >= 0 and found.max() < numel
    room = torch.zeros(60, device=device)
    values = torch.ones(count, device=device)
    ops.add_pairs_(room[20:40], values, packed, numel, start=numel // 2)
    assert not room[:20].any() and not room[40:].any() and bool(room.any())


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 400),
    numel=st.sampled_from([1, 300, 65_536, 70_001, 400_000]),
    seed=st.integers(0, 2**31),
)
def test_foreign_bytes_say_the_same_as_to_the_reference(count, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    size = ops.packed_index_bytes(count, numel)
    packed = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    want = reference.unpack_indices(packed, count, numel)
    assert torch.equal(ops.unpack_indices(packed, count, numel), want)
    values = torch.randn(count, generator=generator)
    found, slow = torch.zeros(2, numel)
    ops.add_pairs_(found, values, packed, numel, divisor=3)
    reference.add_pairs_(slow, values, packed, numel, divisor=3)
    assert torch.equal(found, slow)


IDX, OUT, VALUES = torch.tensor([1, 5, 9]), torch.zeros(10), torch.ones(3)
PACKED = torch.zeros(16, dtype=torch.uint8)


REFUSED = {
    "pack_indices": [
        {"indices_K": IDX, "numel": 10},
        ({"indices_K": IDX.int()}, "indices to be Long"),
        ({"indices_K": IDX[None]}, r"indices to be a 1-D tensor \[K\]"),
        ({"numel": -1}, r"numel to be in \[0, 2\^62\], got -1"),
        ({"numel": 0}, "numel to be at least 1 for 3 pairs, got 0"),
        ({"numel": 9}, r"indices to be in \[0, 9\), got 9 at 2"),
        ({"indices_K": IDX - 2, "numel": 9}, r"indices to be in \[0, 9\), got -1 at 0"),
        ({"indices_K": IDX.flip(0)}, "indices to be ascending, got 5 after 9 at 1"),
    ],
    "unpack_indices": [
        {"packed": PACKED, "count": 3, "numel": 10},
        ({"packed": PACKED.int()}, "packed to be Byte"),
        ({"count": -1}, r"number of pairs to be in \[0, 2147483647\], got -1"),
        ({"count": 5, "numel": 10**6}, r"packed to be 32 contiguous bytes, got shape \[16\]"),
        ({"packed": PACKED.repeat(2)[::2]}, "packed to be 16 contiguous bytes"),
        ({"packed": PACKED.repeat(2)[1:17]}, "at a multiple of 4 bytes"),
    ],
    "add_pairs_": [
        {"out": OUT, "values_K": VALUES, "packed": PACKED, "numel": 10},
        ({"out": OUT.double()}, "out to be Float"),
        ({"values_K": VALUES.double()}, "values to be Float, got Double"),
        ({"packed": PACKED.char()}, "packed to be Byte, got Char"),
        ({"values_K": VALUES[None]}, r"values to be a 1-D tensor \[K\]"),
        ({"values_K": VALUES.repeat(2), "numel": 10**6}, "packed to be 32 contiguous bytes"),
        ({"out": OUT[::2]}, "out to be contiguous"),
        ({"out": OUT[:0]}, "out to have elements for 3 pairs"),
        ({"start": 11}, r"start to be in \[0, 10\], got 11"),
        ({"divisor": 0}, "divisor to be finite and other than 0"),
        ({"values_K": OUT[3:6]}, "memory of its own, got a part of values'"),
        ({"packed": OUT.view(torch.uint8)[:16]}, "memory of its own, got a part of packed's"),
    ],
}


@refusals.parametrize(REFUSED)
def test_refuses(name, given, message):
    refusals.check(name, given, message)
    assert not OUT.any()
