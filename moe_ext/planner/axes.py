"""Axes of a placement, their values, and many placements as columns, one tensor per axis.

With columns, one formula costs a single placement or a million. Shapes: C candidates.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moe_ext._checks import check_choice, check_rule
from moe_ext.dispatch.wire import LOSSLESS
from moe_ext.planner.presets import LayerParts

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved")
DISPATCHERS = ("alltoall", "dedup", "hierarchical", "allgather")
WIRES = (None, "int8", "fp8", "mx", LOSSLESS)
# Formats of keys and values on their way round a ring.
KV_WIRES = tuple(wire for wire in WIRES if wire != LOSSLESS)
COMBINES = ("exact", "reduced")
BALANCES = ("none", "exact")
SCHEMES = ("ring", "ulysses")
OFFLOADS = ("none", "host")
# Codecs of gradients: those that round, and all values of the axis.
ROUNDED = ("bf16", "fp8", "int8", "int4")
GRADIENTS = ("none", LOSSLESS, *ROUNDED)
# Stages per rank with the schedule "interleaved".
CHUNKS = 2

Columns = dict[str, Tensor]
Choice = dict[str, "int | str | None"]
# Columns that describe a stage: numbers of its layers with each part (`LayerParts`), and of its
# recomputed layers with each part. "ends" counts embedding and output matrices, "in_flight" held
# micro-batches. "late" counts micro-batches that lack only gradients of weights, and "loss" is 1
# for the stage with the loss.
PARTS = LayerParts._fields
AGAIN = tuple(f"again_{name}" for name in PARTS)
STAGE = (*PARTS, *AGAIN, "ends", "in_flight", "late", "loss")

# All axes, with values that stand for the absence of the option.
DEFAULTS: Mapping[str, int | str | None] = {
    "pp": 1,
    "tp": 1,
    "cp": 1,
    "ep": 1,
    "etp": 1,
    "micro_batch": 1,
    "schedule": "1f1b",
    "turns": 0,
    "zero": 0,
    "recompute": 0,
    "offload": "none",
    "dispatcher": "alltoall",
    "wire": None,
    "combine": "exact",
    "balance": "none",
    "scheme": "ring",
    "gradients": "none",
    "kv_wire": None,
}
AXES = tuple(DEFAULTS)
# Axes that the first versions of plan files lacked. Such files get the defaults.
YOUNGER = ("etp", "turns", "offload", "balance", "scheme", "gradients", "kv_wire")
MESH = ("pp", "tp", "cp", "ep", "etp", "micro_batch")
# Axes with named values. A column holds the position of the value in this tuple.
NAMES: Mapping[str, tuple[str | None, ...]] = {
    "schedule": SCHEDULES,
    "offload": OFFLOADS,
    "dispatcher": DISPATCHERS,
    "wire": WIRES,
    "combine": COMBINES,
    "balance": BALANCES,
    "scheme": SCHEMES,
    "gradients": GRADIENTS,
    "kv_wire": KV_WIRES,
}
# Axes that only take these numbers.
_FEW: Mapping[str, tuple[int, ...]] = {"turns": (0, 1), "zero": (0, 1, 2, 3), "recompute": (0, 1)}


def choice_of(columns: Columns, i: int) -> Choice:
    """Return the values of candidate `i` by axis, as names where an axis has names."""
    found: Choice = {}
    for name in AXES:
        value = int(columns[name][i])
        found[name] = NAMES[name][value] if name in NAMES else value
    return found


def columns_of(choices: Sequence[Mapping[str, int | str | None]]) -> Columns:
    """Make columns of candidates; axes that a choice lacks get their default.

    Raises:
        ValueError: there is no such axis, or an axis has no such value.
    """
    for name in {name for choice in choices for name in choice}:
        _check_axis(name)
    rows = [{**DEFAULTS, **choice} for choice in choices]
    return {name: torch.tensor([number_of(name, row[name]) for row in rows]) for name in AXES}


def masked(c: Columns, mask: Tensor) -> Columns:
    """Return the candidates for which a mask is True."""
    # Indexing by the mask itself would scan the mask again for each column.
    index = mask.nonzero().view(-1)
    return {name: column[index] for name, column in c.items()}


def one_of(c: Columns, i: int) -> Columns:
    """Return the columns of candidate `i` alone."""
    return {name: column[i : i + 1] for name, column in c.items()}


def runs(c: Columns, schedule: str) -> Tensor:
    """Return True for candidates with this schedule."""
    return c["schedule"] == SCHEDULES.index(schedule)


def _check_axis(name: str) -> None:
    if name not in AXES:
        raise ValueError(f"plan: expected fixed to name axes of {AXES}, got {name!r}")


def number_of(name: str, value: int | str | None) -> int:
    """Return the number that stands for a value in columns."""
    _check_axis(name)
    if name in NAMES:
        check_choice("plan", name, value, NAMES[name])
        return NAMES[name].index(value)
    least = 1 if name in MESH else 0
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"plan: expected {name} to be a whole number of at least {least}, got {value!r}"
        )
    if name in _FEW:
        check_choice("plan", name, value, _FEW[name])
    check_rule("plan", name, value, f"below {2**31}", value < 2**31)
    return int(value)


def present(column: Tensor) -> list[int]:
    """Return the values that occur in a column of small numbers, ascending."""
    return torch.bincount(column).nonzero().view(-1).tolist()


def by_values(
    columns: Sequence[Tensor],
    row: Callable[..., Sequence[float]],
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute numbers `[C, N]` for candidates, by a function of their values in some columns.

    Args:
        columns: columns of small numbers.
        row: function of one value per column, called once for each combination that occurs.
        dtype: dtype to which the numbers are rounded; the result is float64.
    """
    sizes = [int(column.max()) + 1 for column in columns]
    key = torch.zeros_like(columns[0])
    for column, size in zip(columns, sizes, strict=True):
        key = key * size + column
    found = present(key)
    rows = torch.tensor([row(*_digits(each, sizes)) for each in found], dtype=dtype)
    table = torch.zeros(found[-1] + 1, rows.shape[1], dtype=torch.float64)
    table[found] = rows.double()
    return table[key]


def _digits(key: int, sizes: Sequence[int]) -> list[int]:
    """Split a key of `by_values` into the values of the columns, each below its size."""
    digits = []
    for size in reversed(sizes):
        key, digit = divmod(key, size)
        digits.append(digit)
    return digits[::-1]


def total(terms: Columns) -> Tensor:
    """Return the sum of all columns, added in their order."""
    found = sum(terms.values())
    assert isinstance(found, Tensor)
    return found


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*low, *(number // i for i in low)})
