"""Loads of experts for which a plan is made, by name, by numbers or from a file.

Shapes: S steps, E experts, K top-k.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ext._checks import check_rule

# The workloads of NVIDIA/Megatron-LM pull request 7488.
LOADS = (
    "W0_balanced",
    "W1_hot_expert_set",
    "W2_hot_rank",
    "W3_spread_hot_experts",
    "W4_source_ragged",
    "W5_zero_expert_rank",
    "W6_rotating_hotspot",
    "W7_burst",
)
# Steps of a named load. Bursts come every fourth step, and rotating hot spots return to their first
# place after at most twelve steps.
_STEPS = 12

Load = float | tuple[float, ...] | tuple[tuple[float, ...], ...]


def pool_of(load: str, step: int, token: int, num_experts: int, top_k: int) -> list[int]:
    """Return the experts from which those of a token are drawn, all equally likely.

    Args:
        load: one of `LOADS`.
        step: number of the step.
        token: place of the token in the batch.
        num_experts: E, experts of a layer.
        top_k: K, at most half of E.
    """
    everyone = list(range(num_experts))
    hot = max(top_k, num_experts // 4)
    if load == "W5_zero_expert_rank":
        return everyone[num_experts // 2 :]
    if load == "W7_burst":
        return everyone[:hot] if step % 4 == 3 and token % 2 == 0 else everyone
    if load in ("W0_balanced", "W4_source_ragged") or token % 4 == 0:
        return everyone
    if load == "W3_spread_hot_experts":
        return everyone[::2]
    first = step // 3 * hot if load == "W6_rotating_hotspot" else 0
    return [(first + i) % num_experts for i in range(hot)]


def _expected(load: str, num_experts: int, top_k: int) -> tuple[tuple[float, ...], ...]:
    steps = []
    for step in range(_STEPS):
        counts = [0.0] * num_experts
        for token in range(4):
            pool = pool_of(load, step, token, num_experts, top_k)
            for expert in pool:
                counts[expert] += top_k / len(pool)
        steps.append(tuple(counts))
    return tuple(steps)


def load_of(
    load: float | str | Path | Sequence[float] | Sequence[Sequence[float]],
    *,
    num_experts: int,
    top_k: int,
) -> Load:
    """Convert a load to the form of `Job.load`.

    Args:
        load: s of Zipf's law; tokens of each expert, of one step or of many; a name of `LOADS`, or
            "W3" for short, for the average tokens that it sends to each expert in each of twelve
            steps; or a file with a JSON list of tokens of each expert.
        num_experts: E, experts of a layer.
        top_k: K, experts of a token.

    Raises:
        ValueError: there is no such name or file, or the file holds something else.
    """
    if isinstance(load, (str, Path)):
        name = next((n for n in LOADS if str(load) in (n, n.partition("_")[0])), None)
        if name is not None:
            rule = f"above 0 with load={name!r}"
            check_rule("plan", "num_experts", num_experts, rule, num_experts > 0)
            rule = f"at most half of the {num_experts} experts with load={name!r}"
            check_rule("plan", "top_k", top_k, rule, 2 * top_k <= num_experts)
            return _expected(name, num_experts, top_k)
        if not Path(load).is_file():
            raise ValueError(
                f"plan: expected load to be a file, a number, tokens of experts or one of {LOADS}, "
                f"got {str(load)!r}"
            )
        try:
            held = json.loads(Path(load).read_text())
        except ValueError as error:
            raise ValueError(f"plan: expected {load} to hold JSON: {error}") from None
        if not isinstance(held, list):
            raise ValueError(f"plan: expected {load} to hold a list of numbers, got {held!r:.80}")
        load = held
    # Tensors and arrays have `tolist`.
    counts: Any = load.tolist() if hasattr(load, "tolist") else load
    if isinstance(counts, numbers.Real):
        return float(counts)
    try:
        if isinstance(counts, Mapping):
            raise TypeError
        if counts and isinstance(counts[0], numbers.Real):
            return _tokens(counts)
        return tuple(map(_tokens, counts))
    except (TypeError, ValueError):
        raise ValueError(
            "plan: expected load to hold numbers of tokens, of one step or of many, got "
            f"{load!r:.80}"
        ) from None


def _tokens(step: Any) -> tuple[float, ...]:
    """Convert the tokens of a step; raise TypeError for text and mappings, which also iterate."""
    if isinstance(step, (str, Mapping)):
        raise TypeError
    return tuple(float(count) for count in step)


def counts_of(load: tuple[float, ...] | tuple[tuple[float, ...], ...]) -> Tensor:
    """Return the tokens `[S, E]` of each step and expert.

    Raises:
        ValueError: steps of unlike lengths, a negative number, or a step without tokens.
    """
    many = [step for step in load if isinstance(step, tuple)]
    one = tuple(count for count in load if not isinstance(count, tuple))
    steps, problem = many or [one], None
    if len({len(step) for step in steps}) != 1 or (many and one):
        problem = "steps of unlike lengths"
    elif not all(0 <= count < math.inf for step in steps for count in step):
        problem = "a number that is negative or not finite"
    elif not all(sum(step) > 0 for step in steps):
        problem = "a step without tokens"
    if problem is not None:
        raise ValueError(f"Job: expected load to hold tokens of each expert, got {problem}")
    return torch.tensor(steps, dtype=torch.float64)
