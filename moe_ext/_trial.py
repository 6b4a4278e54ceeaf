"""Trials of other libraries' kernels, whose results are compared with ours before they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def first_mistake(
    run: Callable[[], Sequence[Tensor]],
    exact: Sequence[Tensor],
    names: Sequence[str],
    most: float,
    *,
    of: str = "",
) -> str:
    """The first mistake in the results of a library, empty if there is none.

    Args:
        run: gives the results.
        exact: those of ours.
        names: of the results, for the text.
        most: relative error that is none.
        of: what the results are of, behind their names.
    """
    try:
        found = run()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    for name, a, b in zip(names, found, exact, strict=True):
        off = float((a.to(b.dtype) - b).norm() / b.norm())
        if not off <= most:
            return f"the {name}{of} is off by {100 * off:.0f} %"
    return ""
