"""Ranks on a network of their own: Linux namespaces joined by veth, slowed down by a token bucket.

Two namespaces hang on one wire. More hang on a bridge in a namespace of its own, and what comes to
a rank is held to the rate as what leaves it. Needs Linux, root and iproute2.
"""

import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import keep_memory

DEVICE = "eth0"
PORT = 29500
TIMEOUT = datetime.timedelta(seconds=120)
SUBNET = "10.97.0"
HUB = "hub"
TX_BYTES = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")

# More than the largest packet that the kernel hands over at once (64 KiB), or it never leaves; at
# fast links what comes in a tick of 1/4 ms. Little beside a message, which it lets pass unslowed.
BURST_BYTES = 128 * 1024
BURST_SECONDS = 0.25e-3
# Longer than what TCP leaves underway, so that nothing is dropped and sent twice.
QUEUE_BYTES = 32 * 2**20


def command(*words: str) -> None:
    """Run a program of iproute2; RuntimeError with what it said where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def why_not() -> str:
    """Text that says what namespaces with a slowed wire lack here; empty if nothing."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} (iproute2) is not installed"
    try:
        with network(2) as wires:
            wires.limit(1e9)
    except RuntimeError as error:
        return f"network namespaces are not allowed here ({str(error).splitlines()[0]})"
    return ""


@dataclass
class Network:
    """Namespaces by name, of the ranks first."""

    prefix: str
    num_ranks: int
    ends: list[tuple[str, str]] = field(default_factory=list)  # (namespace, device)

    def namespace(self, rank: int | str) -> str:
        """Name of the namespace of a rank, or of the hub."""
        return f"{self.prefix}-{rank}"

    @property
    def namespaces(self) -> list[str]:
        """Names of all namespaces."""
        names = [self.namespace(rank) for rank in range(self.num_ranks)]
        return [*names, *([self.namespace(HUB)] if self.num_ranks != 2 else [])]

    def build(self) -> None:
        """Make namespaces, wires and addresses."""
        for name in self.namespaces:
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        if self.num_ranks == 2:
            self.wire(self.namespace(0), DEVICE, self.namespace(1), DEVICE)
        else:
            hub = self.namespace(HUB)
            command("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
            command("ip", "-n", hub, "link", "set", "bridge", "up")
            for rank in range(self.num_ranks):
                self.wire(self.namespace(rank), DEVICE, hub, f"port{rank}")
                command("ip", "-n", hub, "link", "set", f"port{rank}", "master", "bridge")
        for rank in range(self.num_ranks):
            name = self.namespace(rank)
            command("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", DEVICE)

    def wire(self, near: str, near_device: str, far: str, far_device: str) -> None:
        """Join two namespaces."""
        ends = ("name", near_device, "type", "veth", "peer", "name", far_device, "netns", far)
        command("ip", "-n", near, "link", "add", *ends)
        for name, device in ((near, near_device), (far, far_device)):
            command("ip", "-n", name, "link", "set", device, "up")
            self.ends.append((name, device))

    def limit(self, bits_per_second: float | None, burst_bytes: int = BURST_BYTES) -> None:
        """Hold every end of every wire to a rate, behind a burst; None lets all pass."""
        for name, device in self.ends:
            verb = ("tc", "-n", name, "qdisc")
            if bits_per_second is None:
                with contextlib.suppress(RuntimeError):  # there was no limit
                    command(*verb, "del", "dev", device, "root")
                continue
            burst = max(burst_bytes, int(bits_per_second / 8 * BURST_SECONDS))
            rate = ("rate", f"{int(bits_per_second)}bit", "burst", str(burst))
            limit = ("limit", str(QUEUE_BYTES))
            command(*verb, "replace", "dev", device, "root", "tbf", *rate, *limit)

    def remove(self) -> None:
        """Delete every namespace, and with it its wires."""
        for name in self.namespaces:
            with contextlib.suppress(RuntimeError):  # it was not made
                command("ip", "netns", "del", name)


def address(rank: int) -> str:
    """Address of a rank inside the network."""
    return f"{SUBNET}.{rank + 1}"


@contextlib.contextmanager
def network(num_ranks: int) -> Iterator[Network]:
    """A network, removed whatever happens inside."""
    wires = Network(f"mx{os.getpid()}", num_ranks)
    try:
        wires.build()
        yield wires
    finally:
        wires.remove()


class Ranks:
    """A Python script on every rank, which answers lines of JSON with lines of JSON.

    The script gets its rank and the number of ranks as arguments, and GLOO_SOCKET_IFNAME,
    MASTER_ADDR and MASTER_PORT in its environment; one thread a rank. `per_node` consecutive ranks
    share a namespace, and what they send each other passes no wire.
    """

    def __init__(self, wires: Network, script: Path, per_node: int = 1) -> None:
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(script.parent.parent)])
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": DEVICE,
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses have no names here
            "PYTHONPATH": path,
        }
        num_ranks = wires.num_ranks * per_node
        self.processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", wires.namespace(rank // per_node)]
                + [sys.executable, str(script), str(rank), str(num_ranks)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(num_ranks)
        ]

    def ask(self, question: dict[str, Any]) -> list[Any]:
        """Answers of all ranks; RuntimeError if one ended instead."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
        answers = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} ended with exit status {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def close(self, grace: float = 10.0) -> None:
        """Let the scripts end, and kill those that do not."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        deadline = time.monotonic() + grace
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextlib.contextmanager
def ranks_on(wires: Network, script: Path, per_node: int = 1) -> Iterator[Ranks]:
    """Ranks that are gone when the context ends."""
    ranks = Ranks(wires, script, per_node)
    try:
        yield ranks
    finally:
        ranks.close()


def answer_jobs(kind: Callable[[int], Any]) -> None:
    """The body of a script of `Ranks`: joins the others, and answers jobs until the input ends.

    Args:
        kind: makes an object from the rank; a job names one of its methods and the arguments.
    """
    rank, size = (int(word) for word in sys.argv[1:3])
    torch.set_num_threads(1)
    keep_memory(touched=0)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT)
    here = kind(rank)
    for line in sys.stdin:
        job = json.loads(line)
        answer = getattr(here, job.pop("do"))(**job)
        print(json.dumps(answer), flush=True)
