"""Specifications of models, as numbers that costs and memory follow from."""

from moe_ext.planner.presets import PRESETS, ModelSpec, preset

__all__ = ["PRESETS", "ModelSpec", "preset"]


def __dir__() -> list[str]:
    return __all__
