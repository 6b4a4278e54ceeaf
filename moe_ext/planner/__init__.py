"""Plans of training: sizes of models, rates of processors, and the quickest placement."""

from moe_ext.comm.rates import CodecRate, CostTable
from moe_ext.planner.apply import Applied
from moe_ext.planner.cluster import CLUSTERS, ClusterSpec, Host, Level
from moe_ext.planner.cost import StepCost
from moe_ext.planner.job import Job
from moe_ext.planner.plan import Plan, plan
from moe_ext.planner.presets import PRESETS, ModelSpec, RecurrentSpec, preset
from moe_ext.planner.profile import measure_cluster
from moe_ext.planner.report import html_report
from moe_ext.planner.search import Found, SearchResult, search
from moe_ext.planner.sent_bytes import exchange_bytes, gradient_bytes
from moe_ext.planner.spec import model_spec
from moe_ext.planner.stage_layers import StageLayers

__all__ = [
    "CLUSTERS",
    "PRESETS",
    "Applied",
    "ClusterSpec",
    "CodecRate",
    "CostTable",
    "Found",
    "Host",
    "Job",
    "Level",
    "ModelSpec",
    "Plan",
    "RecurrentSpec",
    "SearchResult",
    "StageLayers",
    "StepCost",
    "exchange_bytes",
    "gradient_bytes",
    "html_report",
    "measure_cluster",
    "model_spec",
    "plan",
    "preset",
    "search",
]


def __dir__() -> list[str]:
    return __all__
