"""Timer, profile and rows that the benchmarks of a GPU share; all of it runs on a CPU, too."""

import json
import statistics
import subprocess
import sys
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
)
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
    """One call as the profiler saw it.

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


def sampled(run: Run, device: torch.device, command: Sequence[str] = SMI) -> dict[str, object]:
    """Clocks, power and temperature while something runs over and over."""
    names = ("SM MHz", "memory MHz", "W", "C", "limits")
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                run()
                wait_for(device)
            assert process.stdout is not None
            cells = process.stdout.read().strip().split(", ")
    except OSError as error:
        return {"clocks": f"unknown: {error}"}
    if len(cells) != len(names):
        return {"clocks": f"unknown: {' '.join(cells)[:80]}"}
    return dict(zip(names, cells, strict=True))


def show(row: dict[str, object]) -> None:
    """A figure at once: the next one may end the process."""
    print(json.dumps(row), flush=True)


class Section:
    """Rows of one table; a figure that fails is told in its row, and the next one goes on."""

    num_failed = 0

    def __init__(self, title: str) -> None:
        self.title = title

    def add(self, labels: dict[str, object], measure: Callable[[], dict[str, object]]) -> None:
        """Shows labels and what is measured, or why it was not."""
        try:
            found = measure()
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
    families: Mapping[str, Callable[[B], None]], names: Iterable[str], bench: B
) -> int:
    """Shows figures of these families, and returns how many failed."""
    Section.num_failed = 0
    for name in names:
        families[name](bench)
    return Section.num_failed


def run_script(measure: Callable[..., int], families: Iterable[str]) -> NoReturn:
    """Measures the families that the command line names on its device, all where it names none."""
    device, *names = sys.argv[1:]
    sys.exit(int(measure(torch.device(device), names or list(families), small=False) > 0))


def dtype_name(dtype: torch.dtype) -> str:
    """Without its module."""
    return str(dtype).removeprefix("torch.")
