"""Table of the options of a `MoELayer` that cannot be combined, and the check of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from moe_ext.dispatch import CAPABILITIES, Wire, check_served
from moe_ext.distributed.dtensor import is_fsdp
from moe_ext.nn.experts import GroupedExperts, runs_own_forward
from moe_ext.nn.module_experts import ModuleExperts
from moe_ext.nn.replay import can_replay
from moe_ext.nn.routers import Router

SETS_ROWS = "a router that sets the rows of each expert"
# Features of a layer that cannot be combined with everything. For each, the argument whose value
# may have the feature, and a function that tells whether a value other than None has it.
FEATURES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "capacity": ("capacity", bool),
    "capacity.pad": ("capacity", lambda capacity: capacity.pad),
    "capacity.drop='random'": ("capacity", lambda capacity: capacity.drop == "random"),
    "capacity.overflow='reroute'": ("capacity", lambda capacity: capacity.overflow == "reroute"),
    "row_budget": ("row_budget", bool),
    "row_budget.static": ("row_budget", lambda budget: budget.static),
    "overlap": ("overlap", lambda parts: parts > 1),
    "rebalance": ("rebalance", bool),
    "an ep_group of several ranks": ("num_ranks", lambda ranks: ranks > 1),
    "etp": ("etp", lambda shards: shards > 1),
    "combine='reduced'": ("combine", lambda combine: combine == "reduced"),
    "wire": ("wire", lambda wire: wire != Wire()),
    "wire.dispatch='lossless'": ("wire", lambda wire: wire.dispatch == "lossless"),
    "a dispatcher that is an object": ("own_dispatcher", lambda _: True),
    "experts of another class": ("experts", lambda e: not isinstance(e, GroupedExperts)),
    "experts with a forward of their own": ("experts", lambda e: not runs_own_forward(e)),
    "ModuleExperts": ("experts", lambda experts: isinstance(experts, ModuleExperts)),
    "experts in shards of FSDP2": ("experts", lambda e: any(map(is_fsdp, e.modules()))),
    "a router of another class": ("router", lambda r: not isinstance(r, (str, Router))),
    "a router without with_choice": ("router", lambda r: type(r) is not str and not can_replay(r)),
    SETS_ROWS: ("router", lambda router: getattr(router, "sets_capacity", False)),
    "a router without score_fn": ("unknown_scores", bool),
    "balance='sequence'": ("balance", lambda balance: balance.scope == "sequence"),
    "a layer that counts tokens": ("counts", bool),
    "torch.func": ("transforms", bool),
    "vmap": ("transforms", lambda transforms: "vmap" in transforms),
}

# Pairs of features that cannot be combined, and the reason. An error asks to change the first.
REFUSED = {
    ("capacity", "overlap"): "the rows of an expert are counted in a whole batch",
    ("capacity", "rebalance"): "rows of an expert go to ranks that share no limit",
    ("capacity", SETS_ROWS): "both limit the rows",
    ("capacity.pad", "row_budget"): "a round has no whole capacity",
    ("row_budget", "overlap"): "both cut a batch",
    ("row_budget", "rebalance"): "rows are placed in one plan for the whole batch",
    ("row_budget.static", "combine='reduced'"): "the rows are those of 'alltoall'",
    ("overlap", "rebalance"): "rows are placed in one plan for the whole batch",
    ("etp", "rebalance"): "whole experts travel",
    ("a dispatcher that is an object", "etp"): "it was made for whole experts",
    ("a dispatcher that is an object", "rebalance"): "it was made without slots for moved experts",
    ("wire", "a dispatcher that is an object"): "the object has its own",
    ("combine='reduced'", "a dispatcher that is an object"): "the object has its own",
    ("wire", "etp"): "the parts of a result would be rounded apart",
    ("experts of another class", "etp"): "nobody knows how to cut them",
    ("experts with a forward of their own", "rebalance"): "nobody knows which weights to send",
    (
        "experts in shards of FSDP2",
        "row_budget",
    ): "they run several times; call sync_gradients for whole ones",
    ("a router of another class", "capacity.drop='random'"): "the draws are those of a Router",
    ("a router of another class", "capacity.overflow='reroute'"): "a Router weighs other choices",
    (
        "a router without with_choice",
        "capacity.overflow='reroute'",
    ): "the layer asks it for weights",
    ("a router without score_fn", "balance='sequence'"): "the loss sums them by sequence",
    ("torch.func", "an ep_group of several ranks"): "torch.func cannot follow messages",
    ("torch.func", "experts in shards of FSDP2"): "torch.func cannot follow hooks that gather them",
    ("torch.func", "row_budget"): "torch.func cannot follow rounds that run again",
    ("vmap", "ModuleExperts"): "the host reads the number of each expert's rows",
    ("vmap", "a layer that counts tokens"): "the calls would share one count",
}

# Words in errors for the value that is expected instead of a feature. The default is None.
RULES = {
    "capacity.pad": "capacity.pad to be False",
    "row_budget.static": "row_budget.static to be False",
    "overlap": "overlap to be 1",
    "etp": "etp of ep_group to be 1",
    "combine='reduced'": "combine to be 'exact'",
    "a dispatcher that is an object": "dispatcher to be a name",
    "experts of another class": "experts to be GroupedExperts",
    "experts with a forward of their own": "experts to be GroupedExperts",
    "experts in shards of FSDP2": "fully_shard to leave the experts whole (ignored_params)",
    "a router of another class": "router to be a moe_ext.nn.Router",
    "a router without with_choice": "router to weigh a choice that is not its own (with_choice)",
    "a router without score_fn": "router to say what its scores are (RouterOutput.score_fn)",
    "torch.func": "the layer to be called outside of torch.func",
    "vmap": "the layer to be called outside of vmap",
}


def check_combination(owner: str, dispatcher: object = None, **given: Any) -> None:
    """Refuse values of a layer's options that cannot be combined.

    Args:
        owner: name for error messages.
        dispatcher: name or object of a dispatcher that must serve the features; None for no check.
        **given: values by the arguments of `FEATURES`. Arguments that are missing are not checked.

    Raises:
        ValueError: two features are a pair of `REFUSED`, or the dispatcher does not serve one.
        RuntimeError: a feature cannot be combined with a call inside of `torch.func`.
    """
    found = {
        name: given[argument]
        for name, (argument, has) in FEATURES.items()
        if given.get(argument) is not None and has(given[argument])
    }
    for first, second in REFUSED:
        if first in found and second in found:
            raise refusal(owner, first, second, found)
    if dispatcher is not None:
        check_served(owner, dispatcher, {n: _shown(n, found) for n in CAPABILITIES if n in found})


def refusal(owner: str, first: str, second: str, found: Mapping[str, object]) -> Exception:
    """Return the error for a pair of `REFUSED`; `found` has the value of each feature."""
    value, argument = found[first], FEATURES[first][0]
    # Modules and users' dispatchers are named by class, since their repr may have many lines.
    by_class = isinstance(value, nn.Module) or argument == "own_dispatcher"
    got, rule = type(value).__name__ if by_class else value, RULES.get(first, f"{first} to be None")
    text = f"expected {rule} with {_shown(second, found)}, got {got}: {REFUSED[first, second]}"
    return (RuntimeError if argument == "transforms" else ValueError)(f"{owner}: {text}")


def _shown(name: str, found: Mapping[str, object]) -> str:
    return f"{name}={found[name]}" if name in ("overlap", "etp", "wire") else name
