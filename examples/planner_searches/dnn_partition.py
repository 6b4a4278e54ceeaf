"""dnn-partition: stages of a graph that is no chain, by a dynamic program over down-sets.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators"
(NeurIPS 2020, arXiv:2006.16423)
Class: exact for the slowest stage, of stages on one device each that a pipeline can run
Complexity: i^2 d for i down-sets: polynomial of graphs of fixed width
"""

from __future__ import annotations

from planner_searches.problem import Choice, Nodes, Pipeline, Stage
from planner_searches.stages import best_stages


def search(pipeline: Pipeline) -> Choice:
    """Down-sets without replicas; a stage has room for its weights and one micro-batch."""

    def fill(nodes: Nodes, devices: tuple[int, ...], ways: int, behind: int) -> Stage | None:
        stage = pipeline.stage(nodes, devices)
        return stage if pipeline.stage_memory(stage, 1) <= pipeline.graph.capacity else None

    _, stages = best_stages(pipeline, pipeline.ideals, [(1, 1)], fill)
    return pipeline.choice(stages)
