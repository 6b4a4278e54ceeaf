"""Examples with models of transformers: tuned, upcycled, and in trainers, on one rank and two."""

import functools
import re

import pytest
import torch.distributed as dist

pytest.importorskip("transformers", minversion="5.0")

TINY = ["--batch=4", "--seq-len=16", "--device=cpu", "--timeout=60"]
HELD_OUT = re.compile(r"held-out loss ([0-9.]+) before, ([0-9.]+) after")


def held_out(output):
    return [float(text) for text in HELD_OUT.search(output).groups()]


@pytest.fixture
def tune(run_here, text_file):
    return functools.partial(run_here, "finetune_hf_moe", *TINY, "--steps=4", "--data", text_file)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_verifies_tunes_and_saves(family, tune, tmp_path):
    out = tmp_path / "tuned"
    code, stdout, _ = tune("--family", family, "--out", out, "--lr=0.01")
    assert code == 0
    assert "logits: max difference" in stdout
    assert "2 blocks run on moe_ext" in stdout
    before, after = held_out(stdout)
    assert after < before
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    code, again, _ = tune("--model", out)
    assert code == 0
    assert held_out(again)[0] == pytest.approx(after, abs=2e-4)


def test_two_ranks_share_the_experts(tune, launch, text_file, tmp_path):
    args = [*TINY, "--steps=4", "--data", text_file, "--out", tmp_path / "two", "--ep=2"]
    output = launch(args, script="finetune_hf_moe.py").finish()
    assert "ep=2" in output
    code, stdout, _ = tune("--out", tmp_path / "one")
    assert code == 0
    # The auxiliary loss is that of each rank's own tokens.
    assert held_out(output) == pytest.approx(held_out(stdout), rel=1e-3)
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("one", "two")]
    assert sizes[0] == sizes[1]


UPCYCLED = re.compile(r"(\d) of 4 networks.* " + HELD_OUT.pattern)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ([], 2),
        (["--every=1", "--num-experts=4", "--top-k=1"], 4),
        (["--method=granular", "--granularity=2", "--top-k=4"], 2),
    ],
)
def test_upcycling_loses_nothing(options, count, run_here, text_file, tmp_path):
    args = [*TINY, "--steps=3", "--data", text_file, "--out", tmp_path]
    code, stdout, stderr = run_here("upcycle", *args, *options)
    assert code == 0
    assert "upcycled: 100%" in stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    replaced, before, after = UPCYCLED.search(stdout).groups()
    assert int(replaced) == count
    assert float(after) == pytest.approx(float(before), abs=2e-6)
    for name in ("dense", "upcycled"):
        assert re.search(rf"^{name}: held-out loss [0-9.]+$", stdout, re.MULTILINE)


def test_upcycling_on_two_ranks_loses_nothing(launch, text_file):
    options = [*TINY, "--steps=3", "--ep=2", "--data", text_file, "--method=granular"]
    options += ["--granularity=2", "--top-k=4"]
    before, after = held_out(launch(options, script="upcycle.py").finish())
    assert after == pytest.approx(before, abs=2e-6)


def forget_ranks():
    """Accelerate keeps those of this process for the next user."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("tool", ["trainer", "lightning", "fabric"])
def test_frameworks_on_two_ranks_and_then_on_one(launch, text_file, tmp_path, capsys, tool):
    pytest.importorskip("accelerate")
    if tool != "trainer":
        pytest.importorskip("lightning")
    import train_with_frameworks

    out = tmp_path / "out"
    args = [*TINY, "--steps=4", "--lr=0.01", f"--data={text_file}", f"--out={out}"]
    args += [f"--tool={tool}"]
    before, after = held_out(launch([*args, "--ep=2"], script="train_with_frameworks.py").finish())
    assert after < before - 0.1
    # The files that the tool left, optimizer and all.
    assert (out / "model.safetensors").exists() or tool != "trainer"
    assert train_with_frameworks.main(args) == 0
    output = capsys.readouterr().out
    left = "checkpoint-4" if tool == "trainer" else "state.ckpt"
    assert re.search(f"goes on from .*{left}", output)
    assert held_out(output)[1] < after
    forget_ranks()
    if tool == "trainer":
        assert (out / "trainer" / "checkpoint-8").exists()
        assert train_with_frameworks.main([*args, "--tool=accelerate"]) == 0
        assert (out / "accelerate" / "optimizer.bin").exists()
        forget_ranks()
