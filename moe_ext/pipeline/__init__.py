"""Pipelines as tables: the actions of each rank in their order, checked, costed and run."""

from moe_ext.pipeline.check import check_table, in_flight, weight_versions
from moe_ext.pipeline.executor import Pipeline
from moe_ext.pipeline.messages import add_messages
from moe_ext.pipeline.schedules import ASYNCHRONOUS, SCHEDULES, make_table
from moe_ext.pipeline.simulate import Costs, Span, Timeline, simulate
from moe_ext.pipeline.slices import plan_slices
from moe_ext.pipeline.table import Action, ActionTable
from moe_ext.pipeline.turn_plan import TurnPlan, plan_turns
from moe_ext.pipeline.waves import WaveUpdates

__all__ = [
    "ASYNCHRONOUS",
    "SCHEDULES",
    "Action",
    "ActionTable",
    "Costs",
    "Pipeline",
    "Span",
    "Timeline",
    "TurnPlan",
    "WaveUpdates",
    "add_messages",
    "check_table",
    "in_flight",
    "make_table",
    "plan_slices",
    "plan_turns",
    "simulate",
    "weight_versions",
]


def __dir__() -> list[str]:
    return __all__
