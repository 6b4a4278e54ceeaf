"""Training out of files: the steps of one in memory, bounded memory, a kill at any layer."""

import ctypes
import os
import signal
from pathlib import Path

import offload_to_files
import pytest
import torch
from offload_to_files import FileAdamW, batch, initial, train_step
from torch import nn

from moe_ext import optim
from moe_ext.testing import spawn_ranks

LAYERS, STEPS = 4, 3


def state_of(folder, dim=32, layers=LAYERS):
    return FileAdamW(Path(folder), [(dim, dim)] * layers, lr=0.01, weight_decay=0.1)


def train(folder):
    state = state_of(folder)
    while state.step < STEPS:
        train_step(state)
    return [state.weight(layer).clone() for layer in range(LAYERS)]


def in_memory():
    weights = [nn.Parameter(initial(layer, (32, 32))) for layer in range(LAYERS)]
    optimizer = optim.CPUAdamW(weights, lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        x, target = batch(step, 32)
        for weight in weights:
            x = (x @ weight.T).tanh()
        optimizer.zero_grad()
        (x - target).square().mean().backward()
        optimizer.step()
    return weights


def killed(rank, folder, step, layer):
    state = state_of(folder)

    def after_update(done):
        if (state.step, done) == (step, layer):
            os.kill(os.getpid(), signal.SIGKILL)

    while state.step < STEPS:
        train_step(state, after_update)


def killed_in_commit(rank, folder, step, renamed):
    """Killed when the number of the next step is half written, or when its file has its name."""
    state = state_of(folder)
    write, rename = Path.write_text, os.replace

    def half_written(path, text):
        if state.step == step and not renamed:
            write(path, "")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, text)

    def replaced(*names):
        rename(*names)
        if state.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Path.write_text, os.replace = half_written, replaced
    while state.step < STEPS:
        train_step(state)


def memory(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def rise(rank, folder):
    """Bytes by which resident memory rises in a step, once everything has run."""
    torch.set_num_threads(1)
    # Freed tensors leave at once, whatever was freed before in this process (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    state = state_of(folder, dim=1024, layers=8)
    train_step(state)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    train_step(state)
    return memory("VmHWM") - before


def test_steps_are_those_in_memory(tmp_path):
    for found, want in zip(train(tmp_path), in_memory(), strict=True):
        # Products of 32 that may be added up in another order, through Adam's quotient, which is
        # no steeper than lr / eps times a gradient's error where that is near zero: 3 steps.
        torch.testing.assert_close(found, want.detach(), rtol=0, atol=3 * 0.01 * 1e-3)


@pytest.mark.parametrize(("step", "layer"), [(0, 3), (1, 2), (2, 0)])
def test_no_step_is_lost_by_a_kill(tmp_path, step, layer):
    spawn_ranks(killed, 1, tmp_path / "killed", step, layer, may_die={0})
    assert state_of(tmp_path / "killed").step == step
    for found, want in zip(train(tmp_path / "killed"), train(tmp_path / "whole"), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("renamed", [False, True])
def test_a_kill_inside_the_commit_leaves_one_step_or_the_other(tmp_path, renamed):
    spawn_ranks(killed_in_commit, 1, tmp_path / "killed", 1, renamed, may_die={0})
    assert state_of(tmp_path / "killed").step == 1 + renamed
    for found, want in zip(train(tmp_path / "killed"), train(tmp_path / "whole"), strict=True):
        assert torch.equal(found, want)


def test_memory_is_that_of_one_layer(tmp_path):
    (found,) = spawn_ranks(rise, 1, tmp_path)
    # Weight and moments, as read and as written, and the gradient; of 8 layers in the files.
    window = 7 * 4 * 1024**2
    assert found < 1.2 * window < 8 * 3 * 4 * 1024**2


def test_goes_on_where_it_was(tmp_path, capsys):
    options = ["--folder", str(tmp_path), "--layers", "2", "--dim", "8"]
    offload_to_files.main([*options, "--steps", "2"])
    offload_to_files.main([*options, "--steps", "3"])
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["step 0", "step 1", "result", "step 2", "result"]


def test_the_loss_falls_at_the_default_sizes(tmp_path, capsys):
    offload_to_files.main(["--folder", str(tmp_path), "--steps", "10"])
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[:-1]]
    # Either of the two batches.
    assert losses[8] < losses[0] / 3 and losses[9] < losses[1] / 3


@pytest.mark.parametrize(("layers", "dim"), [(2, 16), (2, 64), (1, 32), (3, 32)])
def test_refuses_a_folder_of_other_layers(layers, dim, tmp_path, capsys):
    args = ["--folder", str(tmp_path), "--steps=2"]
    assert offload_to_files.main([*args, "--layers=2", "--dim=32"]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as ended:
        offload_to_files.main([*args, f"--layers={layers}", f"--dim={dim}", "--steps=4"])
    assert ended.value.code == 2
    assert f"expected the layers of {tmp_path}, files of [4096, 4096]" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
