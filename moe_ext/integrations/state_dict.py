"""Converts state dicts of mixture-of-experts layers between the layouts of libraries.

Shapes: D model, F ffn, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_ext._checks import check_rule
from moe_ext.distributed.dtensor import is_dtensor

__all__ = ["LAYOUTS", "ExpertNames", "convert"]

# Part of a layer to its dimensions during a conversion. "2F" holds gate and up together.
_DIMS = {
    "router": "E D",
    "router_bias": "E",
    "gate": "E F D",
    "gate_bias": "E F",
    "up": "E F D",
    "up_bias": "E F",
    "down": "E D F",
    "down_bias": "E D",
    "gate_up": "E 2F D",
    "gate_up_bias": "E 2F",
    "count": "",
}

# Part to (key, dimensions) in a library's file. "EF" is one dimension of length E * F. A key with
# "{e}" stands for one key per expert; its dimensions do not include E.
Entries = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class ExpertNames:
    """Names of the linear layers inside an expert module.

    Attributes:
        up: name of the first layer, D to F.
        down: name of the last layer, F to D.
        gate: name of the gate layer, D to F; None for experts without a gate.
    """

    up: str
    down: str
    gate: str | None = None


@dataclass(frozen=True)
class _Layout:
    """Entries of a layer whose experts have no gate, and of a layer whose experts have one.

    `pair_dim` is 1 if all gates come before all ups in "2F", and 2 if gates and ups alternate.
    """

    plain: Entries = field(default_factory=dict)
    gated: Entries = field(default_factory=dict)
    pair_dim: int = 1


def _linear(part: str, path: str, dims: str, *, flipped: bool = False, lead: str = "") -> Entries:
    """Return the entries of a linear layer, whose weight has dimensions `dims` or the reverse."""
    weight = dims[::-1] if flipped else dims
    return {
        part: (f"{path}.weight", lead + weight),
        f"{part}_bias": (f"{path}.bias", lead + dims[0]),
    }


def _modules(router: str, experts: str, names: ExpertNames, **options: Any) -> _Layout:
    """Make a layout with one module per expert; `options` go to `_linear`."""
    flipped = options.get("flipped", False)
    entries = _linear("router", router, "E D", flipped=flipped)
    for part, layer in (("up", names.up), ("gate", names.gate), ("down", names.down)):
        if layer is not None:
            dims = "D F" if part == "down" else "F D"
            entries |= _linear(part, f"{experts}{{e}}.{layer}", dims, **options)
    return _Layout(plain=entries) if names.gate is None else _Layout(gated=entries)


def _fused(router: str, up: str, dims: str, down: str, *, part: str = "gate_up") -> Entries:
    """Return the entries of stacked weights, with gate and up in one tensor, or without a gate."""
    return {
        **_linear("router", router, "E D"),
        part: (f"experts.{up}", dims),
        f"{part}_bias": (f"experts.{up}_bias", _DIMS[f"{part}_bias"]),
        "down": ("experts.down_proj", down),
        "down_bias": ("experts.down_proj_bias", "E D"),
    }


_TUTEL = {"router": ("gates.0.wg.weight", "E D"), "count": ("_num_global_experts", "")}
_STACKED = {
    "moe_ext": _Layout(
        plain=_fused("router", "up_proj", "E F D", "E D F", part="up"),
        gated=_fused("router", "gate_up_proj", "E 2F D", "E D F"),
    ),
    "huggingface": _Layout(gated=_fused("gate", "gate_up_proj", "E 2F D", "E D F")),
    "gpt_oss": _Layout(gated=_fused("router", "gate_up_proj", "E D 2F", "E F D"), pair_dim=2),
    "megablocks": _Layout(
        plain={
            "router": ("router.layer.weight", "E D"),
            "up": ("experts.mlp.w1", "EF D"),
            "down": ("experts.mlp.w2", "EF D"),
        },
        gated={
            "router": ("router.layer.weight", "E D"),
            "gate": ("experts.mlp.w1", "EF D"),
            "up": ("experts.mlp.v1", "EF D"),
            "down": ("experts.mlp.w2", "EF D"),
        },
    ),
    "tutel": _Layout(
        plain={
            **_TUTEL,
            "up": ("experts.batched_fc1_w", "E F D"),
            "down": ("experts.batched_fc2_w", "E F D"),
            "up_bias": ("experts.batched_fc1_bias", "E F"),
            "down_bias": ("experts.batched_fc2_bias", "E D"),
        },
        gated={
            **_TUTEL,
            "gate": ("experts.W_fc1", "EDF"),
            "up": ("experts.W_fc2", "EDF"),
            "down": ("experts.W_fc3", "EFD"),
        },
    ),
    "torchtitan": _Layout(
        gated={
            "router": ("router.gate.weight", "E D"),
            "gate": ("routed_experts.inner_experts.w1_EFD", "E F D"),
            "up": ("routed_experts.inner_experts.w3_EFD", "E F D"),
            "down": ("routed_experts.inner_experts.w2_EDF", "E D F"),
        }
    ),
}
_TWO_LINEAR = ExpertNames(up="htoh4", down="h4toh")
# Layout to (router, experts, names inside the experts). None means that a user chooses the names.
_OF_MODULES: dict[str, tuple[str, str, ExpertNames | None]] = {
    "mixtral": ("gate", "experts.", ExpertNames(gate="w1", up="w3", down="w2")),
    "qwen_moe": ("gate", "experts.", ExpertNames("up_proj", "down_proj", "gate_proj")),
    "deepspeed": ("deepspeed_moe.gate.wg", "deepspeed_moe.experts.deepspeed_experts.", None),
    "fairscale": ("gate.wg", "experts.", None),
    "fastmoe": ("gate.gate", "experts.", _TWO_LINEAR),
    "paddle": ("gate.gate", "experts.", _TWO_LINEAR),
    "paddle_torch": ("gate.gate", "experts.", _TWO_LINEAR),
}
_OPTIONS: dict[str, dict[str, Any]] = {"fastmoe": {"lead": "1 "}, "paddle": {"flipped": True}}

LAYOUTS = tuple(sorted([*_STACKED, *_OF_MODULES]))


def _find(name: str, names: ExpertNames | None) -> _Layout:
    rule = f"among {', '.join(LAYOUTS)}"
    check_rule("convert", "source and target", name, rule, name in LAYOUTS)
    if name in _STACKED:
        if names is not None:
            raise ValueError(
                f"convert: expected no ExpertNames for layout {name!r}, whose experts are stacked, "
                f"got {names}"
            )
        return _STACKED[name]
    router, experts, usual = _OF_MODULES[name]
    names = names or usual
    if names is None:
        raise ValueError(
            f"convert: expected ExpertNames for layout {name!r}, whose experts are modules of the "
            "user's, got None"
        )
    return _modules(router, experts, names, **_OPTIONS.get(name, {}))


def _length(dim: str, sizes: Mapping[str, int]) -> int:
    """Return the length of a dimension such as "F", "2F" or "EF"."""
    factors = re.findall(r"\d+|[A-Z]", dim)
    return math.prod(int(f) if f.isdigit() else sizes[f] for f in factors)


def _in_order(value: Tensor, dims: str, wanted: str, sizes: Mapping[str, int]) -> Tensor:
    """Permute and reshape a tensor from dimensions `dims` to `wanted`, which has equal letters."""
    letters, order = (re.findall(r"2?[A-Z]", text) for text in (dims, wanted))
    apart = value.reshape([_length(letter, sizes) for letter in letters])
    moved = apart.permute([letters.index(letter) for letter in order]).contiguous()
    return moved.reshape([_length(dim, sizes) for dim in wanted.split()])


class _LayerReader:
    """Reads the entries of one layer, and compares their shapes with each other.

    Args:
        state: state dict of the model.
        prefix: prefix of the layer's names.
        layout: name of the layout, for messages.
    """

    def __init__(self, state: Mapping[str, Any], prefix: str, layout: str) -> None:
        self._own = {n[len(prefix) :]: v for n, v in state.items() if n.startswith(prefix)}
        self._prefix = prefix
        self._layout = layout
        self.sizes: dict[str, int] = {}

    def read(self, layout: _Layout) -> dict[str, Tensor]:
        """Return all parts of the layer.

        Raises:
            ValueError: an entry is missing, has a wrong shape, or is unknown.
        """
        known = {key for key, _ in layout.plain.values()}
        has_gate = any(key in self._own for key, _ in layout.gated.values() if key not in known)
        entries = layout.gated if has_gate or not known else layout.plain
        parts = {}
        for part, (key, dims) in entries.items():
            optional = part.endswith("_bias") or part == "count"
            if optional and key.replace("{e}", "0") not in self._own:
                continue
            if "{e}" in key:
                if part == "up":  # the first entry of experts in every layout
                    self._check_indices(key.partition("{e}")[0])
                keys = [key.replace("{e}", str(e)) for e in range(self.sizes["E"])]
                value, dims = torch.stack([self._take(key, dims) for key in keys]), f"E {dims}"
            else:
                value = self._take(key, dims)
            parts[part] = _in_order(value, dims, _DIMS[part], self.sizes)
        if self._own:
            raise ValueError(
                f"convert: expected the keys of a layer of layout {self._layout!r} under prefix "
                f"{self._prefix!r}, got {self._prefix + next(iter(self._own))!r}, which has no "
                "counterpart"
            )
        count = parts.pop("count", None)
        if count is not None:
            rule = f"{self.sizes['E']}, the rows of the router"
            fits = int(count) == self.sizes["E"]
            check_rule("convert", f"{entries['count'][0]!r}", int(count), rule, fits)
        for end in ("", "_bias"):
            if f"gate_up{end}" in parts:
                both = parts.pop(f"gate_up{end}")
                apart = both.unflatten(1, (2, -1) if layout.pair_dim == 1 else (-1, 2))
                gate, up = apart.unbind(layout.pair_dim)
                parts |= {f"gate{end}": gate.contiguous(), f"up{end}": up.contiguous()}
        return parts

    def _take(self, name: str, dims: str) -> Tensor:
        """Remove and return an entry, after comparing its shape with `dims`, such as "E 2F D"."""
        if name not in self._own:
            raise ValueError(
                f"convert: expected key {self._prefix + name!r} in a layer of layout "
                f"{self._layout!r}, got none"
            )
        value, each = torch.as_tensor(self._own.pop(name)), dims.split()
        if value.dim() != len(each) or not all(map(self._fits, each, value.shape)):
            wanted = ", ".join(
                dim + "".join(f" ({c}={self.sizes[c]})" for c in dim if c in self.sizes)
                for dim in each
            )
            raise ValueError(
                f"convert: expected {self._prefix + name!r} to be of shape [{wanted}], got "
                f"{tuple(value.shape)}"
            )
        return value

    def _fits(self, dim: str, size: int) -> bool:
        """Return True if a size is the product that `dim` names.

        If the size of one letter is unknown, `_fits` computes and remembers it.
        """
        unknown = [c for c in dim if c.isalpha() and c not in self.sizes]
        known = _length(dim, {**self.sizes, **dict.fromkeys(unknown, 1)})
        if not unknown:
            return size == known
        if len(unknown) > 1 or known == 0 or size % known != 0 or size == 0:
            return False
        self.sizes[unknown[0]] = size // known
        return True

    def _check_indices(self, experts: str) -> None:
        pattern = re.compile(re.escape(experts) + r"(\d+)\.")
        matches = map(pattern.match, self._own)
        found = sorted({int(match[1]) for match in matches if match})
        count = self.sizes["E"]
        rule = f"0..{count - 1}, as the router has {count}"
        fits = found == list(range(count))
        check_rule("convert", f"the experts under {experts!r}", found, rule, fits)


def _write(
    name: str, layout: _Layout, parts: dict[str, Tensor], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the entries of a layer in a layout.

    Raises:
        ValueError: the layout has no entry for a part, or needs a part that the layer lacks.
    """
    entries = layout.gated if "gate" in parts else layout.plain
    if not entries and "gate" not in parts:
        raise ValueError(
            f"convert: expected a layer with gated experts for layout {name!r}, got one without"
        )
    parts = dict(parts) if entries else {"gate": parts["gate"]}
    if "gate_up" in entries:
        for end in ("", "_bias"):
            if {f"gate{end}", f"up{end}"} <= parts.keys():
                pair = parts.pop(f"gate{end}"), parts.pop(f"up{end}")
                parts[f"gate_up{end}"] = torch.stack(pair, layout.pair_dim).flatten(1, 2)
    state: dict[str, Tensor] = {}
    if "count" in entries:
        state[entries["count"][0]] = torch.tensor(sizes["E"])
    for part, value in parts.items():
        if part not in entries:
            raise ValueError(
                f"convert: expected a layer without {part.replace('_', ' ')}, for which layout "
                f"{name!r} has no place, got one of shape {tuple(value.shape)}"
            )
        key, dims = entries[part]
        if "{e}" not in key:
            state[key] = _in_order(value, _DIMS[part], dims, sizes)
            continue
        if is_dtensor(value):
            raise ValueError(
                f"convert: expected whole tensors for layout {name!r}, whose experts are modules, "
                f"got parts over ranks of {part.replace('_', ' ')}; take those of "
                "moe_ext.distributed.full_state_dict(model)"
            )
        stacked = _in_order(value, _DIMS[part], f"E {dims}", sizes)
        for e, own in enumerate(stacked):
            state[key.replace("{e}", str(e))] = own.clone()
    return state


def convert(
    state: Mapping[str, Any],
    source: str,
    target: str,
    *,
    prefix: str = "",
    source_names: ExpertNames | None = None,
    target_names: ExpertNames | None = None,
) -> dict[str, Tensor]:
    """Rename and rearrange the parameters of one layer, without loss.

    Layouts: "moe_ext" (`MoELayer` with `GroupedExperts` of the default layout, not transposed);
    "huggingface" (stacked, gates before ups); "gpt_oss" (stacked, transposed, gates and ups
    alternate); "mixtral" and "qwen_moe" (files with one module per expert); "paddle"
    (PaddlePaddle's own [in, out] weights, also as arrays of numpy); "paddle_torch"
    (`integrations.paddle.MoELayer`); "deepspeed", "fairscale", "fastmoe", "megablocks", "tutel",
    "torchtitan". The state must hold all experts, so an expert-parallel job gathers them first.

    Args:
        state: state dict of a model; it is not changed.
        source: layout of the state.
        target: layout of the result.
        prefix: prefix of the layer's names in the model, such as "layers.3.moe."; other entries are
            copied unchanged.
        source_names: linear layers inside the experts of the source; needed for "deepspeed" and
            "fairscale", whose experts are a user's modules.
        target_names: the same for the target.

    Returns:
        The state dict with the entries of the layer replaced.

    Raises:
        ValueError: a layout is unknown, a key is missing, a key or part has no counterpart, or a
            shape does not fit the others. The message names it.
    """
    reading, writing = _find(source, source_names), _find(target, target_names)
    reader = _LayerReader(state, prefix, source)
    parts = reader.read(reading)
    others = {name: value for name, value in state.items() if not name.startswith(prefix)}
    written = _write(target, writing, parts, reader.sizes)
    return {**others, **{prefix + name: value for name, value in written.items()}}
