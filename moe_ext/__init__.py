"""moe_ext: the communication side of sparse training, for CPU and CUDA."""

from moe_ext import (
    attention,
    compression,
    distributed,
    integrations,
    nn,
    ops,
    optim,
    pipeline,
    planner,
    plot,
)
from moe_ext._info import info
from moe_ext._memory import reuse_memory
from moe_ext._version import __version__
from moe_ext.distributed import parallelize
from moe_ext.integrations import replace, verify
from moe_ext.nn import MoELayer, replace_ffn

__all__ = [
    "MoELayer",
    "__version__",
    "attention",
    "compression",
    "distributed",
    "info",
    "integrations",
    "nn",
    "ops",
    "optim",
    "parallelize",
    "pipeline",
    "planner",
    "plot",
    "replace",
    "replace_ffn",
    "reuse_memory",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
