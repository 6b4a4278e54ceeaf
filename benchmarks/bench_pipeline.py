"""Steps of pipelines whose stages sleep, over the times that the simulator gives."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import namespaces
import torch
import torch.distributed as dist
from _harness import Table
from pipeline_stages import Sleeper, Sleeping, costs_of, exchange_costs, plan_exchanges

from moe_ext.pipeline import (
    SCHEDULES,
    ActionTable,
    Costs,
    Pipeline,
    make_table,
    plan_turns,
    simulate,
)
from moe_ext.testing import spawn_ranks

RANKS, MICRO, SECONDS, STEPS = 2, 8, 0.04, 5
# With exchanges.
WAVES, WAVE_SECONDS, RATE = 16, 0.16, 1e8
# Bytes, of 500 kB in a transfer, that may pass unslowed after a pause.
BURST = 64 * 1024
# Factor of the times of the last rank's actions, where that is the slow one.
SLOW = 2.0


def step_times(
    rank: int,
    slow: float,
    ep: int,
    schedules: Sequence[str] = SCHEDULES,
    seconds: float = SECONDS,
    steps: int = STEPS,
) -> dict[str, tuple[float, float, float]]:
    """Best step of each schedule, its simulated time, and that with sleeps that end on time.

    All ranks of a stage meet in the step.
    """
    grid = torch.arange(dist.get_world_size()).view(RANKS, ep)
    stage_groups = [dist.new_group(row) for row in grid.tolist()]
    pipelines = [dist.new_group(row) for row in grid.T.tolist()]
    place, data = rank // ep, rank % ep
    sent = torch.zeros(ep)

    def meet() -> None:
        if ep > 1:
            dist.all_to_all_single(torch.empty_like(sent), sent, group=stage_groups[place])

    longer_by = _longer(seconds)
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
        longer = [tuple(map(sum, zip(cost, longer_by, strict=True))) for cost in costs]
        found[name] = (
            min(times),
            *(simulate(table, costs_of(stages)).makespan for stages in (longer, costs)),
        )
    return found


def _longer(seconds: float, count: int = 20) -> tuple[float, float, float]:
    """Seconds beyond its sleeps that a stage takes for forward pass, gradients of input and weight.

    Medians, of a stage alone: sleeps end late, and calls and autograd take time.
    """
    stage, passes = Sleeper((seconds,) * 3), []
    for _ in range(count):
        start = time.perf_counter()
        out = stage(torch.zeros(4, requires_grad=True)).mean()
        middle = time.perf_counter()
        out.backward()
        passes.append((middle - start - seconds, time.perf_counter() - middle - 2 * seconds))
    forward, backward = (sorted(each)[count // 2] for each in zip(*passes, strict=True))
    return forward, backward / 2, backward / 2


def hidden_share(table: ActionTable, costs: Costs, seconds: float) -> float:
    """Share of its exchanges that a step of so many seconds hides.

    No exchange is hidden if the step waits for each as it is sent.
    """
    at_once = {kind: [(sent, sent) for sent, _ in e] for kind, e in costs.exchanges.items()}
    seen = plan_turns(table, replace(costs, exchanges=at_once), lanes=1).makespan
    none = plan_turns(table, replace(costs, transfer=0.0), lanes=1).makespan
    return (seen - seconds) / (seen - none)


def exchange_table() -> Table:
    """Stages of two ranks, each in a network namespace of its own, that exchange rows."""
    with (
        namespaces.network(4) as wires,
        namespaces.ranks_on(wires, Path(__file__).with_name("pipeline_rank.py")) as ranks,
    ):
        wires.limit(RATE, burst_bytes=BURST)
        rows = []
        for name in SCHEDULES:
            table = make_table(name, RANKS, WAVES)
            seconds = WAVE_SECONDS * RANKS / table.num_stages
            # A quarter of a forward pass at that rate; half of the rows stay on their rank.
            count = 2 * round(seconds / 4 * RATE / 8 / (4 * Sleeping.COLUMNS))
            job = {"rows": count, "seconds": seconds}
            found = ranks.ask({"do": "alone", **job})
            measured = tuple(max(times) for times in zip(*found, strict=True))
            costs = exchange_costs(table.num_stages, *measured)
            job |= {"do": "steps", "name": name, "micro": WAVES, "costs": measured}
            cells = []
            for lanes in (1, 2):
                simulated = plan_exchanges(table, costs, lanes).makespan
                asked = ranks.ask({**job, "lanes": lanes, "count": 2})
                times = [max(t) for t in zip(*asked, strict=True)]
                cells += [
                    f"{1e3 * min(times):.0f}",
                    f"{min(times) / simulated:.3f}",
                    f"{100 * hidden_share(table, costs, min(times)):.0f} %",
                    f"{100 * hidden_share(table, costs, simulated):.0f} %",
                ]
            rows.append((name, *cells))
    note = (
        f"2 x 2 ranks, each in a network namespace of its own at 100 Mbit/s, "
        f"{WAVES} micro-batches. "
        f"Stages sleep {WAVE_SECONDS * 1e3:.0f} ms for forward, gradient of rows and gradient of "
        "weights each (half of it where a rank has two), run forward again before they go "
        "backward, and exchange rows twice in each pass, which takes half of what a forward pass "
        "sleeps. What passes take whose rows stay, and an exchange, is measured on a stage alone. "
        "One action at a time, and two in turn with three micro-batches more in flight "
        "(`plan_turns`), the better of two steps: over the simulated, and the share of the "
        "exchanges hidden, measured and simulated, where none is if each is waited for as it is "
        "sent."
    )
    words = ("ms", "/ simulated", "hidden", "simulated")
    header = ("schedule", *words, *(f"in turn, {word}" for word in words))
    return Table("Exchanges behind other micro-batches", note, header, rows)


def tables() -> list[Table]:
    """Two ranks alike, 2 x 2 with a slow last stage, and stages that exchange rows."""
    header = ("schedule", "step ms", "step / simulated", "slow stage ms", "slow / simulated")
    alike, uneven = (
        spawn_ranks(step_times, RANKS * ep, slow, ep)[0] for slow, ep in ((1.0, 1), (SLOW, 2))
    )
    rows = []
    for name in SCHEDULES:
        cells = []
        for measured, simulated, _ in (alike[name], uneven[name]):
            cells += [f"{measured * 1e3:.0f}", f"{measured / simulated:.3f}"]
        rows.append((name, *cells))
    note = (
        f"{RANKS} ranks over Gloo, {MICRO} micro-batches, stages that sleep {SECONDS * 1e3:.0f} ms "
        "for forward, input and weight gradient each (half of it where a rank has two stages); the "
        "best of "
        f"{STEPS} steps, over the makespan by what a stage takes alone. At the right 2 x 2 "
        f"ranks: each pass ends in an all-to-all of its stage, and the last rank takes {SLOW:g} "
        "times as long."
    )
    found = [Table("Pipelines", note, header, rows)]
    reason = namespaces.why_not()
    if reason:
        print(f"benchmark pipeline: no exchanges, since {reason}", file=sys.stderr)
        return found
    return [*found, exchange_table()]
