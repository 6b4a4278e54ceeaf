"""Sends changes of a model's weights to rollout workers, replicas and files."""

from moe_ext.sync.encoder import DeltaEncoder
from moe_ext.sync.exchange import sync_weights
from moe_ext.sync.formats import (
    WeightPatch,
    fp8_blocks,
    hugging_face_names,
    load_patches,
    patches,
    save_patches,
)
from moe_ext.sync.receiver import DeltaReceiver
from moe_ext.sync.update import Update

__all__ = [
    "DeltaEncoder",
    "DeltaReceiver",
    "Update",
    "WeightPatch",
    "fp8_blocks",
    "hugging_face_names",
    "load_patches",
    "patches",
    "save_patches",
    "sync_weights",
]


def __dir__() -> list[str]:
    return __all__
