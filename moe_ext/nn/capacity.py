"""How many rows an expert takes, and what becomes of the others.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction

import torch

DROP_POLICIES = ("position", "score", "random", "batch_prioritized", "choice")
OVERFLOWS = ("drop", "reroute")
BUDGET_OVERFLOWS = ("rounds", "drop")


@dataclass(frozen=True)
class Capacity:
    """Limit on the rows that an expert takes: `ceil(factor * T' * K / E)` from each group of T'.

    Attributes:
        factor: positive; 1.0 has room for an even load and no more.
        minimum: rows that an expert takes at least, from each group.
        groups: number of groups that the T tokens of a rank are cut into, `T' = ceil(T / groups)`
            consecutive ones each; an expert takes its capacity from every group.
        drop: which slots of an overfull expert go. "position": those of the last tokens; "choice":
            slots are served choice by choice, every token's first before any second, and by
            position within a choice (GShard); "batch_prioritized": as "choice", tokens in the order
            of their largest weight (V-MoE); "score": the slots of the smallest weights; "random":
            slots drawn anew at each step, by `set_routing_step` (by position in eval mode).
        overflow: "drop" leaves such a slot without an expert; "reroute" sends it to the token's
            next best expert that has room, and drops it where there is none.
        pad: give every expert exactly its capacity of rows, zero rows behind the tokens, for
            experts that want equal shapes.
        eval_factor: factor in eval mode; None keeps `factor`.
        seed: of the "random" policy, where the router draws no random numbers of its own.

    Raises:
        ValueError: a value is out of its range.
    """

    factor: float
    _: KW_ONLY
    minimum: int = 1
    groups: int = 1
    drop: str = "position"
    overflow: str = "drop"
    pad: bool = False
    eval_factor: float | None = None
    seed: int = 0
    _ratios: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what is not allowed."""
        for name in ("factor", "eval_factor"):
            value = getattr(self, name)
            if not (name == "eval_factor" and value is None) and not 0 < value < math.inf:
                raise ValueError(f"Capacity: expected {name} to be positive, got {value}")
        for name in ("minimum", "groups"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Capacity: expected {name} to be at least 1, got {getattr(self, name)}"
                )
        for name, known in (("drop", DROP_POLICIES), ("overflow", OVERFLOWS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"Capacity: expected {name} to be one of {known}, got {getattr(self, name)!r}"
                )

        # In eval mode and in training. Whole numbers: exact, and symbolic where T is.
        factors = (self.factor if self.eval_factor is None else self.eval_factor, self.factor)
        ratios = [Fraction(factor).limit_denominator(1 << 20) for factor in factors]
        object.__setattr__(self, "_ratios", tuple(r.as_integer_ratio() for r in ratios))

    def rows_per_group(
        self, num_tokens: int, top_k: int, num_experts: int, *, training: bool = True
    ) -> int:
        """Rows that an expert takes from each group of tokens."""
        numerator, denominator = self._ratios[training]
        group_tokens = -(-num_tokens // self.groups)
        rows = -(-group_tokens * top_k * numerator // (denominator * num_experts))
        return torch.sym_max(rows, self.minimum)


@dataclass(frozen=True)
class RowBudget:
    """Limit on the rows that a rank holds at once, however the router spreads the tokens.

    Attributes:
        rows: rows that a rank runs through its experts at once, alignment padding included. In an
            expert-parallel layer it is also the most that a rank sends or receives at once.
        overflow: "rounds" runs the rows beyond the budget in further rounds, with the exact result;
            "drop" leaves them out and counts them in `num_dropped`.

    Raises:
        ValueError: a value is out of its range.
    """

    rows: int
    _: KW_ONLY
    overflow: str = "rounds"

    def __post_init__(self) -> None:
        """Refuse what is not allowed."""
        if self.rows < 1:
            raise ValueError(f"RowBudget: expected rows to be at least 1, got {self.rows}")
        if self.overflow not in BUDGET_OVERFLOWS:
            raise ValueError(
                f"RowBudget: expected overflow to be one of {BUDGET_OVERFLOWS}, "
                f"got {self.overflow!r}"
            )
