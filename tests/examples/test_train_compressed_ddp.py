import functools
import json
import math
import sys

import pytest
from compressed_ddp.settings import NAMES
from example_jobs import PNG_MAGIC

TINY_OPTIONS = {
    "model-dim": 32,
    "num-layers": 2,
    "num-heads": 2,
    "ffn-dim": 32,
    "num-experts": 4,
    "seq-len": 16,
    "batch": 4,
    "steps": 6,
    "dense-steps": 2,
    "warmup": 2,
    "validate-every": 3,
    "validation-batches": 2,
    "timeout": 60,
}
TINY = [f"--{name}={value}" for name, value in TINY_OPTIONS.items()]


@pytest.fixture
def compressed_ddp(run_here, text_file, tmp_path):
    options = [*TINY, "--data", text_file, "--out", tmp_path / "out"]
    return functools.partial(run_here, "train_compressed_ddp", *options)


def result(tmp_path):
    return json.loads((tmp_path / "out" / "result.json").read_text())


def test_every_setting_on_two_ranks(launch, text_file, tmp_path):
    args = [*TINY, "--data", text_file, "--out", tmp_path / "out", "--density", 0.05, "--compare"]
    ranks = launch(args, script="train_compressed_ddp.py")
    assert ranks.wait() == [0, 0], ranks.output()
    output = ranks.output()
    assert ranks.output(1) == ""
    found = result(tmp_path)
    dense = found["dense_bytes_a_step"]
    runs = {run["setting"]: run for run in found["runs"]}
    assert list(runs) == [{"topk": "topk 5 %"}.get(name, name) for name in NAMES]
    for label, run in runs.items():
        assert any(line.startswith(label) for line in output.splitlines())
        assert [point["step"] for point in run["validation"]] == [3, 6]
        assert all(math.isfinite(loss) for loss in run["losses"]) and len(run["losses"]) == 6
        assert run["validation"][0]["sent_bytes"] == sum(run["sent_bytes"][:3])
        if sys.platform == "linux":  # /proc counts what goes to sockets
            # The last step: what sets connections up is in the first ones.
            counted, written = run["sent_bytes"][-1], run["written_bytes"][-1]
            assert counted <= written < 1.1 * counted + 3000, label
    sent = {label: run["sent_bytes"][-1] for label, run in runs.items()}
    # Of the embedding only the rows of bytes that were read are sent, in every setting but one.
    assert 0.7 * dense < sent["none"] < dense
    assert 0.5 * sent["none"] <= sent["bf16"] < 0.7 * sent["none"]
    for label, share in (("int8", 0.4), ("int4", 0.25), ("onebit", 0.15), ("topk 5 %", 0.3)):
        assert 0 < sent[label] < share * dense, label
    assert dense <= runs["onebit"]["sent_bytes"][1] < 1.05 * dense
    dense_steps = [runs[label]["sent_bytes"][:2] for label in ("none", "topk 5 %")]
    # But for what the message of status says of residuals.
    assert all(abs(a - b) < 100 for a, b in zip(*dense_steps, strict=True))
    # Two steps are dense, the third begins with what they made of the weights.
    assert runs["none"]["losses"][:3] == runs["topk 5 %"]["losses"][:3]
    assert runs["none"]["losses"][3:] != runs["topk 5 %"]["losses"][3:]
    assert "choice" in output and "why" in output
    assert (tmp_path / "out" / "loss_and_bytes.png").read_bytes().startswith(PNG_MAGIC)


def test_one_process_sends_nothing(compressed_ddp, tmp_path):
    code, stdout, _ = compressed_ddp("--compare", "int8", "topk:0.1", "onebit", "auto")
    assert code == 0
    assert "topk 10 %" in stdout
    for run in result(tmp_path)["runs"]:
        assert sum(run["sent_bytes"]) == 0
        assert run["validation"][-1]["loss"] < run["losses"][0]
    assert (tmp_path / "out" / "loss_and_bytes.png").read_bytes().startswith(PNG_MAGIC)


@pytest.mark.parametrize("name", ["int8", "onebit"])
def test_a_gradient_that_is_not_finite_ends_the_run(name, compressed_ddp, monkeypatch):
    from compressed_ddp import training

    real = training.mean_loss
    monkeypatch.setattr(training, "mean_loss", lambda *args: real(*args) * math.inf)
    code, _, stderr = compressed_ddp("--compression", name)
    assert code == 2
    assert "expected gradients to be finite" in stderr
    assert "try a lower --lr" in stderr
