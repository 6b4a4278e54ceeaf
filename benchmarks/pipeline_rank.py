"""Rank of pipelines whose stages sleep and exchange rows; a script of `namespaces.Ranks`.

``pipeline_rank.py RANK WORLD_SIZE`` with the rendezvous in the environment.
"""

import itertools
import time

import torch
import torch.distributed as dist
from namespaces import answer_jobs
from pipeline_stages import Sleeping, exchange_costs, plan_exchanges

from moe_ext.pipeline import Pipeline, make_table

RANKS, EP = 2, 2


class Rank:
    """Pipelines of two ranks, each stage of which is spread over two."""

    def __init__(self, rank: int) -> None:
        grid = torch.arange(RANKS * EP).view(RANKS, EP)
        stage_groups = [dist.new_group(row) for row in grid.tolist()]
        pipelines = [dist.new_group(row) for row in grid.T.tolist()]
        self.place, data = rank // EP, rank % EP
        self.stage_group, self.pipeline = stage_groups[self.place], pipelines[data]
        self.alone_group = [dist.new_group([each]) for each in range(RANKS * EP)][rank]

    def alone(self, rows: int, seconds: float, count: int = 9) -> tuple[float, ...]:
        """Seconds of a forward pass, gradients of its rows, that of its weight, and a transfer.

        Medians of passes whose rows stay here; what a sleep takes too long, and what calls take, is
        in them. A transfer is half of what forward passes one after the other take longer.
        """
        stage, times = Sleeping(seconds, rows, self.alone_group, is_first=False), []
        for _ in range(count):
            begins = [time.perf_counter()]
            out = stage(torch.zeros(4, requires_grad=True)).sum()
            begins.append(time.perf_counter())
            out.backward()
            begins.append(time.perf_counter())
            time.sleep(seconds)
            begins.append(time.perf_counter())
            times.append([end - begin for begin, end in itertools.pairwise(begins)])
        forward, backward, weight = (sorted(each)[count // 2] for each in zip(*times, strict=True))
        stage = Sleeping(seconds, rows, self.stage_group, is_first=False)
        dist.barrier()
        ends = [time.perf_counter()]
        for _ in range(count):
            stage(torch.zeros(4, requires_grad=True))
            ends.append(time.perf_counter())
        passes = sorted(end - begin for begin, end in itertools.pairwise(ends))
        return forward, backward - weight, weight, (passes[count // 2] - forward) / 2

    def steps(
        self,
        name: str,
        micro: int,
        seconds: float,
        costs: tuple[float, ...],
        rows: int,
        lanes: int,
        count: int,
    ) -> list[float]:
        """Seconds of each step of a schedule, every stage recomputed."""
        table = make_table(name, RANKS, micro)
        plan = plan_exchanges(table, exchange_costs(table.num_stages, *costs), lanes)
        own = [stage for (_, stage), r in table.rank_of.items() if r == self.place]
        made = (seconds, rows, self.stage_group)
        pipeline = Pipeline(
            plan,
            {stage: Sleeping(*made, is_first=stage == 0) for stage in own},
            lambda out, target: out.mean(),
            group=self.pipeline,
            recompute=True,
        )
        x = [torch.zeros(4)] * micro
        given = [x if stage in own else () for stage in (0, table.num_stages - 1)]
        times = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(*given)
            dist.barrier()
            times.append(time.perf_counter() - start)
        return times


if __name__ == "__main__":
    answer_jobs(Rank)
