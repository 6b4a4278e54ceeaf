"""Fixtures that start jobs: in this process, or one process a rank."""

import functools
import importlib
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from example_jobs import Ranks, write_text  # noqa: E402 - lies beside this file


@pytest.fixture
def launch(tmp_path):
    """Starts `world_size` ranks; those still alive at the end of the test are killed."""
    started = []

    def start(args, world_size=2, **kill):
        folder = tmp_path / f"launch{len(started)}"
        folder.mkdir()
        started.append(Ranks(list(map(str, args)), world_size, folder, **kill))
        return started[-1]

    yield start
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.wait()


@pytest.fixture
def text_file(tmp_path):
    """A file that a tiny model can learn from."""
    return write_text(tmp_path)


@pytest.fixture
def run_here(capsys):
    """Runs an example in this process and returns (exit code, stdout, stderr)."""

    def run(name, *args):
        code = importlib.import_module(name).main(list(map(str, args)))
        assert not dist.is_initialized()
        return (code, *capsys.readouterr())

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def train(run_here):
    """Runs `train_moe_lm`, which leaves the handlers of signals as they were."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield functools.partial(run_here, "train_moe_lm")
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture
def process_group():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
