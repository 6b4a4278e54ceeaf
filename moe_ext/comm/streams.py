"""Side streams for messages between ranks, so that kernels of the caller run at the same time.

On a device without streams a collective has ended when it returns, and everything here runs inline.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_side_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def has_streams(device: torch.device) -> bool:
    """Return True if work on the device is queued on streams."""
    return device.type == "cuda"


def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return the side stream of a device for one purpose, which is made at the first call."""
    if (device, purpose) not in _side_streams:
        _side_streams[device, purpose] = torch.cuda.Stream(device)
    return _side_streams[device, purpose]


def is_capturing(device: torch.device) -> bool:
    """Return True while a CUDA graph captures the current stream of the device."""
    return has_streams(device) and torch.cuda.is_current_stream_capturing()


class HostCopy:
    """Asynchronous copy of an integer tensor to the host.

    Args:
        source: `[N, M]`. On a device without streams it is kept without a copy.
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
        """Return True if `rows` would return without waiting."""
        return self._event is None or bool(self._event.query())

    def rows(self) -> list[list[int]]:
        """Return the rows. NOTE: device-to-host sync, for work queued before the copy only."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class Beside:
    """Work on a side stream, with references to the memory that it uses until `join`.

    Args:
        side: the side stream; None for work that has ended.
        main: stream of the caller, which reuses the memory afterwards.
        held: objects that own the memory which the work reads or writes.
    """

    # NOTE: References are held instead of calling `record_stream`. After `record_stream` the
    # allocator cannot reuse freed memory before the host has polled the event of the side stream.

    def __init__(
        self,
        side: torch.cuda.Stream | None = None,
        main: torch.cuda.Stream | None = None,
        held: tuple[object, ...] = (),
    ) -> None:
        self._main, self._held = main, held
        self._event = None if side is None else side.record_event()

    def join(self) -> None:
        """Make the current stream wait for this work. The host does not wait."""
        event, held = self._event, self._held
        self._event, self._held = None, ()
        if event is not None:
            assert self._main is not None
            for stream in {self._main, torch.cuda.current_stream(self._main.device)}:
                stream.wait_event(event)
        # The references are dropped after the waits are queued: later users of the memory, on these
        # streams, then run after the side stream.
        del held

    def __del__(self) -> None:
        """Join work that nobody waited for, after an error, before its memory is reused."""
        self.join()


def run_beside(
    work: Callable[[], None], *tensors: Tensor, purpose: str, held: tuple[object, ...] = ()
) -> Beside:
    """Queue work on a side stream, after everything that is queued on the current stream.

    Args:
        work: function that queues the work.
        tensors: tensors that it reads or writes, on one device. Before `join`, no other work may
            touch the tensors that it writes.
        purpose: name of the side stream. Work of one purpose runs in order, and concurrently with
            work of other purposes.
        held: owners of other memory that the work reads, such as autograd nodes.

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
        # Kernels that `work` has queued before the error still use the tensors.
        Beside(side, main, (*tensors, *held)).join()
        raise
    return Beside(side, main, (*tensors, *held))
