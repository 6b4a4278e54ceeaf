"""Decorators of `torch.compiler` without an import of `torch._dynamo`, which takes a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate like `torch.compiler.disable`: graphs break at a call of the function."""
    disabled: Callable[P, T] = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # A call of the disabled function costs as much as ten plain calls. If no frame is compiled,
        # the plain function does the same.
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate like `torch.compiler.assume_constant_result`: a graph holds the first result."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
