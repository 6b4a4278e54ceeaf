import os
import re
import time

import pytest
from example_jobs import EXAMPLES, lose_a_node

pytest.importorskip("sklearn")

FULL = os.environ.get("MOE_EXT_FULL") == "1"
FEW = ["--steps=2", "--batch=16", "--device=cpu", "--timeout=60"]
ACCURACY = re.compile(r"held-out accuracy ([0-9.]+) after (\d+) steps")


@pytest.mark.parametrize("name", ["paddle_sample", "deepspeed_sample"])
def test_a_few_steps_and_the_same_again(run_here, name):
    results = []
    for _ in range(2):
        code, stdout, stderr = run_here(name, *FEW)
        assert code == 0, stderr
        results.append(ACCURACY.search(stdout).groups())
        assert "loss" in stdout
    assert results[0] == results[1]
    assert results[0][1] == "2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "paddle_sample --steps=40",
        "deepspeed_sample --steps=200",
        "deepspeed_sample --steps=150 --mlp-type=residual",
    ],
)
def test_accuracy_is_what_the_example_says(run_here, monkeypatch, command):
    # An eighth of the example's, which is as good.
    monkeypatch.setattr("paddle_sample.D_HIDDEN", 256)
    _, stdout, stderr = run_here(*command.split(), "--device=cpu")
    assert float(ACCURACY.search(stdout)[1]) > 0.9, stderr


def test_residual_experts_on_two_ranks(launch):
    options = [*FEW, "--ep-size=1", "--mlp-type=residual"]
    assert ACCURACY.search(launch(options, script="deepspeed_sample.py").finish())


@pytest.mark.parametrize(
    "options",
    [
        ["--dtype=bf16", "--top-k=1", "--noisy-gate-policy=RSample"],
        ["--dtype=fp16", "--noisy-gate-policy=Jitter"],
        ["--mlp-type=residual", "--top-k=3"],
    ],
    ids=" ".join,
)
def test_options_of_the_deepspeed_sample(run_here, options):
    code, stdout, stderr = run_here("deepspeed_sample", *FEW, *options)
    assert code == 0, stderr
    assert ACCURACY.search(stdout)


def test_loss_scale_skips_steps_that_overflow():
    import torch
    from deepspeed_sample import LossScale
    from moe_lm.runtime import UserError

    scale = LossScale(enabled=True, calm=2)
    assert not scale.accept(torch.tensor(torch.inf))
    assert scale.value == 2.0**15
    assert scale.accept(torch.tensor(1.0))
    assert scale.accept(torch.tensor(1.0))
    assert scale.value == 2.0**16
    with pytest.raises(UserError, match="gradients are not finite"):
        LossScale(enabled=False).accept(torch.tensor(torch.nan))


def test_fsdp2_on_two_ranks_then_on_one(launch, tmp_path, capsys):
    options = ["--device=cpu", "--timeout=60", "--batch=16"]
    first = ["--steps=15", "--log-every=1", "--ep=2", "--save", tmp_path / "saved"]
    output = launch([*options, *first], script="train_fsdp2.py").finish()
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    # Ten classes: a model that has learned nothing is at 2.3.
    assert sum(losses[-5:]) / 5 < 1.7 < losses[0]
    train_fsdp2 = pytest.importorskip("train_fsdp2")
    second = ["--steps=2", "--load", str(tmp_path / "saved"), "--bf16"]
    assert train_fsdp2.main([*options, *second]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"step +(\d+)  loss", printed) == ["16", "17"]
    assert ACCURACY.search(printed)[2] == "17"
    assert all(float(loss) < 2 for loss in re.findall(r"loss ([0-9.]+)", printed))


DIES_IN_STEP_7 = """
import itertools, os, runpy, signal, sys
from moe_ext.pipeline import Pipeline
steps, step = itertools.count(1), Pipeline.step
def step_or_die(self, *args, **options):
    if next(steps) == 7:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **options)
Pipeline.step = step_or_die
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(not FULL, reason="half a minute, most of it torchrun's: MOE_EXT_FULL=1")
def test_torchrun_goes_on_with_fewer_stages(tmp_path):
    (tmp_path / "dying.py").write_text(DIES_IN_STEP_7)
    script, folder = EXAMPLES / "train_pipeline.py", tmp_path / "saved"
    options = ["--device=cpu", "--timeout=20", "--batch=16", "--log-every=1", "--save-every=3"]
    args = [*options, "--steps=12", "--save", folder]
    text = lose_a_node(script, [tmp_path / "dying.py", script], args, tmp_path)
    assert re.search(r"rank \d (died|did not answer)", text), text
    # Stage 1 lived on the node that is gone: its rank printed the losses of the first six steps.
    assert [int(step) for step in re.findall(r"step +(\d+)  loss", text)][-6:] == [*range(7, 13)]


def test_a_pipeline_is_killed_and_goes_on_as_one_stage(launch, tmp_path, capsys):
    """By another schedule."""
    folder = tmp_path / "saved"
    options = ["--device=cpu", "--timeout=60", "--batch=16", "--log-every=1", "--save-every=2"]
    first = [*options, "--save", folder, "--schedule=zb-h1", "--steps=100000"]
    ranks = launch(first, script="train_pipeline.py")
    deadline = time.monotonic() + 60
    while not (folder / "00000004" / ".metadata").exists():
        assert time.monotonic() < deadline and ranks.processes[0].poll() is None, ranks.output()
        time.sleep(0.02)
    ranks.processes[1].kill()
    assert all(code != 0 for code in ranks.wait())
    assert "rank 1 died" in ranks.output() or "rank 1 did not answer" in ranks.output()
    done = max(int(path.parent.name) for path in folder.glob("*/.metadata"))
    train_pipeline = pytest.importorskip("train_pipeline")
    given = [*options, f"--steps={done + 2}"]
    assert train_pipeline.main([*given, "--save", str(folder), "--schedule=zbv"]) == 0
    last = re.findall(r"step +(\d+)  loss ([0-9.]+)", capsys.readouterr().out)
    assert [int(step) for step, _ in last] == [done + 1, done + 2]
    assert train_pipeline.main([*given, "--recompute"]) == 0
    whole = re.findall(r"step +(\d+)  loss ([0-9.]+)", capsys.readouterr().out)
    # float32: AdamW divides by roots of sums whose order differs.
    assert abs(float(whole[-1][1]) - float(last[-1][1])) < 0.02
    assert train_pipeline.main(["--device=cpu", "--batch=16", "--steps=3"]) == 0
    # Fewer steps than lie between two lines.
    assert re.findall(r"step +(\d+)  loss", capsys.readouterr().out) == ["1", "3"]
    assert train_pipeline.main([*given, "--schedule=pipedream"]) == 0
    found = re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)
    assert float(found[-1]) < float(found[0])
