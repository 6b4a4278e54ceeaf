import functools
import re

import pytest

pytest.importorskip("transformers", minversion="5.0")

TINY = ["--steps=4", "--batch=4", "--seq-len=16", "--device=cpu", "--timeout=60"]
HELD_OUT = re.compile(r"held-out loss ([0-9.]+) before, ([0-9.]+) after")


@pytest.fixture
def tune(run_here):
    return functools.partial(run_here, "finetune_hf_moe", *TINY)


def held_out(output):
    return [float(text) for text in HELD_OUT.search(output).groups()]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_verifies_tunes_and_saves(family, tune, text_file, tmp_path):
    out = tmp_path / "tuned"
    code, stdout, _ = tune("--data", text_file, "--family", family, "--out", out, "--lr=0.01")
    assert code == 0
    assert "logits: max difference" in stdout
    assert "2 blocks run on moe_ext" in stdout
    before, after = held_out(stdout)
    assert after < before
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    code, again, _ = tune("--data", text_file, "--model", out)
    assert code == 0
    assert held_out(again)[0] == pytest.approx(after, abs=2e-4)


def test_two_ranks_share_the_experts(tune, launch, text_file, tmp_path):
    args = ["--data", text_file, "--out", tmp_path / "two"]
    output = launch([*TINY, *args, "--ep=2"], script="finetune_hf_moe.py").finish()
    assert "ep=2" in output
    code, stdout, _ = tune("--data", text_file, "--out", tmp_path / "one")
    assert code == 0
    # The auxiliary loss is that of each rank's own tokens.
    assert held_out(output) == pytest.approx(held_out(stdout), rel=1e-3)
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("one", "two")]
    assert sizes[0] == sizes[1]
