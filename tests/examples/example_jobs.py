"""How the tests of the examples start jobs and look at what they left."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from forked import Script

import moe_ext
from moe_ext import testing

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
DRIVER = Path(__file__).with_name("killed_run.py")
sys.path.insert(0, str(EXAMPLES))
# Ranks are forked from a process that has imported it.
testing.PRELOADED.append("train_moe_lm")

# Small enough for hundreds of steps a second; the balance loss is off since it depends on how the
# tokens are spread over ranks.
TINY_OPTIONS = {
    "model-dim": 16,
    "num-layers": 2,
    "num-heads": 2,
    "ffn-dim": 16,
    "num-experts": 4,
    "seq-len": 16,
    "batch": 4,
    "warmup": 2,
    "validate-every": 1000,
    "validation-batches": 2,
    "sample-bytes": 3,
    "balance-loss-coef": 0,
    "device": "cpu",
    "timeout": 60,
}
TINY = [f"--{name}={value}" for name, value in TINY_OPTIONS.items()] + ["--no-tensorboard"]


def write_text(folder):
    """A file that a tiny model can learn from."""
    path = folder / "text.txt"
    path.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    return path


def lose_a_node(script, dying, args, folder):
    """Run a script by torchrun on two nodes, whose second one dies; the output of the first.

    `dying` is what runs there in the place of the script: it kills itself, and the agent with it.
    """
    port, agents = testing._free_port(), []
    for node, command in enumerate(([script], dying)):
        # How long a first node waits for another one; how soon a silent one counts as dead (five
        # seconds, not fifteen); who keeps the store.
        conf = (
            f"last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=5,is_host={1 - node}"
        )
        launcher = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        launcher += ["--rdzv-conf", conf, "--local-addr=127.0.0.1", "--max-restarts=3"]
        more = {"DIE_WITH_PARENT": "1"} if node else {}
        log = folder / f"agent{node}.log"
        agents.append(torchrun([*launcher, *command, *args], log, **more))
    try:
        assert agents[1].wait(timeout=90) == -signal.SIGKILL
        assert agents[0].wait(timeout=90) == 0
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)  # and with it what it started
            agent.wait(timeout=30)
    return (folder / "agent0.log").read_text()


def torchrun(args, log, folder=".", **environment):
    """Start torchrun, which forks the ranks from itself."""
    command = list(map(str, ["-m", "torch.distributed.run", *args]))
    return Script(command, job_environment() | environment, log, folder)


class Ranks:
    """One process a rank, with their output."""

    def __init__(
        self, args, world_size, folder, kill=None, kill_rank=0, script="train_moe_lm.py", cwd="."
    ):
        port = testing._free_port()
        self.logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            command = [str(EXAMPLES / script)]
            if kill is not None and rank == kill_rank:
                command = [str(DRIVER), kill]
            env = job_environment() | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            self.processes.append(Script([*command, *args], env, log, cwd))

    def wait(self, timeout=90):
        """Return the exit codes; a rank that hangs fails the test."""
        deadline = time.monotonic() + timeout
        try:
            return [
                process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes
            ]
        finally:
            for process in self.processes:
                process.kill()

    def finish(self, timeout=90):
        """Return the output of rank 0; a rank that fails fails the test."""
        codes = self.wait(timeout)
        assert not any(codes), "\n".join(map(self.output, range(len(codes))))
        return self.output()

    def output(self, rank=0):
        return self.logs[rank].read_text(errors="replace")


def job_environment():
    package_root = str(Path(moe_ext.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def snapshot(folder):
    """Return the names and contents of all files below a folder, to see that nothing changed."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


def losses(out):
    """Return the training losses in metrics.jsonl, and check that no step is missing or double."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    train = [(record["step"], record["loss"]) for record in records if "loss" in record]
    assert [step for step, _ in train] == list(range(1, len(train) + 1))
    return [loss for _, loss in train]
