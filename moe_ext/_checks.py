"""Checks of arguments that all packages share."""

from __future__ import annotations

import operator
from collections.abc import Collection


def check_choice(owner: str, name: str, value: object, allowed: Collection[object]) -> None:
    """ValueError unless the value is one of those that are allowed."""
    if value not in allowed:
        raise ValueError(f"{owner}: expected {name} to be one of {tuple(allowed)}, got {value!r}")


def check_kind(owner: str, name: str, value: object, *kinds: type) -> None:
    """TypeError unless the value is None or of one of the classes."""
    if value is not None and not isinstance(value, kinds):
        words = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{owner}: expected {name} to be of type {words}, got {value!r}")


def check_callable(owner: str, name: str, value: object) -> None:
    """TypeError unless the value is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{owner}: expected {name} to be callable, got {value!r}")


def check_integer(owner: str, name: str, value: int) -> None:
    """Refuse what cannot count."""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: expected {name} to be an integer, got {value!r}") from None


def check_sizes(owner: str, **sizes: int) -> None:
    """Refuse sizes that are no integers in `[1, 2^31)`."""
    for name, size in sizes.items():
        check_integer(owner, name, size)
        if size < 1:
            raise ValueError(f"{owner}: expected {name} to be at least 1, got {size}")
        if size >= 2**31:
            raise ValueError(f"{owner}: expected {name} to be below 2**31, got {size}")
