"""PipeDream-2BW: depth, width, micro-batch and recompute of equal stages, within memory.

Paper: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv:2006.09503),
section 4
Class: exact within a grid of equal stages, for the slowest stage
Complexity: depths that divide the devices, times sizes of micro-batches, times two
"""

from __future__ import annotations

import itertools
import math

from planner_searches.problem import Choice, Pipeline


def search(pipeline: Pipeline) -> Choice:
    """Equal stages with room for two versions of weights."""
    least, best = math.inf, Choice((), math.inf)
    devices = len(pipeline.speeds)
    depths = [d for d in range(1, len(pipeline.all_nodes) + 1) if devices % d == 0]
    for depth, size, again in itertools.product(depths, pipeline.micro_batches, (False, True)):
        stages = pipeline.equal(depth, recompute=again)
        held = max(
            pipeline.stage_memory(stage, depth - k, size, versions=2)
            for k, stage in enumerate(stages)
        )
        if held > pipeline.graph.capacity or pipeline.batch % (size * devices // depth):
            continue
        slowest = max(pipeline.seconds(stage, size) for stage in stages)
        seconds = slowest * pipeline.num_micro_batches(size)
        if seconds < least:
            least, best = seconds, pipeline.choice(stages, size)
    return best
