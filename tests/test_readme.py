"""The README's own code runs as it stands."""

import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import moe_ext

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# Runs the script as it stands, and writes down the last batch of the rank: what two ranks print at
# once is mixed.
RUNNER = """
import os, pathlib, runpy
batch = runpy.run_path({script!r}, run_name="__main__")["tokens"][:, 0].tolist()
pathlib.Path({folder!r}, "batch" + os.environ["RANK"]).write_text(str(batch))
"""


@pytest.mark.slow
def test_training_script_runs_on_two_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(next(block for block in BLOCKS if "init_process_group" in block))
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER.format(script=str(script), folder=str(tmp_path)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launch, runner],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    steps = re.findall(r"^(\d+) (\d+\.\d+) \[\d+", result.stdout, re.MULTILINE)
    assert [int(step) for step, _ in steps] == list(range(10))
    # From that of a blind guess to less than half of it.
    losses = [float(loss) for _, loss in steps]
    assert abs(losses[0] - math.log(256)) < 0.5 and losses[-1] < losses[0] / 2
    batches = [(tmp_path / f"batch{rank}").read_text() for rank in range(2)]
    assert batches[0] != batches[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_snippet_runs(dtype):
    names = {}
    exec(next(block for block in BLOCKS if "presets" in block), names)
    x = torch.randn(2, 3, 512, dtype=dtype)
    y = names["layer"].to(dtype)(x)
    assert y.shape == x.shape and y.dtype == dtype


def test_sequence_snippet_runs():
    calls = []

    def model(tokens, position_ids):
        x = torch.stack([tokens, position_ids.expand_as(tokens)], -1)[:, None].float()
        calls.append(torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True))
        return calls[-1]

    names = {
        "mesh": types.SimpleNamespace(cp_group=None),
        "model": model,
        "tokens": torch.randint(9, (2, 7)),
    }
    exec(next(block for block in BLOCKS if "sequence_parallel" in block), names)
    assert names["logits_L"].shape == (2, 1, 7, 2)
    assert calls[0].grad_fn is None and torch.isfinite(calls[0]).all()


def test_pipeline_snippet_runs(capsys):
    exec(next(block for block in BLOCKS if "make_table" in block), {})
    # ZB-V idles for three forward passes of half a rank's layers, of 8 micro-batches' 3 units each.
    assert float(capsys.readouterr().out) == pytest.approx(3 * 0.5 / (8 * 3 + 3 * 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drop_in_snippet_runs(dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        dtype=dtype,
    )
    snippet = next(block for block in BLOCKS if "replace" in block)
    ids = torch.randint(0, 32, (2, 8))
    names = {
        "transformers": transformers,
        "config": config,
        "moe_ext": moe_ext,
        "batch": {"input_ids": ids, "labels": ids},
    }
    exec(snippet, names)
    assert names["model"].config._experts_implementation == "moe_ext"
    assert names["model"].dtype == dtype
