"""Run the example in a process that kills itself with SIGKILL at a chosen moment.

Usage: killed_run.py MOMENT:STEP [arguments of the example]
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_moe_lm
from moe_lm import checkpoint
from moe_lm.model import Attention


def die():
    if "DIE_WITH_PARENT" in os.environ:  # as a node does, with the agent that would restart it
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_training(moment, step):
    """Die in the step that follows `step` finished ones."""
    current = 0

    def at_batch(*args, _real=train_moe_lm.train_batch, **kwargs):
        nonlocal current
        current = kwargs["step"]
        if moment == "batch" and current == step:
            die()
        return _real(*args, **kwargs)

    def at_forward(self, x, _real=Attention.forward):
        result = _real(self, x)
        if moment == "forward" and current == step:
            die()
        return result

    def at_backward(*args, _real=train_moe_lm.moe_ext.distributed.sync_gradients, **options):
        if moment == "backward" and current == step:
            die()
        return _real(*args, **options)

    def at_metrics(*args, _real=train_moe_lm.reduce_metrics):
        if moment == "optimizer" and current == step:
            die()
        return _real(*args)

    train_moe_lm.train_batch = at_batch
    Attention.forward = at_forward
    train_moe_lm.moe_ext.distributed.sync_gradients = at_backward
    train_moe_lm.reduce_metrics = at_metrics


def kill_in_save(moment, step):
    """Die while the checkpoint of `step` is written."""
    saving = False

    def at_save(*args, _real=checkpoint.save, **kwargs):
        nonlocal saving
        saving = kwargs["step"] == step
        return _real(*args, **kwargs)

    def at_tensors(*args, _real=checkpoint.dcp.save, **kwargs):
        if saving and moment == "before_tensors":
            die()
        _real(*args, **kwargs)
        if saving and moment == "after_tensors":
            die()

    def at_manifest(manifest, file, **kwargs):
        text = real_json.dumps(manifest)
        if saving and moment == "half_manifest":
            file.write(text[: len(text) // 2])
            file.flush()
            die()
        file.write(text)

    def at_rename(self, target, _real=Path.rename):
        if saving and moment == "before_rename" and Path(target).name.startswith("step-"):
            die()
        result = _real(self, target)
        if saving and moment == "after_rename" and Path(target).name.startswith("step-"):
            die()
        if saving and moment == "half_removal" and Path(target).name.endswith("-old"):
            (Path(target) / checkpoint.MANIFEST).unlink()
            die()
        return result

    class PatchedJson:
        dump = staticmethod(at_manifest)
        load = staticmethod(checkpoint.json.load)

    real_json = checkpoint.json
    checkpoint.json = PatchedJson
    checkpoint.save = at_save
    checkpoint.dcp.save = at_tensors
    Path.rename = at_rename


if __name__ == "__main__":
    moment, _, step = sys.argv[1].partition(":")
    patch = kill_in_training if moment in ("batch", "forward", "backward", "optimizer") else None
    # torchrun counts its restarts: only the first attempt dies.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        (patch or kill_in_save)(moment, int(step))
    train_moe_lm.run_and_exit(lambda: train_moe_lm.main(sys.argv[2:]))
