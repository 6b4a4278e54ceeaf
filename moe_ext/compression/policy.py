"""Codecs of parameters, by their roles in the model."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from moe_ext._checks import check_choice, check_kind, check_numbers_of_fields
from moe_ext.compression.codecs import Codec, codec_names, codec_of
from moe_ext.distributed.placement import holds_experts
from moe_ext.nn.routers import Router

Role = Literal["expert", "router", "norm", "bias", "embedding", "attention", "other"]
ROLES: tuple[Role, ...] = get_args(Role)

# Patterns for the last part of a module's name: "gate" is a router, "gate_proj" is not.
_ROUTER = re.compile(r"router|^w?gate$|expert_gate$")
_NORM = re.compile(r"norm|^ln(_|\d|$)")
_ATTENTION = re.compile(r"attn|attention")
_EMBEDDING = re.compile(r"embedding|^(wte|wpe)$")


def _role_of_module(module: nn.Module, name: str) -> Role | None:
    """Return the role of a module's parameters, or None; `name` is the last part of its path."""
    kind, name = type(module).__name__.lower(), name.lower()
    if isinstance(module, Router) or _ROUTER.search(name) or "router" in kind:
        return "router"
    if _NORM.search(name) or "norm" in kind:
        return "norm"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or _EMBEDDING.search(kind):
        return "embedding"
    if _ATTENTION.search(name) or _ATTENTION.search(kind):
        return "attention"
    return "expert" if holds_experts(module) else None


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every parameter, by its name in `model.named_parameters()`.

    The innermost module that has a role decides. Routers are the routers of moe_ext, and modules
    called `router` or `gate`. Norms have a class or name with "norm", or a name like `ln_1`.
    Further roles are embeddings, attention, and experts. Experts are declared (see
    `moe_ext.distributed.declare_placement`), which a `MoELayer` does for its own. A parameter whose
    name ends with "bias" is a bias, except in a router or norm.

    Args:
        model: any module.
    """
    roles: dict[str, Role] = {}
    inherited: dict[str, Role | None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, last = path.rpartition(".")
        own = _role_of_module(module, last) if path else None
        above = inherited.get(parent) if path else None
        inherited[path] = own or above
        for name, _ in module.named_parameters(recurse=False):
            role = inherited[path] or "other"
            if role not in ("router", "norm") and name.endswith("bias"):
                role = "bias"
            roles[f"{path}.{name}" if path else name] = role
    return {name: roles[name] for name, _ in model.named_parameters()}


@dataclass(frozen=True)
class Policy:
    """Codecs by role; None means the default.

    Routers, norms and biases have few elements and are sensitive, so they are dense. Embeddings
    send the touched rows, exactly. If the codec is a plain all-reduce, experts that no token has
    reached are left out.

    Args:
        default: a codec or its name; "auto" lets the cost model choose.
        expert: for experts.
        router: for routers.
        norm: for norms.
        bias: for biases.
        embedding: for embeddings.
        attention: for attention.
        other: for all other parameters.
        by_name: glob pattern of parameter names to codec; the first that fits precedes the role.
        dense_below: parameters of fewer elements are dense.
        density: density for the names "topk" and "threshold".

    Raises:
        ValueError: a codec is unknown.
    """

    default: str | Codec = "auto"
    expert: str | Codec | None = None
    router: str | Codec | None = "none"
    norm: str | Codec | None = "none"
    bias: str | Codec | None = "none"
    embedding: str | Codec | None = "rows"
    attention: str | Codec | None = None
    other: str | Codec | None = None
    by_name: Mapping[str, str | Codec] = field(default_factory=dict)
    dense_below: int = 1024
    density: float = 0.01

    def __post_init__(self) -> None:
        check_kind("Policy", "by_name", self.by_name, Mapping, required=True)
        check_numbers_of_fields(self, ["dense_below"])
        named = [self.default, *(getattr(self, role) for role in ROLES), *self.by_name.values()]
        for codec in named:
            if codec is not None:
                _check_known(codec, "Policy")

    def codec_for(self, name: str, role: Role, parameter: nn.Parameter) -> Codec | None:
        """Return the codec of a parameter; None if the cost model chooses."""
        codec, _ = self._rule(name, role, parameter)
        return None if codec == "auto" else codec_of(codec, self.density, owner="Policy")

    def why(self, name: str, role: Role, parameter: nn.Parameter) -> str:
        """Return the rule by which a parameter got its codec, as text."""
        return self._rule(name, role, parameter)[1]

    def _rule(self, name: str, role: Role, parameter: nn.Parameter) -> tuple[str | Codec, str]:
        for pattern, codec in self.by_name.items():
            if fnmatch.fnmatchcase(name, pattern):
                return codec, f"name fits {pattern}"
        chosen: str | Codec | None = getattr(self, role)
        if parameter.numel() < self.dense_below:
            return "none", f"fewer than {self.dense_below} elements"
        return (self.default, "default") if chosen is None else (chosen, f"role {role}")

    def is_exact(self, role: Role, parameter: nn.Parameter, codec: Codec | None) -> bool:
        """Return True if rows of zeros may be left out when the codec turns out to be "none"."""
        if codec is not None and codec.skips_zeros:
            return True
        may_skip = codec is None or codec.skipping_zeros().skips_zeros
        return role == "expert" and may_skip and parameter.numel() >= self.dense_below


def policy_of(codec: str | Codec | Policy, density: float) -> Policy:
    """Make a policy with one default codec and the usual exceptions.

    Raises:
        ValueError: the codec is unknown.
    """
    if isinstance(codec, Policy):
        return codec
    _check_known(codec, "CompressionState")
    return Policy(codec, density=density)


def _check_known(codec: str | Codec, owner: str) -> None:
    if isinstance(codec, str):
        check_choice(owner, "codec", codec, codec_names())
    else:
        codec_of(codec, owner=owner)
