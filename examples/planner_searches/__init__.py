"""Searches of published planners, one file each, over one cost model of small graphs."""

from collections.abc import Callable, Mapping

from planner_searches import (
    alpa_inter,
    alpa_intra,
    auto_map,
    automap,
    chimera,
    distir,
    dnn_partition,
    double_recursion,
    flexflow,
    gspmd,
    hetpipe,
    optcnn,
    pipedream,
    piper,
    reinforce,
    tensoropt,
    terapipe,
    tofu,
    two_bw,
)
from planner_searches.problem import (
    Choice,
    Pipeline,
    Problem,
    Stage,
    Way,
    bottleneck,
    brute_force,
    latency,
)

# By the name of the module that holds each.
SEARCHES: Mapping[str, Callable[..., Choice]] = {
    module.__name__.rpartition(".")[2]: module.search
    for module in (
        *(optcnn, tofu, flexflow, gspmd, automap, reinforce, pipedream, dnn_partition, distir),
        *(piper, tensoropt, double_recursion, auto_map, alpa_intra, alpa_inter),
        *(chimera, hetpipe, two_bw, terapipe),
    )
}

__all__ = [
    "SEARCHES",
    "Choice",
    "Pipeline",
    "Problem",
    "Stage",
    "Way",
    "bottleneck",
    "brute_force",
    "latency",
]


def __dir__() -> list[str]:
    return __all__
