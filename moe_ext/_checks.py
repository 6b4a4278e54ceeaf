"""Checks of arguments that all packages share."""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, NoReturn

from torch import Tensor


def check_choice(owner: str, name: str, value: object, allowed: Collection[object]) -> None:
    """Raise a ValueError unless the value is one of those that are allowed."""
    if value not in allowed:
        raise ValueError(f"{owner}: expected {name} to be one of {tuple(allowed)}, got {value!r}")


def check_rule(owner: str, name: str, value: object, rule: str, fits: bool) -> None:
    """Raise a ValueError with a rule, such as "at least 1", unless the value fits."""
    if not fits:
        raise ValueError(f"{owner}: expected {name} to be {rule}, got {value!r}")


def check_kind(owner: str, name: str, value: object, *kinds: type, required: bool = False) -> None:
    """Raise a TypeError unless the value is of one of the classes, or None and not required.

    True and False do not count as numbers, although `bool` is a subclass of `int`.
    """
    truth = isinstance(value, bool) and bool not in kinds
    if (value is not None or required) and (truth or not isinstance(value, kinds)):
        words = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{owner}: expected {name} to be of type {words}, got {value!r:.200}")


def refuse_copy(owner: str) -> NoReturn:
    """Raise a TypeError: a copy or a pickle of the object would lack its group or hooks."""
    raise TypeError(
        f"{owner}: expected its state_dict() to be copied or pickled, got the object itself; make "
        "one anew and let it load_state_dict"
    )


def check_callable(owner: str, name: str, value: object) -> None:
    """Raise a TypeError unless the value is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{owner}: expected {name} to be callable, got {value!r}")


def check_integer(owner: str, name: str, value: int) -> None:
    """Raise a TypeError unless the value is an integer.

    A bool and a tensor of one integer are refused, although `operator.index` accepts them.
    """
    try:
        if isinstance(value, (bool, Tensor)):
            raise TypeError
        operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: expected {name} to be an integer, got {value!r}") from None


def check_real(owner: str, name: str, value: float) -> None:
    """Raise a TypeError unless the value is a number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{owner}: expected {name} to be a number, got {value!r}")


def check_numbers(
    owner: str,
    annotations: Mapping[str, Any],
    values: Mapping[str, Any],
    may_be_zero: Collection[str] = (),
) -> None:
    """Refuse values of another type for arguments that are annotated as int, float or bool.

    Bounds are left to the class, except for ints whose only bound is that they are at least 0. A
    float must not be NaN. A tensor without dimensions counts as a float, and a tensor of one
    element as a "float | Tensor". A bool may be anything but a text, since "False" would be true.

    Args:
        owner: class that the error names.
        annotations: annotations of its constructor or of its fields, as texts.
        values: values of the arguments by name. Other names are ignored, so that `locals()` or
            `vars(self)` may be passed.
        may_be_zero: names of ints that must be at least 0.

    Raises:
        TypeError: a value is of another type.
        ValueError: an int of ``may_be_zero`` is negative, or a float is NaN.
    """
    for name, annotation in annotations.items():
        kind, _, other = str(annotation).partition(" | ")
        if kind not in ("int", "float", "bool") or other not in ("", "None", "Tensor"):
            continue
        value = values[name]
        if value is None and other == "None":
            continue
        if kind == "int":
            check_integer(owner, name, value)
            if value < 0 and name in may_be_zero:
                raise ValueError(f"{owner}: expected {name} to be at least 0, got {value}")
        elif kind == "bool":
            if isinstance(value, str):
                raise TypeError(f"{owner}: expected {name} to be True or False, got {value!r}")
        elif not isinstance(value, numbers.Real) and not (
            isinstance(value, Tensor)
            and (value.numel() == 1 if other == "Tensor" else value.dim() == 0)
        ):
            raise TypeError(f"{owner}: expected {name} to be a number, got {value!r}")
        elif value != value:
            raise ValueError(f"{owner}: expected {name} to be a number, got {value!r}")


def check_numbers_of_fields(spec: Any, may_be_zero: Collection[str] = ()) -> None:
    """Call `check_numbers` for the fields of a dataclass, those of its bases included."""
    annotations = {each.name: each.type for each in fields(spec)}
    values = {name: getattr(spec, name) for name in annotations}
    check_numbers(type(spec).__name__, annotations, values, may_be_zero)


def check_sizes(owner: str, **sizes: int) -> None:
    """Refuse sizes that are not integers in `[1, 2^31)`."""
    for name, size in sizes.items():
        check_integer(owner, name, size)
        if size < 1:
            raise ValueError(f"{owner}: expected {name} to be at least 1, got {size}")
        if size >= 2**31:
            raise ValueError(f"{owner}: expected {name} to be below 2**31, got {size}")


def check_fields(spec: Any, *, may_be_zero: Collection[str] = (), below: int = 2**31) -> None:
    """Raise a ValueError unless each field of a dataclass has a value that fits its annotation.

    An int must be whole and at least 1, a float finite and above 0, and neither may be a bool. The
    same rules hold for elements of a ``tuple[int, ...]`` and values of a ``Mapping[str, float]``.
    Fields of other annotations are left to their class. Numbers of NumPy become those of Python,
    which JSON can hold.

    Args:
        spec: instance of a dataclass whose annotations are texts.
        may_be_zero: fields whose numbers may also be 0.
        below: whole numbers must be below this.
    """
    owner = type(spec).__name__
    for each in fields(spec):
        value, zero = getattr(spec, each.name), each.name in may_be_zero
        annotation = str(each.type)
        kind, is_optional = annotation.removesuffix(" | None"), annotation.endswith(" | None")
        if value is None and is_optional:
            continue
        found: object = value
        if kind == "tuple[int, ...]" and isinstance(value, tuple):
            found = tuple(
                _number(owner, f"{each.name}[{i}]", element, "int", zero, below)
                for i, element in enumerate(value)
            )
        elif kind == "Mapping[str, float]" and isinstance(value, Mapping):
            found = {
                name: _number(owner, f"{each.name}[{name!r}]", element, "float", zero, below)
                for name, element in value.items()
            }
        elif kind in ("int", "float"):
            found = _number(owner, each.name, value, kind, zero, below)
        elif kind in _KINDS and not isinstance(value, _KINDS[kind]):
            raise ValueError(f"{owner}: expected {each.name} to be {kind}, got {value!r:.80}")
        # `object.__setattr__` also sets a field of a frozen dataclass.
        object.__setattr__(spec, each.name, found)


_KINDS: dict[str, type] = {
    "bool": bool,
    "str": str,
    "tuple[int, ...]": tuple,
    "Mapping[str, float]": Mapping,
}


def _number(owner: str, name: str, value: Any, kind: str, zero: bool, below: int) -> int | float:
    wanted: type = numbers.Integral if kind == "int" else numbers.Real
    rule = None
    if not isinstance(value, wanted) or isinstance(value, bool):
        rule = "a whole number" if kind == "int" else "a number"
    elif not abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        rule = "finite"
    elif value < 0 or (not value and not zero):  # type: ignore[operator]
        least = "at least 1" if kind == "int" else "above 0"
        rule = "at least 0" if zero else least
    elif kind == "int" and value >= below:  # type: ignore[operator]
        rule = f"below {below}"
    if rule is not None:
        raise ValueError(f"{owner}: expected {name} to be {rule}, got {value!r:.80}")
    if kind == "int":
        return int(value)
    # Tensors compare with no larger whole numbers.
    return value if isinstance(value, int) and value < 2**63 else float(value)
