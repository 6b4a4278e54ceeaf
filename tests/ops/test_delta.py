"""Deltas of tensors: round trips of every bit pattern, damaged payloads, hashes."""

import contextlib

import emulation
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ext import ops, reference

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float64]
SIZES = [0, 1, 31, 32, 33, 257, 70_000, (1 << 18) + 5]


def versions(numel, dtype, density, seed=0):
    """Two versions of a tensor of random bits, the second different at random places."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (2, numel * dtype.itemsize), dtype=torch.uint8, generator=generator)
    old, new = (half.clone().view(dtype) for half in raw)
    keep = torch.rand(numel, generator=generator) >= density
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return old, torch.where(keep, old.view(bits), new.view(bits)).view(dtype)


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", [0.0, 1e-4, 0.02, 1.0])
@pytest.mark.parametrize("xored", [False, True])
def test_round_trip(device, dtype, numel, density, xored):
    old, new = (version.to(device) for version in versions(numel, dtype, density))
    payload = ops.delta_encode(new, old, xored=xored)
    places, values = ops.delta_unpack(payload, old, numel)
    assert torch.equal(places, reference.delta_places(new, old))
    assert xored or same(values, new[places])
    target = old.clone()
    change = ops.delta_hash_change(target, payload, 7, xored=xored)
    ops.delta_apply_(target, payload, xored=xored)
    assert same(target, new)
    total = ops.delta_hash(old, 7) + change - ops.delta_hash(new, 7)
    assert total % (1 << 64) == 0
    assert torch.equal(ops.delta_pack(places, values, numel), payload)


@pytest.mark.parametrize(("share", "ratio"), [(0.022, 22), (0.009, 50)])
def test_bytes(share, ratio):
    """bfloat16: a byte for a place and two for a value, and few more."""
    old = torch.zeros(1 << 20, dtype=torch.bfloat16)
    new = old.clone()
    new[
        torch.randperm(new.numel(), generator=torch.Generator().manual_seed(0))[
            : int(share * new.numel())
        ]
    ] = 1
    payload = ops.delta_encode(new, old)
    assert 2 * old.numel() / payload.numel() > ratio
    assert payload.numel() <= 3.2 * share * old.numel() + 12 * 4


def test_special_values_are_values(device):
    old = torch.tensor([0.0, float("nan"), 1.0, float("nan"), 1e-45], device=device)
    new = torch.tensor([-0.0, float("nan"), 1.0, 2.0, 0.0], device=device)
    places, _ = ops.delta_unpack(ops.delta_encode(new, old), old, 5)
    assert places.tolist() == [0, 3, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_hash_equals_the_reference(device, dtype):
    x = versions(300, dtype, 0.0)[0].to(device)
    assert ops.delta_hash(x, -5) == reference.delta_hash(x, -5)
    places = torch.arange(100, 400)
    shifted = -5 + 100 * 0x9E3779B97F4A7C15
    assert ops.delta_hash(x, -5, places) == reference.delta_hash(x, shifted)
    assert ops.delta_hash(x, -5) != ops.delta_hash(x.flip(0), -5)


@pytest.mark.skipif(not emulation.is_built(), reason="no emulation of CUDA")
@pytest.mark.parametrize("density", [0.0, 1e-4, 0.02, 1.0])
@pytest.mark.parametrize("xored", [False, True])
def test_cuda_gives_the_bytes_of_the_cpu(density, xored):
    """Narrow and wide gaps, and a chunk behind one without changes."""
    old, new = versions((1 << 18) + 70_000, torch.bfloat16, density)
    new[: 1 << 18][::2] = old[: 1 << 18][::2]
    payload = ops.delta_encode(new, old, xored=xored)
    places, values = ops.delta_unpack(payload, old, len(old))
    change = ops.delta_hash_change(old, payload, 5, xored=xored)
    total, wrong = ops.delta_hash(new, 5), places.flip(0)
    with emulation.emulated_cuda():
        assert torch.equal(ops.delta_encode(new, old, xored=xored), payload)
        assert torch.equal(ops.delta_pack(places, values, len(old)), payload)
        assert ops.delta_hash_change(old, payload, 5, xored=xored) == change
        assert ops.delta_hash(new, 5) == total
        if len(wrong) > 1:
            with pytest.raises(RuntimeError, match=f"got {int(wrong[1])} at 1"):
                ops.delta_pack(wrong, values, len(old))


@pytest.mark.skipif(not emulation.is_built(), reason="no emulation of CUDA")
def test_cuda_refuses_what_the_cpu_refuses():
    old, new = versions(600, torch.bfloat16, 0.1)
    sound, generator = ops.delta_encode(new, old), torch.Generator().manual_seed(0)
    outcomes = []
    for turn in range(60):
        payload = sound[: len(sound) - turn % 3].clone()
        at = torch.randint(0, 12 if turn % 2 else len(payload), (2,), generator=generator)
        payload[at] = torch.randint(0, 256, (2,), generator=generator).byte()
        told = []
        for cuda in (False, True):
            target = old.clone()
            with emulation.emulated_cuda() if cuda else contextlib.nullcontext():
                try:
                    ops.delta_apply_(target, payload)
                    told.append(target.view(torch.int16).tolist())
                except RuntimeError as error:
                    assert same(target, old)
                    told.append(str(error).splitlines()[0])
        assert told[0] == told[1]
        outcomes.append(isinstance(told[0], str))
    assert 10 < sum(outcomes) < 60


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damage_is_refused_before_a_write(data):
    """Cut or changed payloads raise, or are deltas of the same length; memory outside stays."""
    numel = data.draw(st.integers(0, 600))
    old, new = versions(numel, torch.bfloat16, data.draw(st.sampled_from([0.01, 0.3])), seed=1)
    raw = bytearray(ops.delta_encode(new, old).numpy().tobytes())
    if raw and data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    else:
        raw = raw[: data.draw(st.integers(0, len(raw)))] + data.draw(st.binary(max_size=20))
    payload = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    room = torch.full((numel + 64,), 7, dtype=torch.int16)
    target = room[32 : numel + 32].view(torch.bfloat16)
    target.copy_(old)
    before = target.clone()
    try:
        ops.delta_apply_(target, payload)
    except RuntimeError as error:
        assert "delta_apply_: expected payload" in str(error)
        assert same(target, before)
    assert (room[:32] == 7).all() and (room[numel + 32 :] == 7).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.delta_encode(x, x[:4]), "delta_encode: expected base to be of shape"),
        (lambda x: ops.delta_encode(x, x.float()), "delta_encode: expected base to be BFloat16"),
        (lambda x: ops.delta_encode(x[::2], x[::2]), "delta_encode: expected x to be contiguous"),
        (lambda x: ops.delta_apply_(x, x), "delta_apply_: expected payload to be Byte"),
        (
            lambda x: ops.delta_pack(torch.tensor([3, 3]), x[:2], 8),
            r"delta_pack: expected places to ascend in \[0, 8\), got 3 at 1",
        ),
        (lambda x: ops.delta_pack(torch.tensor([8]), x[:1], 8), "got 8 at 0"),
        (
            lambda x: ops.delta_apply_(x[:5], ops.delta_encode(x, -x)),
            "expected payload to have places inside the tensor, got others in chunk 0",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.arange(1, 9, dtype=torch.bfloat16))
