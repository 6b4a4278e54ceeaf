"""Specifications of models and rates of processors: numbers that costs and memory follow from."""

from moe_ext.distributed.cost_table import CodecRate, CostTable
from moe_ext.planner.presets import PRESETS, ModelSpec, preset

__all__ = ["PRESETS", "CodecRate", "CostTable", "ModelSpec", "preset"]


def __dir__() -> list[str]:
    return __all__
