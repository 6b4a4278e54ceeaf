"""A side stream for what travels between ranks, so that kernels of the caller run beside it.

The collectives of a device without streams have ended when they return: there all of this is a call
in line.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is queued on streams."""
    return device.type == "cuda"


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one side stream of a device, made at its first use."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


def run_beside(work: Callable[[], None], *tensors: Tensor) -> None:
    """Queue work on the side stream, behind all that the current stream holds by now.

    Args:
        work: what to queue.
        tensors: all that it reads or writes, on one device. Nothing else may touch what it writes
            before `join`.
    """
    device = tensors[0].device
    if not has_streams(device):
        work()
        return
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    for tensor in tensors:
        # Else the allocator would give freed memory to the current stream while it is in use here.
        tensor.record_stream(side)


def join(device: torch.device) -> None:
    """Let the current stream wait for the side stream; the host goes on."""
    if has_streams(device):
        torch.cuda.current_stream(device).wait_stream(side_stream(device))
