"""Rank of the all-reduce benchmark: reads jobs as lines of JSON, and answers with their costs.

``allreduce_rank.py RANK WORLD_SIZE`` with the rendezvous in the environment.
"""

import statistics
import time
from typing import Any

import allreduce_peers
import torch
import torch.distributed as dist
from namespaces import TX_BYTES, answer_jobs
from torch import Tensor

from moe_ext.comm import link

NUM_GRADS = 3
NUM_COPIES = 15


def gradients(rank: int, shape: list[int]) -> list[Tensor]:
    """Gradients that differ between ranks, and are the same in every run."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randn(shape, generator=generator) for _ in range(NUM_GRADS)]


def sent_bytes() -> int:
    """Bytes that have left this namespace."""
    return int(TX_BYTES.read_text())


class Rank:
    """Contenders that live from job to job, with their residuals."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reduces: dict[str, allreduce_peers.Reduce] = {}
        self.turn = 0

    def prepare(self, names: list[str], shape: list[int]) -> dict[str, Any]:
        """Make new contenders."""
        self.grads = gradients(self.rank, shape)
        self.grad = torch.empty(shape)
        self.reduces = {name: allreduce_peers.make(name) for name in names}
        return {}

    def renew(self, names: list[str]) -> dict[str, Any]:
        """Make some anew, on a link that has changed."""
        link._links.clear()
        self.reduces |= {name: allreduce_peers.make(name) for name in names}
        return {}

    def time(self, names: list[str]) -> dict[str, Any]:
        """Run each once: wall and CPU seconds, bytes, and which codec was taken."""
        found = {}
        for name in names:
            self.grad.copy_(self.grads[self.turn % NUM_GRADS])
            dist.barrier()
            sent = sent_bytes()
            wall, cpu = time.perf_counter(), time.process_time()
            self.reduces[name](self.grad)
            spent = time.perf_counter() - wall, time.process_time() - cpu
            dist.barrier()  # acknowledgements are under way
            found[name] = [*spent, sent_bytes() - sent]
        self.turn += bool(names)
        return found

    def copies(self) -> list[float]:
        """Seconds of a copy of the bucket, on rank 0 alone and on all at once."""

        def seconds() -> float:
            start = time.perf_counter()
            self.grad.copy_(self.grads[0])
            return time.perf_counter() - start

        alone = []
        for _ in range(NUM_COPIES):
            dist.barrier()
            alone.append(seconds() if self.rank == 0 else 0.0)
        dist.barrier()
        return [statistics.median(alone), statistics.median(seconds() for _ in range(NUM_COPIES))]

    def error(self, names: list[str]) -> dict[str, Any]:
        """Relative distance of a first step to the mean in float64."""
        exact = self.grads[0].double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        found = {}
        for name in names:
            self.grad.copy_(self.grads[0])
            out = self.reduces[name](self.grad)
            found[name] = float((out.double().view_as(exact) - exact).norm() / exact.norm())
        return found

    def explain(self, names: list[str]) -> dict[str, Any]:
        """The explanation of `auto` for its choice."""
        return {name: self.reduces[name].explain() for name in names}


if __name__ == "__main__":
    answer_jobs(Rank)
