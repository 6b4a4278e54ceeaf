"""The state of an optimizer, brought to its parameters by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def by_name(op: str, groups: Sequence[Mapping[str, Any]], saved: dict[str, Any]) -> dict[str, Any]:
    """A state with the numbers that its parameters have here; the same one where names lack.

    A state of torch's form counts parameters, and tells their names where the optimizer was given
    some: the order of the parameters may then be another one, and so may their groups.

    Args:
        op: for error messages.
        groups: the parameter groups of the optimizer that loads.
        saved: of torch's form.

    Raises:
        ValueError: the state is of parameters with other names.
    """
    counted, num_params = [], 0
    for group in groups:
        last = num_params + len(group["params"])
        counted.append({**group, "params": list(range(num_params, last))})
        num_params = last
    here, there = _numbers(counted), _numbers(saved["param_groups"])
    if here is None or there is None or here == there:
        return saved
    missing, strange = sorted(set(here) - set(there)), sorted(set(there) - set(here))
    if missing or strange:
        found = f"one without {missing[0]}" if missing else f"one with {strange[0]}"
        raise ValueError(
            f"{op}: expected a state of parameters with the names of these, got {found}"
        )
    if len(counted) != len(saved["param_groups"]):
        raise ValueError(
            f"{op}: expected a state of {len(counted)} parameter groups, got "
            f"{len(saved['param_groups'])}"
        )
    number = {there[name]: here[name] for name in here}
    renumbered = {
        **saved,
        "state": {number[index]: state for index, state in saved["state"].items()},
        "param_groups": [
            {**options, "params": group["params"], "param_names": list(group["param_names"])}
            for options, group in zip(saved["param_groups"], counted, strict=True)
        ],
    }
    if "compression" in saved:
        servers = [
            {**server, "parameters": [number[index] for index in server["parameters"]]}
            for server in saved["compression"]["servers"]
        ]
        renumbered["compression"] = {**saved["compression"], "servers": servers}
    return renumbered


def _numbers(groups: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Name to number; None where a group has no names."""
    found: dict[str, int] = {}
    for group in groups:
        if "param_names" not in group:
            return None
        found.update(zip(group["param_names"], group["params"], strict=True))
    return found
