"""Names, roles and codecs of the parameters that a state reduces."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._compile import outside_graphs
from moe_ext.compression.codecs import Codec
from moe_ext.compression.policy import Policy, Role, parameter_roles
from moe_ext.distributed.placement import placements, sharded_parameters
from moe_ext.nn import MoELayer


class NamedParameters:
    """Names and roles of the parameters of one model.

    Args:
        model: the model; None numbers parameters in the order of their first reduction.
        policy: codecs of the parameters when the state is made.

    Attributes:
        by_name: name to parameter. References are held, so that an id is not used again.
        may_be_new: unknown parameters get a number. True without a model, until the first
            successful step of this process.
        sharded: name to (rank, size) of the expert-parallel group, for experts that have one.
        compresses: at least one parameter may have a residual; True without a model.
        reached: watches the experts whose rows may be left out.
    """

    def __init__(self, model: nn.Module | None, policy: Policy) -> None:
        self.may_be_new = model is None
        self.by_name: dict[str, nn.Parameter] = dict(model.named_parameters()) if model else {}
        self._name_of = {id(parameter): name for name, parameter in self.by_name.items()}
        self._roles: dict[str, Role] = parameter_roles(model) if model else {}
        placed = sharded_parameters(model) if model else {}
        self.sharded = {name: (at.part, at.num_parts) for name, (_, at) in placed.items()}
        codecs = {name: self.codec(policy, name) for name in self.by_name}
        self.compresses = model is None or any(
            codec is None or codec.feeds_back for codec in codecs.values()
        )
        experts = [
            name
            for name, codec in codecs.items()
            if self._roles[name] == "expert" and self.is_exact(policy, name, codec)
        ]
        self.reached = ReachedExperts(model, experts)

    def names_of(self, parameters: Sequence[nn.Parameter]) -> tuple[tuple[str, ...], str | None]:
        """Return the names of parameters, and the problem of one of them or None."""
        names, problem = [], None
        for parameter in parameters:
            name = self._name_of.get(id(parameter))
            if name is None:
                name = f"parameter_{len(self._name_of)}"
                if not self.may_be_new:
                    problem = (
                        "expected the parameters to belong to the one model that the state "
                        f"serves, got another one of shape {tuple(parameter.shape)}"
                    )
                else:
                    self._name_of[id(parameter)] = name
                    self.by_name[name] = parameter
            if parameter.is_complex():
                problem = f"expected parameters of real numbers, got {parameter.dtype} for {name}"
            names.append(name)
        return tuple(names), problem

    def codec(self, policy: Policy, name: str) -> Codec | None:
        """Return the codec of a parameter; None if the cost model chooses."""
        return policy.codec_for(name, self._role(name), self.by_name[name])

    def why(self, policy: Policy, names: Sequence[str]) -> str:
        """Return the rules by which the policy chose codecs for these parameters, as text."""
        found = [policy.why(name, self._role(name), self.by_name[name]) for name in names]
        return ", ".join(dict.fromkeys(found))

    def is_exact(self, policy: Policy, name: str, codec: Codec | None) -> bool:
        """Return True if a plain all-reduce may leave out rows of zeros of a parameter."""
        return policy.is_exact(self._role(name), self.by_name[name], codec)

    def _role(self, name: str) -> Role:
        return self._roles.get(name, "bias" if self.by_name[name].dim() <= 1 else "other")


class ReachedExperts:
    """Finds the experts that tokens have reached since the last reduction, by the layers' counts.

    Only MoE layers that hold all of their experts are watched. With an expert-parallel group tokens
    come from other ranks, so the gradients are searched instead.

    Args:
        model: any module; MoE layers with watched parameters get a forward hook.
        names: parameters to watch.
    """

    def __init__(self, model: nn.Module | None, names: Collection[str]) -> None:
        self._reached: dict[str, Tensor] = {}
        self._layer_of: dict[str, str] = {}
        for path, layer in model.named_modules() if model is not None else ():
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
                handle = layer.register_forward_hook(_Note(self, path))
                weakref.finalize(self, handle.remove)

    def note(self, path: str, layer: MoELayer) -> None:
        """Add the experts that tokens have reached in a forward pass of a layer."""
        reached_E = layer.metrics["num_tokens_per_expert"] > 0
        before_E = self._reached.get(path)
        self._reached[path] = reached_E if before_E is None else before_E | reached_E

    def bitmap(self, name: str) -> Tensor | None:
        """Return the reached experts as a bitmap of `nonzero_blocks`; None if they are unknown."""
        if name not in self._layer_of:
            return None
        reached_E = self._reached.get(self._layer_of[name])
        return None if reached_E is None else ops.pack_bits(reached_E)

    def clear(self) -> None:
        """Forget the reached experts, after a reduction."""
        self._reached = {}


class _Note:
    """A layer's hook for `ReachedExperts`. A copy does nothing: no state reduces a copied layer."""

    def __init__(self, reached: ReachedExperts | None, path: str) -> None:
        self._reached = None if reached is None else weakref.ref(reached)
        self._path = path

    def __reduce__(self) -> tuple[type[_Note], tuple[None, str]]:
        return _Note, (None, self._path)

    @outside_graphs
    def __call__(self, layer: MoELayer, args: object, output: object) -> None:
        reached = None if self._reached is None else self._reached()
        if reached is not None and torch.is_grad_enabled():
            reached.note(self._path, layer)
