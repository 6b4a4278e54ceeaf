"""Every axis of MoEMesh from the command line of the example, against one process."""

import os
import re

import pytest
import torch
import torch.distributed as dist
import train_moe_lm
from example_jobs import TINY
from moe_lm import checkpoint
from moe_lm import job as jobs
from moe_lm.options import check_args, parse_args
from moe_lm.runtime import FolderLock, Runtime, StopSignal, UserError
from moe_lm.validation import validation_loss

from moe_ext.testing import spawn_ranks

FULL = os.environ.get("MOE_EXT_FULL") == "1"
# Sums of float32 in another order, which some steps of Adam amplify.
RTOL = 2e-4
STEPS = 2  # of each job
SIZES = ["--num-layers=4", "--num-heads=4", "--moe-every=2", "--batch=8", "--lr=0.01"]
# Each goes on from the checkpoint of the one before it.
CHAIN = [
    "--tp=2 --cp=2 --ep=4 --dispatcher=dedup",
    "--pp=2 --ep=2 --micro-batches=4 --checkpointing=full",
    "--zero=3 --cp=2 --ep=2 --micro-batches=2 --checkpointing=selective",
    "--pp=2 --tp=2 --schedule=zbv --micro-batches=4",
    "--pp=2 --cp=2 --ep=2 --schedule=interleaved --micro-batches=2 --zero=1 --combine=reduced"
    " --dispatcher=dedup",
]
# Shards of experts, whose checkpoints have other shapes; rows of four bytes an element, and of one.
ALONE = [
    "--tp=2 --etp=2 --dispatcher=dedup",
    "--pp=2 --etp=2 --micro-batches=2",
    "",
    "--ep=4 --compress=int8",
]
MORE = [
    "--zero=1 --ep=2 --dispatcher=hierarchical --combine=reduced",
    "--zero=2 --ep=4 --dispatcher=allgather --combine=reduced --checkpointing=full",
    "--tp=4 --ep=2 --dp=2 --checkpointing=selective",
    "--pp=2 --ep=2 --schedule=dual-pipe-v --micro-batches=4 --checkpointing=selective",
    "--pp=4 --schedule=gpipe --micro-batches=2",
    "--zero=3 --ep=2 --dp=2 --checkpointing=full",
    "--pp=2 --schedule=zero-bubble --micro-batches=2 --ep=2 --dispatcher=dedup",
]


def run_steps(out, data, options, total, times=1):
    """Go on for some steps and save, so many times: what each step said, and the validation."""
    arguments = [*TINY, *SIZES, *options.split(), f"--steps={total}", "--warmup=4"]
    args = parse_args([*arguments, "--out", str(out), "--data", str(data)], "")
    runtime = Runtime(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "")
    job = jobs.build_job(args, runtime, FolderLock())
    done, found = train_moe_lm.resume(job), []
    for _ in range(times):
        for step in range(done, done + STEPS):
            told = train_moe_lm.train_step(job, step, StopSignal())
            found.append({key: told[key] for key in ("loss", "grad_norm", "expert_load")})
        done += STEPS
        found.append({"validation": validation_loss(job, job.model, job.runner.loss, job.share)})
        state, settings = job.state.state_dict(), job.settings
        checkpoint.save(job.checkpoints, state, step=done, settings=settings, keep=2)
    return found


def run_whole(rank, out, data, times):
    return run_steps(out, data, "", STEPS * times, times)


def run_chain(rank, out, data, chain):
    """The chain, and each of the others from the start."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # nodes of the hierarchical dispatcher
    total = STEPS * len(chain)
    found = [run_steps(out / "chain", data, options, total) for options in chain]
    alone = [run_steps(out / str(i), data, options, total) for i, options in enumerate(ALONE)]
    return sum(found, []), alone


def assert_same(found, want, rtol, chain=("",)):
    for i, (mine, other) in enumerate(zip(found, want, strict=True)):
        mine, other, options = dict(mine), dict(other), chain[i // (STEPS + 1)]
        loads = mine.pop("expert_load", None), other.pop("expert_load", None)
        assert mine == pytest.approx(other, rel=rtol), options
        assert loads[0] == loads[1] or rtol > RTOL, options


@pytest.mark.parametrize("chain", [CHAIN, MORE] if FULL else [CHAIN])
def test_one_training_on_other_axes_every_two_steps(tmp_path, text_file, chain):
    (want,) = spawn_ranks(run_whole, 1, tmp_path / "one", text_file, len(chain))
    for found, alone in spawn_ranks(run_chain, 4, tmp_path / "four", text_file, chain):
        assert_same(found, want, RTOL, chain)
        for options, told in zip(ALONE, alone, strict=True):
            # Rows lose 0.65 % of their norm, on their way to two of four blocks.
            assert_same(told, want[: STEPS + 1], 0.01 if "int8" in options else RTOL, [options])
        *_, whole, int8 = alone
        assert int8[0]["loss"] != whole[0]["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--zero=2 --tp=2", "expected --zero to be 0 with --tp, whose layers are divided already"),
        ("--zero=3 --pp=2", "expected --zero to be at most 1 with --pp"),
        ("--zero=2 --etp=2", "expected --zero to be at most 1 with --etp, got 2"),
        ("--compress=mx --etp=2", "expected --compress to be left out with --etp, got mx"),
        ("--schedule=zbv", "expected --schedule to be left out without --pp, got zbv"),
        ("--cp=4 --seq-len=20", "expected --seq-len to be a multiple of twice --cp 4"),
        ("--tp=4 --num-heads=2", "expected --num-heads to be a multiple of --tp 4, got 2"),
        ("--tp=4 --ffn-dim=3 --top-k=1", "--ffn-dim times --top-k to be a multiple of --tp 4"),
        ("--etp=4 --ffn-dim=6", "expected --ffn-dim to be a multiple of --etp 4, got 6"),
        ("--pp=4 --schedule=zbv", "expected --num-layers to be at least the number of stages 8"),
        ("--pp=3", "expected --pp x --cp x --tp to divide the number of ranks 4, got 3"),
        ("--etp=3 --ffn-dim=6", "expected --pp x --etp to divide the number of ranks 4, got 3"),
        ("--micro-batches=4", "expected --batch to be a multiple of 16, the number of ranks"),
        ("--dp=0", "expected --dp to be positive, got 0"),
        ("--tp=-1", "expected --tp to be positive, got -1"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    args = parse_args([*TINY, *SIZES, *options.split(), "--out=x"], "")
    with pytest.raises(UserError, match=re.escape(message)):
        check_args(args, 4)


def run_refused(rank, out, data):
    found = []
    few = "--pp=2 --schedule=dual-pipe-v"  # micro-batches for four stages
    for options in ("--dp=3", "--ep=4 --dispatcher=alltoall --combine=reduced", few):
        with pytest.raises(UserError) as error:
            run_steps(out, data, options, 2)
        found.append(str(error.value))
    return found


def test_what_the_library_refuses_is_told_on_every_rank(tmp_path, text_file):
    found = spawn_ranks(run_refused, 4, tmp_path / "out", text_file)
    assert found == [found[0]] * 4
    dp, combine, schedule = found[0]
    assert dp.startswith("MoEMesh: expected dp * ep")
    assert combine.startswith("MoELayer: expected dispatcher to be one of")
    assert "--schedule dual-pipe-v, 1 micro-batches" in schedule
    assert not (tmp_path / "out").exists()
