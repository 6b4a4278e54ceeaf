"""Piper: stages over down-sets with replicas, and in each a knapsack of tensor parallelism.

Paper: Tarnawski, Narayanan and Phanishayee, "Piper" (NeurIPS 2021)
Class: exact for the slowest stage, memory included, where options within a stage add no edges
Complexity: i^2 d^2 s knapsacks for i down-sets, d devices and s stages
"""

from __future__ import annotations

import dataclasses
from functools import cache

from planner_searches import tensoropt
from planner_searches.problem import Choice, Nodes, Pipeline, Problem, Stage
from planner_searches.stages import best_stages


def _knapsack(problem: Problem) -> Choice:
    """The quickest options that fit, with no look at edges."""
    return tensoropt.search(dataclasses.replace(problem, edges={}))


def search(pipeline: Pipeline) -> Choice:
    """Down-sets, ways, replicas and recompute, within memory."""

    @cache
    def options(nodes: Nodes, ways: int, behind: int) -> tuple[int, ...] | None:
        return pipeline.fill(nodes, ways, behind, 1, _knapsack)

    def fill(nodes: Nodes, devices: tuple[int, ...], ways: int, behind: int) -> Stage | None:
        found = options(nodes, ways, behind)
        return None if found is None else Stage(nodes, found, devices)

    _, stages = best_stages(pipeline, pipeline.ideals, pipeline.shapes, fill)
    return pipeline.choice(stages)
