"""Interleaved timings, counted bytes and Markdown tables that the benchmarks share."""

import ctypes
import gc
import math
import platform
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import moe_ext

Runs = dict[str, Callable[[], object]]

# Columns that hold a cost: less is better.
UNIT = re.compile(r"(^|\s)(ms|us|MB)$")


@dataclass(frozen=True)
class Timing:
    """Costs of one contender."""

    median: float  # seconds
    best: float  # seconds


@dataclass(frozen=True)
class Table:
    """A Markdown table: a title, a text, a header and rows of text."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table as it stands in docs/benchmarks.md."""
        lines = [f"## {self.title}", "", self.note, "", "| " + " | ".join(self.header) + " |"]
        lines.append("|" + "---|" * len(self.header))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def figures(self) -> dict[str, dict[str, float]]:
        """Every number by the row's labels (the cells before the first time) and its column."""
        is_figure = [UNIT.search(name) is not None for name in self.header]
        if not any(is_figure):
            return {}
        labels = is_figure.index(True)
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            numbers = found.setdefault(", ".join(row[:labels]), {})
            for name, cell in list(zip(self.header, row, strict=True))[labels:]:
                try:
                    numbers[name] = float(cell.rstrip(" %"))
                except ValueError:
                    continue  # a dash: nothing was measured
        return found


def compare(title: str, new: dict[str, dict[str, float]], old: dict[str, dict[str, float]]) -> str:
    """Lines that set a table beside that of the last run: new over old, below one is better."""
    lines, logs = [], []
    for row, numbers in new.items():
        ratios = {
            column: numbers[column] / old[row][column]
            for column in numbers
            if UNIT.search(column) and old.get(row, {}).get(column) and numbers[column] > 0
        }
        if ratios:
            logs += [math.log(r) for r in ratios.values()]
            cells = "  ".join(f"{column} {r:.2f}" for column, r in ratios.items())
            lines.append(f"  {row}: {cells}")
    if not logs:
        return f"{title}: nothing to compare with"
    mean = math.exp(statistics.mean(logs))
    return "\n".join([f"{title}, new over last run (geometric mean {mean:.2f}):", *lines])


def keep_memory(touched: int = 2**31) -> None:
    """Makes malloc reuse freed memory, for every contender alike.

    The page faults of fresh memory (three to ten times the time of a copy) would hide what the
    operators do.
    """
    moe_ext.reuse_memory()
    # Touch the memory once, so that no contender pays for the first use of it.
    torch.zeros(touched, dtype=torch.uint8)


def status_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"status_bytes: expected key to be a line of /proc/self/status, got {key}")


def rise_of_memory(run: Callable[[], object]) -> int:
    """Bytes by which the resident memory rises while something runs."""
    ctypes.CDLL(None).malloc_trim(0)
    # Sets the high-water mark to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    run()
    return status_bytes("VmHWM") - before


def peak_allocated(run: Callable[[], object]) -> int:
    """Most bytes of torch's allocator alive at once while something runs, of those made in it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    changes: list[tuple[int, int, int]] = []
    events = profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.alloc_size, fields.ptr))
    alive: dict[int, int] = {}
    now = most = 0
    for _, size, pointer in sorted(changes):
        # A message's thread may have released what was here, which no event tells.
        now -= alive.pop(pointer, 0)
        if size > 0:
            alive[pointer] = size
            now += size
        most = max(most, now)
    return most


class _Malloc(ctypes.Structure):
    """Numbers of glibc's `mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def peak_sampled(run: Callable[[], object]) -> int:
    """The same over all threads: bytes of glibc's allocator, read five times a millisecond."""
    read = ctypes.CDLL("libc.so.6").mallinfo2
    read.restype = _Malloc

    def used() -> int:
        found = read()
        return int(found.uordblks + found.hblkhd)

    gc.collect()
    before, most, ended = used(), [0], threading.Event()

    def poll() -> None:
        while not ended.wait(2e-4):
            most[0] = max(most[0], used() - before)

    thread, interval = threading.Thread(target=poll), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        run()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    return most[0]


def interleaved(
    runs: Runs, *, seconds: float = 1.5, warmup: int = 2, least: int = 5
) -> dict[str, Timing]:
    """Times the contenders in turn, A B C A B C ...: a drift of the machine hits all alike.

    Each has an equal share of the seconds; one that has used up its share, and ran at least `least`
    times, sits out the rounds that are left.
    """
    for run in runs.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    spent = dict.fromkeys(runs, 0.0)
    share = seconds / len(runs)
    while waiting := [n for n in runs if spent[n] < share or len(times[n]) < least]:
        for name in waiting:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
            spent[name] += times[name][-1]
    return {name: Timing(statistics.median(t), min(t)) for name, t in times.items()}


def interleaved_fresh(runs: Runs, **options: float) -> dict[str, Timing]:
    """`interleaved` as in a process that did not call `reuse_memory`."""
    moe_ext.reuse_memory(False)
    try:
        return interleaved(runs, **options)  # type: ignore[arg-type]
    finally:
        keep_memory()


def copy_of(num_bytes: int) -> Callable[[], object]:
    """A contender that moves `num_bytes` in all, half read and half written, by torch's copy."""
    source = torch.zeros(max(1, num_bytes // 8), dtype=torch.float32)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def clone_of(num_bytes: int) -> Callable[[], object]:
    """`copy_of` into a tensor of its own, as an operator writes its result."""
    source = torch.zeros(max(1, num_bytes // 8), dtype=torch.float32)
    return source.clone


def milliseconds(timing: Timing) -> str:
    """The median, for a table."""
    return f"{timing.median * 1e3:.3f}"


def ratio(slower: Timing, faster: Timing) -> str:
    """The ratio of the first time to the second."""
    return f"{slower.median / faster.median:.2f}"


def machine() -> list[str]:
    """The lines under the title: what the figures were measured on, its rates included."""
    capability = torch.backends.cpu.get_cpu_capability()
    copied = 2**28
    times = interleaved({"copy": copy_of(copied), **products()}, seconds=3.0)
    rates = [f"copy {copied / times['copy'].median / 1e9:.1f} GB/s (read plus written)"]
    for name in ("float32", "bfloat16"):
        rates.append(f"{name} product {PRODUCT_FLOP / times[name].median / 1e9:.0f} GFLOP/s")
    return [
        f"CPU figures: {cpu_model()} ({platform.machine()}, {capability}), "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}. Medians of interleaved "
        "runs in one process that has called `moe_ext.reuse_memory()`; *fresh* ms are those of one "
        "that has not.",
        f"Rates of the machine, measured in the same run: {', '.join(rates)}.",
    ]


PRODUCT_SIZE = 1024
PRODUCT_FLOP = 2 * PRODUCT_SIZE**3


def products() -> Runs:
    """A square matrix product in each dtype."""
    runs: Runs = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b, out = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for _ in range(3))
        name = str(dtype).removeprefix("torch.")
        runs[name] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)  # type: ignore[misc]
    return runs


def cpu_model() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def processor() -> str:
    """The processor of this machine, for a table that stands on the page of a like one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    known = dict(tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line)
    numbers = f"family {known.get('cpu family')} model {known.get('model')}"
    return f"{cpu_model()}, {numbers}, {torch.backends.cpu.get_cpu_capability()}"
