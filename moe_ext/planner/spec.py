"""Specifications of transformers models, read from their modules and checked by counting."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext.planner.presets import PRESETS, ModelSpec, RecurrentSpec, preset

# Relative deviation of a part's parameters from its formula that is accepted.
_OFF = 0.01
# Names that model families of transformers give to the same number. The first that exists counts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k", "num_experts_per_token", "top_k")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Parts of the class names of attention whose scores are neither all pairs nor a window.
_OTHER_SCORES = re.compile("Sparse|LSH|Lightning|LinearAttention|Delta|Cross|Relative")
# Values of `layer_types` that are accepted. The parts of such a layer are read from its modules.
_KINDS = ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "mlp", "moe")
# Fields of `RecurrentSpec` for H, groups, K and V, and their names in modules of two families.
_SIZES = ("num_heads", "num_groups", "head_dim", "v_dim")
_DELTA_RULE = ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
_BY_HEAD = ("num_heads", "n_groups", "ssm_state_size", "head_dim")


def model_spec(model: ModelSpec | nn.Module | Mapping[str, Any] | str | Path) -> ModelSpec:
    """Read the sizes of a model.

    The modules of a model are read layer by layer. For a configuration they are made on the meta
    device. A layer mixes tokens by an attention, a recurrence (a state space, a gated delta rule, a
    short convolution) or both side by side. A feed-forward network, gated or not, or experts
    follow. Alternatively each layer has one of these parts alone. The parameters of each part must
    agree with the formulas of `ModelSpec` within 1 %.

    Args:
        model: a spec; the name of a preset; a causal language model of transformers, also on the
            meta device; its configuration as a mapping, or the path of its ``config.json``.

    Raises:
        ImportError: a configuration is given, and transformers is not installed.
        ValueError: the model has a layer without a formula, which the message names; or a
            configuration lacks a size, or transformers cannot make a model of it.
    """
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, nn.Module):
        return _Reader(model).spec()
    if isinstance(model, Mapping):
        return _Reader(_built(model)).spec()
    if str(model) in PRESETS:
        return preset(str(model))
    try:
        found = json.loads(Path(model).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model_spec: expected model to be one of {sorted(PRESETS)} or a config.json, got "
            f"{str(model)!r}: {error}"
        ) from error
    return _Reader(_built(found)).spec()


def _built(found: Any) -> nn.Module:
    """Make the causal language model of a configuration on the meta device."""
    if not isinstance(found, Mapping):
        raise ValueError(f"model_spec: expected a configuration to be a mapping, got {found!r:.80}")
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(
            "model_spec: expected transformers, which makes the model of a configuration; without "
            "it, give a ModelSpec"
        ) from error
    kind = found.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            "model_spec: expected the configuration to have a model_type that transformers knows, "
            f"got {kind!r}; give the model itself or a ModelSpec"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(found))
        with torch.device("meta"):
            made: nn.Module = AutoModelForCausalLM.from_config(config)
    # A wrong configuration raises any kind of error, somewhere in the code of its family.
    except Exception as error:
        raise ValueError(
            f"model_spec: expected transformers to make a causal language model of the "
            f"configuration of {kind!r}, got {type(error).__name__}: {error}"
        ) from error
    return made


@dataclass(frozen=True)
class _Layer:
    """A layer's feed-forward network, or its experts and their shared expert.

    Attributes:
        num_experts: E, or 0.
        width: F of an expert, or of the network.
        gated: whether the network or experts are gated.
        shared: F of the shared expert.
    """

    num_experts: int
    width: int
    gated: bool
    shared: int = 0


@dataclass(frozen=True)
class _Mixer:
    """Attention or recurrence of a layer, both or neither.

    Attributes:
        attends: whether the layer has attention.
        gate: whether its attention has a gate.
        recurrent: sizes of its recurrence, or None.
    """

    attends: bool = False
    gate: bool = False
    recurrent: RecurrentSpec | None = None

    @property
    def name(self) -> str:
        """Name of the mixer in `ModelSpec.mixers`."""
        if self.recurrent is None:
            return "attention" if self.attends else "none"
        return "both" if self.attends else "recurrent"


class _Reader:
    """Reads the sizes of a causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "get_text_config"):
            raise ValueError(
                "model_spec: expected model to have a transformers configuration, got "
                f"{type(model).__name__}; give a ModelSpec"
            )
        self._model, self._config = model, config.get_text_config()
        self._title = type(model).__name__
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        weights: list[Any] = [getattr(end, "weight", None) for end in ends]
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        if not all(isinstance(w, Tensor) and w.dim() == 2 for w in weights) or not lists:
            raise ValueError(
                f"model_spec: expected model to have an embedding, layers in a ModuleList and an "
                f"output, got {self._title}; give a ModelSpec"
            )
        self._embedding, self._output = weights
        self._dim = int(self._embedding.shape[1])
        # The largest ModuleList holds the layers. Smaller lists are inside layers, or belong to
        # towers, whose parameters `_counted` refuses.
        self._layers = max(lists, key=lambda held: sum(p.numel() for p in held.parameters()))

    def _given(self, *names: str) -> Any:
        """Return the first of these values that the configuration has, or None."""
        for name in names:
            try:
                value = getattr(self._config, name, None)
            # Configurations whose layers differ raise an error of some kind instead.
            except Exception as error:
                raise ValueError(
                    f"model_spec: expected the configuration of {self._title} to have one {name}, "
                    f"got {type(error).__name__}: {error}"
                ) from error
            if value is not None:
                return value
        return None

    def _size(self, *names: str, least: int = 1) -> int:
        """Return the first of these numbers that the configuration has; ValueError for none."""
        value = self._given(*names)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"model_spec: expected the configuration of {self._title} to have "
                f"{' or '.join(names)}, a whole number of at least {least}, got {value!r:.80}"
            )
        return value

    def _maybe(self, *names: str) -> int | None:
        return None if self._given(*names) is None else self._size(*names)

    def spec(self) -> ModelSpec:
        """Read the sizes, and check them by the number of parameters."""
        self._refuse_shared()
        bare = self._attention_spec()
        layers = [self._layer(i, layer, bare) for i, layer in enumerate(self._layers)]
        mixers, found = [mixer for mixer, _ in layers], [network for _, network in layers]
        one_part = self._is_one_part(layers)
        dense = {each for each in found if each and not each.num_experts}
        experts = {each for each in found if each and each.num_experts}
        gates = {mixer.gate for mixer in mixers if mixer.attends}
        recurrent = {mixer.recurrent for mixer in mixers if mixer.recurrent}
        for alike, what in (
            (dense, "feed-forward networks"),
            (experts, "experts"),
            (gates, "gates of attention"),
            (recurrent, "recurrences"),
        ):
            if len(alike) > 1:
                raise ValueError(
                    f"model_spec: expected {what} of all layers of {self._title} to be alike, got "
                    f"{sorted(alike, key=str)}; give a ModelSpec"
                )
        plain = next(iter(dense), None)
        moe = next(iter(experts), None)
        one = moe or plain or _Layer(0, 1, False)
        told = self._maybe(*_EXPERTS)
        if moe and told not in (None, moe.num_experts):
            raise ValueError(
                f"model_spec: expected {self._title} to have all {told} experts of its "
                f"configuration, before they are spread over ranks, got {moe.num_experts}"
            )
        places = tuple(i for i, each in enumerate(found) if each and each.num_experts)
        names = tuple(mixer.name for mixer in mixers)
        is_last = places == tuple(range(len(found) - len(places), len(found)))
        spec = replace(
            bare,
            ffn_dim=one.width,
            num_experts=one.num_experts,
            top_k=self._top_k() if moe else 0,
            num_moe_layers=len(places),
            moe_layers=() if is_last else places,
            gated=(plain or one).gated,
            gated_experts=moe is not None and moe.gated,
            dense_ffn_dim=plain.width if plain and moe else None,
            shared_ffn_dim=moe.shared if moe else 0,
            attention_gate=True in gates,
            mixers=() if {*names} == {"attention"} else names,
            recurrent=next(iter(recurrent), None),
            one_part=one_part,
        )
        return self._counted(spec)

    def _refuse_shared(self) -> None:
        """Raise ValueError for weights that layers share, which would be counted in each layer."""
        holders: dict[int, int] = {}
        for i, layer in enumerate(self._layers):
            for name, child in layer.named_children():
                for p in child.parameters():
                    first = holders.setdefault(id(p), i)
                    if first < i:
                        why = f"weights that are those of layer {first} have no cost"
                        raise self._refuse(i, name, child, why)

    def _is_one_part(self, layers: Sequence[tuple[_Mixer, _Layer | None]]) -> bool:
        """Return True if each layer is a mixer or a network, False if each layer has both."""
        one_part = any(network is None for _, network in layers)
        for i, (mixer, network) in enumerate(layers):
            mixes = mixer.name != "none"
            if one_part and mixes and network or not one_part and not mixes:
                why = "other layers are one part alone" if mixes else "the layer has no attention"
                name, largest = max(
                    self._layers[i].named_children(),
                    key=lambda each: sum(p.numel() for p in each[1].parameters()),
                )
                raise self._refuse(i, name, largest, why)
        return one_part

    def _attention_spec(self) -> ModelSpec:
        """Return a spec with all sizes except those of feed-forward networks."""
        # A model of recurrences alone may have no number of heads.
        attends = any("Attention" in type(m).__name__ for m in self._layers.modules())
        heads = self._size("num_attention_heads") if attends else 1
        latent: tuple[int, ...] = ()
        if self._given("kv_lora_rank"):
            queries = self._maybe("q_lora_rank") or 0
            latent = (queries, *(self._size(name, least=0) for name in _LATENT))
        kv_heads = self._maybe(*_KV_HEADS) if attends else None
        if self._given("multi_query") and not self._given("new_decoder_architecture"):
            kv_heads = 1
        window, num_windows = self._windows()
        vectors = {id(p): p.numel() for _, p in _parameters(self._model) if _is_vector(p)}
        vectors |= {
            id(p): p.numel() for name, p in self._model.named_parameters() if _is_bias(name)
        }
        return ModelSpec(
            len(self._layers),
            self._dim,
            heads,
            1,
            int(self._embedding.shape[0]),
            # Families round down if the number of heads does not divide the model dimension.
            head_dim=(self._maybe("head_dim") if attends else None) or max(1, self._dim // heads),
            positions=sum(self._positions()),
            num_kv_heads=kv_heads,
            tied=self._embedding is self._output,
            latent=latent,
            window=window,
            num_window_layers=num_windows,
            vectors=sum(vectors.values()),
            source=str(self._given("model_type") or self._title),
        )

    def _windows(self) -> tuple[int, int]:
        """Return the tokens of a sliding window, and the number of layers with one."""
        kinds: Sequence[str] = self._given("layer_types") or ()
        for i, kind in enumerate(kinds[: len(self._layers)]):
            if kind not in _KINDS:
                raise ValueError(
                    f"model_spec: expected layers of {self._title} to be of {_KINDS}, which have a "
                    f"cost, got {kind!r} in layer {i}, {type(self._layers[i]).__name__}; give a "
                    f"ModelSpec"
                )
        # A configuration keeps `sliding_window` from its file even if the family has no windows and
        # ignores it. The family's default configuration tells whether it has them.
        is_known = hasattr(type(self._config)(), "sliding_window")
        is_used = is_known and self._given("use_sliding_window") is not False
        if not is_used or not self._given("sliding_window"):
            return 0, 0
        many = kinds.count("sliding_attention") if kinds else len(self._layers)
        return (self._size("sliding_window"), many) if many else (0, 0)

    def _positions(self) -> Iterator[int]:
        """Yield the rows of embeddings other than the word embedding."""
        inside = {id(m) for m in self._layers.modules()}
        for module in self._model.modules():
            if isinstance(module, nn.Embedding) and id(module) not in inside:
                rows, width = module.weight.shape
                if module.weight is not self._embedding and width == self._dim:
                    yield int(rows)

    def _top_k(self) -> int:
        found = self._maybe(*_TOP_K)
        if found is not None:
            return found
        for module in self._layers.modules():
            held = getattr(module, "top_k", None)
            if isinstance(held, int) and held > 0:
                return held
        return self._size(*_TOP_K)

    def _refuse(self, i: int, name: str, module: Any, why: str) -> ValueError:
        return ValueError(
            f"model_spec: expected each layer of {self._title} to be one attention or recurrence "
            f"and one feed-forward network or experts, which have a cost, got in layer {i} "
            f"{name!r}, {type(module).__name__}: {why}; give a ModelSpec"
        )

    def _layer(self, i: int, layer: nn.Module, bare: ModelSpec) -> tuple[_Mixer, _Layer | None]:
        """Read the mixer and the network of a layer, whose attention must be that of `bare`."""
        rest: dict[str, Tensor] = dict(_parameters(layer, recurse=False))
        mixer, largest = _Mixer(), ("", layer, 0)
        for name, child in layer.named_children():
            held = {f"{name}.{path}": p for path, p in _parameters(child) if not _is_vector(p)}
            count = sum(p.numel() for p in held.values())
            has_conv = any(isinstance(m, (nn.Conv1d, nn.Conv2d)) for m in child.modules())
            if has_conv or hasattr(child, "slope_rate"):
                if mixer.recurrent is not None:
                    raise self._refuse(i, name, child, "a second recurrence has no cost")
                mixer = replace(mixer, recurrent=self._recurrent(i, name, child, count))
                continue
            if not count:
                continue
            if "Attention" not in type(child).__name__:
                rest |= held
                largest = max(largest, (name, child, count), key=lambda each: each[2])
                continue
            if mixer.attends:
                raise self._refuse(i, name, child, "a second attention has no cost")
            family = type(self._config).__name__.removesuffix("Config")
            for module in child.modules():
                if _OTHER_SCORES.search(type(module).__name__.removeprefix(family)):
                    raise self._refuse(i, name, module, "its scores have no cost")
            mixer = replace(mixer, attends=True, gate=self._has_gate(i, name, child, count, bare))
        matrices = {name: p for name, p in rest.items() if not _is_vector(p)}
        found = self._network(matrices)
        if matrices and found is None:
            count = sum(p.numel() for p in rest.values())
            raise self._refuse(
                i, *largest[:2], f"{count} parameters in matrices of no network with a formula"
            )
        return mixer, found

    def _has_gate(self, i: int, name: str, child: nn.Module, count: int, bare: ModelSpec) -> bool:
        """Return True if an attention has a gate in addition to the matrices of `bare`."""
        wanted = bare.attention_parameters()
        gated = replace(bare, attention_gate=True).attention_parameters()
        if count == gated:
            return True
        if abs(count - wanted) <= _OFF * wanted:
            return False
        raise self._refuse(
            i, name, child, f"{count} parameters in matrices, for {wanted} by its formula"
        )

    def _recurrent(self, i: int, name: str, child: nn.Module, count: int) -> RecurrentSpec:
        """Read the sizes of a module with a convolution, or of lightning attention."""
        convolutions = [m for m in child.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d))]
        conv: Any = convolutions[0] if convolutions else None
        rates: Tensor | None = getattr(child, "A_log", None)
        # Kimi's delta attention and RG-LRU are known by an attribute that no other module has,
        # lightning attention by the lack of a convolution.
        is_kimi, unit = hasattr(child, "forget_gate"), getattr(child, "rg_lru", None)
        is_known = conv is None or (len(convolutions) == 1 and conv.groups == conv.out_channels)
        is_other = "Attention" in type(child).__name__ and conv is not None and not is_kimi
        if not is_known or isinstance(conv, nn.Conv2d) or is_other:
            raise self._refuse(i, name, child, "its convolutions have no cost")
        sized: Any = child
        is_gated = all(hasattr(child, size) for size in _DELTA_RULE)
        sizes: dict[str, Any] = {"has_beta": is_kimi or is_gated}
        names = _DELTA_RULE if is_gated else _BY_HEAD
        held: tuple[int, ...]
        if is_kimi:
            heads, dim = sized.num_heads, sized.head_dim
            held, sizes["by_element"] = (heads, heads, dim, dim), True
        elif unit is not None:
            # In RG-LRU each channel is a head with one number of state.
            held = (conv.out_channels, 1, 1, 1)
        elif conv is None:
            heads, dim = sized.num_attention_heads, sized.head_dim
            held = (heads, heads, dim, dim)
        elif rates is None:
            held = (0, 0, 0, 0)
        elif rates.dim() == 2:
            held, sizes["by_element"] = (len(rates), 1, rates.shape[1], 1), True
        elif rates.dim() == 1 and all(hasattr(child, size) for size in names):
            held = tuple(getattr(child, size) for size in names)
        else:
            raise self._refuse(i, name, child, "its states have no cost")
        matrices = [m.weight for m in child.modules() if isinstance(m, nn.Linear)]
        # RG-LRU has block-diagonal gates with 3-d weights.
        matrices += [p for _, p in _parameters(unit) if p.dim() == 3] if unit is not None else []
        projections = sum(p.numel() for p in matrices if not _is_vector(p))
        sizes |= dict(zip(_SIZES, held, strict=True))
        # Lightning attention has an activation of queries, keys and values instead of a
        # convolution.
        width = 3 * held[0] * held[2] if conv is None else conv.out_channels
        found = RecurrentSpec(projections, width, conv.kernel_size[0] if conv else 0, **sizes)
        if found.parameters() != count:
            wanted = found.parameters()
            raise self._refuse(
                i, name, child, f"{count} parameters in matrices, for {wanted} by its formula"
            )
        return found

    def _network(self, matrices: Mapping[str, Tensor]) -> _Layer | None:
        """Recognise a feed-forward network or experts by matrices; None for something else."""
        stacked: dict[str, tuple[int, ...]] = {}
        shapes = {name: tuple(p.shape) for name, p in matrices.items()}
        listed: dict[str, set[str]] = {}
        for name, shape in shapes.items():
            inside = re.search(r"\bexperts\.(\d+)\.", name)
            if len(shape) == 3:
                stacked[name] = shape
            elif inside:
                listed.setdefault(inside[1], set()).add(name)
        if listed:
            # Experts that are modules of a list count as stacked matrices of the first expert.
            first = next(iter(listed.values()))
            stacked |= {name: (len(listed), *shapes[name]) for name in first}
        inside_list = set().union(*listed.values()) if listed else set()
        rest = {n: s for n, s in shapes.items() if n not in stacked and n not in inside_list}
        if not stacked:
            width = self._width(list(rest.values()))
            return None if width is None else _Layer(0, *width)
        counts = {shape[0] for shape in stacked.values()}
        expert = self._width([shape[1:] for shape in stacked.values()])
        if len(counts) != 1 or expert is None:
            return None
        (num_experts,), (width_of, gated) = counts, expert
        routers = [
            n for n, shape in rest.items() if sorted(shape) == sorted((num_experts, self._dim))
        ]
        beside = [shape for name, shape in rest.items() if name not in routers[:1]]
        if not routers or not all(self._dim in shape for shape in beside):
            return None
        numel, unit = sum(map(math.prod, beside)), (2 + gated) * self._dim
        shared = round(numel / unit)
        if abs(shared * unit - numel) > _OFF * numel:
            return None
        return _Layer(num_experts, width_of, gated, shared)

    def _width(self, shapes: Sequence[Sequence[int]]) -> tuple[int, bool] | None:
        """Return F, and True for a gate, from a network's matrices; None for something else."""
        if not shapes or not all(len(s) == 2 and self._dim in s for s in shapes):
            return None
        # A single matrix may hold gate and up, so the matrices are judged by their total size.
        width = min(math.prod(shape) // self._dim for shape in shapes)
        share = sum(map(math.prod, shapes)) / max(1, self._dim * width)
        gated = share > 2.5
        return (width, gated) if abs(share - 2 - gated) <= 2 * _OFF else None

    def _counted(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec; raise ValueError unless the model has as many parameters."""
        parameters = dict(self._model.named_parameters())
        count, told = sum(p.numel() for p in parameters.values()), spec.parameters()
        if abs(told - count) <= _OFF * count:
            return spec
        inside = {id(p) for p in (*self._layers.parameters(), self._embedding, self._output)}
        sizes: dict[str, int] = {}
        for name, p in parameters.items():
            if id(p) not in inside:
                place = ".".join(name.split(".")[:2])
                sizes[place] = sizes.get(place, 0) + p.numel()
        largest = max(
            sizes, key=lambda name: sizes[name], default="its layers, which share weights"
        )
        raise ValueError(
            f"model_spec: expected {self._title} to have {told} parameters, as many as its layers "
            f"and embeddings, got {count}; {largest!r} has no cost"
        )


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2]


def _is_vector(parameter: Tensor) -> bool:
    return parameter.numel() == max(parameter.shape, default=1)


def _parameters(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters that are no biases."""
    for name, parameter in module.named_parameters(recurse=recurse):
        if not _is_bias(name):
            yield name, parameter
