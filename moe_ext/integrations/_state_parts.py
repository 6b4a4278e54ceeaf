"""Checked reading and writing of the parameters of one mixture-of-experts layer.

Shapes: D model, F ffn, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertNames:
    """Names of the linear layers inside an expert module.

    Attributes:
        up: of the first layer, D to F.
        down: of the last layer, F to D.
        gate: of the gate layer, D to F; None for experts without a gate.
    """

    up: str
    down: str
    gate: str | None = None


@dataclass
class Parts:
    """A layer's parameters, whatever their names.

    Attributes:
        router: `[E, D]`.
        up: `[E, F, D]`.
        down: `[E, D, F]`.
        gate: `[E, F, D]`, None for experts without a gate.
        router_bias: `[E]`.
        up_bias: `[E, F]`.
        down_bias: `[E, D]`.
        gate_bias: `[E, F]`.
    """

    router: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    router_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_bias: Tensor | None = None

    def refuse(self, layout: str, *names: str) -> None:
        """ValueError when the layer has one of the parts, for which a layout has no place."""
        for name in names:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"convert: expected a layer without {name.replace('_', ' ')}, for which layout "
                    f"{layout!r} has no place, got one of shape {tuple(getattr(self, name).shape)}"
                )

    def need_gate(self, layout: str) -> Tensor:
        """The gate; ValueError where a layout needs one and there is none."""
        if self.gate is None:
            raise ValueError(
                f"convert: expected a layer with gated experts for layout {layout!r}, got one "
                "without"
            )
        return self.gate


class Reader:
    """Takes the entries of one layer, and checks their shapes against each other.

    Args:
        state: state dict of the model.
        prefix: of the names of the layer.
        layout: for messages.
    """

    def __init__(self, state: Mapping[str, Any], prefix: str, layout: str) -> None:
        self._own = {n[len(prefix) :]: v for n, v in state.items() if n.startswith(prefix)}
        self._prefix = prefix
        self._layout = layout
        self.sizes: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def names(self) -> list[str]:
        """Names that nobody took yet, without the prefix."""
        return list(self._own)

    def take(self, name: str, *dims: str) -> Tensor:
        """An entry of a shape such as ("E", "2F", "D"); letters get their sizes as they come.

        Raises:
            ValueError: there is no such entry, or its shape does not fit.
        """
        if name not in self._own:
            raise ValueError(
                f"convert: expected key {self._prefix + name!r} in a layer of layout "
                f"{self._layout!r}, got none"
            )
        value = torch.as_tensor(self._own.pop(name))
        fits = value.dim() == len(dims) and all(map(self._fits, dims, value.shape))
        if not fits:
            wanted = ", ".join(
                dim + "".join(f" ({c}={self.sizes[c]})" for c in dim if c in self.sizes)
                for dim in dims
            )
            raise ValueError(
                f"convert: expected {self._prefix + name!r} to be of shape [{wanted}], got "
                f"{tuple(value.shape)}"
            )
        return value

    def take_if_there(self, name: str, *dims: str) -> Tensor | None:
        """The entry that `take` gives; None if there is none."""
        return self.take(name, *dims) if name in self else None

    def _fits(self, dim: str, size: int) -> bool:
        """True if a size is the product that `dim` names; learns a letter of unknown size."""
        known, unknown = 1, ""
        for factor in re.findall(r"\d+|[A-Z]", dim):
            if factor.isdigit():
                known *= int(factor)
            elif factor in self.sizes:
                known *= self.sizes[factor]
            else:
                unknown += factor
        if not unknown:
            return size == known
        if len(unknown) > 1 or known == 0 or size % known != 0 or size == 0:
            return False
        self.sizes[unknown] = size // known
        return True

    def finish(self) -> None:
        """ValueError for an entry of the layer that nobody took."""
        if self._own:
            raise ValueError(
                f"convert: expected the keys of a layer of layout {self._layout!r} under prefix "
                f"{self._prefix!r}, got {self._prefix + next(iter(self._own))!r}, which has no "
                "counterpart"
            )


def interleave(gate_EFX: Tensor, up_EFX: Tensor) -> Tensor:
    """Gate and up features in turn, `[E, F, ...]` twice to `[E, 2F, ...]`."""
    return torch.stack([gate_EFX, up_EFX], dim=2).flatten(1, 2)


def deinterleave(both: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up features of `[E, 2F, ...]` where they come in turn."""
    return both[:, ::2].contiguous(), both[:, 1::2].contiguous()


def halves(both: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up features of `[E, 2F, ...]` where the gate is the first half."""
    gate, up = both.chunk(2, dim=1)
    return gate.contiguous(), up.contiguous()


def flip(x: Tensor) -> Tensor:
    """Swap the last two dimensions, in memory too."""
    return x.transpose(-2, -1).contiguous()
