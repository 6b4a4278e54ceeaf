"""Measures latency and bandwidth of the link of a process group, once for each group."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._checks import check_numbers_of_fields, check_rule
from moe_ext.comm import collectives
from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.groups import check_group, group_size
from moe_ext.comm.workers import Messages

# Bytes that a rank sends in a small and in a large message. The large one takes 40 ms at 200
# Mbit/s. On an accelerator's network it must be larger, so that its time is more than latency.
SMALL_BYTES = 1024
LARGE_BYTES = {"cpu": 2**20, "cuda": 2**24}
SMALL_REPEATS, LARGE_REPEATS = 3, 2
_OPERATION = "CostModel.probe"


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of a group's messages.

    Attributes:
        latency: seconds of an empty message.
        exchange_bandwidth: bytes a second that a rank sends in all-gathers and all-to-alls.
        reduce_bandwidth: bytes a second that a rank sends in dense all-reduces, including the time
            of the sums.
    """

    latency: float
    exchange_bandwidth: float
    reduce_bandwidth: float

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        check_numbers_of_fields(self)
        for name in ("exchange_bandwidth", "reduce_bandwidth"):
            value = getattr(self, name)
            check_rule("Link", name, value, "above 0 bytes a second", value > 0)
        check_rule("Link", "latency", self.latency, "at least 0 s", self.latency >= 0)

    @classmethod
    def of_rate(cls, bits_per_second: float, *, latency: float = 50e-6) -> Link:
        """Make a link from its nominal rate.

        Args:
            bits_per_second: rate of the network in one direction.
            latency: seconds of an empty message.
        """
        return cls(latency, bits_per_second / 8, bits_per_second / 8)


_links: weakref.WeakKeyDictionary[ProcessGroup, Link] = weakref.WeakKeyDictionary()


def max_over_ranks(seconds: list[float], group: ProcessGroup, device: torch.device) -> list[float]:
    """Return the maximum of each number over the ranks; one small all-reduce.

    NOTE: device-to-host sync, since the callers branch on the result.
    """
    # Some devices have no float64, and the 24 bits of float32 are enough for a time.
    agreed = torch.tensor(seconds, dtype=torch.float32, device=device)
    collectives.all_reduce_(agreed, group, operation=_OPERATION, op="max", counted=False)
    return agreed.tolist()


def synchronize(device: torch.device) -> None:
    """Wait for the work that is queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, until the device is done with it."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def quickest(
    send: Callable[[Tensor], object], x: Tensor, repeats: int, *, warm_ups: int = 0
) -> float:
    """Return the least seconds of a few calls; disturbances only make a call longer.

    The first `warm_ups` of the calls do not count.
    """
    times = [seconds_of(lambda: send(x), x.device) for _ in range(repeats)]
    return min(times[warm_ups:])


def _line(send: Callable[[Tensor], object], sizes: list[Tensor], sent: int) -> tuple[float, float]:
    """Return (seconds of a small message, seconds a byte) of one kind of collective."""
    small, large = sizes
    # The first call makes the connections, and grows their TCP windows.
    send(large)
    least = quickest(send, small, SMALL_REPEATS)
    most = quickest(send, large, LARGE_REPEATS)
    # If both sizes take the same time, a tenth of it is attributed to the bytes.
    return least, max(most - least, 0.1 * most, 1e-9) / sent


def measure_link(group: ProcessGroup, device: torch.device) -> Link:
    """Measure messages of two sizes in two kinds of collectives; six messages of each kind.

    Args:
        group: process group of P > 1 ranks.
        device: device of the messages.

    Returns:
        Link: numbers of the slowest rank, equal on all ranks.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    size = group_size(group)
    large = LARGE_BYTES.get(device.type, LARGE_BYTES["cpu"])

    def exchange(x: Tensor) -> None:
        # Codecs send by `Messages`. Gloo's own all-to-all takes twice the time on a slow link.
        with naming_failed_ranks(group, _OPERATION):
            Messages(group).exchange(x)

    def reduce(x: Tensor) -> None:
        collectives.all_reduce_(x, group, operation=_OPERATION, counted=False)

    parts = [
        torch.zeros(max(1, num_bytes // (size - 1)) * size, dtype=torch.uint8, device=device)
        for num_bytes in (SMALL_BYTES, large)
    ]
    wholes = [
        torch.zeros(max(1, num_bytes * size // (8 * (size - 1))), device=device)
        for num_bytes in (SMALL_BYTES, large)
    ]
    alpha, exchange_cost = _line(exchange, parts, large)
    _, reduce_cost = _line(reduce, wholes, large)
    agreed = max_over_ranks([alpha, exchange_cost, reduce_cost], group, device)
    return Link(agreed[0], 1 / agreed[1], 1 / agreed[2])


def link_of(group: ProcessGroup, device: torch.device, *, again: bool = False) -> Link:
    """Return the link of a group, which is measured at the first call.

    All ranks of the group make the call together.

    Args:
        group: process group.
        device: device of the messages.
        again: measure again, for a link that has changed.

    Raises:
        TypeError: ``group`` is no process group.
        RankFailureError: a rank died or did not answer.
    """
    check_group(group, "CostModel", name="group")
    if again or group not in _links:
        _links[group] = measure_link(group, device)
    return _links[group]
