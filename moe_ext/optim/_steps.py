"""What every optimizer does around its formula."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_ext.optim._shards import sharding_groups


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss, None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def advance(state: dict[str, Any], parameter: Tensor, buffers: Sequence[str]) -> int:
    """Count a step of one parameter, making its buffers of zeros at the first; the new count."""
    if "step" not in state:
        # On the host, as torch's optimizers keep it: reading it costs nothing.
        state["step"] = torch.zeros((), dtype=torch.float32)
    for name in buffers:
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    state["step"] += 1
    return int(state["step"])


@contextmanager
def unchanged_if_it_fails(
    states: defaultdict[Any, dict[str, Any]], parameters: Sequence[Tensor]
) -> Iterator[None]:
    """Put the states of parameters back where a message to other ranks fails.

    Only sharded parameters need any; a copy of their state is kept meanwhile.
    """
    kept = {}
    if any(sharding_groups(parameter) for parameter in parameters):
        kept = {
            parameter: {
                name: (value, value.clone()) for name, value in states.get(parameter, {}).items()
            }
            for parameter in parameters
        }
    try:
        yield
    except BaseException:
        for parameter, state in kept.items():
            states.pop(parameter, None)
            for name, (value, before) in state.items():
                states[parameter][name] = value.copy_(before)
        raise
