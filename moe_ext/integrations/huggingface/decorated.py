"""Finds the experts of transformers models that can be replaced, and refuses other models."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moe_ext._checks import check_rule
from moe_ext.attention.huggingface.interface import of_transformers
from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.distributed.placement import placement_of
from moe_ext.integrations.huggingface.experts import KNOWN_FLAGS, weight_names

# Attributes that `use_experts_implementation` of transformers 5 sets on experts in every version.
_MARKS = ("has_bias", "has_gate", "is_transposed")


@dataclass(frozen=True)
class ReplacedParts:
    """The parts of a model that a replacement touches."""

    model: Any
    experts: dict[str, Any]

    def implementations(self) -> list[tuple[Any, str | None]]:
        """Return (config, name of its experts implementation) for each config, outer ones first."""
        configs = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        return [(config, config._experts_implementation) for config in configs.values()]

    def set_implementation(self, name: str) -> None:
        """Set the implementation that runs all experts."""
        self.model.set_experts_implementation(name)
        for module in self.experts.values():
            # The model's method does not reach a layer that has a config of its own.
            module.config._experts_implementation = name


def restore(implementations: list[tuple[Any, str | None]]) -> None:
    """Set the implementations that `ReplacedParts.implementations` returned."""
    # Assigning to a config also assigns to the configs inside it, so inner configs are set last.
    for config, name in implementations:
        config._experts_implementation = name


def experts_interface() -> Any:
    """Return the class in which transformers 5 registers implementations of experts."""
    return of_transformers("replace", "integrations.moe", "ExpertsInterface")


def _is_decorated(module: nn.Module) -> bool:
    return all(name in vars(module) for name in _MARKS)


def find(model: nn.Module, operation: str) -> ReplacedParts:
    """Find the experts of a model; ValueError if they cannot be replaced."""
    experts_interface()
    transformers = importlib.import_module("transformers")
    if hasattr(model, "get_base_model"):  # a PeftModel
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(
            f"{operation}: expected model to be a transformers model, got {type(model).__name__}"
        )
    experts = {path: m for path, m in model.named_modules() if _is_decorated(m)}
    if not experts:
        raise ValueError(
            f"{operation}: expected model to have experts of a class that transformers decorates "
            f"with use_experts_implementation, got none in {type(model).__name__}: "
            "set_experts_implementation changes nothing there"
        )
    _check_model(model, operation)
    for path, module in model.named_modules():
        # If an adapter wraps the experts, a submodule has the decorated class.
        if path.endswith(".experts") and not any(map(_is_decorated, module.modules())):
            raise ValueError(
                f"{operation}: expected {path} to be of a class that transformers decorates with "
                f"use_experts_implementation, got {type(module).__name__}"
            )
    for path, module in experts.items():
        _check_layout(path, module, operation)
    return ReplacedParts(model, experts)


def _check_model(model: Any, operation: str) -> None:
    """Refuse a model whose config asks for features that moe_ext would ignore."""
    config = model.config
    method = getattr(config, "quantization_config", None)
    if method is not None or getattr(model, "hf_quantizer", None):
        method = getattr(method, "quant_method", method)
        raise ValueError(f"{operation}: expected a model that is not quantised, got {method!r}")
    if getattr(model, "use_kernels", False):
        raise ValueError(
            f"{operation}: expected use_kernels=False, got a model whose blocks run kernels of "
            "the hub"
        )
    if config._experts_implementation == "deepgemm_megamoe":
        raise ValueError(
            f"{operation}: expected an experts implementation that can be changed, got "
            "'deepgemm_megamoe'"
        )


def _check_layout(path: str, module: nn.Module, operation: str) -> None:
    ours = placement_of(module) is not None
    if getattr(module, "_is_expert_parallel", False) or (
        not ours and any(is_dtensor(parameter) for parameter in module.parameters())
    ):
        raise ValueError(
            f"{operation}: expected all experts of {path} on this rank, got a model that "
            "transformers has made expert parallel; load it with "
            "DistributedConfig(ep_implementation='moe_ext') instead"
        )
    flags = {n for n, v in vars(module).items() if n.startswith(("is_", "has_")) and v}
    if unknown := sorted(flags - KNOWN_FLAGS):
        raise ValueError(
            f"{operation}: expected the flags of {path} to be among {sorted(KNOWN_FLAGS)}, got "
            f"{unknown[0]}=True"
        )
    num_experts = getattr(module, "num_experts", 0)
    for name, dims in weight_names(module).items():
        weight = getattr(module, name, None)
        stacked = isinstance(weight, Tensor) and weight.dim() == dims
        if not stacked or weight.shape[0] != num_experts:  # type: ignore[union-attr]
            found = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(
                f"{operation}: expected {path}.{name} to be stacked over {num_experts} experts in "
                f"{dims} dimensions, got {found}"
            )
    for name, parameter in module.named_parameters():
        fits = parameter.is_floating_point()
        check_rule(operation, f"{path}.{name}", parameter.dtype, "floating point", fits)
