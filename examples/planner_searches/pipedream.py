"""PipeDream: runs of layers, each with replicas, so that the slowest stage is as quick as can be.

Paper: Narayanan et al., "PipeDream" (SOSP 2019), section 3.1
Class: exact for the slowest stage of runs with replicas; no look at memory
Complexity: n^2 d^2 for d devices
"""

from __future__ import annotations

from planner_searches.problem import Choice, Pipeline
from planner_searches.stages import best_stages


def search(pipeline: Pipeline) -> Choice:
    """Runs of operators with replicas, without tensor parallelism and recompute."""
    shapes = [(count, ways) for count, ways in pipeline.shapes if ways == 1]
    _, stages = best_stages(
        pipeline,
        pipeline.prefixes,
        shapes,
        lambda nodes, devices, ways, behind: pipeline.stage(nodes, devices),
    )
    return pipeline.choice(stages)
