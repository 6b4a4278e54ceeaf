"""Trials of other libraries' kernels: results are compared with ours before a kernel is used."""

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
    """Return a text about the first mistake in the results of a library; empty if there is none.

    Args:
        run: function that computes the results.
        exact: results of our own kernels.
        names: names of the results, for the text.
        most: largest relative error that is not a mistake.
        of: words that follow the name of a result in the text.
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
