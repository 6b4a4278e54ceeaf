"""Low-rank adapters of PEFT on experts that are spread over ranks.

Shapes: E experts, R rank of the adapter, I input features, O output features.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from moe_ext.distributed.placement import Placement


def wrappers_of(model: nn.Module, path: str) -> list[Any]:
    """Return PEFT's wrappers around the parameters of a module, outermost first.

    Raises:
        ValueError: the module is wrapped with other parameters, of which it is unknown how they
            belong to the experts.
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
    # PEFT's `modules_to_save` holds a trained copy of the experts, which is spread like the experts
    # themselves.
    if others := [name for name in others if "modules_to_save" not in name]:
        raise ValueError(
            f"replace: expected adapters of {path} to be of LoraConfig(target_parameters=...), "
            f"where its experts are spread over ranks, got {others[0]}"
        )
    return found


def factors_of(
    model: nn.Module, path: str, experts: Placement
) -> Iterator[tuple[Any, str, nn.Linear, Placement]]:
    """Yield (wrapper, name in it, layer, placement) for each factor of each adapter of a module.

    Factor A is [E * R, I]: the R rows of an expert are neighbours. Factor B is [O, R * E]: the R
    columns of an expert are E apart.
    """
    for wrapper in wrappers_of(model, path):
        for name, layer in wrapper.lora_A.items():
            yield wrapper, f"lora_A.{name}.weight", layer, experts
        for name, layer in wrapper.lora_B.items():
            rank = layer.in_features // experts.size
            place = Placement("ep", experts.group, experts.held, experts.size, dim=1, blocks=rank)
            yield wrapper, f"lora_B.{name}.weight", layer, place
