"""Conversion of saved optimizer states to another order of parameters and to other ranks.

A state has torch's form. The state of an optimizer that compresses has the further entry
``compression``. Its ``servers`` hold the errors of this rank's shards, one for each group of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from moe_ext.compression import shard_numel
from moe_ext.compression.feedback import add_at
from moe_ext.optim._compressed_mean import BlockPacking

State = dict[str, Any]


def by_name(op: str, groups: Sequence[Mapping[str, Any]], saved: State) -> State:
    """Renumber the parameters of a state by name; a state without names is returned unchanged.

    A state of torch's form numbers its parameters. If it also has their names, the order of the
    parameters and their groups may differ from those of the optimizer that loads.

    Args:
        op: name of the optimizer, for error messages.
        groups: the parameter groups of the optimizer that loads.
        saved: state of torch's form.

    Raises:
        ValueError: the state is of parameters with other names.
    """
    numbers = itertools.count()
    counted = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
    here, there = _numbers_of(counted), _numbers_of(saved["param_groups"])
    sizes = [[len(group["params"]) for group in each] for each in (counted, saved["param_groups"])]
    if here is None or there is None or (here == there and sizes[0] == sizes[1]):
        return saved
    missing, strange = sorted(set(here) - set(there)), sorted(set(there) - set(here))
    if missing or strange:
        found = f"one without {missing[0]}" if missing else f"one with {strange[0]}"
        raise ValueError(
            f"{op}: expected a state of parameters with the names of these, got {found}"
        )
    if len(sizes[0]) != len(sizes[1]) and "compression" in saved:
        raise ValueError(
            f"{op}: expected a state of {len(counted)} parameter groups, got "
            f"{len(saved['param_groups'])}"
        )
    number = {there[name]: here[name] for name in here}
    renumbered = {
        **saved,
        "state": {number[index]: state for index, state in saved["state"].items()},
        "param_groups": [_with_options(op, group, saved["param_groups"]) for group in counted],
    }
    if "compression" in saved:
        servers = [
            {**server, "parameters": [number[index] for index in server["parameters"]]}
            for server in saved["compression"]["servers"]
        ]
        renumbered["compression"] = {**saved["compression"], "servers": servers}
    return renumbered


def _with_options(op: str, group: Mapping[str, Any], saved: Sequence[State]) -> State:
    """Return a group with the options that all its parameters had in the saved groups."""
    own = {name: group[name] for name in ("params", "param_names", "name") if name in group}
    found: list[State] = [
        {name: value for name, value in old.items() if name not in (*own, "name")}
        for old in saved
        if not {*own["param_names"]}.isdisjoint(old["param_names"])
    ]
    for other in found[1:]:
        for name in found[0].keys() | other.keys():
            if found[0].get(name) != other.get(name):
                raise ValueError(
                    f"{op}: expected parameters of a group to have been saved with the same "
                    f"options, got {name}={found[0].get(name)} and {name}={other.get(name)}"
                )
    return {**(found[0] if found else group), **own}


def _numbers_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Map names to numbers of parameters; None if a group has no names."""
    found: dict[str, int] = {}
    for group in groups:
        if "param_names" not in group:
            return None
        found.update(zip(group["param_names"], group["params"], strict=True))
    return found


def owes(saved: State) -> bool:
    """Return True if a rank's saved state has nonzero errors."""
    return any(
        bool(error.any())
        for server in saved["compression"]["servers"]
        for error in (server["server_error"], *_worker_errors(saved, server))
    )


def check_whole(op: str, saved: State) -> None:
    """Raise ValueError for a state with errors but no `compression`, which torch's tools drop."""
    owing = [
        index
        for index, state in saved["state"].items()
        if "worker_error" in state and bool(state["worker_error"].any())
    ]
    if owing and "compression" not in saved:
        raise ValueError(
            f"{op}: expected a state that owes something to hold `compression`, got one without "
            f"it that owes for parameter {owing[0]}; call flush before saving, or take "
            "`worker_error` out of it to give up what is owed"
        )


def is_between(saved: State) -> bool:
    """Return True if a state was saved while parameters differed between ranks."""
    return any(state.get("apart", False) for state in saved["state"].values())


def check_synchronised(op: str, saved: State, remedy: str = "") -> None:
    """Raise ValueError for a state that was saved between two synchronisations."""
    if is_between(saved):
        raise ValueError(
            f"{op}: expected states of synchronised ranks, got some from between two "
            f"synchronisations; call flush before saving{remedy}"
        )


def owed_by(saved: State) -> dict[int, Tensor]:
    """Return the errors in a rank's saved state, by number of the parameter."""
    found: dict[int, Tensor] = {}
    block = saved["compression"]["block"]
    for server in saved["compression"]["servers"]:
        workers = _worker_errors(saved, server)
        packing = BlockPacking([error.shape for error in workers], block)
        flat_N = workers[0].new_zeros(packing.numel)
        shard = shard_numel(packing.numel, server["world_size"], block)
        add_at(flat_N, server["server_error"], server["rank"] * shard)
        pieces = zip(server["parameters"], workers, packing.pieces(flat_N), strict=True)
        found.update((index, error + piece) for index, error, piece in pieces)
    return found


def _worker_errors(saved: State, server: State) -> list[Tensor]:
    return [saved["state"][index]["worker_error"] for index in server["parameters"]]


def check_order(op: str, states: Sequence[State]) -> None:
    """Raise ValueError unless the states are those of all ranks, each once, in order."""
    for place, state in enumerate(states):
        group_of = {
            number: index
            for index, group in enumerate(state["param_groups"])
            for number in group["params"]
        }
        for server in state["compression"]["servers"]:
            members = _members(state, group_of[server["parameters"][0]], len(states))
            rank = members[server["rank"]] if server["world_size"] == len(members) else None
            if rank != place:
                raise ValueError(
                    f"{op}: expected state {place} of {len(states)} to be that of rank {place} of "
                    f"{len(states)}, got rank {server['rank']} of {server['world_size']}"
                )


def _members(state: State, index: int, num_ranks: int) -> Sequence[int]:
    """Return the ranks that held copies of a parameter group when a state was saved."""
    known = state["compression"].get("members")
    return range(num_ranks) if known is None or index >= len(known) else known[index]


def holders(
    op: str, states: Sequence[State], members: Sequence[Sequence[int]], num_ranks: int
) -> list[list[int]]:
    """Find, for each parameter group of this rank, the old ranks that held its parameters.

    Args:
        op: name of the optimizer, for error messages.
        states: states of the old ranks, in their order.
        members: for each parameter group, the new ranks that hold copies, with this rank.
        num_ranks: number of ranks of the new run.

    Raises:
        ValueError: experts were divided over another number of ranks, or in a way from which the
            experts of a rank are not known.
    """
    found = []
    for index, mine in enumerate(members):
        own, held = _part(mine, num_ranks), []
        for rank, state in enumerate(states):
            theirs = _members(state, index, len(states))
            part = _part(theirs, len(states))
            if own is None or part is None or own[1] != part[1]:
                raise ValueError(
                    f"{op}: expected parameter group {index} to be divided over as many ranks as "
                    "before, in groups of neighbours or at equal distances, got ranks "
                    f"{list(mine)} of {num_ranks}, and before {list(theirs)} of {len(states)}; "
                    "call flush before experts are divided otherwise"
                )
            if part[0] == own[0]:
                held.append(rank)
        found.append(held)
    return found


def _part(members: Sequence[int], num_ranks: int) -> tuple[int, int] | None:
    """Return (index, number of groups) if all ranks are divided into groups like this one.

    Groups hold neighbouring ranks, or ranks at equal distances. Return None for any other group.
    """
    size, first = len(members), members[0]
    if num_ranks % size:
        return None
    parts = num_ranks // size
    if list(members) == list(range(first, num_ranks, parts)):
        return first, parts
    if list(members) == list(range(first, first + size)) and first % size == 0:
        return first // size, parts
    return None


def shared_state(states: Sequence[State], held_by: Sequence[Sequence[int]]) -> State:
    """Merge states without errors, taking each parameter group from a rank that held it."""
    rows = {
        number: states[held[0]]["state"][number]
        for group, held in zip(states[0]["param_groups"], held_by, strict=True)
        for number in group["params"]
        if number in states[held[0]]["state"]
    }
    return {**states[0], "state": rows}
