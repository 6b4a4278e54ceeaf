"""DistIR: a grid of data, tensor and pipeline parallelism, each point simulated.

Paper: Santhanam et al., "DistIR" (arXiv:2111.05426)
Class: exact within a grid of equal stages, by its simulator
Complexity: one simulation of each way to factor the devices in three
"""

from __future__ import annotations

import math

from moe_ext.pipeline import Costs, make_table, simulate
from planner_searches.problem import Choice, Pipeline


def search(pipeline: Pipeline) -> Choice:
    """Equal stages by the simulated seconds of 1F1B, within memory."""
    least, best = math.inf, Choice((), math.inf)
    devices = len(pipeline.speeds)
    for depth in range(1, min(devices, len(pipeline.all_nodes)) + 1):
        for ways in sorted({way.ways for way in pipeline.ways}):
            replicas = devices // (depth * ways)
            if depth * ways * replicas != devices or pipeline.batch % replicas:
                continue
            stages = pipeline.equal(depth, ways)
            if not pipeline.fits(stages):
                continue
            thirds = [pipeline.pass_seconds(stage) / 3 for stage in stages]
            table = make_table("1f1b", depth, pipeline.batch // replicas)
            seconds = simulate(table, Costs(thirds, thirds, thirds)).makespan
            seconds += max(map(pipeline.sync_seconds, stages))
            if seconds < least:
                least, best = seconds, pipeline.choice(stages)
    return best
