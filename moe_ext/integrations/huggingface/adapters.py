"""Low-rank adapters of PEFT on experts that are spread over ranks.

Shapes: E experts, R the adapter's rank, I and O features in and out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from moe_ext.distributed.placement import Placement


def wrappers_of(model: nn.Module, path: str) -> list[Any]:
    """PEFT's wrappers around the parameters of a module, from the outside.

    Raises:
        ValueError: other parameters around the module, whose experts are not known.
    """
    layer = sys.modules.get("peft.tuners.lora.layer")
    kind = getattr(layer, "ParamWrapper", ())
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:i])) for i in range(1, len(names))]
    found = [module for module in around if isinstance(module, kind)]
    adapters = nn.ModuleList(m for w in found for m in (w.lora_A, w.lora_B))
    known = {*model.get_submodule(path).parameters(), *adapters.parameters()}
    root = next((m for n, m in zip(names, around, strict=False) if n == "experts"), None)
    others = [] if root is None else [n for n, p in root.named_parameters() if p not in known]
    # A copy that is trained in the place of the experts is spread as they are.
    if others := [name for name in others if "modules_to_save" not in name]:
        raise ValueError(
            f"replace: expected adapters of {path} to be of LoraConfig(target_parameters=...), "
            f"where its experts are spread over ranks, got {others[0]}"
        )
    return found


def factors_of(
    model: nn.Module, path: str, experts: Placement
) -> Iterator[tuple[Any, str, nn.Linear, Placement]]:
    """Wrapper, name in it, layer and placement of each factor of each adapter of a module.

    The first is [E * R, I], experts one after the other; the second [O, R * E], experts in turn.
    """
    for wrapper in wrappers_of(model, path):
        for name, layer in wrapper.lora_A.items():
            yield wrapper, f"lora_A.{name}.weight", layer, experts
        for name, layer in wrapper.lora_B.items():
            rank = layer.in_features // experts.size
            place = Placement("ep", experts.group, experts.held, experts.size, dim=1, blocks=rank)
            yield wrapper, f"lora_B.{name}.weight", layer, place
