"""The only file of the layers that asks autograd's private state."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether this thread runs a backward pass: a forward pass inside one is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
