"""Model specifications from configurations of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from moe_ext.planner.presets import PRESETS, ModelSpec, preset

# Names that families of transformers give to the same number, the first that is there.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_top_k", "top_k")


def model_spec(model: ModelSpec | nn.Module | Mapping[str, Any] | str | Path) -> ModelSpec:
    """Sizes of a model.

    Args:
        model: a spec; the name of a preset; a transformers model, on the meta device too; its
            configuration as a mapping, or the path of its ``config.json``.

    Raises:
        ValueError: the configuration lacks a size, or the module has none.
    """
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "to_dict"):
            raise ValueError(
                "model_spec: expected model to have a transformers configuration, got "
                f"{type(model).__name__}; give a ModelSpec"
            )
        return _from_config(config.to_dict())
    if isinstance(model, Mapping):
        return _from_config(model)
    if str(model) in PRESETS:
        return preset(str(model))
    try:
        found = json.loads(Path(model).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"model_spec: expected model to be one of {sorted(PRESETS)} or a config.json, got "
            f"{str(model)!r}: {error}"
        ) from error
    return _from_config(found)


def _from_config(config: Mapping[str, Any]) -> ModelSpec:
    config = config.get("text_config") or config

    def size(*names: str) -> int:
        for name in names:
            if config.get(name) is not None:
                return int(config[name])
        raise ValueError(f"model_spec: expected the configuration to have {' or '.join(names)}")

    def maybe(*names: str) -> int | None:
        return size(*names) if any(config.get(name) is not None for name in names) else None

    layers, experts = size("num_hidden_layers"), maybe(*_EXPERTS) or 0
    first_dense = maybe("first_k_dense_replace") or 0
    every = maybe("decoder_sparse_step", "moe_layer_freq") or 1
    dense = set(config.get("mlp_only_layers") or ())
    has_experts = [
        i >= first_dense
        and i not in dense
        and (i % every == 0 if config.get("moe_layer_freq") else (i + 1) % every == 0)
        for i in range(layers)
    ]
    places = [i for i, has in enumerate(has_experts) if has and experts]
    ffn = size("moe_intermediate_size", "intermediate_size") if experts else 0
    shared = maybe("n_shared_experts") or 0
    latent: tuple[int, ...] = ()
    if config.get("kv_lora_rank"):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        latent = tuple(size(name) for name in (*names, "v_head_dim"))
    return ModelSpec(
        layers,
        size("hidden_size"),
        size("num_attention_heads"),
        ffn or size("intermediate_size"),
        size("vocab_size"),
        head_dim=maybe("head_dim"),
        num_experts=experts,
        top_k=size(*_TOP_K) if experts else 0,
        num_moe_layers=len(places),
        moe_layers=() if places == list(range(layers - len(places), layers)) else tuple(places),
        gated=True,
        gated_experts=True,
        num_kv_heads=maybe("num_key_value_heads"),
        dense_ffn_dim=maybe("intermediate_size"),
        shared_ffn_dim=maybe("shared_expert_intermediate_size") or shared * ffn,
        tied=bool(config.get("tie_word_embeddings", False)),
        latent=latent,
        window=maybe("sliding_window") or 0,
        num_window_layers=list(config.get("layer_types") or ()).count("sliding_attention"),
        source=str(config.get("model_type", "configuration")),
    )
