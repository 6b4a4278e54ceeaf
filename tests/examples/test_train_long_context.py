import functools
import json
import math
import re
import sys

import pytest
import torch
from example_jobs import PNG_MAGIC
from long_context import sequence
from moe_lm.data import load_text, packed_documents

from moe_ext import attention

TINY = [
    "--model-dim=16",
    "--num-layers=2",
    "--num-heads=2",
    "--ffn-dim=16",
    "--seq-len=203",
    "--longest=70",
    "--steps=3",
    "--check-every=2",
    "--timeout=60",
]
NO_COSTS = ["--measure"]
VERDICT = re.compile(r"^equal to one process in 2 steps: .* tolerance ([0-9.e-]+)", re.MULTILINE)


@pytest.fixture
def folder(tmp_path):
    """Three files, two of them longer than a document of the tiny job."""
    root = tmp_path / "texts"
    root.mkdir()
    for name, count in (("a", 60), ("b", 5), ("c", 120)):
        (root / name).write_text("".join(f"{name}{i}: {i * i}\n" for i in range(count)))
    return root


@pytest.fixture
def long_context(run_here, folder, tmp_path):
    options = [*TINY, "--data", folder, "--out", tmp_path / "out"]
    return functools.partial(run_here, "train_long_context", *options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_process(dtype, long_context, tmp_path):
    code, stdout, _ = long_context("--dtype", dtype, *NO_COSTS)
    assert code == 0
    assert VERDICT.search(stdout)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["losses"]) == 3
    assert result["differences"]["checks"] == 2
    assert 0 < result["differences"]["gradient"] <= result["tolerance"]


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--steps", 0, "positive, got 0"),
        ("--longest", 1, "at least 2, got 1"),
        ("--warmup", -1, "at least 0, got -1"),
        ("--check-every", -1, "at least 0, got -1"),
    ],
)
def test_what_is_refused(option, value, rule, long_context):
    code, _, stderr = long_context(f"{option}={value}")
    assert code != 0 and f"expected {option} to be {rule}" in stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--layout=striped", "--scheme=all_gather"],
        ["--layout=per_document"],
        ["--layout=contiguous", "--scheme=ulysses", "--dtype=bf16"],
    ],
    ids=" ".join,
)
def test_two_ranks_equal_one(options, launch, folder, tmp_path):
    args = [*TINY, *options, "--data", folder, "--out", tmp_path / "out", *NO_COSTS]
    ranks = launch(args, script="train_long_context.py")
    assert ranks.wait() == [0, 0], ranks.output()
    assert VERDICT.search(ranks.output())
    assert ranks.output(1) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_rank_needs_is_measured_and_drawn(launch, folder, tmp_path):
    args = [*TINY, "--data", folder, "--out", tmp_path / "out", "--seq-len=512", "--measure", 1, 2]
    output = launch(args, script="train_long_context.py").finish()
    assert VERDICT.search(output)
    costs = json.loads((tmp_path / "out" / "result.json").read_text())["costs"]
    assert costs["1"]["sent_bytes"] < [2000]
    # Two layers, K and V forward and back, dK and dV, all in float32; and messages of agreement.
    shard = 2 * 256 * 16 * 4
    for sent in costs["2"]["sent_bytes"]:
        assert 2 * 3 * shard <= sent < 2 * 3 * shard + 10_000
    assert all(peak > 0 for peaks in costs.values() for peak in peaks["peak_bytes"])
    picture = tmp_path / "out" / "memory_and_bytes.png"
    assert picture.read_bytes().startswith(PNG_MAGIC)


def test_a_wrong_attention_is_noticed(long_context, monkeypatch):
    real = attention.ring_attention

    def without_documents(*args, **kwargs):
        return real(*args, **{**kwargs, "cu_seqlens": None})

    monkeypatch.setattr(sequence.attention, "ring_attention", without_documents)
    code, stdout, _ = long_context(*NO_COSTS)
    assert code == 1
    assert "NOT EQUAL to one process" in stdout


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)], ids=["first", "last"])
def test_a_loss_that_is_not_a_number_is_noticed(order):
    import train_long_context

    found, one = train_long_context.Differences(), [torch.ones(2)]
    for loss in order:
        found.add((1.0, loss), one, one)
    assert math.isnan(found.worst)


def test_a_system_without_proc_is_not_measured(long_context, monkeypatch, tmp_path):
    from long_context import measure

    monkeypatch.setattr(measure, "PROC", tmp_path / "proc")
    code, stdout, _ = long_context("--measure", 1)
    assert code == 0
    assert "not measured" in stdout
    assert len(json.loads((tmp_path / "out" / "result.json").read_text())["losses"]) == 3


def test_packed_documents_are_pieces_of_files(folder):
    data = load_text(str(folder), 32)
    text = bytes(data.train_N.tolist())
    edges = data.train_offsets.tolist()
    assert (edges[0], edges[-1]) == (0, len(text))
    assert all(text[edge - 1 : edge] == b"\n" for edge in edges[1:-1])
    files = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    seen = set()
    for step in range(6):
        tokens_S, offsets = packed_documents(data, step=step, seed=1, seq_len=203, longest=70)
        assert (offsets[0], offsets[-1], len(tokens_S)) == (0, 203, 203)
        for a, b in zip(offsets, offsets[1:], strict=False):
            assert 0 < b - a <= 70
            document = bytes(tokens_S[a:b].tolist())
            seen |= {i for i, file in enumerate(files) if document in file}
            assert any(document in file for file in files)
        again, _ = packed_documents(data, step=step, seed=1, seq_len=203, longest=70)
        assert torch.equal(tokens_S, again)
    assert len(seen) > 1
