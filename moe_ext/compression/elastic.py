"""Residuals of one number of ranks for another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_ext.compression.feedback import ELEMENTWISE, by_name


def merged_for(
    states: Sequence[Mapping[str, Any]],
    rank: int,
    world_size: int,
    expert_parallel: Mapping[str, tuple[int, int]],
    average: bool,
) -> dict[str, Any]:
    r"""The state of one of P' ranks, from those of P ranks.

    Rank j takes over :math:`e'_j = s \sum_r e_r` over the r with r mod P' = j. Steps apply the mean
    over ranks: with :math:`s = P' / P` the parameters are owed what they were,
    :math:`\frac{1}{P'} \sum e' = \frac{1}{P} \sum e`. Where it is the sum, s = 1. The replicas of
    an expert all take over its mean.

    Args:
        states: what `CompressionState.state_dict` returned on every rank, in any order.
        rank: j.
        world_size: P'.
        expert_parallel: of the model that loads: name to (rank, size) of the expert-parallel group;
            those parameters are different ones on its ranks.
        average: whether the state that loads takes the mean, which must be what was saved.

    Raises:
        ValueError: states are missing or do not belong together, or expert-parallel groups have
            another size than they had.
    """
    states = sorted(states, key=lambda state: state["rank"])
    _check(states, expert_parallel, average)
    size = len(states)
    if size == world_size:
        return dict(states[rank])
    memory: dict[str, Any] = {kind: {} for kind in ELEMENTWISE}
    for state in states:
        for name, kinds in by_name(state["memory"]).items():
            scale = world_size / size if average else 1.0
            if name in expert_parallel:
                ep_rank, ep_size = expert_parallel[name]
                if state["expert_parallel"].get(name, (0, 1))[0] != ep_rank:
                    continue
                # All replicas of an expert take over the same.
                scale = ep_size / (size if average else world_size)
            elif state["rank"] % world_size != rank:
                # Ranks that are owed nothing hold zeros: all hold tensors of the same names.
                scale = 0.0
            for kind, tensor in kinds.items():
                scaled = tensor * scale if scale else torch.zeros_like(tensor)
                known = memory[kind].get(name)
                memory[kind][name] = scaled if known is None else known + scaled
    memory["layouts"], memory["marks"] = [], states[0]["memory"]["marks"]
    return {**states[0], "rank": rank, "world_size": world_size, "memory": memory}


def check_single(state: Mapping[str, Any], rank: int, world_size: int, average: bool) -> None:
    """ValueError unless a state is that of this rank of as many ranks."""
    prefix = "CompressionState.load_state_dict: expected"
    _check_kind(state, average)
    found = (state["rank"], state["world_size"])
    if (rank, world_size) != found:
        raise ValueError(
            f"{prefix} the state of rank {rank} of {world_size}, got that of rank {found[0]} of "
            f"{found[1]}; give the list of the states of all ranks to resume on another number of "
            "them"
        )


def _check_kind(state: Mapping[str, Any], average: bool) -> None:
    prefix = "CompressionState.load_state_dict: expected"
    if state.get("version") != 1:
        raise ValueError(f"{prefix} a state of version 1, got {state.get('version')}")
    if state["average"] != average:
        raise ValueError(
            f"{prefix} a state of average={average}, got one of average={state['average']}: what a "
            "residual makes of a parameter is not the same with both; flush before the change"
        )


def _check(
    states: Sequence[Mapping[str, Any]],
    expert_parallel: Mapping[str, tuple[int, int]],
    average: bool,
) -> None:
    prefix = "CompressionState.load_state_dict: expected"
    if not states:
        raise ValueError(f"{prefix} the states of all ranks, got none")
    for state in states:
        _check_kind(state, average)
    size = states[0]["world_size"]
    ranks = [state["rank"] for state in states]
    if ranks != list(range(size)) or any(state["world_size"] != size for state in states):
        raise ValueError(f"{prefix} the states of ranks 0 to {size - 1}, each once, got {ranks}")
    steps = [state["step"] for state in states]
    if len(set(steps)) > 1:
        raise ValueError(f"{prefix} states of one step, got those of steps {steps}")
    for state in states:
        for name in {**expert_parallel, **state["expert_parallel"]}:
            ep_size = expert_parallel.get(name, (0, 1))[1]
            held = state["expert_parallel"].get(name, (0, 1))[1]
            if held != ep_size:
                raise ValueError(
                    f"{prefix} expert-parallel groups of {ep_size} ranks, got {held} for {name}; "
                    "flush before the experts are divided otherwise"
                )
