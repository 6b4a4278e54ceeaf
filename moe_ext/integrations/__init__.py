"""Layers, optimizers and calls with the interfaces of other libraries."""

from moe_ext.integrations import (
    deepspeed,
    fairscale,
    fastmoe,
    horovod,
    megablocks,
    paddle,
    state_dict,
    tutel,
)
from moe_ext.integrations.huggingface import VerifyReport, replace, verify

__all__ = [
    "VerifyReport",
    "deepspeed",
    "fairscale",
    "fastmoe",
    "horovod",
    "megablocks",
    "paddle",
    "replace",
    "state_dict",
    "tutel",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
