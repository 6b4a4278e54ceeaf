"""Codecs by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

from moe_ext.compression.codecs import (
    BlockSparse,
    Codec,
    Dense,
    OneBit,
    Quantize,
    Unsent,
    check_choice,
)
from moe_ext.compression.sparse_codecs import Threshold, TopK


def _powersgd(density: float) -> Codec:
    # Imports torch's hooks, which few want.
    module = importlib.import_module("moe_ext.compression.powersgd")
    made: Codec = module.PowerSGD()
    return made


# Makes a codec of a name and a density.
_NAMED: dict[str, Callable[[float], Codec]] = {
    "none": lambda density: Dense(),
    "bf16": lambda density: Dense("bf16"),
    "fp16": lambda density: Dense("fp16"),
    "int8": lambda density: Quantize("int8"),
    "int4": lambda density: Quantize("int4"),
    "fp8": lambda density: Quantize("fp8"),
    "onebit": lambda density: OneBit(),
    "topk": lambda density: TopK(density),
    "threshold": lambda density: Threshold(density),
    "powersgd": _powersgd,
    "block_sparse": lambda density: BlockSparse(),
    "rows": lambda density: BlockSparse("row"),
}
CODEC_NAMES = (*_NAMED, "auto")


def codec_of(codec: str | Codec, density: float = 0.01, *, owner: str = "codec_of") -> Codec:
    """The codec of a name.

    Args:
        codec: a name, or a codec, which is returned.
        density: for "topk" and "threshold".
        owner: for error messages.

    Raises:
        ValueError: an unknown name, or "auto", which is no codec but a choice between some.
    """
    if isinstance(codec, str):
        check_choice(owner, "codec", codec, tuple(_NAMED))
        made: Codec = _NAMED[codec](density)
        return made
    if not isinstance(codec, Codec):
        raise ValueError(
            f"{owner}: expected codec to be a codec or one of {CODEC_NAMES}, got {codec!r}"
        )
    return codec


def unsent(codec: Codec) -> Unsent:
    """What a codec is for a rank that has no other one to reduce with."""
    return Unsent(codec.momentum if isinstance(codec, TopK | Threshold) else None)


def with_density(codec: Codec, density: float) -> Codec:
    """The same codec that sends another share of the elements; others as they are."""
    return replace(codec, density=density) if isinstance(codec, TopK | Threshold) else codec
