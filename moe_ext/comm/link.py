"""Measures what a link takes: once for a process group."""

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

# Bytes that leave a rank in a message of either size. The large one takes 40 ms at 200 Mbit/s; on
# an accelerator's network it must be larger to last longer than its latency.
SMALL_BYTES = 1024
LARGE_BYTES = {"cpu": 2**20, "cuda": 2**24}
SMALL_REPEATS, LARGE_REPEATS = 3, 2
_OPERATION = "CostModel.probe"


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of a group's messages.

    Attributes:
        latency: seconds of a message of no length.
        exchange_bandwidth: bytes a second that leave a rank in all-gathers and all-to-alls.
        reduce_bandwidth: the same in dense all-reduces, whose sums take time too.
    """

    latency: float
    exchange_bandwidth: float
    reduce_bandwidth: float

    def __post_init__(self) -> None:
        """Refuse what no link has."""
        check_numbers_of_fields(self)
        for name in ("exchange_bandwidth", "reduce_bandwidth"):
            value = getattr(self, name)
            check_rule("Link", name, value, "above 0 bytes a second", value > 0)
        check_rule("Link", "latency", self.latency, "at least 0 s", self.latency >= 0)

    @classmethod
    def of_rate(cls, bits_per_second: float, *, latency: float = 50e-6) -> Link:
        """A link by its nominal rate.

        Args:
            bits_per_second: of the network, in one direction.
            latency: seconds of a message.
        """
        return cls(latency, bits_per_second / 8, bits_per_second / 8)


_links: weakref.WeakKeyDictionary[ProcessGroup, Link] = weakref.WeakKeyDictionary()


def max_over_ranks(seconds: list[float], group: ProcessGroup, device: torch.device) -> list[float]:
    """The slowest rank's numbers, on every rank; one small all-reduce.

    NOTE: device-to-host sync, since the callers branch on the result.
    """
    # Not every device has float64, and 24 bits of a time are enough.
    agreed = torch.tensor(seconds, dtype=torch.float32, device=device)
    collectives.all_reduce_(agreed, group, operation=_OPERATION, op="max", counted=False)
    return agreed.tolist()


def synchronize(device: torch.device) -> None:
    """Wait for what is queued on a device."""
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
    """Least seconds of a few calls, after some that do not count: what disturbs makes it longer."""
    times = [seconds_of(lambda: send(x), x.device) for _ in range(repeats)]
    return min(times[warm_ups:])


def _line(send: Callable[[Tensor], object], sizes: list[Tensor], sent: int) -> tuple[float, float]:
    """(seconds of a small message, seconds a byte) of one kind of collective."""
    small, large = sizes
    send(large)  # connections are made, and their windows opened
    least = quickest(send, small, SMALL_REPEATS)
    most = quickest(send, large, LARGE_REPEATS)
    # On a link too fast for the clock, a tenth of the time is taken to be bytes.
    return least, max(most - least, 0.1 * most, 1e-9) / sent


def measure_link(group: ProcessGroup, device: torch.device) -> Link:
    """Six messages of two sizes in each of two kinds of collectives; agreed over the ranks.

    Args:
        group: of P > 1 ranks.
        device: of the messages.

    Returns:
        Link: of the slowest rank, the same on all of them.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    size = group_size(group)
    large = LARGE_BYTES.get(device.type, LARGE_BYTES["cpu"])

    def exchange(x: Tensor) -> None:
        # As codecs send: Gloo's own all-to-all takes twice the time on a slow link.
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
    """The link of a group, measured at the first call.

    All ranks of the group call it together.

    Args:
        group: process group.
        device: of the messages.
        again: measure even if it has been; for a link that has changed.

    Raises:
        TypeError: ``group`` is no process group.
        RankFailureError: a rank died or did not answer.
    """
    check_group(group, "CostModel", name="group")
    if again or group not in _links:
        _links[group] = measure_link(group, device)
    return _links[group]
