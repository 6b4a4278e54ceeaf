"""Process group, device, signals and errors that all ranks agree on."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

import moe_ext

T = TypeVar("T")
# Gloo counts nanoseconds in 64 bits.
MAX_TIMEOUT_S = 1e9
# numpy takes 32 bits.
SEEDS = 2**32


class UserError(Exception):
    """A mistake that the user can correct; printed without a traceback."""


@dataclass(frozen=True)
class Runtime:
    """Place of this process in the job."""

    rank: int
    world_size: int
    device: torch.device
    device_note: str

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0


def choose_device(name: str) -> tuple[torch.device, str]:
    """Return the device for `name` ("auto", "cpu" or "cuda") and a line that says why."""
    if name == "cpu":
        return torch.device("cpu"), "training on CPU, as asked"
    if not torch.cuda.is_available():
        if name == "cuda":
            raise UserError("expected --device cuda to find a GPU, but this PyTorch sees none")
        return torch.device("cpu"), "no GPU found: training on CPU"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        moe_ext.ops.topk_gate(torch.zeros(1, 2, device=device), 1)
    except (NotImplementedError, RuntimeError) as error:
        if name == "cuda":
            raise UserError(f"moe_ext cannot run on this GPU: {error}") from error
        return torch.device("cpu"), "moe_ext has no operators for this GPU: training on CPU"
    return device, f"training on {torch.cuda.get_device_name(device)}"


def start(args: argparse.Namespace) -> Runtime:
    """Join the job that torchrun describes, or make a job of one process without it."""
    if not 0 < args.timeout < MAX_TIMEOUT_S:
        raise UserError(
            f"expected --timeout to be positive and below {MAX_TIMEOUT_S:g}, got {args.timeout}"
        )
    if not 0 <= args.seed < SEEDS:
        raise UserError(f"expected --seed to be at least 0 and below {SEEDS}, got {args.seed}")
    device, note = choose_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Gloo stays beside NCCL: objects and files are agreed on without touching the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=args.timeout)
    rank, world_size = 0, 1
    store = dist.HashStore()
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun keeps its store over restarts: without a prefix of its own, a new attempt would
        # read the addresses of the processes that died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Runtime(rank, world_size, device, note)


def agree(step: Callable[[], T], errors: type[Exception] | tuple[type[Exception], ...]) -> T:
    """Run `step` on every rank; if one rank raises one of `errors`, all raise the same.

    Without this, a rank that finds a bad file would leave the others waiting in a collective.
    """
    result: T | None = None
    failure: str | None = None
    try:
        result = step()
    except errors as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size()
    with moe_ext.distributed.naming_failed_ranks(None, "agree"):
        dist.all_gather_object(failures, failure)
    for message in failures:
        if message is not None:
            raise UserError(message)
    return result  # type: ignore[return-value]


def from_main(step: Callable[[], T], errors: type[Exception] | tuple[type[Exception], ...]) -> T:
    """Run `step` on rank 0 and return its result, or raise its error, on every rank."""
    result = agree(lambda: step() if dist.get_rank() == 0 else None, errors)
    box = [result]
    with moe_ext.distributed.naming_failed_ranks(None, "from_main"):
        dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def make_folder(path: Path | None) -> None:
    """UserError for a folder that cannot be made, before hours of training are lost."""
    if path is not None:
        agree(lambda: path.mkdir(parents=True, exist_ok=True), OSError)


def run_example(
    work: Callable[[argparse.Namespace, Runtime], int | None], args: argparse.Namespace
) -> int:
    """Join the job, do the work; mistakes of the user are one line and exit code 2.

    Every rank raises these together: one of them prints, none waits for another.
    """
    try:
        runtime = start(args)
        code = work(args, runtime)
        dist.destroy_process_group()
    except UserError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 2
    return code or 0


class StopSignal:
    """Remembers that SIGTERM or SIGINT arrived, while it is entered as a context.

    Outside of it, before there is anything to save, the signals end the process as usual.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: dict[int, Any] = {}

    # Ctrl-C arrives twice, from the terminal and from torchrun: the second must change nothing.
    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received = True

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run `main` in reused memory and end the process, without tearing the interpreter down.

    A thread of Gloo may still drop a Python tensor of the last collective; when that meets the
    interpreter's shutdown, the process aborts (seen in one exit of twenty).
    """
    moe_ext.reuse_memory()
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


class FolderLock:
    """Keeps a second job out of a folder; ranks orphaned by a killed launcher may still write.

    The lock is on the folder itself and dies with the process, so no file is left behind.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def acquire(self, folder: Path, wait_s: float = 10.0) -> None:
        """Take the lock, waiting a little for a job that is about to end."""
        if self._descriptor is not None:
            return
        self._descriptor = os.open(folder, os.O_RDONLY)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"another job is writing to {folder}: stop it or choose another --out"
                    ) from None
                time.sleep(0.2)
            except OSError:
                return  # a file system without locks

    def release(self) -> None:
        """Let other jobs in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def choose_expert_parallel_size(asked: int | None, world_size: int, num_experts: int) -> int:
    """Return the number of ranks that share one set of experts."""
    if asked is None:
        return math.gcd(world_size, num_experts)
    if asked < 1 or world_size % asked:
        raise UserError(f"expected --ep to divide the number of ranks {world_size}, got {asked}")
    if num_experts % asked:
        raise UserError(f"expected --ep to divide --num-experts {num_experts}, got {asked}")
    return asked
