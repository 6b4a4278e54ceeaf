"""The README's script runs as it stands, and the first lines of three guides."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / f"{page}.md").read_text(), re.DOTALL)


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
    script.write_text(blocks("README")[0])
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
def test_options_of_the_page_about_routers_run(dtype):
    names = {}
    exec(next(block for block in blocks("docs/routers") if "presets" in block), names)
    x = torch.randn(2, 3, 512, dtype=dtype)
    y = names["layer"].to(dtype)(x)
    assert y.shape == x.shape and y.dtype == dtype


def test_the_page_about_pipelines_prints_the_idle_share(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("docs/pipelines")[0], {})
    # 1F1B idles for three micro-batches of 3 units each, beside the work of eight.
    assert float(capsys.readouterr().out.split()[1]) == pytest.approx(3 * 3 / (8 * 3 + 3 * 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drop_in_snippet_runs(dtype, tmp_path):
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
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    snippet = next(block for block in blocks("docs/hugging_face") if "moe_ext.replace" in block)
    ids = torch.randint(0, 32, (2, 8))
    names = {"path": str(tmp_path), "batch": {"input_ids": ids, "labels": ids}}
    exec(snippet, names)
    assert names["model"].config._experts_implementation == "moe_ext"
    assert names["model"].dtype == dtype
