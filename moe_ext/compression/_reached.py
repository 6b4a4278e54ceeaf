"""Which experts tokens have reached since the last reduction, from the layers' own counts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext._compile import outside_graphs
from moe_ext.distributed.placement import placements
from moe_ext.nn import MoELayer


class ReachedExperts:
    """Watches the MoE layers of a model that hold all of their experts.

    With an expert-parallel group tokens come from other ranks, and the gradients are looked at
    instead.

    Args:
        model: any module; forward hooks are put on the MoE layers with parameters that are watched.
        names: parameters to watch.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._reached: dict[str, Tensor] = {}
        self._layer_of: dict[str, str] = {}
        self._handles: list[Any] = []
        for path, layer in model.named_modules():
            if not isinstance(layer, MoELayer):
                continue
            prefix = f"{path}.experts" if path else "experts"
            places = placements(layer.experts)
            watched = {
                f"{prefix}.{name}": path
                for name, parameter in layer.experts.named_parameters()
                if f"{prefix}.{name}" in names
                and name in places
                and places[name].num_parts == 1
                and places[name].dim == 0
                and parameter.shape[0] == layer.num_experts
            }
            self._layer_of.update(watched)
            if watched:
                self._handles.append(layer.register_forward_hook(self._hook(path)))

    def _hook(self, path: str) -> Any:
        @outside_graphs
        def note(layer: MoELayer, args: object, output: object) -> None:
            if not torch.is_grad_enabled():
                return
            reached_E = layer.metrics["num_tokens_per_expert"] > 0
            before_E = self._reached.get(path)
            self._reached[path] = reached_E if before_E is None else before_E | reached_E

        return note

    def bitmap(self, name: str) -> Tensor | None:
        """The experts of a parameter as a map of blocks, None where they are not known."""
        reached_E = self._reached.get(self._layer_of.get(name, ""))
        return None if reached_E is None or name not in self._layer_of else packed_bits(reached_E)

    def clear(self) -> None:
        """Begin anew, after a reduction."""
        self._reached = {}

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._reached = [], {}


def packed_bits(flags_B: Tensor) -> Tensor:
    """A map as `nonzero_blocks` makes it: eight blocks a byte, the first in the lowest bit."""
    num_bytes = (flags_B.shape[0] + 7) // 8
    padded = flags_B.new_zeros(num_bytes * 8)
    padded[: flags_B.shape[0]] = flags_B
    weights = 2 ** torch.arange(8, device=flags_B.device)
    return (padded.view(-1, 8) * weights).sum(dim=1).to(torch.uint8)
