"""Timer, profile and rows that the benchmarks of a GPU share; all of it runs on a CPU, too."""

import atexit
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

Run = Callable[[], object]
B = TypeVar("B")
SMI = (
    "nvidia-smi",
    "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active",
    "--format=csv,noheader,nounits",
    "--loop-ms=50",
)
METERED = ("SM MHz", "memory MHz", "W", "C", "limits")
# Calls of the driver in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


class Absent(Exception):
    """Raised where a thing to measure is not there, which is no failure."""


class Timer:
    """Median time of a call, by events on a GPU and by the clock elsewhere."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        # Writing this between calls leaves nothing of the last call in the second-level cache.
        size = 256 * 2**20 if device.type == "cuda" else 1
        self.flush = torch.empty(size, dtype=torch.uint8, device=device)

    def __call__(self, run: Run) -> float:
        """Returns microseconds."""
        for _ in range(3):
            run()
        times = [self._once(run) for _ in range(self.repeats)]
        return statistics.median(times)

    def host(self, run: Run) -> float:
        """Microseconds until the host has handed a call over, nothing before it underway."""
        times = []
        for _ in range(self.repeats):
            wait_for(self.device)
            start = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times)

    def _once(self, run: Run) -> float:
        self.flush.zero_()
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return 1e6 * (time.perf_counter() - start)
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        start_event.record()
        run()
        end_event.record()
        end_event.synchronize()
        return 1e3 * start_event.elapsed_time(end_event)


def wait_for(device: torch.device) -> None:
    """Returns when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Memory:
    """Bytes that torch's allocator has given out on a device since this was made; 0 elsewhere."""

    def __init__(self, device: torch.device) -> None:
        wait_for(device)
        self.is_counted = device.type == "cuda"
        if self.is_counted:
            torch.cuda.reset_peak_memory_stats(device)
        self.before = self._now()

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self.is_counted else 0

    @property
    def now(self) -> int:
        """Bytes that are there and were not before."""
        return self._now() - self.before

    @property
    def peak(self) -> int:
        """The most that was there at once."""
        return torch.cuda.max_memory_allocated() - self.before if self.is_counted else 0


@dataclass(frozen=True)
class Profile:
    """A call as the profiler saw it.

    Attributes:
        operators: (name, calls, host microseconds, kernel microseconds), the longest first; calls
            of the driver stand by themselves.
        kernels: microseconds by name, copies included.
        launches: kernels and copies.
        waits: times that the host waited for the device.
    """

    operators: list[tuple[str, int, float, float]]
    kernels: dict[str, float]
    launches: int
    waits: int

    def microseconds(self, *parts: str) -> float:
        """Time of the kernels whose name has one of these parts; of all where none is given."""
        names = (n for n in self.kernels if not parts or any(p in n.lower() for p in parts))
        return sum(self.kernels[name] for name in names)


def summary(averages: Iterable[Any]) -> Profile:
    """Profile of one call, from the averages by name of `torch.profiler`."""
    operators, kernels, launches, waits = [], dict[str, float](), 0, 0
    for event in averages:
        if event.device_type == torch.autograd.DeviceType.CPU:
            times = (event.self_cpu_time_total, event.self_device_time_total)
            operators.append((event.key, event.count, *times))
            waits += event.count * (event.key in WAITS)
        elif not getattr(event, "is_user_annotation", False):
            kernels[event.key] = event.self_device_time_total
            launches += event.count
    operators.sort(key=lambda found: -found[2] - found[3])
    return Profile(operators, kernels, launches, waits)


def profiled(run: Run, device: torch.device) -> Profile:
    """Profiles one call behind two that warm up."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU]
    for _ in range(2):
        run()
    wait_for(device)
    with torch.profiler.profile(activities=activities) as profile:
        run()
    return summary(profile.key_averages())


class Meter:
    """Clocks and power of the device, which a program prints over and over in the background."""

    def __init__(self, command: Sequence[str] = SMI) -> None:
        self.readings: list[tuple[float, list[str]]] = []
        self.why_not = "no reading"
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            self.why_not = str(error)
            return
        atexit.register(self.process.kill)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            cells = line.strip().split(", ")
            if len(cells) == len(METERED):
                self.readings.append((time.monotonic(), cells))
            else:
                self.why_not = line.strip()[:80]

    def since(self, start: float) -> dict[str, object]:
        """The reading of the most power since then; without one, the last before."""
        readings = list(self.readings)
        if not readings:
            return {"clocks": f"unknown: {self.why_not}"}
        found = [cells for at, cells in readings if at >= start] or [readings[-1][1]]
        return dict(zip(METERED, max(found, key=_watts), strict=True))


def _watts(cells: list[str]) -> float:
    try:
        return float(cells[METERED.index("W")])
    except ValueError:
        return 0.0


class Card:
    """The copy of its process, and the clocks and power of the card, beside which a figure is set.

    Attributes:
        copy: bytes a microsecond that `Tensor.copy_` moves, read and written ones together.
    """

    def __init__(self, device: torch.device, timer: Timer, copy_bytes: int) -> None:
        self.meter = Meter() if device.type == "cuda" else None
        source = torch.zeros(copy_bytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        self.copy = copy_bytes / timer(lambda: target.copy_(source))
        show({"copy_gigabytes_per_second": self.copy / 1e3})

    def beside(self, found: Mapping[str, object], start: float) -> dict[str, object]:
        """Share of the copy of what counts bytes, and clocks and power since `start`."""
        rate = found.get("GB/s")
        added: dict[str, object] = {"copy GB/s": self.copy / 1e3}
        if isinstance(rate, float):
            added["share of copy"] = 1e3 * rate / self.copy
        return {**added, **(self.meter.since(start) if self.meter else {})}


def show(row: dict[str, object]) -> None:
    """A figure at once: the next one may end the process."""
    print(json.dumps(row), flush=True)


class Section:
    """Rows of one table; a figure that fails is told in its row, and the next one goes on."""

    num_failed = 0
    card: Card | None = None  # read once a process

    def __init__(self, title: str) -> None:
        self.title = title

    def add(self, labels: dict[str, object], measure: Callable[[], dict[str, object]]) -> None:
        """Shows labels and what is measured, or why it was not."""
        start = time.monotonic()
        try:
            found = measure()
            if Section.card is not None:
                found = {**found, **Section.card.beside(found, start)}
        except Absent as error:
            found = {"why not": str(error)}
        except Exception as error:
            Section.num_failed += 1
            lines = str(error).splitlines() or [""]
            found = {"why not": f"failed: {type(error).__name__}: {lines[0]}"}
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        show({"section": self.title, **labels, **found})


def measure_families(
    families: Mapping[str, Callable[[B], None]], names: Iterable[str], bench: B, card: Card
) -> int:
    """Shows figures of these families beside the card's, and returns how many failed."""
    Section.num_failed, Section.card = 0, card
    for name in names:
        show({"family": name})
        families[name](bench)
    return Section.num_failed


def run_script(measure: Callable[..., int], families: Iterable[str]) -> NoReturn:
    """Measures the families that the command line names on its device, all where it names none."""
    device, *names = sys.argv[1:]
    sys.exit(int(measure(torch.device(device), names or list(families), small=False) > 0))


def dtype_name(dtype: torch.dtype) -> str:
    """Without its module."""
    return str(dtype).removeprefix("torch.")
