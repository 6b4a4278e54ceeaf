"""Rank of the codecs' benchmark: measures the link to another rank."""

from dataclasses import asdict

import torch
import torch.distributed as dist
from namespaces import answer_jobs

from moe_ext.comm.link import measure_link


class Rank:
    """Measures links."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def link(self) -> dict[str, float]:
        """As a cost table has it."""
        assert dist.group.WORLD is not None
        return asdict(measure_link(dist.group.WORLD, torch.device("cpu")))


if __name__ == "__main__":
    answer_jobs(Rank)
