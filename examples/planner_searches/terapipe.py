"""TeraPipe: a sequence goes through the pipeline in slices, later ones shorter.

Paper: Li et al., "TeraPipe" (arXiv:2102.07988), section 3.3
Class: exact for slices that are multiples of a unit, by `moe_ext.pipeline.plan_slices`
Complexity: u^4 for u units
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_ext.pipeline import plan_slices
from planner_searches.problem import Choice, Pipeline, latency


def _slice_seconds(pipeline: Pipeline, units: int, context: float) -> Callable[[int, int], float]:
    stages = pipeline.equal(len(pipeline.speeds))
    slowest = max(pipeline.pass_seconds(stage) for stage in stages) - pipeline.launch

    def seconds(length: int, before: int) -> float:
        share = length / units
        return pipeline.launch + slowest * share * (1 + context * (before + length / 2) / units)

    return seconds


def cost(pipeline: Pipeline, lengths: Sequence[int], context: float = 1.0) -> float:
    """Seconds of one sample in slices through as many equal stages as there are devices.

    A slice takes its share of the slowest stage, `context` times the share of the sequence before
    it more, and a launch.
    """
    each = _slice_seconds(pipeline, sum(lengths), context)
    times = [each(length, sum(lengths[:k])) for k, length in enumerate(lengths)]
    return latency(times, len(pipeline.speeds))


def search(pipeline: Pipeline, units: int = 8, context: float = 1.0) -> Choice:
    """Lengths of slices, in units of the sequence."""
    each = _slice_seconds(pipeline, units, context)
    lengths = plan_slices(units, len(pipeline.speeds), each)
    return Choice(tuple(lengths), cost(pipeline, lengths, context))
