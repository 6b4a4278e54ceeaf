"""Weights by deltas in one process: chains, refusals, shards, formats."""

import dataclasses
import json
import math
import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_ext
from moe_ext import sync
from moe_ext.sync.region import Region


def model(seed=0):
    torch.manual_seed(seed)
    return {
        "dense": torch.randn(37, 24).bfloat16(),
        "layers.0.experts.gate_up_proj": torch.randn(4, 12, 8),
        "layers.0.experts.down_proj": torch.randn(4, 8, 6).to(torch.float16),
        "bias": torch.randn(5),
    }


def change(state, seed, share=0.05):
    """Overwrite a share of every tensor with random bits, special values among them."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        raw = tensor.view(torch.uint8).view(-1, tensor.itemsize)
        rows = torch.rand(raw.shape[0], generator=generator) < share
        raw[rows] = torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator)[rows]
        if seed % 3 == 0:
            tensor.view(-1)[:4] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40])


def assert_same(a, b):
    for name in a:
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def copies(state):
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("xored", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_hundred_updates_are_exact(xored, compression):
    if compression:
        pytest.importorskip("zstandard")
    state = model()
    encoder = sync.DeltaEncoder(state, xored=xored)
    here = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    receiver = sync.DeltaReceiver(here)
    receiver.apply(encoder.full().to_bytes(compression=compression))
    for step in range(100):
        change(state, step)
        receiver.apply(encoder.encode().to_bytes(compression=compression))
    assert_same(state, here)
    assert receiver.version == encoder.version == 100
    receiver.verify()
    here["bias"][1] += 1
    with pytest.raises(ValueError, match=r"verify: expected bias to have the hash"):
        receiver.verify()


def test_base_needs_no_elements():
    """A receiver that loaded the same weights joins by hashes; one with others is refused."""
    state = model()
    encoder, here = sync.DeltaEncoder(state), copies(state)
    receiver = sync.DeltaReceiver(here)
    assert encoder.base().num_bytes == 0
    receiver.apply(encoder.base())
    change(state, 1)
    receiver.apply(encoder.encode())
    assert_same(state, here)
    with pytest.raises(ValueError, match="expected dense to have the hash"):
        sync.DeltaReceiver(copies(model(1))).apply(encoder.base())


def test_a_lost_update_is_made_up_for():
    state = model()
    encoder, here = sync.DeltaEncoder(state, history=3), copies(state)
    receiver = sync.DeltaReceiver(here)
    receiver.apply(encoder.base())
    for step in range(3):
        change(state, step)
        encoder.encode()
    before = copies(here)
    with pytest.raises(ValueError, match=r"expected an update of version 0 of .* got one of ver"):
        receiver.apply(encoder.since(1)[0])
    assert_same(before, here)
    missing = encoder.since(receiver.version)
    assert [update.kind for update in missing] == ["delta"] * 3
    for update in missing:
        receiver.apply(update)
    assert_same(state, here)
    for step in range(4):
        change(state, step)
        encoder.encode()
    (whole,) = encoder.since(receiver.version)
    assert whole.kind == "full"
    receiver.apply(whole)
    assert_same(state, here)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda u: dataclasses.replace(u, chain="other"), "of other; ask the encoder"),
        (lambda u: dataclasses.replace(u, base_version=7), "got one of version 7"),
        (lambda u: first(u, name="none"), "expected a tensor none here"),
        (lambda u: first(u, dtype="float16"), "expected dense to be float16"),
        (lambda u: first(u, dtype="load"), "expected a dtype of torch, got 'load'"),
        (lambda u: first(u, after=5), "expected dense to have the hash"),
        (lambda u: first(u, before=5), "expected dense to have the hash"),
        (lambda u: first(u, payload=u.entries[0].payload[:-1]), "expected payload to be whole"),
        (lambda u: last(u, payload=u.entries[-1].payload[:-1]), "expected payload to be whole"),
    ],
)
def test_a_wrong_update_changes_nothing(wrong, message):
    state = model()
    encoder, here = sync.DeltaEncoder(state), copies(state)
    receiver = sync.DeltaReceiver(here)
    receiver.apply(encoder.base())
    change(state, 1)
    update, before = encoder.encode(), copies(here)
    with pytest.raises(ValueError, match=message):
        receiver.apply(wrong(update))
    assert_same(before, here)
    receiver.apply(update)
    assert_same(state, here)


def first(update, **facts):
    entries = (dataclasses.replace(update.entries[0], **facts), *update.entries[1:])
    return dataclasses.replace(update, entries=entries)


def last(update, **facts):
    entries = (*update.entries[:-1], dataclasses.replace(update.entries[-1], **facts))
    return dataclasses.replace(update, entries=entries)


def test_another_base_is_refused_by_its_hash():
    """The version says the same, the weights do not: nothing is written."""
    state = model()
    encoder, here = sync.DeltaEncoder(state), copies(state)
    receiver = sync.DeltaReceiver(here)
    receiver.apply(encoder.base())
    here["dense"][0, 0] += 1
    state["dense"][0, 0] += 2
    state["bias"][0] += 1
    before = copies(here)
    with pytest.raises(ValueError, match="expected dense to have the hash"):
        receiver.apply(encoder.encode())
    assert_same(before, here)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_bytes_are_refused(data):
    state = model()
    encoder, here = sync.DeltaEncoder(state), copies(state)
    receiver = sync.DeltaReceiver(here)
    receiver.apply(encoder.base())
    change(state, 1)
    raw = bytearray(encoder.encode().to_bytes().numpy().tobytes())
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] ^= data.draw(st.integers(1, 255))
    else:
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(ValueError, match=r"Update\.from_bytes: "):
        receiver.apply(bytes(raw))
    assert_same(copies(model()), here)


def leaves(table, path=()):
    """The path of every value of a table."""
    pairs = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in list(pairs):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, key))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_tables_of_an_adversary_are_refused(data):
    """Every value of the table replaced by another, under a CRC that fits."""
    state = model()
    encoder, here = sync.DeltaEncoder(state), copies(state)
    receiver = sync.DeltaReceiver(here)
    receiver.apply(encoder.base())
    change(state, 1)
    raw = encoder.encode().to_bytes(compression=data.draw(st.sampled_from([None, "zstd"])))
    raw = raw.numpy().tobytes()
    (length,) = struct.unpack_from("<Q", raw, 8)
    table = json.loads(raw[20 : 20 + length])
    *path, last = data.draw(st.sampled_from(list(leaves(table))))
    place = table
    for key in path:
        place = place[key]
    others = [
        math.inf,
        math.nan,
        -1,
        0,
        1,
        2**31,
        2**63,
        2**80,
        0.5,
        True,
        None,
        "x",
        "zstd",
        [],
        {},
    ]
    place[last] = data.draw(st.sampled_from(others))
    text = json.dumps(table).encode()
    head = struct.pack("<4sIQ", b"MXWD", 1, len(text))
    rest = text + raw[20 + length :]
    raw = head + struct.pack("<I", zlib.crc32(head + rest)) + rest
    try:
        receiver.apply(raw)
    except ValueError:
        assert_same(copies(model()), here)
    else:
        # Another version or "xored": true in the place of true.
        assert_same(state, here)


def test_encoder_refuses_other_tensors():
    state = model()
    encoder = sync.DeltaEncoder(state)
    extra = state.pop("bias")
    with pytest.raises(ValueError, match=r"encode: expected the tensors of the first version, got"):
        encoder.encode()
    state["bias"] = extra.double()
    with pytest.raises(ValueError, match="expected bias to stay float32"):
        encoder.encode()
    state["bias"] = extra
    assert encoder.encode().version == 1
    with pytest.raises(TypeError, match="expected state to hold dense real tensors, got 'x'"):
        sync.DeltaEncoder({"x": 3})


def cut(tensor, region):
    """The part of a whole tensor that a region names."""
    for dim, runs in enumerate(region.runs):
        kept = torch.cat([torch.arange(a, a + n) for a, n in runs])
        tensor = tensor.index_select(dim, kept)
    return tensor.contiguous()


REGIONS = [
    [Region((6, 4), (((0, 2),), ((0, 4),))), Region((6, 4), (((2, 4),), ((0, 4),)))],
    [Region((6, 4), (((0, 6),), ((0, 1),))), Region((6, 4), (((0, 6),), ((1, 3),)))],
    # As FSDP2 over tensor parallelism cuts rows.
    [
        Region((6, 4), (((0, 1), (3, 1)), ((0, 4),))),
        Region((6, 4), (((1, 2), (4, 2)), ((0, 4),))),
    ],
]


@pytest.mark.parametrize("sent", REGIONS)
@pytest.mark.parametrize("kept", [None, *REGIONS])
@pytest.mark.parametrize("xored", [False, True])
def test_parts_meet_other_parts(monkeypatch, sent, kept, xored):
    """Any cut of the sender serves any cut of the receiver, by base, delta and full update."""
    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    regions = {}
    monkeypatch.setattr(Region, "of", lambda t: regions[t.data_ptr()])

    def part(region):
        found = cut(whole, region)
        regions[found.data_ptr()] = region
        return found

    all_of_it = Region((6, 4), (((0, 6),), ((0, 4),)))
    senders = [{"w": part(region)} for region in sent]
    encoders = [sync.DeltaEncoder(state, xored=xored) for state in senders]
    here = [{"w": part(region)} for region in kept or [all_of_it]]
    receivers = [sync.DeltaReceiver(state) for state in here]
    # The shape of a DTensor is that of the whole.
    monkeypatch.setattr(
        sync.DeltaReceiver, "_target", lambda self, e: self._tensors["w"].view(torch.int32).view(-1)
    )
    for kind in ("base", "delta", "full"):
        if kind == "delta":
            whole[1:5:3, ::2] += 1
            for state, region in zip(senders, sent, strict=True):
                state["w"].copy_(cut(whole, region))
            updates = [encoder.encode() for encoder in encoders]
        else:
            updates = [getattr(encoder, kind)() for encoder in encoders]
        for receiver, state, region in zip(receivers, here, kept or [all_of_it], strict=True):
            receiver.apply(updates[0].merged(*updates[1:]).to_bytes())
            assert torch.equal(state["w"], cut(whole, region)), kind
            receiver.verify()


def test_patches_of_experts_in_the_names_of_checkpoints(tmp_path):
    pytest.importorskip("safetensors")
    state = model()
    encoder = sync.DeltaEncoder(state)
    old = copies(state)
    state["layers.0.experts.gate_up_proj"][2, 7, 3] = 5
    state["layers.0.experts.down_proj"][3] = 1
    found = list(sync.patches(encoder.encode(), sync.hugging_face_names))
    assert [patch.name for patch in found] == [
        "layers.0.experts.2.up_proj.weight",
        "layers.0.experts.3.down_proj.weight",
    ]
    up, down = found
    assert (up.shape, up.indices.tolist(), up.values.tolist()) == ((6, 8), [1 * 8 + 3], [5.0])
    assert up.indices.dtype == torch.int32
    assert down.indices is None and (down.values == 1).all()
    sync.save_patches(tmp_path / "update.safetensors", found, 1)
    again, version = sync.load_patches(tmp_path / "update.safetensors")
    assert version == 1 and len(list(tmp_path.iterdir())) == 1
    for a, b in zip(found, again, strict=True):
        assert (a.name, a.shape, a.dtype) == (b.name, b.shape, b.dtype)
        assert torch.equal(a.values, b.values)
    # A full update has every piece, whole.
    whole = {p.name: p for p in sync.patches(encoder.full(), sync.hugging_face_names)}
    assert len(whole) == 2 + 4 * 3 and all(p.indices is None for p in whole.values())
    gate = whole["layers.0.experts.1.gate_proj.weight"]
    assert torch.equal(gate.values.view(gate.shape), old["layers.0.experts.gate_up_proj"][1, :6])
    with pytest.raises(ValueError, match="patches: expected an update with values, got base"):
        list(sync.patches(encoder.base()))


def test_quantised_then_compared():
    """Weights that move less than a step of fp8 send nothing, and receivers hold the fp8 bits."""
    torch.manual_seed(0)
    state = {"w": torch.randn(200, 300), "b": torch.randn(3)}
    encoder = sync.DeltaEncoder(state, transform=sync.fp8_blocks)
    here = {name: t.clone() for n, v in state.items() for name, t in sync.fp8_blocks(n, v).items()}
    assert sorted(here) == ["b", "w", "w_scale_inv"]
    assert here["w"].dtype == torch.float8_e4m3fn and here["w_scale_inv"].shape == (2, 3)
    scale = here["w_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    # Three bits of mantissa round by 1/16; below 2^-6 steps are 2^-9.
    error = (here["w"].float() * scale - state["w"]).abs()
    assert (error <= torch.maximum(state["w"].abs() / 16, scale * 2**-10) * 1.001).all()
    receiver = sync.DeltaReceiver(here)
    receiver.apply(encoder.base())
    state["w"] *= 1 + 1e-6 * torch.rand(200, 300)
    update = encoder.encode()
    changed = sum(p.values.numel() for p in sync.patches(update) if p.name == "w")
    assert changed < 20
    receiver.apply(update)
    want = sync.fp8_blocks("w", state["w"])
    assert torch.equal(here["w"].view(torch.uint8), want["w"].view(torch.uint8))


def test_a_module_of_experts():
    """A layer's state dict is written in place, and computes the same."""
    torch.manual_seed(0)
    layer, other = (moe_ext.MoELayer(16, 32, 4) for _ in range(2))
    encoder, receiver = sync.DeltaEncoder(layer), sync.DeltaReceiver(other)
    receiver.apply(encoder.full())
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    x = torch.randn(9, 16)
    layer(x).sum().backward()
    optimizer.step()
    receiver.apply(encoder.encode())
    assert torch.equal(layer(x), other(x))


def test_regions_of_dtensors():
    """Plain, strided and uneven shards, by the rule of torch's own arithmetic."""
    assert Region.of(torch.empty(3, 2)).is_whole
    region = Region.parse([6, 4], [[[0, 1], [3, 1]], [[0, 4]]])
    assert region.start is None and region.shape == (2, 4)
    places = region.to_whole(torch.arange(8))
    assert places.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert region.from_whole(torch.tensor([13, 4])).tolist() == [5, -1]
    assert Region.parse([6, 4], [[[2, 2]], [[0, 4]]]).start == 8
    assert json.dumps(region.to_json())
    with pytest.raises(ValueError, match="expected runs inside"):
        Region.parse([6], [[[4, 3]]])


def test_zstd_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    update = sync.DeltaEncoder(model()).full()
    with pytest.raises(RuntimeError, match="expected the package zstandard"):
        update.to_bytes(compression="zstd")
