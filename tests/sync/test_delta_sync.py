"""Weights by deltas in one process: chains, refusals, shards, formats."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import resource
import struct
import zlib
from unittest import mock

import numpy as np
import pytest
import torch
from forked import forkserver
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_ext import sync
from moe_ext.sync.region import Region
from moe_ext.sync.update import KINDS


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


def followed(**options):
    """Weights with their encoder, and copies of them with a receiver at its version."""
    state = model()
    encoder, here = sync.DeltaEncoder(state, **options), copies(state)
    receiver = sync.DeltaReceiver(here)
    receiver.apply(encoder.base())
    return state, encoder, here, receiver


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
    state, encoder, here, receiver = followed()
    assert encoder.base().num_bytes == 0
    change(state, 1)
    receiver.apply(encoder.encode())
    assert_same(state, here)
    with pytest.raises(ValueError, match="expected dense to have the hash"):
        sync.DeltaReceiver(copies(model(1))).apply(encoder.base())


def test_a_lost_update_is_made_up_for():
    state, encoder, here, receiver = followed(history=3)
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
    state, encoder, here, receiver = followed()
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


@functools.cache
def first_update(compression=None):
    """(base, bytes of the update that follows it, the weights after it) of `model()`."""
    state, encoder, *_ = followed()
    base = encoder.base()
    change(state, 1)
    return base, encoder.encode().to_bytes(compression=compression).numpy().tobytes(), state


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_bytes_are_refused(data):
    base, raw, _ = first_update()
    here = model()
    receiver = sync.DeltaReceiver(here)
    receiver.apply(base)
    raw = bytearray(raw)
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] ^= data.draw(st.integers(1, 255))
    else:
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(ValueError, match=r"Update\.from_bytes: "):
        receiver.apply(bytes(raw))
    assert_same(model(), here)


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_bytes_come_in_any_buffer(kind):
    base, raw, state = first_update()
    here = model()
    receiver = sync.DeltaReceiver(here)
    receiver.apply(base)
    receiver.apply(kind(raw))
    assert_same(state, here)


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
    base, raw, state = first_update(data.draw(st.sampled_from([None, "zstd"])))
    here = model()
    receiver = sync.DeltaReceiver(here)
    receiver.apply(base)
    (length,) = struct.unpack_from("<Q", raw, 8)
    table = json.loads(raw[20 : 20 + length])
    *path, last = data.draw(st.sampled_from(list(leaves(table))))
    place = table
    for key in path:
        place = place[key]
    numbers = [math.inf, math.nan, -1, 0, 1, 2**31, 2**63, 2**80, 0.5]
    others = [*numbers, True, None, "x", "zstd", [], {}]
    place[last] = data.draw(st.sampled_from(others))
    text = json.dumps(table).encode()
    head = struct.pack("<4sIQ", b"MXWD", 1, len(text))
    rest = text + raw[20 + length :]
    raw = head + struct.pack("<I", zlib.crc32(head + rest)) + rest
    try:
        receiver.apply(raw)
    except ValueError:
        assert_same(model(), here)
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


@pytest.mark.filterwarnings("ignore")  # torch warns of all these kinds
@pytest.mark.parametrize(
    ("make", "about"),
    [
        (lambda: 3, "int"),
        (lambda: torch.ones(2, dtype=torch.complex64), "Tensor, torch.complex64"),
        (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.eye(2).to_mkldnn(), "torch._mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "Tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "torch.qint8"),
        (lambda: torch.ones(2, device="meta"), "on meta"),
    ],
)
@pytest.mark.parametrize("end", [sync.DeltaEncoder, sync.DeltaReceiver])
def test_what_is_no_dense_tensor_is_refused(end, make, about):
    match = rf"{end.__name__}: expected state to hold dense real tensors, got 'x' of .*{about}"
    with pytest.raises(TypeError, match=match):
        end({"x": make()})
    with pytest.raises(TypeError, match=f"transform: expected .* got 'x' of .*{about}"):
        sync.DeltaEncoder({"x": torch.ones(2)}, transform=lambda name, tensor: {name: make()})


def cut(tensor, region):
    """The part of a whole tensor that a region names."""
    for dim, runs in enumerate(region.runs):
        kept = torch.cat([torch.arange(0), *(torch.arange(a, a + n) for a, n in runs)])
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
    # More ranks than columns.
    [Region((6, 4), (((0, 6),), ((0, 4),))), Region((6, 4), (((0, 6),), ()))],
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


@pytest.mark.parametrize("ffn_dim", [128, 96, 200])
def test_quantised_experts_in_the_names_of_checkpoints(ffn_dim):
    """Each expert's matrix has the codes and the factors that it has by itself."""
    torch.manual_seed(0)
    fused = torch.randn(2, 2 * ffn_dim, 130) * (1 + torch.arange(2 * ffn_dim)[:, None])
    state = {"experts.gate_up_proj": fused, "experts.down_proj": torch.randn(2, 130, ffn_dim)}
    encoder = sync.DeltaEncoder(state, transform=sync.fp8_blocks)
    found = {p.name: p for p in sync.patches(encoder.full(), sync.hugging_face_names)}
    want = {}
    for expert in range(2):
        gate, up = state["experts.gate_up_proj"][expert].split(ffn_dim)
        parts = {"gate": gate, "up": up, "down": state["experts.down_proj"][expert]}
        for part, weight in parts.items():
            want |= sync.fp8_blocks(f"experts.{expert}.{part}_proj.weight", weight)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert found[name].shape == tensor.shape, name
        values = found[name].values.view(tensor.shape)
        assert torch.equal(values.view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_weights_are_quantised(dtype, flushed):
    """Blocks whose factor would be a denormal, or 0."""
    weights = (2.0 ** torch.arange(-148, -110.0)).to(dtype)
    torch.set_flush_denormal(flushed)
    try:
        for weight in weights.tolist():
            made = sync.fp8_blocks("w", torch.full((2, 2), weight, dtype=dtype))
            scale = made["w_scale_inv"].item()
            assert scale > 0
            back = made["w"].float() * scale
            assert ((back - weight).abs() <= max(weight / 16, scale * 2**-10) * 1.001).all(), weight
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_module_has_the_names_of_a_plain_one(end, whole):
    modules = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2)]
    weights = [module[1].weight for module in modules]
    if whole:
        modules[end] = torch.compile(modules[end])
    else:
        modules[end][1] = torch.compile(modules[end][1])
    encoder, receiver = sync.DeltaEncoder(modules[0]), sync.DeltaReceiver(modules[1])
    receiver.apply(encoder.full())
    assert torch.equal(*weights)


def test_regions_of_dtensors():
    """Plain, strided and uneven shards, by the rule of torch's own arithmetic."""
    assert Region.of(torch.empty(3, 2)).shape == (3, 2)
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
    with pytest.raises(ValueError, match="expected compression to be one of .*, got 'gzip'"):
        update.to_bytes(compression="gzip")


def tied(fill):
    """One tensor under two names."""
    w = fill(6, 4)
    return [{"a": w, "b": w, "c": fill(3)}]


def overlapping(fill):
    """A flat tensor, and views of it that overlap."""
    flat = fill(24)
    return [{"flat": flat, "head": flat[:12].view(3, 4), "tail": flat[8:]}]


def whole_twice(fill):
    """Two sources that hold the same whole tensors, as norms and buffers of FSDP2."""
    w = fill(6, 4)
    return [{"w": w}, {"w": w.clone()}]


def whole_and_own(fill):
    """Two sources that share a tensor, and have one of their own each."""
    w = fill(6, 4)
    return [{"w": w, "a": fill(5)}, {"w": w.clone(), "b": fill(5)}]


HELD = [tied, overlapping, whole_twice, whole_and_own]


def randn(*shape):
    return torch.randn(shape)


def receiver_of(held):
    """Tensors held in the same way by one receiver, with other values."""
    here = {}
    for state in held(lambda *shape: torch.zeros(shape)):
        here = {**state, **here}
    return here


def touch(states):
    """Change the same places of all that the sources hold, once each."""
    seen = set()
    for state in states:
        for tensor in state.values():
            if tensor.data_ptr() not in seen:
                tensor.view(-1)[1::3] += 1
            seen.add(tensor.data_ptr())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("xored", [False, True])
@pytest.mark.parametrize("held", HELD)
def test_memory_and_sources_in_common_are_applied_once(kind, xored, held):
    """Each kind of update, however tensors overlap and however many sources hold them."""
    states = held(randn)
    encoders = [sync.DeltaEncoder(state, xored=xored) for state in states]
    here = receiver_of(held)
    receiver = sync.DeltaReceiver(here)

    def send(kind):
        parts = [getattr(e, "encode" if kind == "delta" else kind)() for e in encoders]
        update = parts[0].merged(*parts[1:])
        assert len({(e.name, e.region) for e in update.entries}) == len(update.entries)
        receiver.apply(update.to_bytes())

    if kind == "base":
        with pytest.raises(ValueError, match="to have the hash"):
            send("base")
        for state in states:
            for name, tensor in state.items():
                here[name].copy_(tensor)
    send("base" if kind == "base" else "full")
    for _ in range(3):
        touch(states)
        send("delta")
        for state in states:
            assert_same(state, here)
        receiver.verify()
    # All of it is verified: also what two sources sent, and what lies in one memory.
    for tensor in here.values():
        kept = tensor.clone()
        tensor.view(-1)[0] += 1
        with pytest.raises(ValueError, match="verify: expected"):
            receiver.verify()
        tensor.copy_(kept)
    # Sources that differ, and tensors that differ where here they share memory, are refused.
    before = copies(here)
    last = states[-1][min(states[-1].keys())]
    other = last.clone()
    states[-1][min(states[-1].keys())] = other
    other.view(-1)[-1] += 5
    touch(states)
    if held is whole_and_own:
        states[-1]["w"] = states[-1]["w"] + 1
    match = "to send the same w" if held in (whole_twice, whole_and_own) else "share memory here"
    with pytest.raises(ValueError, match=match):
        send("delta")
    assert_same(before, here)
    receiver.verify()


def test_parts_that_overlap_otherwise_are_refused():
    w = torch.randn(6, 4)
    update = sync.DeltaEncoder({"w": w}).full()
    part = dataclasses.replace(
        update.entries[0],
        region=Region((6, 4), (((0, 2),), ((0, 4),))),
        payload=w[:2].view(-1).view(torch.uint8),
    )
    other = dataclasses.replace(update, entries=(part,))
    with pytest.raises(ValueError, match="the parts of w to be equal or apart from each other"):
        update.merged(other)
    strided = Region((6, 4), (((0, 1), (3, 1)), ((0, 4),)))
    other = dataclasses.replace(update, entries=(dataclasses.replace(part, region=strided),))
    with pytest.raises(ValueError, match="the parts of w to be equal or apart from each other"):
        update.merged(other)
    # A source that was left out is noticed, too.
    with pytest.raises(ValueError, match="expected all 24 elements of w that are here, got 8"):
        sync.DeltaReceiver({"w": w.clone()}).apply(dataclasses.replace(update, entries=(part,)))


def copied(module):
    return copies(module.state_dict())


@pytest.mark.parametrize(
    "replace",
    [
        lambda module: module.to(torch.bfloat16),
        lambda module: module.load_state_dict(copied(module), assign=True),
        lambda module: setattr(module, "weight", nn.Parameter(copied(module)["weight"])),
        lambda module: module.register_buffer("more", torch.zeros(2)),
    ],
)
def test_a_receiver_notices_that_tensors_were_replaced(replace):
    source, module = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    encoder, receiver = sync.DeltaEncoder(source), sync.DeltaReceiver(module)
    with pytest.raises(ValueError, match="verify: expected an update to be here, got none yet"):
        receiver.verify()
    receiver.apply(encoder.full())
    receiver.verify()
    replace(module)
    with torch.no_grad():
        source.weight += 1
    for call in (lambda: receiver.apply(encoder.encode()), receiver.verify):
        with pytest.raises(ValueError, match="expected state to hold the tensors that it had"):
            call()
    assert receiver.version == 0


def test_a_state_dict_of_copies_is_refused():
    """A module whose hook clones what it saves would never see an update."""
    module = torch.nn.Linear(3, 4)
    module.register_state_dict_post_hook(
        lambda _, state, *__: state.update({name: t.clone() for name, t in state.items()})
    )
    receiver = sync.DeltaReceiver(module)
    with pytest.raises(ValueError, match="or a copy that state_dict makes"):
        receiver.apply(sync.DeltaEncoder(torch.nn.Linear(3, 4)).full())


def test_names_do_not_meet():
    """Names of a transform, and of pieces, that two tensors would have."""
    w = {"w": torch.randn(4, 4), "w_scale_inv": torch.ones(1, 1)}
    with pytest.raises(ValueError, match="names of their own, got w_scale_inv twice"):
        sync.DeltaEncoder(w, transform=sync.fp8_blocks)
    taken = {"experts.down_proj": torch.ones(2, 3, 4), "experts.1.down_proj.weight": torch.ones(2)}
    full = sync.DeltaEncoder(taken).full()
    with pytest.raises(
        ValueError, match=r"got experts\.1\.down_proj\.weight of experts\.down_proj"
    ):
        list(sync.patches(full, sync.hugging_face_names))


def patches_of(version, numel=40):
    """Patches with names that would meet, and two of one name, as of merged sources."""
    w = torch.full((numel,), float(version))
    encoders = []
    for rows in ((0, numel // 2), (numel // 2, numel // 2)):
        own = sync.DeltaEncoder({"w": w[rows[0] :][: rows[1]]}).full()
        entry = dataclasses.replace(own.entries[0], region=Region((numel,), ((rows,),)))
        encoders.append(dataclasses.replace(own, entries=(entry,)))
    found = list(sync.patches(encoders[0].merged(encoders[1])))
    indices = torch.tensor([1], dtype=torch.int32)
    found.append(
        sync.WeightPatch("w.indices", (4,), torch.bfloat16, indices, torch.ones(1).bfloat16())
    )
    return found


def assert_loaded(path, version):
    found, here = sync.load_patches(path)
    assert here == version and [patch.name for patch in found] == ["w", "w", "w.indices"]
    for patch, want in zip(found, patches_of(version, found[0].shape[0]), strict=True):
        assert (patch.shape, patch.dtype) == (want.shape, want.dtype)
        assert torch.equal(patch.values, want.values)
        assert torch.equal(patch.indices, want.indices)


def test_files_of_patches_keep_all_and_find_damage(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "patches"
    for seven in (np.int64(7), torch.tensor(7), 7):
        shapes = [tuple(np.int64(size) for size in patch.shape) for patch in patches_of(7)]
        found = [
            dataclasses.replace(p, shape=s) for p, s in zip(patches_of(7), shapes, strict=True)
        ]
        sync.save_patches(path, found, seven)
        assert_loaded(path, 7)
    raw = path.read_bytes()
    # Every byte counts: of the table, of padding in the header, and of the elements.
    for place in range(8, len(raw), 7):
        damaged = bytearray(raw)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            assert_loaded(path, 7)
        except ValueError as error:
            assert "load_patches: expected" in str(error)
        else:
            assert raw[place] == ord(" ")
    for length in (0, 7, 100, len(raw) - 1):
        path.write_bytes(raw[:length])
        with pytest.raises(ValueError, match="load_patches: expected"):
            sync.load_patches(path)
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="to be of the format moe_ext patches 2, got None"):
        sync.load_patches(path)


def test_patches_may_share_memory(tmp_path):
    """Patches of tied weights have each of their names."""
    pytest.importorskip("safetensors")
    _, _, one = patches_of(3)
    whole = sync.WeightPatch("w", (1,), torch.bfloat16, None, one.values)
    found = [whole, one, dataclasses.replace(one, name="tied")]
    sync.save_patches(tmp_path / "patches", found, 3)
    again, _ = sync.load_patches(tmp_path / "patches")
    for a, b in zip(found, again, strict=True):
        assert a.name == b.name and torch.equal(a.values, b.values)
        assert (a.indices is None) == (b.indices is None)
        assert a.indices is None or torch.equal(a.indices, b.indices)


def test_a_full_disk_leaves_the_last_file(tmp_path):
    """Files may have 64 KiB and no more: the next version does not fit."""
    pytest.importorskip("safetensors")
    path, limits = tmp_path / "patches", resource.getrlimit(resource.RLIMIT_FSIZE)
    sync.save_patches(path, patches_of(1), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="save_patches: .*patches: "):
            sync.save_patches(path, patches_of(2, 1 << 18), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_loaded(path, 1)
    assert os.listdir(tmp_path) == ["patches"]


def write_versions(path, written):
    """Save one version after the other, without an end."""
    for version in itertools.count(1):
        values = torch.full((1 << 20,), float(version))
        found = [sync.WeightPatch("w", (1 << 20,), torch.float32, None, values)]
        sync.save_patches(path, found, version)
        if version == 1:
            written.send("written")


def test_a_version_that_comes_while_one_is_read_is_read_whole(tmp_path, monkeypatch):
    """safetensors opens a file twice by its name, for the header and then for the tensors."""
    safetensors = pytest.importorskip("safetensors")
    path, opened = str(tmp_path / "patches"), safetensors.safe_open
    opens = []

    @contextlib.contextmanager
    def replaced(name, framework):
        opens.append(name)
        with opened(name, framework) as first:
            metadata = first.metadata()
            if len(opens) == 1:
                sync.save_patches(path, patches_of(2), 2)
            with opened(name, framework) as second:
                yield mock.Mock(
                    metadata=lambda: metadata, keys=second.keys, get_tensor=second.get_tensor
                )

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    sync.save_patches(path, patches_of(1), 1)
    assert_loaded(path, 2)
    assert len(opens) == 2


def test_readers_beside_a_writer_that_is_killed(tmp_path):
    """Each read is a whole version, in order, also after the writer is dead."""
    pytest.importorskip("safetensors")
    path = str(tmp_path / "patches")
    # Forked from the process that ranks are forked from: it has imported torch.
    context = forkserver()
    ours, theirs = context.Pipe(duplex=False)
    writer = context.Process(target=write_versions, args=(path, theirs), daemon=True)
    writer.start()
    try:
        assert ours.recv() == "written"
        versions = []
        while writer.is_alive():
            (patch,), version = sync.load_patches(path)
            assert (patch.values == version).all()
            versions.append(version)
            if len(set(versions)) == 5:
                # In the midst of a file, most of the time.
                writer.kill()
        versions.append(sync.load_patches(path)[1])
    finally:
        writer.kill()
        writer.join()
    assert versions == sorted(versions) and versions[-1] > 1
    # A new writer goes on, whatever is left of the old one.
    sync.save_patches(path, patches_of(9), 9)
    assert_loaded(path, 9)
