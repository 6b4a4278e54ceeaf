import argparse
import importlib
import json
import os
import re
import signal
import sys
import time

import pytest
import torch
import train_moe_lm
from example_jobs import (
    DRIVER,
    EXAMPLES,
    PNG_MAGIC,
    TINY,
    lose_a_node,
    losses,
    snapshot,
    torchrun,
    write_text,
)
from moe_lm.options import learning_rate, parse_args
from moe_lm.report import MetricsLog, read_metrics
from moe_lm.runtime import FolderLock, UserError, choose_expert_parallel_size

# Ranks add the same gradients in another order; 12 steps of Adam amplify the rounding.
RANKS_RTOL = 2e-4


def job(out, text_file, *extra):
    return [*TINY, "--out", out, "--data", text_file, *extra]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of 12 steps on one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    args = job(folder / "out", write_text(folder), "--steps", 12)
    assert train_moe_lm.main(list(map(str, args))) == 0
    return losses(folder / "out")


def test_run_writes_everything_and_repeats_nothing(train, text_file, tmp_path):
    out = tmp_path / "out"
    args = job(out, text_file, "--steps", 30, "--lr", 0.04, "--validate-every", 10, "--tensorboard")
    code, stdout, _ = train(*args)
    assert code == 0
    assert "training on CPU" in stdout
    assert "1 = 1 data parallel x 1 expert parallel" in stdout
    assert re.search(r"^step 30: validates, then writes a sample .*\n----- sample", stdout, re.M)
    values = losses(out)
    assert len(values) == 30
    result = json.loads((out / "result.json").read_text())
    assert result["validation_loss"] < result["unigram_entropy"] < values[0]
    assert f"{result['unigram_entropy']:.4f} nats/byte" in stdout
    for picture in ("loss.png", "expert_load.png"):
        assert (out / picture).read_bytes().startswith(PNG_MAGIC)
    assert any((out / "tensorboard").iterdir())
    assert (out / "sample.txt").read_bytes()
    records = read_metrics(out / "metrics.jsonl")
    assert [r["step"] for r in records if "validation_loss" in r] == [10, 20, 30]
    tokens, top_k = 4 * 16, 2
    assert [sum(layer) for layer in records[0]["expert_load"]] == [tokens * top_k] * 2
    assert records[0]["load_imbalance"] >= 1 and records[0]["tokens_per_second"] > 0

    before = snapshot(out)
    code, again, _ = train(*args)
    assert code == 0
    assert again.splitlines()[-1] == stdout.splitlines()[-1]
    after = snapshot(out)
    for name in ("metrics.jsonl", "result.json", "sample.txt"):
        assert after[name] == before[name]
    assert {n for n in after if "checkpoints" in n} == {n for n in before if "checkpoints" in n}


@pytest.mark.slow
def test_resume_on_other_numbers_of_ranks(launch, train, text_file, tmp_path, undisturbed):
    out = tmp_path / "out"
    args = job(out, text_file, "--steps", 12, "--checkpoint-every", 3)
    # 2 ranks share the experts, then 1 rank holds all, then 2 hold all each, then 2 pairs share.
    first = launch(args, 2, kill="batch:4")
    assert first.wait()[0] == -signal.SIGKILL, first.output()
    one = launch(args, 1, kill="batch:7")
    one.wait()
    assert "from step 3" in one.output()
    two = launch([*args, "--ep", 1], 2, kill="batch:10", kill_rank=1)
    two.wait()
    assert "from step 6" in two.output()
    four = launch([*args, "--ep", 2], 4)
    assert four.wait() == [0] * 4, four.output()
    assert "from step 9" in four.output()
    assert "2 data parallel x 2 expert parallel" in four.output()
    assert losses(out) == pytest.approx(undisturbed, rel=RANKS_RTOL)


@pytest.mark.slow
def test_sigkill_at_any_moment_loses_only_the_steps_since_the_checkpoint(
    launch, text_file, tmp_path
):
    out = tmp_path / "out"
    reference = tmp_path / "reference"
    extra = ("--steps", 12, "--checkpoint-every", 2, "--keep-checkpoints", 1)
    assert launch(job(reference, text_file, *extra)).wait() == [0, 0]
    resumed_from = 0
    for kill, kill_rank, complete in [
        ("forward:1", 1, 0),
        ("before_tensors:2", 1, 0),
        ("after_tensors:2", 0, 0),
        ("half_manifest:2", 0, 0),
        ("after_rename:2", 0, 2),
        ("backward:3", 0, 2),
        ("before_rename:4", 0, 2),
        ("half_removal:4", 0, 4),
        ("optimizer:7", 1, 6),
    ]:
        ranks = launch(job(out, text_file, *extra), kill=kill, kill_rank=kill_rank)
        codes = ranks.wait()
        assert codes[kill_rank] == -signal.SIGKILL, (kill, ranks.output())
        assert codes[1 - kill_rank] not in (0, -signal.SIGKILL), (kill, ranks.output())
        named = rf"RankFailureError: .*rank {kill_rank}(, has probably)? died"
        assert re.search(named, ranks.output(1 - kill_rank)), (kill, ranks.output(1 - kill_rank))
        assert ("resume   " in ranks.output()) == (resumed_from > 0), kill
        if resumed_from:
            assert f"from step {resumed_from}:" in ranks.output(), kill
        steps = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
        assert steps[-1:] == ([f"step-{complete:08d}"] if complete else []), kill
        resumed_from = complete
    ranks = launch(job(out, text_file, *extra))
    assert ranks.wait() == [0, 0], ranks.output()
    assert losses(out) == losses(reference)
    assert (out / "result.json").read_bytes() == (reference / "result.json").read_bytes()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000012"]


def wait_for_steps(out, num_steps, alive):
    deadline = time.monotonic() + 240
    while len(read_metrics(out / "metrics.jsonl")) < num_steps:
        assert alive() and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_and_all_exit_with_0(launch, train, text_file, tmp_path):
    out = tmp_path / "out"
    args = job(out, text_file, "--steps", 100000, "--checkpoint-every", 100000)
    ranks = launch(args)
    wait_for_steps(out, 3, lambda: ranks.processes[0].poll() is None)
    ranks.processes[1].send_signal(signal.SIGTERM)
    assert ranks.wait() == [0, 0], ranks.output()
    done = len(losses(out))
    assert f"stopped by a signal after step {done}" in ranks.output()
    assert (out / "checkpoints" / f"step-{done:08d}").is_dir()
    code, stdout, _ = train(*args, "--steps", done)
    assert code == 0
    assert f"from step {done}:" in stdout


STANDALONE = ["--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
def test_sigterm_to_torchrun_saves(text_file, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    args = job(out, text_file, "--steps", 100000, "--checkpoint-every", 100000)
    launcher = torchrun([*STANDALONE, EXAMPLES / "train_moe_lm.py", *args], log)
    wait_for_steps(out, 3, lambda: launcher.poll() is None)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=60)
    done = len(losses(out))
    assert f"stopped by a signal after step {done}" in log.read_text()
    assert (out / "checkpoints" / f"step-{done:08d}").is_dir()
    assert "Unable to shutdown process" not in log.read_text()


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank(text_file, tmp_path, undisturbed):
    out, log = tmp_path / "out", tmp_path / "log"
    args = job(out, text_file, "--steps", 12, "--checkpoint-every", 3)
    launcher = torchrun([*STANDALONE, "--max-restarts=1", DRIVER, "batch:7", *args], log)
    assert launcher.wait(timeout=120) == 0, log.read_text()
    assert "from step 6" in log.read_text()
    assert losses(out) == pytest.approx(undisturbed, rel=RANKS_RTOL)


@pytest.mark.slow
def test_torchrun_goes_on_with_fewer_ranks(text_file, tmp_path, undisturbed):
    out = tmp_path / "out"
    args = job(out, text_file, "--steps", 12, "--checkpoint-every", 3, "--timeout", 20)
    text = lose_a_node(EXAMPLES / "train_moe_lm.py", [DRIVER, "batch:7"], args, tmp_path)
    assert "2 = 1 data parallel x 2 expert parallel" in text
    assert re.search(r"RankFailureError: .*rank \d died", text), text
    assert "1 = 1 data parallel x 1 expert parallel" in text
    assert "from step 6" in text
    assert losses(out) == pytest.approx(undisturbed, rel=RANKS_RTOL)


@pytest.mark.slow
def test_a_checkpoint_of_another_job_or_a_damaged_one_stops_it(launch, train, text_file, tmp_path):
    out = tmp_path / "out"
    args = job(out, text_file, "--steps", 1)
    assert train(*args)[0] == 0
    before = snapshot(out)
    text = text_file.read_text()
    for option, value, message in (
        ("--model-dim", 32, "expected model_dim to be 32 as in this command, got 16"),
        ("--num-experts", 8, "expected num_experts to be 8 as in this command, got 4"),
        ("--top-k", 1, "expected top_k to be 1"),
        ("--seed", 1, "expected seed to be 1"),
        ("--batch", 8, "expected batch to be 8"),
        ("--data", text_file, "expected data_sha256 to be"),
    ):
        if option == "--data":
            text_file.write_text(text + "more")
        code, _, stderr = train(*args, option, value)
        assert code == 2, option
        assert message in stderr and "nothing was changed" in stderr
        assert snapshot(out) == before
    text_file.write_text(text)
    (tensors,) = (out / "checkpoints" / "step-00000001").glob("*.distcp")
    tensors.write_bytes(tensors.read_bytes()[:-10])
    before = snapshot(out)
    ranks = launch(args)
    assert ranks.wait() == [2, 2]
    assert f"file {tensors.name} is truncated" in ranks.output(0)
    assert "Traceback" not in ranks.output(0) + ranks.output(1)
    assert snapshot(out) == before


@pytest.mark.slow
def test_text_that_differs_between_ranks(launch, tmp_path):
    out = tmp_path / "out"
    ranks = launch([*TINY, "--out", out, "--data", "/proc/self/status"])
    assert ranks.wait() == [2, 2]
    assert "got other text on rank 1 than on rank 0" in ranks.output()
    assert not out.exists()


def test_out_is_a_file(train, text_file):
    before = text_file.read_bytes()
    code, _, stderr = train(*job(text_file, text_file))
    assert code == 2
    assert "expected --out to be a folder" in stderr
    assert text_file.read_bytes() == before


def test_out_in_use_by_another_job(train, text_file, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(FolderLock.acquire, "__defaults__", (0.1,))
    other = FolderLock()
    other.acquire(out)
    code, _, stderr = train(*job(out, text_file))
    other.release()
    assert code == 2
    assert "another job is writing to" in stderr
    assert not list(out.iterdir())


def test_a_loss_that_is_not_finite_stops_the_job(train, text_file, tmp_path):
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train_moe_lm.moe_ext.distributed, "clip_grad_norm_", lambda *_, **__: float("nan")
        )
        code, _, stderr = train(*job(out, text_file, "--steps", 2))
    assert code == 2
    assert "the gradient norm of step 1 is nan" in stderr
    assert not list(out.glob("checkpoints/step-*"))


def test_a_resumed_run_goes_on_with_the_next_batch(train, text_file, tmp_path, monkeypatch):
    seen, stops = [], [4]

    def batch_of(data, *, step, **options):
        if step in stops:
            stops.remove(step)
            raise UserError("stopped here")
        seen.append((step, *train_batch(data, step=step, **options)))
        return seen[-1][1:]

    train_batch = train_moe_lm.train_batch
    monkeypatch.setattr(train_moe_lm, "train_batch", batch_of)
    options = ["--steps", 6, "--checkpoint-every", 3]
    for code in (2, 0):
        assert train(*job(tmp_path / "in_two", text_file, *options))[0] == code
    in_two, seen[:] = [*seen], []
    assert train(*job(tmp_path / "in_one", text_file, *options))[0] == 0
    assert [step for step, *_ in in_two] == [0, 1, 2, 3, 3, 4, 5]
    # The step after the checkpoint is taken again, with the same bytes.
    del in_two[3]
    for (step, *one), (other, *two) in zip(in_two, seen, strict=True):
        assert step == other and all(map(torch.equal, one, two))
    assert losses(tmp_path / "in_two") == losses(tmp_path / "in_one")


@pytest.mark.parametrize(
    ("asked", "world_size", "num_experts", "size"),
    [
        (None, 1, 8, 1),
        (None, 2, 8, 2),
        (None, 16, 8, 8),
        (None, 3, 8, 1),
        (None, 6, 4, 2),
        (2, 4, 8, 2),
    ],
)
def test_expert_parallel_size(asked, world_size, num_experts, size):
    assert choose_expert_parallel_size(asked, world_size, num_experts) == size


def test_expert_parallel_size_must_divide_the_experts():
    with pytest.raises(UserError, match="expected --ep to divide --num-experts 6, got 4"):
        choose_expert_parallel_size(4, 4, 6)


def test_learning_rate_warms_up_and_decays(tmp_path):
    options = ["--out", str(tmp_path), "--lr", "1", "--warmup", "4", "--steps", "10"]
    args = parse_args(options, "")
    assert [learning_rate(args, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(args, 4) == 1.0
    assert learning_rate(args, 7) == pytest.approx(0.55)
    assert learning_rate(args, 10) == pytest.approx(0.1)


def test_metrics_drop_what_the_checkpoint_does_not_hold(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    log = MetricsLog(tmp_path, first_step=2, tensorboard=False)
    log.write({"step": 3, "loss": 2.0})
    log.close()
    kept = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in kept] == [(1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.parametrize("script", sorted(path.stem for path in EXAMPLES.glob("*_*.py")))
def test_help_tells_every_default(script, monkeypatch):
    module = importlib.import_module(script)
    if not hasattr(module, "main"):
        pytest.skip("no program")
    parsers = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda self, _: parsers.append(self) or sys.exit()
    )
    with pytest.raises(SystemExit):
        module.main(["--out", "nowhere"])
    (parser,) = parsers
    for action in parser._actions:
        if action.dest != "help":
            assert "(" in (action.help or "") or action.default is None, action.option_strings


def test_help_explains_resume(train, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        train("--help")
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert "SIGTERM" in told and "--keep-checkpoints" in told
    assert not os.listdir(tmp_path)
