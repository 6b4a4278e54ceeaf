"""State dicts of mixture-of-experts layers from one library's layout to another's.

Shapes: D model, F ffn, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ext.integrations._state_parts import (
    ExpertNames,
    Parts,
    Reader,
    deinterleave,
    flip,
    halves,
    interleave,
)

__all__ = ["LAYOUTS", "ExpertNames", "convert"]

Write = Callable[[Parts], dict[str, Tensor]]


@dataclass(frozen=True)
class _List:
    """One module an expert: `router.weight`, `experts.0.up.weight`, ...

    `leading` stands for dimensions of size one before those of a weight or a bias; `flipped` says
    that a linear layer has its weight as [in, out].
    """

    name: str
    router: str
    experts: str
    names: ExpertNames | None = None
    flipped: bool = False
    leading: bool = False

    def read(self, reader: Reader) -> Parts:
        """Stack the experts."""
        router = self._weight(reader, self.router, "E", "D")
        bias = reader.take_if_there(f"{self.router}.bias", "E")
        self._check_indices(reader)
        names = self._names()
        found = {"up": (names.up, "F", "D")}
        if names.gate is not None:
            found["gate"] = (names.gate, "F", "D")
        found["down"] = (names.down, "D", "F")
        stacked: dict[str, Tensor] = {}
        for part, (layer, out_dim, in_dim) in found.items():
            paths = [f"{self.experts}{e}.{layer}" for e in range(reader.sizes["E"])]
            lead = ("1",) if self.leading else ()
            weights = [self._weight(reader, path, *lead, out_dim, in_dim) for path in paths]
            stacked[part] = torch.cat(weights) if self.leading else torch.stack(weights)
            if f"{paths[0]}.bias" in reader:
                biases = [reader.take(f"{path}.bias", *lead, out_dim) for path in paths]
                stacked[f"{part}_bias"] = torch.cat(biases) if self.leading else torch.stack(biases)
        return Parts(router=router, router_bias=bias, **stacked)

    def write(self, parts: Parts) -> dict[str, Tensor]:
        """Give every expert its own entries."""
        names = self._names()
        if names.gate is None:
            parts.refuse(self.name, "gate")
        else:
            parts.need_gate(self.name)
        state = {f"{self.router}.weight": flip(parts.router) if self.flipped else parts.router}
        if parts.router_bias is not None:
            state[f"{self.router}.bias"] = parts.router_bias
        for e in range(parts.router.shape[0]):
            for part, layer in (("gate", names.gate), ("up", names.up), ("down", names.down)):
                if layer is None:
                    continue
                path = f"{self.experts}{e}.{layer}"
                rows = slice(e, e + 1) if self.leading else e
                weight = getattr(parts, part)[rows]
                state[f"{path}.weight"] = flip(weight) if self.flipped else weight.clone()
                if getattr(parts, f"{part}_bias") is not None:
                    state[f"{path}.bias"] = getattr(parts, f"{part}_bias")[rows].clone()
        return state

    def _names(self) -> ExpertNames:
        assert self.names is not None
        return self.names

    def _weight(self, reader: Reader, path: str, *dims: str) -> Tensor:
        if not self.flipped:
            return reader.take(f"{path}.weight", *dims)
        return flip(reader.take(f"{path}.weight", *dims[::-1]))

    def _check_indices(self, reader: Reader) -> None:
        pattern = re.compile(re.escape(self.experts) + r"(\d+)\.")
        matches = (pattern.match(name) for name in reader.names())
        found = sorted({int(match[1]) for match in matches if match})
        wanted = list(range(reader.sizes["E"]))
        if found != wanted:
            raise ValueError(
                f"convert: expected the experts under {self.experts!r} to be 0..{len(wanted) - 1}, "
                f"as the router has {len(wanted)}, got {found}"
            )


@dataclass(frozen=True)
class _Fused:
    """Stacked weights with gate and up in one: `gate_up_proj [E, 2F, D]`, `down_proj [E, D, F]`.

    `interleaved` says that gate and up features come in turn, `flipped` that weights are [in, out].
    """

    name: str
    router: str
    experts: str
    interleaved: bool = False
    flipped: bool = False
    plain: bool = True

    def read(self, reader: Reader) -> Parts:
        """Split gate and up."""
        router = reader.take(f"{self.router}.weight", "E", "D")
        router_bias = reader.take_if_there(f"{self.router}.bias", "E")
        path = f"{self.experts}gate_up_proj"
        if self.plain and path not in reader:
            up = self._take(reader, f"{self.experts}up_proj", "F", "D")
            up_bias = reader.take_if_there(f"{self.experts}up_proj_bias", "E", "F")
            gate = gate_bias = None
        else:
            split = deinterleave if self.interleaved else halves
            gate, up = split(self._take(reader, path, "2F", "D"))
            both = reader.take_if_there(f"{path}_bias", "E", "2F")
            gate_bias, up_bias = (None, None) if both is None else split(both)
        down = self._take(reader, f"{self.experts}down_proj", "D", "F")
        down_bias = reader.take_if_there(f"{self.experts}down_proj_bias", "E", "D")
        return Parts(router, up, down, gate, router_bias, up_bias, down_bias, gate_bias)

    def write(self, parts: Parts) -> dict[str, Tensor]:
        """Join gate and up."""
        state = {f"{self.router}.weight": parts.router}
        if parts.router_bias is not None:
            state[f"{self.router}.bias"] = parts.router_bias
        if parts.gate is None and self.plain:
            found = {"up_proj": parts.up, "up_proj_bias": parts.up_bias}
        else:
            join = interleave if self.interleaved else lambda *pair: torch.cat(pair, dim=1)
            found = {"gate_up_proj": join(parts.need_gate(self.name), parts.up)}
            if parts.gate_bias is not None and parts.up_bias is not None:
                found["gate_up_proj_bias"] = join(parts.gate_bias, parts.up_bias)
        found |= {"down_proj": parts.down, "down_proj_bias": parts.down_bias}
        for name, tensor in found.items():
            if tensor is not None:
                flipped = self.flipped and not name.endswith("_bias")
                state[f"{self.experts}{name}"] = flip(tensor) if flipped else tensor
        return state

    def _take(self, reader: Reader, name: str, out_dim: str, in_dim: str) -> Tensor:
        if self.flipped:
            return flip(reader.take(name, "E", in_dim, out_dim))
        return reader.take(name, "E", out_dim, in_dim)


@dataclass(frozen=True)
class _MegaBlocks:
    """`experts.mlp.w1` (the gate where there is a `v1`), `v1`, `w2`, each `[E*F, D]`."""

    name: str = "megablocks"

    def read(self, reader: Reader) -> Parts:
        """Unfold the experts."""
        router = reader.take("router.layer.weight", "E", "D")
        rows = [reader.take("experts.mlp.w1", "EF", "D")]
        if "experts.mlp.v1" in reader:
            rows.append(reader.take("experts.mlp.v1", "EF", "D"))
        down = reader.take("experts.mlp.w2", "EF", "D")
        shape = (reader.sizes["E"], reader.sizes["F"], reader.sizes["D"])
        *gate, up = (weight.view(shape) for weight in rows)
        return Parts(router, up, flip(down.view(shape)), *gate)

    def write(self, parts: Parts) -> dict[str, Tensor]:
        """Fold the experts."""
        parts.refuse(self.name, "router_bias", "up_bias", "down_bias", "gate_bias")
        state = {"router.layer.weight": parts.router}
        first, second = (parts.up, None) if parts.gate is None else (parts.gate, parts.up)
        state["experts.mlp.w1"] = first.flatten(0, 1)
        state["experts.mlp.w2"] = flip(parts.down).flatten(0, 1)
        if second is not None:
            state["experts.mlp.v1"] = second.flatten(0, 1)
        return state


@dataclass(frozen=True)
class _Tutel:
    """Experts "ffn": `batched_fc1_w`, `batched_fc2_w` `[E, F, D]`; "llama_ffn": flat `W_fc1..3`."""

    name: str = "tutel"

    def read(self, reader: Reader) -> Parts:
        """Either kind of experts."""
        router = reader.take("gates.0.wg.weight", "E", "D")
        count = reader.take_if_there("_num_global_experts")
        if count is not None and int(count) != reader.sizes["E"]:
            raise ValueError(
                f"convert: expected '_num_global_experts' to be {reader.sizes['E']}, the rows of "
                f"the router, got {int(count)}"
            )
        if "experts.W_fc1" not in reader:
            up = reader.take("experts.batched_fc1_w", "E", "F", "D")
            down = flip(reader.take("experts.batched_fc2_w", "E", "F", "D"))
            up_bias = reader.take_if_there("experts.batched_fc1_bias", "E", "F")
            down_bias = reader.take_if_there("experts.batched_fc2_bias", "E", "D")
            return Parts(router, up, down, up_bias=up_bias, down_bias=down_bias)
        gate, up, down = (reader.take(f"experts.W_fc{i}", "EDF") for i in (1, 2, 3))
        e, d, f = (reader.sizes[letter] for letter in "EDF")
        return Parts(
            router, flip(up.view(e, d, f)), flip(down.view(e, f, d)), flip(gate.view(e, d, f))
        )

    def write(self, parts: Parts) -> dict[str, Tensor]:
        """Gated experts are "llama_ffn", the others "ffn"."""
        parts.refuse(self.name, "router_bias")
        state = {
            "_num_global_experts": torch.tensor(parts.router.shape[0]),
            "gates.0.wg.weight": parts.router,
        }
        if parts.gate is None:
            state["experts.batched_fc1_w"] = parts.up
            state["experts.batched_fc2_w"] = flip(parts.down)
            if parts.up_bias is not None:
                state["experts.batched_fc1_bias"] = parts.up_bias
            if parts.down_bias is not None:
                state["experts.batched_fc2_bias"] = parts.down_bias
            return state
        parts.refuse(self.name, "up_bias", "down_bias", "gate_bias")
        for index, weight in enumerate((parts.gate, parts.up, parts.down), start=1):
            state[f"experts.W_fc{index}"] = flip(weight).flatten()
        return state


@dataclass(frozen=True)
class _TorchTitan:
    """`w1_EFD` (gate), `w3_EFD` (up), `w2_EDF` (down)."""

    name: str = "torchtitan"

    def read(self, reader: Reader) -> Parts:
        """The tensors, unchanged."""
        router = reader.take("router.gate.weight", "E", "D")
        path = "routed_experts.inner_experts."
        gate = reader.take(f"{path}w1_EFD", "E", "F", "D")
        up = reader.take(f"{path}w3_EFD", "E", "F", "D")
        return Parts(router, up, reader.take(f"{path}w2_EDF", "E", "D", "F"), gate)

    def write(self, parts: Parts) -> dict[str, Tensor]:
        """The tensors, unchanged."""
        parts.refuse(self.name, "router_bias", "up_bias", "down_bias", "gate_bias")
        path = "routed_experts.inner_experts."
        return {
            "router.gate.weight": parts.router,
            f"{path}w1_EFD": parts.need_gate(self.name),
            f"{path}w2_EDF": parts.down,
            f"{path}w3_EFD": parts.up,
        }


_TWO_LINEAR = ExpertNames(up="htoh4", down="h4toh")
_Layout = _List | _Fused | _MegaBlocks | _Tutel | _TorchTitan
_LAYOUTS: dict[str, _Layout] = {
    layout.name: layout
    for layout in (
        _Fused("moe_ext", "router", "experts."),
        _Fused("huggingface", "gate", "experts.", plain=False),
        _Fused("gpt_oss", "router", "experts.", interleaved=True, flipped=True, plain=False),
        _List("mixtral", "gate", "experts.", ExpertNames(gate="w1", up="w3", down="w2")),
        _List("qwen_moe", "gate", "experts.", ExpertNames("up_proj", "down_proj", "gate_proj")),
        _List("deepspeed", "deepspeed_moe.gate.wg", "deepspeed_moe.experts.deepspeed_experts."),
        _List("fairscale", "gate.wg", "experts."),
        _List("fastmoe", "gate.gate", "experts.", _TWO_LINEAR, leading=True),
        _List("paddle", "gate.gate", "experts.", _TWO_LINEAR, flipped=True),
        _List("paddle_torch", "gate.gate", "experts.", _TWO_LINEAR),
        _MegaBlocks(),
        _Tutel(),
        _TorchTitan(),
    )
}

LAYOUTS = tuple(sorted(_LAYOUTS))


def _find(name: str, names: ExpertNames | None) -> _Layout:
    if name not in _LAYOUTS:
        raise ValueError(
            f"convert: expected source and target to be among {', '.join(LAYOUTS)}, got {name!r}"
        )
    layout = _LAYOUTS[name]
    if names is None:
        if isinstance(layout, _List) and layout.names is None:
            raise ValueError(
                f"convert: expected ExpertNames for layout {name!r}, whose experts are modules of "
                "the user's, got None"
            )
        return layout
    if not isinstance(layout, _List):
        raise ValueError(
            f"convert: expected no ExpertNames for layout {name!r}, whose experts are stacked, got "
            f"{names}"
        )
    return replace(layout, names=names)


def convert(
    state: Mapping[str, Any],
    source: str,
    target: str,
    *,
    prefix: str = "",
    source_names: ExpertNames | None = None,
    target_names: ExpertNames | None = None,
) -> dict[str, Tensor]:
    """Rename and rearrange the parameters of one layer; lossless, or refused.

    Layouts: "moe_ext" (`MoELayer` with `GroupedExperts`); "huggingface" (stacked, gate half first);
    "gpt_oss" (stacked, transposed, gate and up in turn); "mixtral" and "qwen_moe" (files of one
    module an expert); "paddle" (PaddlePaddle's own [in, out] weights; arrays of numpy are taken
    too); "paddle_torch" (`integrations.paddle.MoELayer`); "deepspeed", "fairscale", "fastmoe",
    "megablocks", "tutel", "torchtitan". All experts must be there: an expert-parallel job gathers
    them first.

    Args:
        state: state dict of a model; it is left as it is.
        source: its layout.
        target: layout to bring the layer to.
        prefix: where the layer is in the model, such as "layers.3.moe."; entries elsewhere are
            passed on.
        source_names: linear layers inside the experts of the source; needed for "deepspeed" and
            "fairscale", whose experts are modules of the user's.
        target_names: the same for the target.

    Returns:
        The state dict with the entries of the layer replaced.

    Raises:
        ValueError: an unknown layout, a missing key, a key or a part that has no counterpart, or a
            shape that does not fit the others; the message names it.
    """
    reading, writing = _find(source, source_names), _find(target, target_names)
    reader = Reader(state, prefix, source)
    parts = reading.read(reader)
    reader.finish()
    others = {name: value for name, value in state.items() if not name.startswith(prefix)}
    return {**others, **{prefix + name: value for name, value in writing.write(parts).items()}}
