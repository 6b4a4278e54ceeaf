"""What every optimizer does around its formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
