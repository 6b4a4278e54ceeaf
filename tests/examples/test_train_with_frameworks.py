import re

import pytest
import torch.distributed as dist

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

TINY = ["--steps=4", "--batch=4", "--seq-len=16", "--device=cpu", "--timeout=60", "--lr=0.01"]
HELD_OUT = re.compile(r"held-out loss ([0-9.]+) before, ([0-9.]+) after")


def forget_ranks():
    """Accelerate keeps those of this process for the next user."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def held_out(output):
    return [float(text) for text in HELD_OUT.search(output).groups()]


def test_trainer_on_two_ranks_and_then_on_one(launch, text_file, tmp_path, capsys):
    import train_with_frameworks

    args = [*TINY, "--data", str(text_file), "--out", str(tmp_path / "out")]
    output = launch([*args, "--ep=2"], script="train_with_frameworks.py").finish()
    before, after = held_out(output)
    assert after < before - 0.1
    assert (tmp_path / "out" / "model.safetensors").exists()
    # What the Trainer left, optimizer and all.
    assert train_with_frameworks.main(args) == 0
    output = capsys.readouterr().out
    assert re.search("goes on from .*checkpoint-4", output)
    assert held_out(output)[1] < after
    assert (tmp_path / "out" / "trainer" / "checkpoint-8").exists()
    forget_ranks()
    assert train_with_frameworks.main([*args, "--tool=accelerate"]) == 0
    forget_ranks()
    assert (tmp_path / "out" / "accelerate" / "optimizer.bin").exists()


@pytest.mark.parametrize("tool", ["lightning", "fabric"])
def test_lightning_on_two_ranks_and_then_on_one(launch, text_file, tmp_path, capsys, tool):
    pytest.importorskip("lightning")
    import train_with_frameworks

    args = [*TINY, "--data", str(text_file), "--out", str(tmp_path / "out"), f"--tool={tool}"]
    output = launch([*args, "--ep=2"], script="train_with_frameworks.py").finish()
    before, after = held_out(output)
    assert after < before - 0.1
    assert train_with_frameworks.main(args) == 0
    output = capsys.readouterr().out
    assert re.search("goes on from .*state.ckpt", output)
    assert held_out(output)[1] < after
    forget_ranks()
