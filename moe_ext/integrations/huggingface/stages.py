"""Decoder layers of a transformers model, and the parts of it that a pipeline runs."""

from __future__ import annotations

from typing import Any

from torch import nn


def decoder_of(model: nn.Module, operation: str) -> Any:
    """The module of a transformers model whose `layers` are all of its decoder layers.

    Raises:
        ValueError: the model has none.
    """
    found: Any = model
    if hasattr(model, "get_decoder"):
        found = model.get_decoder()  # type: ignore[operator]
    layers = getattr(found, "layers", None)
    size = getattr(getattr(found, "config", None), "num_hidden_layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != size:
        raise ValueError(
            f"{operation}: expected model to have a decoder of transformers whose layers are a "
            f"ModuleList of num_hidden_layers={size}, got {type(model).__name__}"
        )
    return found
