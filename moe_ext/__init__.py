"""moe_ext: the communication side of sparse training, for CPU and CUDA.

Operators, layers and `moe_ext.distributed` load with the package, other modules at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from moe_ext import distributed, nn, ops
from moe_ext._memory import reuse_memory
from moe_ext._version import __version__
from moe_ext.distributed import parallelize
from moe_ext.nn import MoELayer, replace_ffn

if TYPE_CHECKING:
    from moe_ext import (
        attention,
        compression,
        integrations,
        optim,
        pipeline,
        planner,
        plot,
        sync,
    )
    from moe_ext._info import info
    from moe_ext.integrations import replace, verify

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
    "sync",
    "verify",
]
# Public functions that load at first use, and the modules that have them.
_FUNCTIONS = {"info": "_info", "replace": "integrations", "verify": "integrations"}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"moe_ext.{_FUNCTIONS[name]}"), name)
    return importlib.import_module(f"moe_ext.{name}")
