"""Side streams for what travels between ranks, so that kernels of the caller run beside it.

The collectives of a device without streams have ended when they return: there all of this is a call
in line.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_side_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def has_streams(device: torch.device) -> bool:
    """True if work on the device is queued on streams."""
    return device.type == "cuda"


def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The side stream of a device for one purpose, made at its first use."""
    if (device, purpose) not in _side_streams:
        _side_streams[device, purpose] = torch.cuda.Stream(device)
    return _side_streams[device, purpose]


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph records what the current stream of the device is given."""
    return has_streams(device) and torch.cuda.is_current_stream_capturing()


class HostCopy:
    """A tensor of integers on its way to the host, which does not wait for it.

    Args:
        source: `[N, M]`; of a device without streams it is kept as it is.
    """

    def __init__(self, source: Tensor) -> None:
        self._host, self._event = source, None
        if has_streams(source.device):
            self._host = torch.empty(
                source.shape, dtype=source.dtype, device="cpu", pin_memory=True
            )
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.current_stream(source.device).record_event()

    def is_there(self) -> bool:
        """True once `rows` returns without a wait."""
        return self._event is None or bool(self._event.query())

    def rows(self) -> list[list[int]]:
        """The numbers. NOTE: device-to-host sync, for what the device was given before alone."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class Beside:
    """Work on a side stream, and what it reads and writes, which lives until others wait for it.

    Args:
        side: the stream; None for work that has ended.
        main: that of the caller, which the memory goes back to.
        held: what has the memory that the work reads or writes.
    """

    # NOTE: A reference in the place of `record_stream`, which would keep freed memory from the next
    # tensors until the host asks again whether the side stream has come by.

    def __init__(
        self,
        side: torch.cuda.Stream | None = None,
        main: torch.cuda.Stream | None = None,
        held: tuple[object, ...] = (),
    ) -> None:
        self._main, self._held = main, held
        self._event = None if side is None else side.record_event()

    def join(self) -> None:
        """Let the current stream wait for this work alone; the host goes on."""
        event, held = self._event, self._held
        self._event, self._held = None, ()
        if event is not None:
            assert self._main is not None
            for stream in {self._main, torch.cuda.current_stream(self._main.device)}:
                stream.wait_event(event)
        del held  # behind the waits

    def __del__(self) -> None:
        """Wait for what nobody asked for, after an error: its memory goes to the next tensors."""
        self.join()


def run_beside(
    work: Callable[[], None], *tensors: Tensor, purpose: str, held: tuple[object, ...] = ()
) -> Beside:
    """Queue work on a side stream, behind all that the current stream holds by now.

    Args:
        work: what to queue.
        tensors: what it reads or writes, on one device. Nothing else may touch what it writes
            before `join`.
        purpose: work of one purpose runs in order, and beside that of others.
        held: what has other memory that the work reads, such as nodes of autograd.

    Returns:
        Work to join before the result is used.
    """
    device = tensors[0].device
    if not has_streams(device):
        work()
        return Beside()
    side, main = side_stream(device, purpose), torch.cuda.current_stream(device)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            work()
    except BaseException:
        # Its queued kernels go on with the tensors.
        Beside(side, main, (*tensors, *held)).join()
        raise
    return Beside(side, main, (*tensors, *held))
