"""Models of transformers that can be replaced, and checks that refuse the others."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn

from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.integrations.huggingface.experts import KNOWN_FLAGS


@dataclass(frozen=True)
class Family:
    """Classes of one `model_type`.

    Attributes:
        experts: class of the experts.
        block: class of the block around them.
        jitter: attribute of the block with the width of a jitter that it multiplies its input by,
            in place; "" where there is none.
        choices: config field to the values that the family's router knows.
    """

    experts: str
    block: str
    jitter: str = ""
    choices: tuple[tuple[str, tuple[object, ...]], ...] = ()


FAMILIES = {
    "deepseek_v2": Family(
        "DeepseekV2Experts",
        "DeepseekV2Moe",
        choices=(("topk_method", ("greedy", "group_limited_greedy")),),
    ),
    "deepseek_v3": Family("DeepseekV3Experts", "DeepseekV3MoE"),
    "gpt_oss": Family("GptOssExperts", "GptOssMLP"),
    "mixtral": Family("MixtralExperts", "MixtralSparseMoeBlock", jitter="jitter_noise"),
    "olmoe": Family("OlmoeExperts", "OlmoeSparseMoeBlock"),
    "phimoe": Family("PhimoeExperts", "PhimoeSparseMoeBlock", jitter="input_jitter_noise"),
    "qwen2_moe": Family("Qwen2MoeExperts", "Qwen2MoeSparseMoeBlock"),
    "qwen3_moe": Family("Qwen3MoeExperts", "Qwen3MoeSparseMoeBlock"),
}


@dataclass(frozen=True)
class Found:
    """The parts of a model that a replacement touches."""

    model: Any
    family: Family
    experts: dict[str, nn.Module]
    blocks: dict[str, nn.Module]


def import_transformers() -> Any:
    """The module transformers.integrations.moe of transformers 5."""
    try:
        moe = importlib.import_module("transformers.integrations.moe")
        moe.ExpertsInterface.register  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "replace: expected transformers 5 or later to be installed, "
            f"try `pip install 'transformers>=5'` ({error})"
        ) from error
    return moe


def find(model: nn.Module, operation: str) -> Found:
    """The blocks of a model of a known family; ValueError where anything differs."""
    import_transformers()
    transformers = importlib.import_module("transformers")
    if hasattr(model, "get_base_model"):  # a PeftModel
        model = model.get_base_model()  # type: ignore[operator]
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(
            f"{operation}: expected model to be a transformers model of one of the families "
            f"{known}, got {type(model).__name__}"
        )
    name = getattr(model.config, "model_type", None)
    if name not in FAMILIES:
        raise ValueError(
            f"{operation}: expected model to be of one of the families {known}, got {name!r}"
        )
    family = FAMILIES[name]
    _check_model(model, family, operation)
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    experts_class = getattr(modeling, family.experts)
    experts = {n: m for n, m in model.named_modules() if isinstance(m, experts_class)}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "experts":
            _check_experts(path, module, experts_class, operation)
    for path, module in experts.items():
        _check_layout(path, module, operation)
    block_class = getattr(modeling, family.block)
    blocks = {n: m for n, m in model.named_modules() if isinstance(m, block_class)}
    return Found(model, family, experts, blocks)


def _check_model(model: Any, family: Family, operation: str) -> None:
    """Refuse what the config asks for and moe_ext would ignore."""
    config = model.config
    if getattr(config, "quantization_config", None) is not None or getattr(
        model, "hf_quantizer", None
    ):
        method = getattr(config, "quantization_config", None)
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
    for field, values in family.choices:
        if getattr(config, field) not in values:
            raise ValueError(
                f"{operation}: expected config.{field} to be one of {values}, got "
                f"{getattr(config, field)!r}"
            )


def _check_experts(path: str, module: nn.Module, cls: type[nn.Module], operation: str) -> None:
    # An adapter wraps the experts: their own class is then further down.
    if not any(isinstance(inner, cls) for inner in module.modules()):
        raise ValueError(
            f"{operation}: expected {path} to be a {cls.__name__}, got {type(module).__name__}"
        )


def _check_layout(path: str, module: nn.Module, operation: str) -> None:
    if getattr(module, "_is_expert_parallel", False) or any(
        is_dtensor(parameter) for parameter in module.parameters()
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
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"{operation}: expected {path}.{name} to be floating point, got {parameter.dtype}"
            )
