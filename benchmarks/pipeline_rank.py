"""One rank of pipelines whose stages sleep and exchange rows; a script of `namespaces.Ranks`.

``pipeline_rank.py RANK WORLD_SIZE`` with the rendezvous in the environment.
"""

import time

import torch
import torch.distributed as dist
from namespaces import answer_jobs
from pipeline_stages import Sleeping, exchange_costs

from moe_ext.distributed.dispatch.rows import all_to_all_rows
from moe_ext.pipeline import Pipeline, make_table, plan_turns

RANKS, EP = 2, 2


class Rank:
    """Pipelines of two ranks, each stage of which is spread over two."""

    def __init__(self, rank: int) -> None:
        grid = torch.arange(RANKS * EP).view(RANKS, EP)
        stage_groups = [dist.new_group(row) for row in grid.tolist()]
        pipelines = [dist.new_group(row) for row in grid.T.tolist()]
        self.place, data = rank // EP, rank % EP
        self.stage_group, self.pipeline = stage_groups[self.place], pipelines[data]

    def transfer(self, rows: int, count: int = 10) -> float:
        """Seconds that an exchange of so many rows takes, the median."""
        x, half, times = torch.zeros(rows, Sleeping.COLUMNS), [rows // 2] * EP, []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            all_to_all_rows(x, self.stage_group, half, half)
            times.append(time.perf_counter() - start)
        return sorted(times)[count // 2]

    def steps(
        self,
        name: str,
        micro: int,
        seconds: float,
        slept: float,
        transfer: float,
        rows: int,
        lanes: int,
        count: int,
    ) -> list[float]:
        """Seconds of each step of a schedule, every stage recomputed."""
        table = make_table(name, RANKS, micro)
        share = RANKS / table.num_stages
        costs = exchange_costs(table.num_stages, share * (seconds + slept), transfer * share)
        plan = plan_turns(table, costs, lanes=lanes)
        own = [stage for (_, stage), r in table.rank_of.items() if r == self.place]
        made = (share * seconds, 2 * int(rows * share / 2), self.stage_group)
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
