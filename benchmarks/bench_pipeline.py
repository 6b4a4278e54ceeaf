"""Steps of pipelines whose stages sleep, over the times that the simulator gives."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from _harness import Table
from pipeline_stages import Sleeper, costs_of

from moe_ext.pipeline import SCHEDULES, Pipeline, make_table, simulate
from moe_ext.testing import spawn_ranks

RANKS, MICRO, SECONDS, STEPS = 2, 8, 0.04, 5
# Factor of the times of the last rank's actions, where that is the slow one.
SLOW = 2.0


def step_times(
    rank: int,
    slow: float,
    ep: int,
    schedules: Sequence[str] = SCHEDULES,
    seconds: float = SECONDS,
    steps: int = STEPS,
) -> dict[str, tuple[float, float]]:
    """Best step of each schedule, and its simulated time; all ranks of a stage meet in it."""
    grid = torch.arange(dist.get_world_size()).view(RANKS, ep)
    stage_groups = [dist.new_group(row) for row in grid.tolist()]
    pipelines = [dist.new_group(row) for row in grid.T.tolist()]
    place, data = rank // ep, rank % ep
    sent = torch.zeros(ep)

    def meet() -> None:
        if ep > 1:
            dist.all_to_all_single(torch.empty_like(sent), sent, group=stage_groups[place])

    slept = _slept(seconds)
    found = {}
    for name in schedules:
        table = make_table(name, RANKS, MICRO)
        share = RANKS / table.num_stages
        factors = [slow if r == RANKS - 1 else 1.0 for _, r in sorted(table.rank_of.items())]
        costs = [(seconds * share * factor,) * 3 for factor in factors]
        own = [stage for (_, stage), r in table.rank_of.items() if r == place]
        pipeline = Pipeline(
            table,
            {stage: Sleeper(costs[stage], meet) for stage in own},
            lambda out, target: out.mean(),
            group=pipelines[data],
        )
        x = [torch.zeros(4)] * MICRO
        given = [x if stage in own else () for stage in (0, table.num_stages - 1)]
        times = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(*given)
            dist.barrier()
            times.append(time.perf_counter() - start)
        # A sleep takes longer than it is asked to, by the same for all lengths.
        longer = [tuple(cost + slept - seconds for cost in stage) for stage in costs]
        found[name] = min(times), simulate(table, costs_of(longer)).makespan
    return found


def _slept(seconds: float, count: int = 20) -> float:
    start = time.perf_counter()
    for _ in range(count):
        time.sleep(seconds)
    return (time.perf_counter() - start) / count


def tables() -> list[Table]:
    """Two ranks alike, and 2 x 2 with an all-to-all in each pass and a slow last stage."""
    header = ("schedule", "step ms", "step / simulated", "slow stage ms", "slow / simulated")
    alike, uneven = (
        spawn_ranks(step_times, RANKS * ep, slow, ep)[0] for slow, ep in ((1.0, 1), (SLOW, 2))
    )
    rows = []
    for name in SCHEDULES:
        cells = []
        for measured, simulated in (alike[name], uneven[name]):
            cells += [f"{measured * 1e3:.0f}", f"{measured / simulated:.3f}"]
        rows.append((name, *cells))
    note = (
        f"{RANKS} ranks over Gloo, {MICRO} micro-batches, stages that sleep {SECONDS * 1e3:.0f} ms "
        "for forward, input and weight gradient each (half of it where a rank has two stages); the "
        "best of "
        f"{STEPS} steps, over the makespan of the table by what a sleep takes. At the right 2 x 2 "
        f"ranks: each pass ends in an all-to-all of its stage, and the last rank takes {SLOW:g} "
        "times as long."
    )
    return [Table("Pipelines", note, header, rows)]
