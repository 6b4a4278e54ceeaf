"""Reading of checkpoints by slices: what is read, its memory, and what fails when."""

import datetime
import functools
import os
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import moe_ext
from moe_ext.distributed import checkpoint, checkpoint_files
from moe_ext.distributed.checkpoint_files import SliceReader
from moe_ext.optim import LAMB, OneBitAdam


def trained(*sizes, seed=0):
    torch.manual_seed(seed)
    layer = moe_ext.MoELayer(*sizes)
    optimizer = torch.optim.AdamW(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return layer, optimizer


def tensors(layer, optimizer):
    state = checkpoint.TrainingState(layer, optimizer).state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_any_box_of_any_tensor(tmp_path, monkeypatch, block):
    monkeypatch.setattr(checkpoint_files, "_BLOCK", block)
    whole = torch.arange(2 * 5 * 7 * 3).view(2, 5, 7, 3)
    saved = {
        "float": whole.float(),
        "half": whole.bfloat16(),
        "long": whole,
        "bool": whole % 3 == 0,
        "complex": whole * 1j,
        "conjugate": (whole * 1j).conj(),
        "negative": torch._neg_view(whole.float()),
        "transposed": whole.double().transpose(1, 2).contiguous().transpose(1, 2),
        "later": torch.arange(500.0)[290:].view(2, 5, 7, 3),
    }
    boxes = [
        ((0, 0, 0, 0), (2, 5, 7, 3)),
        ((1, 2, 3, 1), (1, 2, 4, 2)),
        ((0, 1, 0, 0), (2, 3, 7, 1)),
    ]
    dcp.save(
        {**saved, "number": torch.tensor(3.5), "none": torch.ones(0, 3)}, checkpoint_id=tmp_path
    )
    reader = SliceReader(tmp_path)
    reader.set_up_storage_reader(reader.read_metadata(), True)

    def read(name, offsets, target):
        index = MetadataIndex(name, torch.Size([0] * target.dim()))
        sizes = torch.Size(offsets), target.shape
        item = ReadItem(LoadItemType.TENSOR, index, torch.Size(offsets), index, *sizes)
        planner = types.SimpleNamespace(
            resolve_tensor=lambda _: target, commit_tensor=lambda *_: None
        )
        reader.read_data(reader.prepare_local_plan(LoadPlan([item])), planner).wait()
        return target

    for name, tensor in saved.items():
        for offsets, lengths in boxes:
            want = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
            assert torch.equal(read(name, offsets, torch.zeros_like(want)), want)
    assert read("number", (), torch.zeros(())) == 3.5
    assert read("none", (0, 0), torch.zeros(0, 3)).shape == (0, 3)
    by_torch = {"transposed", "conjugate", "negative", "none"}
    assert not by_torch & {index.fqn for index in reader._saved}
    assert {"number", "later", "bool"} <= {index.fqn for index in reader._saved}
    with pytest.raises(ValueError, match=r"expected float to go into shape \(2, 5, 7, 3\), got"):
        index = MetadataIndex("float", torch.Size([0] * 4))
        at = torch.Size([0] * 4)
        item = ReadItem(LoadItemType.TENSOR, index, at, index, at, torch.Size([2, 5, 7, 3]))
        planner = types.SimpleNamespace(resolve_tensor=lambda _: torch.zeros(2))
        reader.read_data(LoadPlan([item]), planner)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, LAMB, OneBitAdam])
def test_a_load_takes_little_memory(tmp_path, kind):
    def memory(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(f"{key}:")) * 1024

    # 34 MiB: malloc maps what is longer than 32 by itself, and gives it back.
    layer = torch.nn.Linear(1024, 8704, bias=False)
    make = functools.partial(kind, freeze_step=1) if kind is OneBitAdam else kind
    optimizer = make(layer.parameters())
    for _ in range(2):  # the second one compresses
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    layer.weight.grad = None
    checkpoint.save(tmp_path, layer, optimizer)
    wanted = {name: float(tensor.sum()) for name, tensor in tensors(layer, optimizer).items()}
    shard = layer.weight.untyped_storage().nbytes()
    moment = optimizer.state[layer.weight]["exp_avg"]
    for new in (False, True):
        with torch.no_grad():
            layer.weight.zero_()
            moment.zero_()
        if new:
            del moment
            optimizer = make(layer.parameters())
        before = memory("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # sets the peak back
        checkpoint.load(tmp_path, layer, optimizer)
        # A block of a file, the metadata, and what malloc keeps.
        extra = memory("VmHWM") - (memory("VmRSS") if new else before)
        assert extra < checkpoint_files._BLOCK + (6 << 20) < shard
        assert {n: float(t.sum()) for n, t in tensors(layer, optimizer).items()} == wanted
        assert new or optimizer.state[layer.weight]["exp_avg"].data_ptr() == moment.data_ptr()


def test_what_fails_says_what_has_changed(tmp_path, monkeypatch):
    saved = trained(4, 6, 4)
    checkpoint.save(tmp_path / "whole", *saved, extra={"clock": datetime.date(2020, 2, 2)})
    layer, optimizer = trained(4, 6, 4, seed=1)
    before = tensors(layer, optimizer)

    def unchanged():
        after = tensors(layer, optimizer)
        return all(torch.equal(after[name], tensor) for name, tensor in before.items())

    for path, text in (
        ("shorter", "to hold"),
        ("damaged", "damaged bytes"),
        ("missing", "No such file"),
        ("metadata", "expected .*/.metadata to be whole, got"),
    ):
        checkpoint.save(tmp_path / path, *saved)
        (file,) = (tmp_path / path).glob("*.distcp")
        if path == "shorter":
            os.truncate(file, file.stat().st_size - 1)
        elif path == "damaged":
            file.write_bytes(b"0" * file.stat().st_size)
        elif path == "missing":
            file.unlink()
        else:
            os.truncate(tmp_path / path / ".metadata", 50)
        kind = ValueError if path == "metadata" else RuntimeError
        with pytest.raises(kind, match=f"checkpoint.load: .*{text}.*nothing has changed"):
            checkpoint.load(tmp_path / path, layer, optimizer)
        assert unchanged()
    with torch.device("meta"):
        nowhere = moe_ext.MoELayer(4, 6, 4)
    with pytest.raises(ValueError, match=r"expected router.weight to have memory .* call to_empty"):
        checkpoint.load(tmp_path / "whole", nowhere)
    with pytest.raises(RuntimeError, match="Size mismatch between saved .* nothing has changed"):
        checkpoint.load(tmp_path / "whole", *trained(4, 8, 4))
    fill, calls = checkpoint_files._fill_box, []

    def fail_later(*arguments):
        # Options of parameter groups, which are bytes, are read before.
        if arguments[0].is_floating_point():
            calls.append(arguments)
            if len(calls) == 3:
                raise OSError("Input/output error")
        fill(*arguments)

    monkeypatch.setattr(checkpoint_files, "_fill_box", fail_later)
    text = "Input/output error, on rank 0; model and optimizers hold parts of two states now: load"
    with pytest.raises(RuntimeError, match=f"checkpoint.load: {text} again before going on"):
        checkpoint.load(tmp_path / "whole", layer, optimizer)
    assert not unchanged()
    extra = {"clock": None}
    checkpoint.load(tmp_path / "whole", layer, optimizer, extra=extra)
    assert extra["clock"].day == 2
    after = tensors(layer, optimizer)
    assert all(torch.equal(after[name], tensor) for name, tensor in tensors(*saved).items())
