"""Chimera: width, depth and micro-batch of two pipelines that run in opposite directions.

Paper: Li and Hoefler, "Chimera" (SC 2021, arXiv:2107.06925), section 3.4
Class: exact within a grid of equal stages, by its formula; the micro-batch is the largest that fits
Complexity: the even depths that divide the devices
"""

from __future__ import annotations

import math

from planner_searches.problem import Choice, Pipeline


def search(pipeline: Pipeline) -> Choice:
    """Equal stages and the largest micro-batch with room for two stages' weights on a device.

    The formula counts N forward and N + depth - 2 backward passes, which take twice as long.
    """
    least, best = math.inf, Choice((), math.inf)
    devices = len(pipeline.speeds)
    for depth in range(2, min(devices, len(pipeline.all_nodes)) + 1, 2):
        width = devices // depth
        if width * depth != devices:
            continue
        stages = pipeline.equal(depth)
        for size in sorted(pipeline.micro_batches, reverse=True):
            count, left = divmod(pipeline.batch, width * size)
            pairs = zip(stages, reversed(stages), strict=True)
            # Half of the micro-batches underway are of either direction.
            held = max(
                sum(pipeline.stage_memory(stage, depth // 2, size) for stage in pair)
                for pair in pairs
            )
            if left or held > pipeline.graph.capacity:
                continue
            slowest = max(pipeline.pass_seconds(stage, size) for stage in stages)
            sync = max(map(pipeline.sync_seconds, stages))
            seconds = slowest / 3 * (count + 2 * (count + depth - 2)) + sync
            if seconds < least:
                least, best = seconds, pipeline.choice(stages, size)
            break
    return best
