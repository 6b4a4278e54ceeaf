"""HetPipe: a virtual worker of unlike devices, each with a run of layers that suits it.

Paper: Park et al., "HetPipe" (USENIX ATC 2020, arXiv:2005.14038): a linear program
Class: exact for the slowest stage of one virtual worker with room; the order of its devices
is searched too, the choice of its devices is not
Complexity: n^2 d 2^d for d devices
"""

from __future__ import annotations

from planner_searches.problem import Choice, Nodes, Pipeline, Stage
from planner_searches.stages import best_stages


def search(pipeline: Pipeline) -> Choice:
    """Runs of operators on one device each, within memory."""

    def fill(nodes: Nodes, devices: tuple[int, ...], ways: int, behind: int) -> Stage | None:
        stage = pipeline.stage(nodes, devices)
        held = pipeline.stage_memory(stage, min(behind, pipeline.batch))
        return stage if held <= pipeline.graph.capacity else None

    _, stages = best_stages(pipeline, pipeline.prefixes, [(1, 1)], fill)
    return pipeline.choice(stages)
