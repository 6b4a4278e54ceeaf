"""Cuts a transformers model into stages of a pipeline, by its decoder layers."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from moe_ext.attention.huggingface.prepare import BatchCutter


_OP = "Plan.apply"


def decoder_of(model: nn.Module) -> Any:
    """Return the module of a transformers model whose `layers` are all of its decoder layers.

    Raises:
        ValueError: the model has none.
    """
    found: Any = model
    if hasattr(model, "get_decoder"):
        found = model.get_decoder()  # type: ignore[operator]
    layers = getattr(found, "layers", None)
    size = getattr(getattr(found, "config", None), "num_hidden_layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != size:
        raise ValueError(
            f"{_OP}: expected model to have a decoder of transformers whose layers are a "
            f"ModuleList of num_hidden_layers={size}, got {type(model).__name__}"
        )
    return found


class _Elsewhere(nn.Module):
    """Stands for a decoder layer of another stage, and returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Decoders choose the mask of a layer by this attribute.
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the input."""
        return hidden_states


class Stages:
    """A causal language model of transformers that is cut into stages of consecutive layers.

    The first stage has the embedding; the last stage has the norm and the output behind the layers.
    The model is unchanged until `keep`.

    Args:
        model: the whole model.
        spans: (first layer, last layer + 1) of each stage, in order.

    Raises:
        ValueError: the decoder does more than pass hidden states through its layers and a norm;
            the stages do not have all of its layers in order; or the config asks for the routers'
            losses, which are sums over all layers.
    """

    def __init__(self, model: Any, spans: Sequence[tuple[int, int]]) -> None:
        self.model = model
        self.num_stages = len(spans)
        self._spans = tuple(spans)
        decoder = decoder_of(model)
        title, size = type(model).__name__, len(decoder.layers)
        paths = {id(module): path for path, module in model.named_modules()}
        self._decoder = paths[id(decoder)]
        ends = [self.model.get_input_embeddings(), getattr(decoder, "norm", None)]
        ends.append(self.model.get_output_embeddings())
        if any(end is None for end in ends):
            raise ValueError(
                f"{_OP}: expected a model in stages to have an embedding, a norm behind its "
                f"layers, and an output, got {title}"
            )
        at = [0, *(end for _, end in spans)]
        if at[-1] != size or any(i >= j for i, j in spans) or at[:-1] != [i for i, _ in spans]:
            raise ValueError(
                f"{_OP}: expected stages to have all {size} layers of the model in turn, one "
                f"or more each, got {self._spans}"
            )
        if getattr(self.model.config, "output_router_logits", False):
            raise ValueError(
                f"{_OP}: expected output_router_logits to be False for a model in stages, "
                "got True: the loss of its routers is one of all layers"
            )
        self.embedding, self._norm, self.output = (paths[id(end)] for end in ends)
        self._layers = [paths[id(layer)] for layer in decoder.layers]
        self._check()

    def _check(self) -> None:
        """Refuse a decoder that changes its input even without layers and norm."""
        weight = self.model.get_input_embeddings().weight
        x = torch.linspace(-1, 1, 3 * weight.shape[1], dtype=weight.dtype, device=weight.device)
        x = x.view(1, 3, -1)
        shell = _with(self.model, self._without(()))
        with torch.no_grad():
            out = shell.get_submodule(self._decoder)(inputs_embeds=x, use_cache=False)[0]
        if not torch.equal(out, x):
            raise ValueError(
                f"{_OP}: expected the decoder of a model in stages to pass hidden states "
                f"through its layers and a norm alone, got {type(self.model).__name__}"
            )

    def _without(self, stages: Collection[int]) -> dict[str, nn.Module | None]:
        """Return path to stand-in, for the modules that none of these stages has."""
        found: dict[str, nn.Module | None] = {}
        here = {i for s in stages for i in range(*self._spans[s])}
        for i, path in enumerate(self._layers):
            if i not in here:
                found[path] = _Elsewhere(self.model.get_submodule(path))
        if 0 not in stages:
            found[self.embedding] = None
        if self.num_stages - 1 not in stages:
            found |= {self._norm: nn.Identity(), self.output: None}
        return found

    def stage(self, number: int, sequences: BatchCutter | None = None) -> Stage:
        """Make a stage, which shares its modules with the model.

        Args:
            number: index of the stage.
            sequences: cuts each sequence over the ranks that share it; hidden states are then those
                of this rank's part. None leaves sequences whole.
        """
        shell = _with(self.model, self._without((number,)))
        ends = number == 0, number == self.num_stages - 1
        return Stage(shell, self._decoder, *ends, sequences)

    def keep(self, stages: Collection[int]) -> None:
        """Drop all modules of other stages from the model itself; the rest keeps its names."""
        for path, module in self._without(stages).items():
            parent, _, name = path.rpartition(".")
            self.model.get_submodule(parent)._modules[name] = module


class Stage(nn.Module):
    """Maps tokens `[B, S]` or hidden states `[B, L, D]` to hidden states or logits `[B, L, V]`.

    L is S, or the length of this rank's part of the sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: str,
        is_first: bool,
        is_last: bool,
        sequences: BatchCutter | None,
    ) -> None:
        super().__init__()
        self._sequences = sequences
        self.model = model
        self._given = "input_ids" if is_first else "inputs_embeds"
        self._decoder, self._is_last = decoder, is_last

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers of the stage."""
        whole = self.model if self._is_last else self.model.get_submodule(self._decoder)
        positions = None
        if self._sequences is not None:
            if self._given == "input_ids":
                x, positions = self._sequences.tokens(x)
            else:
                positions = self._sequences.positions(x)
        out = whole(**{self._given: x}, position_ids=positions, use_cache=False)
        return out.logits if self._is_last else out.last_hidden_state


def _with(module: nn.Module, replaced: Mapping[str, nn.Module | None]) -> nn.Module:
    """Copy a module; the copy shares all submodules except those at the replaced paths."""
    copied = copy.copy(module)
    copied._modules = {**module._modules}
    for name, child in module._modules.items():
        start = f"{name}."
        inner = {p.removeprefix(start): m for p, m in replaced.items() if p.startswith(start)}
        if name in replaced:
            copied._modules[name] = replaced[name]
        elif child is not None and inner:
            copied._modules[name] = _with(child, inner)
    return copied
